"""The page: one static bundle, which asks nothing of any other host."""

import functools
import hashlib
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_jsonable_python

from jdllm.api.service import Service
from jdllm.decoding.prefilling import PRESETS

router = APIRouter(include_in_schema=False)

_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Of every file. Browsers keep a file, and ask whether it is still the same."""


class File(NamedTuple):
    """A file of the bundle, with its type and its entity tag."""

    content: bytes
    media_type: str
    etag: str


@functools.cache
def bundle() -> dict[str, File]:
    """The files of the page, by name."""
    found = {}
    for entry in files("jdllm.api").joinpath("page").iterdir():
        name = entry.name
        content = entry.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        found[name] = File(content, _TYPES[name[name.rindex(".") :]], etag)
    return found


@router.api_route("/", methods=["GET", "HEAD"])
async def generate_page(request: Request) -> Response:
    """Where text is generated."""
    return _answer(request, "index.html")


@router.api_route("/stats", methods=["GET", "HEAD"])
async def stats_page(request: Request) -> Response:
    """How the server is doing."""
    return _answer(request, "stats.html")


@router.get("/page/settings.json")
async def page_settings(request: Request) -> JSONResponse:
    """What the page shows of this server: texts to try, and what holds where nothing is set."""
    service: Service = request.app.state.service
    settings = service.settings
    told = {"examples": settings.examples, "sampling": settings.default_sampling, "prefilling": PRESETS}
    return JSONResponse(to_jsonable_python(told), headers=HEADERS)


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
async def page_file(name: str, request: Request) -> Response:
    """What the pages are made of."""
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    file = bundle().get(name)
    if file is None:
        raise HTTPException(404, f"the page has no file {name}")
    headers = HEADERS | {"ETag": file.etag}
    if file.etag in _known(request):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


def _known(request: Request) -> set[str]:
    """The entity tags that a browser has."""
    tags = request.headers.get("if-none-match", "").split(",")
    return {tag.strip().removeprefix("W/") for tag in tags}
