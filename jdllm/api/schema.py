"""The schema of requests, as this server takes them."""

import re
from typing import Any

from fastapi import FastAPI
from pydantic_core import to_jsonable_python

from jdllm.api.protocol import SAMPLING_FIELDS, InfillRequest
from jdllm.api.service import Service
from jdllm.decoding.sampling import SamplingParams

_DEFAULT = re.compile(r" \[default: [^\]]*\]$")
_NOT_OF_MASKS = ("steps", "block_length")
"""Fields whose defaults do not hold for POST /v1/infill: see `Service.sampling_of_masks`."""


class Application(FastAPI):
    """An application whose `/openapi.json` shows what holds on this server where a request says nothing."""

    def openapi(self) -> dict[str, Any]:
        """The schema; it is made once."""
        if self.openapi_schema is None:
            service: Service = self.state.service
            _show_defaults(super().openapi()["components"]["schemas"], service.settings.default_sampling)
        assert self.openapi_schema is not None
        return self.openapi_schema


def _show_defaults(schemas: dict[str, Any], sampling: SamplingParams) -> None:
    """Write a server's parameters into the schemas of what clients send: values, and how helps end."""
    for name, schema in schemas.items():
        if not name.endswith("Request") or "gen_length" not in schema.get("properties", ()):
            continue
        left_out = _NOT_OF_MASKS if name == InfillRequest.__name__ else ()
        for field in SAMPLING_FIELDS:
            value = to_jsonable_python(getattr(sampling, field))
            if field not in schema["properties"] or field in left_out:
                continue
            shown = schema["properties"][field]
            if field == "seed":
                value, told = None, " [default: drawn for each prompt]"
            elif value is None or value == [] or isinstance(value, bool | dict):
                told = None
            else:
                told = f" [default: {value}]"
            if value is not None:
                shown["default"] = value
            if told is not None and "description" in shown:
                shown["description"] = _DEFAULT.sub("", shown["description"]) + told
