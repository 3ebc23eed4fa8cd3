"""EXIF and XMP metadata with an orientation, for tests."""

import struct

ORIENTATION = 0x0112
SHORT, LONG = 3, 4


def exif(orientation: int, *, order: str = "<", kind: int = SHORT, thumbnail: bytes = b"") -> bytes:
    """A TIFF structure with one tag, as SHORT, LONG or any other type, and a JPEG thumbnail in a second directory."""
    value = struct.pack(
        order + "I" if kind == LONG else order + "HH", *([orientation] if kind == LONG else [orientation, 0])
    )
    mark = b"II" if order == "<" else b"MM"
    second = 8 + 2 + 12 + 4
    head = mark + struct.pack(order + "HIH", 42, 8, 1) + struct.pack(order + "HHI", ORIENTATION, kind, 1) + value
    if not thumbnail:
        return head + bytes(4)
    offset = second + 2 + 2 * 12 + 4
    entries = struct.pack(order + "HHII", 0x0201, LONG, 1, offset) + struct.pack(
        order + "HHII", 0x0202, LONG, 1, len(thumbnail)
    )
    return head + struct.pack(order + "IH", second, 2) + entries + bytes(4) + thumbnail


def xmp(orientation: int) -> bytes:
    """An XMP packet."""
    return (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="%d"/></rdf:RDF></x:xmpmeta>'
    ) % orientation
