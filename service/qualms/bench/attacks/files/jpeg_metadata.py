"""Hostile JPEG files: segments around few pixels."""

import struct

from qualms.bench.attacks.files.definition import hostile_file, scaled
from qualms.bench.attacks.files.jpeg_parts import (
    APP1,
    APP2,
    APP13,
    COM,
    MAX_SEGMENT,
    blank,
    segment,
)
from qualms.bench.attacks.payloads import MAX_BODY

_MAX_SEGMENTS = 65_000
"""nearly as many as `qualms.images.limits` accepts"""
_SHARE = MAX_BODY // _MAX_SEGMENTS - 10
"""bytes in each of so many segments"""


@hostile_file("jpeg-exif-segments", "a JPEG with 65,000 EXIF segments, 16 MB")
def exif_segments(scale: float = 1.0) -> bytes:
    """Each is appended to a copy of all earlier ones."""
    return blank(segment(APP1, b"Exif\0\0" + bytes(_SHARE - 6)) * scaled(_MAX_SEGMENTS, scale))


@hostile_file("jpeg-exif-tags", "a JPEG with EXIF data of 5,400 entries, 250 times, 16 MB")
def exif_tags(scale: float = 1.0) -> bytes:
    """The directory is parsed for resolution and orientation."""
    entries = b"".join(struct.pack(">HHII", tag, 5, 1, 8) for tag in range(5400))
    data = b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 5400) + entries
    return blank(segment(APP1, data) * scaled(250, scale))


@hostile_file("jpeg-profile-segments", "a JPEG with 65,000 segments of a colour profile, 16 MB")
def profile_segments(scale: float = 1.0) -> bytes:
    """They are sorted before they are joined."""
    segments = [
        segment(APP2, b"ICC_PROFILE\0" + bytes(_SHARE - 16) + struct.pack(">I", 2**32 - 1 - index))
        for index in range(scaled(_MAX_SEGMENTS, scale))
    ]
    return blank(*segments)


@hostile_file("jpeg-photoshop", "a JPEG with 1.4 million empty Photoshop resources, 16 MB")
def photoshop(scale: float = 1.0) -> bytes:
    """Each is parsed in Python."""
    resource = b"8BIM" + struct.pack(">HHI", 1, 0, 0)
    data = b"Photoshop 3.0\0" + resource * ((MAX_SEGMENT - 14) // len(resource))
    return blank(segment(APP13, data) * scaled(MAX_BODY // 2**16 - 1, scale))


@hostile_file("jpeg-empty-segments", "a JPEG with 4 million empty comments, 16 MB")
def empty_segments(scale: float = 1.0) -> bytes:
    """As many as a body can hold: a scan of the structure must not read all of them."""
    return blank(segment(COM) * scaled((MAX_BODY - 2000) // 4, scale))
