"""The schema of requests, as this server takes them."""

import re
from typing import Any

from fastapi import FastAPI
from pydantic_core import to_jsonable_python

from jdllm.api.protocol import SAMPLING_FIELDS, InfillRequest
from jdllm.api.service import Service
from jdllm.decoding.block_sampling import verifies_drafts
from jdllm.decoding.registry import NO_CACHE, POLICIES, RULES, options
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.sampling_options import further_options, option_schema, parameter_helps
from jdllm.llm import LLM

_DEFAULT = re.compile(r" \[default: [^\]]*\]$")
_NOT_OF_MASKS = ("steps", "block_length")
"""Fields whose defaults do not hold for POST /v1/infill: see `Service.sampling_of_masks`."""


class Application(FastAPI):
    """An application whose `/openapi.json` shows what holds on this server where a request says nothing."""

    def openapi(self) -> dict[str, Any]:
        """The schema; it is made once."""
        if self.openapi_schema is None:
            service: Service = self.state.service
            schemas = super().openapi()["components"]["schemas"]
            _show_options(schemas)
            _leave_out_rules(schemas, _unanswered(service.llm))
            _show_defaults(schemas, service.settings.default_sampling)
        assert self.openapi_schema is not None
        return self.openapi_schema


def _show_options(schemas: dict[str, Any]) -> None:
    """Write into the schemas of what clients send the options of rules and policies.

    `x-used-when` says with which values of other fields an option has an effect, any of them; elsewhere it is
    refused. `x-default-when` says the default where it depends on such a value. `x-offered` marks what a page
    should have a field for.
    """
    further, helps = further_options(SamplingParams), parameter_helps(SamplingParams)
    for schema in _of_clients(schemas).values():
        for name, (option, users) in options().items():
            if name in further:
                title = name.replace("_", " ").title()
                schema["properties"][name] = option_schema(option) | {
                    "title": title,
                    "description": helps[name],
                }
            shown = schema["properties"][name]
            shown["x-used-when"] = {user: list(values) for user, values in users.items()}
            shown["x-offered"] = option.offered
        for name in ("refresh_delay", "refresh_interval"):
            defaults = {NO_CACHE: 0} | {policy.name: policy.defaults[name] for policy in POLICIES.values()}
            schema["properties"][name]["x-default-when"] = {"cache": defaults}


def _unanswered(llm: LLM) -> set[str]:
    """The rules that no request may ask a model for."""
    rules = set[str]()
    if not llm.account.verifier:
        rules |= {name for (of, name), rule in RULES.items() if of == "transfer" and rule.acceptance is None}
    if not verifies_drafts(llm.config):
        rules.add("lossy_speculation")
    return rules


def _leave_out_rules(schemas: dict[str, Any], rules: set[str]) -> None:
    """Take rules out of the schemas, and the options that only they use."""
    for schema in _of_clients(schemas).values():
        properties = schema["properties"]
        for kind in properties["transfer"]["anyOf"]:
            if "enum" in kind:
                kind["enum"] = [name for name in kind["enum"] if name not in rules]
        for name, (_, users) in options().items():
            if users.keys() == {"transfer"} and rules.issuperset(users["transfer"]):
                del properties[name]


def _of_clients(schemas: dict[str, Any]) -> dict[str, Any]:
    """The schemas of requests that denoise, by name."""
    return {
        name: schema
        for name, schema in schemas.items()
        if name.endswith("Request") and "gen_length" in schema.get("properties", ())
    }


def _show_defaults(schemas: dict[str, Any], sampling: SamplingParams) -> None:
    """Write a server's parameters into the schemas of what clients send: values, and how helps end."""
    for name, schema in _of_clients(schemas).items():
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
