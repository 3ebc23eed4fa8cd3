"""Images of any kind to the bytes of a file that the service accepts, without loss, and lists of them to request bodies.

Neither NumPy nor Pillow is imported here: a program that passes an array or a PIL image has imported it.
"""

import io
import secrets
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import IOBase
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from qualms.errors import ImageError, first_line
from qualms.replies import RequestLimits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

ImageLike: TypeAlias = "str | PathLike[str] | bytes | bytearray | memoryview | NDArray[np.uint8] | Image"
"""the path of an image file, its bytes, uint8 pixels of shape (H, W) or (H, W, C), or a PIL image"""
Images: TypeAlias = "ImageLike | Iterable[ImageLike]"
ACCEPTED = "a path, bytes, a uint8 array or a PIL image"
_PNG_SIGNATURE, _JPEG_SIGNATURE = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
"""PNG's number for grey, RGB and RGBA, by the number of channels"""
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""modes of PIL images that PNG keeps; TIFF keeps the others"""
_CONVERTED = {"HSV": "RGB", "RGBa": "RGBA"}
"""modes of PIL images that neither format has, and those to which the model converts them"""
_PART_BYTES = 256
"""upper bound of what a form adds to each file"""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The files of one request; `first` is the number of its first image in the call."""

    first: int
    files: list[bytes]

    def halves(self) -> tuple["Chunk", "Chunk"]:
        """Two chunks with half of the files each; there must be more than one."""
        middle = len(self.files) // 2
        return Chunk(self.first, self.files[:middle]), Chunk(self.first + middle, self.files[middle:])

    def body(self) -> tuple[str, bytes]:
        """Content type and body of the request: the file itself, or a form with all files."""
        if len(self.files) == 1:
            return _media_type(self.files[0]), self.files[0]
        boundary = secrets.token_hex(16)  # 128 random bits do not occur in a file
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="images"; filename="image"\r\n\r\n'.encode()
        parts = [piece for file in self.files for piece in (head, file, b"\r\n")]
        return f"multipart/form-data; boundary={boundary}", b"".join([*parts, f"--{boundary}--\r\n".encode()])


def is_one_image(images: Any) -> bool:
    """Whether the argument of `predict` is an image, or nothing that is accepted, and not an iterable of images.

    An open file is an iterable of lines, which are no images.
    """
    kinds = (str, PathLike, bytes, bytearray, memoryview, IOBase)
    return not isinstance(images, Iterable) or isinstance(images, kinds) or _is_array(images) or _is_pil(images)


def chunks(images: Iterable[ImageLike], limits: RequestLimits) -> Iterator[Chunk]:
    """Read and encode images, as many at a time as one request may have. Only one chunk is kept in memory."""
    files: list[bytes] = []
    first = size = 0
    for index, image in enumerate(images):
        file = encode(image, index, limits)
        if files and (len(files) == limits.max_images or size + len(file) + _PART_BYTES > limits.max_body_bytes):
            yield Chunk(first, files)
            files, first, size = [], index, 0
        files.append(file)
        size += len(file) + _PART_BYTES
    if files:
        yield Chunk(first, files)


def encode(image: ImageLike, index: int, limits: RequestLimits) -> bytes:
    """The bytes of an image file; ImageError, which names the image, if it cannot be sent."""
    try:
        return _encode(image, limits.max_body_bytes)
    except ImageError as error:
        name = fspath(image) if isinstance(image, str | PathLike) else f"images[{index}]"
        raise ImageError(f"{name}: {error}", reason=error.reason) from error.__cause__


def _encode(image: ImageLike, max_bytes: int) -> bytes:
    if isinstance(image, str | PathLike):
        data = _read(image, max_bytes)
    elif isinstance(image, bytes | bytearray | memoryview):
        data = bytes(image)
    elif _is_pil(image):
        data = _from_pil(image)
    elif _is_array(image):
        data = _from_array(image)
    else:
        raise ImageError(f"It is a {type(image).__name__}; accepted: {ACCEPTED}.", reason="unsupported")
    if len(data) > max_bytes:
        accepted = f"accepted: at most {max_bytes:,}"
        raise ImageError(f"It has more bytes than the service accepts; {accepted}.", reason="too_large")
    return data


def _read(path: str | PathLike[str], max_bytes: int) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise ImageError(f"The file cannot be read: {reason}.") from error


def _media_type(file: bytes) -> str:
    if file.startswith(_PNG_SIGNATURE):
        return "image/png"
    return "image/jpeg" if file.startswith(_JPEG_SIGNATURE) else "application/octet-stream"


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_pil(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _from_pil(image: Any) -> bytes:
    """A PNG or TIFF file of an upright PIL image."""
    from PIL import ImageOps  # noqa: PLC0415  # optional

    stream = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(image)
        if upright.mode in _CONVERTED:
            upright = upright.convert(_CONVERTED[upright.mode])
        options: dict[str, Any] = (
            {"format": "PNG", "compress_level": 1} if upright.mode in _PNG_MODES else {"format": "TIFF"}
        )
        upright.save(stream, exif=b"", **options)
    except Exception as error:  # Pillow reads files lazily, and its decoders raise many kinds of errors
        raise ImageError(f"The PIL image of mode {image.mode} cannot be written: {first_line(error)}.") from error
    return stream.getvalue()


def _from_array(array: Any) -> bytes:
    """A PNG file of an array."""
    shape = tuple(array.shape)
    channels = 1 if len(shape) == 2 else shape[-1] if len(shape) == 3 else None
    if array.dtype != "uint8" or channels not in _COLOUR_TYPES or 0 in shape:
        raise ImageError(
            f"It is {array.dtype} of shape {shape}; accepted is uint8 of shape (H, W) or (H, W, C) with C = 1, 3 or 4 and "
            "no empty side.",
            reason="shape",
        )
    height, width = shape[:2]
    stride = width * channels
    pixels = memoryview(array.tobytes())
    # Each row begins with the number of its filter, here none.
    rows = b"".join(piece for row in range(height) for piece in (b"\0", pixels[row * stride : (row + 1) * stride]))
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    content = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return _PNG_SIGNATURE + b"".join(_png_chunk(kind, data) for kind, data in content)


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
