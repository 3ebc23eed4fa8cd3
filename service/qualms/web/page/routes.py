"""Serves the page: a few small files from memory, with a content security policy that allows nothing from elsewhere."""

import hashlib
import io
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

import numpy as np
from fastapi import FastAPI, Request, Response
from PIL import Image

from qualms.demo.digits import draw
from qualms.web.problems import Kind, Problem, quoted

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
}
INDEX: Final = "index.html"
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_DIGIT_SEED = 4
"""the embedded digit models classify and accept all ten digits of this seed"""


@dataclass(frozen=True)
class StaticFile:
    """One file of the page."""

    content: bytes
    media_type: str

    @property
    def etag(self) -> str:
        """Changes with the content."""
        return f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'


@cache
def static_files() -> dict[str, StaticFile]:
    """The files of the page by name."""
    folder = files("qualms.web.page") / "static"
    return {
        file.name: StaticFile(file.read_bytes(), _TYPES[file.name.rpartition(".")[2]])
        for file in folder.iterdir()
        if file.name.rpartition(".")[2] in _TYPES
    }


@cache
def digit_file(digit: int) -> StaticFile:
    """A drawn digit as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(draw(digit, np.random.default_rng([_DIGIT_SEED, digit]))).save(buffer, "PNG")
    return StaticFile(buffer.getvalue(), _TYPES["png"])


def add_page(app: FastAPI) -> None:
    """Add the page and its files to `app`."""
    digits = {f"digit-{digit}.png": digit for digit in range(10)}

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _reply(request, static_files()[INDEX])

    @app.get("/page/{name}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        if name in digits:
            return _reply(request, digit_file(digits[name]))
        if name not in static_files() or name == INDEX:
            raise Problem(Kind.NOT_FOUND, f"There is nothing at {quoted(request.url.path)}.")
        return _reply(request, static_files()[name])


def _reply(request: Request, file: StaticFile) -> Response:
    headers = {**_HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=None, headers={**headers, "content-type": file.media_type})
