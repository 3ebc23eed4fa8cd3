"""Read a request's body, and parse it into images: a raw image file, multipart files, base64 or pixel arrays in JSON.

Every error is a Problem that names the image or field. Nothing is decoded here: an image is the bytes of a file, or
pixels.
"""

from collections.abc import Callable, Mapping

from starlette.types import Receive

from qualms.images.preprocess import ImageInput
from qualms.inference.batch import ClientDisconnected
from qualms.web.bodies.json_images import parse_json
from qualms.web.bodies.limits import Limits
from qualms.web.bodies.multipart_images import parse_multipart
from qualms.web.problems import Kind, Problem, quoted

__all__ = [
    "JSON",
    "MEDIA_TYPES",
    "MULTIPART",
    "RAW_IMAGE_TYPES",
    "ImageInput",
    "Limits",
    "parse_images",
    "read_body",
]

RAW_IMAGE_TYPES = ("image/*", "application/octet-stream")
MULTIPART = "multipart/form-data"
JSON = "application/json"
MEDIA_TYPES = (*RAW_IMAGE_TYPES, MULTIPART, JSON)
"""accepted values of Content-Type"""

_ACCEPTED = ", ".join(MEDIA_TYPES)
_USUAL_TYPES = frozenset({b"image/png", b"image/jpeg", b"application/octet-stream"})
"""values of the header that need no parsing"""


async def read_body(
    headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int, check: Callable[[int], None] = lambda _: None
) -> bytes:
    """Receive the whole body; one that is announced as too large is refused before it is read.

    A body that arrives in one message, as small ones do, is not copied. `check` is called with the number of
    bytes so far and may refuse them.
    """
    announced = headers.get(b"content-length")
    if announced is not None and _length(announced) > max_bytes:
        raise _too_large(max_bytes)
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        check(size)
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def parse_images(content_type: bytes, body: bytes, limits: Limits) -> list[ImageInput]:
    """The images of a body, in order; `content_type` is the header's value, empty if there is none."""
    if not body:
        raise Problem.refused(Kind.MALFORMED, None, "The body is empty", f"at least one image, as {_ACCEPTED}")
    if len(body) > limits.body_bytes:
        raise _too_large(limits.body_bytes)
    if content_type in _USUAL_TYPES:
        return [body]
    media_type = content_type.partition(b";")[0].strip().lower().decode("latin-1")
    if media_type.startswith("image/") or media_type in RAW_IMAGE_TYPES:
        return [body]
    if media_type == MULTIPART:
        return parse_multipart(content_type, body, limits)
    if media_type == JSON:
        return parse_json(body, limits)
    what = f"The Content-Type {quoted(media_type)} is not accepted" if media_type else "There is no Content-Type"
    raise Problem.refused(Kind.UNSUPPORTED, "Content-Type", what, _ACCEPTED)


def _length(value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        name = quoted(value.decode("latin-1"))
        raise Problem(Kind.MALFORMED, f"The Content-Length {name} is not a number.", field="Content-Length") from None


def _too_large(max_bytes: int) -> Problem:
    return Problem.refused(Kind.TOO_LARGE, None, "The body is too large", f"at most {max_bytes:,} bytes")
