"""The files of the page: read once, served from memory, by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
INDEX = "index.html"
_BASE = b"{{base}}"  # before the names of files, in the page


@dataclass(frozen=True, slots=True)
class PageFile:
    body: bytes
    media_type: str
    tag: str


@cache
def page_files() -> dict[str, PageFile]:
    """By name. The page is there twice: as INDEX for `/console/`, and as "" for `/console`, from
    where the same files are found below `console/`."""
    found = {}
    for file in files("kvrelay.cluster.api.console").joinpath("static").iterdir():
        end = file.name.rpartition(".")[2]
        if end in _TYPES:
            found[file.name] = _made(file.read_bytes(), _TYPES[end])
    page = found[INDEX].body
    found[""] = _made(page.replace(_BASE, b"console/"), _TYPES["html"])
    found[INDEX] = _made(page.replace(_BASE, b""), _TYPES["html"])
    return found


def _made(body: bytes, media_type: str) -> PageFile:
    return PageFile(body, media_type, f'"{blake2b(body, digest_size=12).hexdigest()}"')


def respond(http: Request, file: PageFile) -> Response:
    """304 for who has it already."""
    headers = {**HEADERS, "etag": file.tag, "cache-control": "no-cache"}
    known = http.headers.get("if-none-match", "")
    if file.tag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)
