"""Hostile JPEG files: scans that cost far more than their bytes, and pixels without data."""

from qualms.bench.attacks.files.arithmetic_coding import endless_coefficients
from qualms.bench.attacks.files.definition import hostile_file, scaled, scaled_side
from qualms.bench.attacks.files.jpeg_parts import (
    ARITHMETIC,
    ARITHMETIC_PROGRESSIVE,
    BASELINE,
    END_OF_BLOCKS,
    PROGRESSIVE,
    Frame,
    huffman,
    jpeg,
    scan,
)
from qualms.bench.attacks.payloads import MAX_BODY

_MAX_SCANS = 100
"""as many as `qualms.images.limits` accepts"""
_COLOUR, _FOUR = (0x11,) * 3, (0x11,) * 4
_SUBSAMPLED = (0x22, 0x11, 0x11)


def _square(kind: int, scale: float, sampling: tuple[int, ...] = _COLOUR) -> Frame:
    side = scaled_side(scale)
    return Frame(kind, side, side, sampling)


def _all(frame: Frame) -> range:
    return range(len(frame.sampling))


def _dc_scan(frame: Frame, data: bytes | None = None) -> bytes:
    """The first scan of a progressive image: one bit for each block, all 0."""
    return scan(bytes(frame.blocks * len(frame.sampling) // 8 + 1) if data is None else data, _all(frame), 0, 0)


@hostile_file("jpeg-arithmetic", "an arithmetic-coded progressive JPEG of 16 MP and 100 scans in 5 kB")
def arithmetic(scale: float = 1.0) -> bytes:
    """The decoder continues with zeros when the data end, and decodes 63 coefficients of each block from them."""
    frame = _square(ARITHMETIC_PROGRESSIVE, scale)
    data = endless_coefficients()
    scans = [scan(data, [index % 3], 1, 63) for index in range(_MAX_SCANS - 1)]
    return jpeg(frame, _dc_scan(frame, b"") + b"".join(scans), tables=b"")


@hostile_file("jpeg-arithmetic-sequential", "an arithmetic-coded JPEG of 16 MP in 140 bytes")
def arithmetic_sequential(scale: float = 1.0) -> bytes:
    """As above, in one pass."""
    frame = _square(ARITHMETIC, scale)
    return jpeg(frame, scan(endless_coefficients(dc=True), _all(frame)), tables=b"")


@hostile_file("jpeg-empty-scans", "a progressive JPEG of 16 MP and 100 scans of 40 bytes")
def empty_scans(scale: float = 1.0) -> bytes:
    """One code ends 16,384 blocks, and the decoder visits all of them."""
    frame = _square(PROGRESSIVE, scale)
    data = bytes(frame.blocks // 2**14 * 2 + 2)
    scans = [scan(data, [index % 3], 1, 63) for index in range(_MAX_SCANS - 1)]
    return jpeg(frame, _dc_scan(frame) + b"".join(scans), tables=huffman(END_OF_BLOCKS))


@hostile_file("jpeg-dc-scans", "a progressive JPEG of 16 MP whose 100 scans each have a bit for every block, 9 MB")
def dc_scans(scale: float = 1.0) -> bytes:
    """Each bit is decoded and changes nothing."""
    frame = _square(PROGRESSIVE, scale)
    return jpeg(frame, _dc_scan(frame) * _MAX_SCANS)


@hostile_file("jpeg-one-scan", "a progressive JPEG of 16 MP with its first scan only, 98 kB")
def one_scan(scale: float = 1.0) -> bytes:
    """The decoder smooths the blocks whose other coefficients are unknown."""
    frame = _square(PROGRESSIVE, scale)
    return jpeg(frame, _dc_scan(frame))


@hostile_file("jpeg-four-components", "a progressive CMYK JPEG of 16 MP and 100 scans")
def four_components(scale: float = 1.0) -> bytes:
    """All coefficients are kept: 134 MB, and the pixels besides."""
    frame = _square(PROGRESSIVE, scale, _FOUR)
    data = bytes(frame.blocks // 2**14 * 2 + 2)
    scans = [scan(data, [index % 4], 1, 63) for index in range(_MAX_SCANS - 1)]
    return jpeg(frame, _dc_scan(frame) + b"".join(scans), tables=huffman(END_OF_BLOCKS))


@hostile_file("jpeg-without-data", "a JPEG of 16 MP without pixel data in 148 bytes")
def without_data(scale: float = 1.0) -> bytes:
    """The decoder fills the image with grey."""
    frame = _square(BASELINE, scale, _SUBSAMPLED)
    return jpeg(frame, scan(b"", _all(frame)))


@hostile_file("jpeg-cmyk", "a CMYK JPEG of 16 MP in 262 kB")
def cmyk(scale: float = 1.0) -> bytes:
    """Four bytes a pixel, and then three."""
    frame = _square(BASELINE, scale, _FOUR)
    return jpeg(frame, scan(bytes(frame.blocks), _all(frame)))


@hostile_file("jpeg-separate-scans", "a baseline JPEG of 16 MP with a scan for each component")
def separate_scans(scale: float = 1.0) -> bytes:
    """All coefficients are kept until the last scan."""
    frame = _square(BASELINE, scale)
    return jpeg(frame, b"".join(scan(bytes(frame.blocks // 4 + 1), [index]) for index in range(3)))


@hostile_file("jpeg-fill-bytes", "a JPEG with 16 MB of fill bytes in its pixel data")
def fill_bytes(scale: float = 1.0) -> bytes:
    """A marker may have any number of bytes 0xFF before it."""
    frame = Frame(BASELINE, 32, 32)
    return jpeg(frame, scan(bytes(1) + b"\xff" * scaled(MAX_BODY - 2000, scale)))
