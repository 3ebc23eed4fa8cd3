"""JPEG files of every kind that cameras and programs write: name and bytes of each."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tests.qualms.images.exif import exif, xmp
from tests.qualms.images.jpeg_encoder import APP0, APP1, APP2, APP14, COM, JFIF, SOF0, Part, adobe, encode, join, split
from tests.qualms.images.png_files import NamedFile

SIZES = ((1, 1), (1, 8), (7, 1), (8, 8), (15, 9), (16, 16), (17, 33), (28, 28), (45, 64))
_WAYS: tuple[dict[str, Any], ...] = ({}, {"progressive": True, "subsampling": 0})
_SAMPLINGS: dict[str, list[tuple[int, int]]] = {
    "4:4:4": [(1, 1), (1, 1), (1, 1)],
    "4:2:2": [(2, 1), (1, 1), (1, 1)],
    "4:2:0": [(2, 2), (1, 1), (1, 1)],
    "4:4:0": [(1, 2), (1, 1), (1, 1)],
    "4:1:1": [(4, 1), (1, 1), (1, 1)],
    "4:4:1": [(1, 4), (1, 1), (1, 1)],
    "4:1:0": [(4, 2), (1, 1), (1, 1)],
    "2×4": [(2, 4), (1, 1), (1, 1)],
    "3×1": [(3, 1), (1, 1), (1, 1)],
    "3×2": [(3, 2), (1, 1), (1, 1)],
    "4:4:4 as 2×2": [(2, 2), (2, 2), (2, 2)],
    "4:2:2 as 2×2, 1×2": [(2, 2), (1, 2), (1, 2)],
    "4:4:0 as 2×2, 2×1": [(2, 2), (2, 1), (2, 1)],
    "4:2:2 as 4×1, 2×1": [(4, 1), (2, 1), (2, 1)],
    "different chroma": [(2, 2), (2, 1), (1, 1)],
    "brightness subsampled": [(1, 1), (2, 2), (2, 2)],
    "one chroma only subsampled": [(2, 1), (2, 1), (1, 1)],
    "not a divisor": [(3, 1), (2, 1), (1, 1)],
}


def photo(seed: int, height: int, width: int, channels: int = 3) -> NDArray[np.uint8]:
    """A picture of gradients, edges and noise, (H, W, C), or (H, W) for one channel."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / rng.uniform(2, 20) + y / rng.uniform(2, 20) + rng.uniform(0, 6)) for _ in range(channels)]
    picture = 127 + 100 * np.stack(waves, axis=-1) + rng.normal(0, 12, (height, width, channels))
    picture[(x - width / 2) ** 2 + (y - height / 2) ** 2 < (min(height, width) / 4) ** 2] *= rng.uniform(0.2, 1.8)
    pixels = picture.clip(0, 255).astype(np.uint8)
    return pixels[..., 0] if channels == 1 else pixels


def save(pixels: NDArray[np.uint8], mode: str | None = None, kind: str = "JPEG", **options: Any) -> bytes:
    """The file that Pillow writes."""
    image = Image.fromarray(pixels)
    if mode == "CMYK":
        image = Image.frombytes("CMYK", (pixels.shape[1], pixels.shape[0]), pixels.tobytes())
    elif mode is not None:
        image = image.convert(mode)
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def jpeg_files() -> Iterator[NamedFile]:
    for part in (_by_pillow(), _by_quality(), _sampled(), _colour_spaces(), _with_metadata(), _oriented(), _large()):
        for name, data in part:
            yield f"jpeg {name}", data


def _by_pillow() -> Iterator[NamedFile]:
    """Modes, sizes, subsampling, progressive files and restart markers, as libjpeg writes them."""
    kinds: list[tuple[str, int, dict[str, Any]]] = [
        ("grey", 1, {}),
        *((f"YCbCr {name}", 3, {"subsampling": name}) for name in ("4:4:4", "4:2:2", "4:2:0")),
        ("RGB", 3, {"keep_rgb": True}),
        ("CMYK", 4, {}),
    ]
    ways: list[tuple[str, dict[str, Any]]] = [
        ("baseline", {}),
        ("optimised", {"optimize": True}),
        ("progressive", {"progressive": True}),
        ("restart by blocks", {"restart_marker_blocks": 1}),
        ("restart by rows", {"restart_marker_rows": 1}),
        ("progressive with restarts", {"progressive": True, "restart_marker_blocks": 3}),
    ]
    for kind, channels, options in kinds:
        for way, more in ways:
            for seed, (height, width) in enumerate(SIZES):
                pixels = photo(seed, height, width, channels)
                data = save(pixels, "CMYK" if channels == 4 else None, **options, **more)
                yield f"{way}: {kind}, {width}×{height}", data


def _by_quality() -> Iterator[NamedFile]:
    for quality in range(1, 101):
        pixels = photo(quality, 24 + quality % 9, 30 + quality % 7)
        yield (
            f"quality: {quality}",
            save(pixels, quality=quality, subsampling=quality % 3, progressive=quality % 2 == 0),
        )


def _sampled() -> Iterator[NamedFile]:
    """Sampling factors, scans and restart intervals that Pillow cannot write."""
    for name, factors in _SAMPLINGS.items():
        for seed, (height, width) in enumerate(SIZES):
            planes = list(np.moveaxis(photo(seed, height, width), -1, 0))
            yield f"sampling: {name}, {width}×{height}", join(encode(planes, factors, step=2))
        planes = list(np.moveaxis(photo(7, 37, 41), -1, 0))
        for restart in (1, 2, 7, 1000):
            yield f"sampling with restarts: {name}, every {restart}", join(encode(planes, factors, restart=restart))
        orders: list[list[list[int]]] = [[[0], [1], [2]], [[2], [0], [1]], [[0, 1], [2]], [[0], [1, 2]]]
        for scans in orders:
            for restart in (0, 3):
                data = join(encode(planes, factors, scans=scans, restart=restart))
                yield f"several scans: {name}, {scans}, restart {restart}", data
        yield f"extended sequential: {name}", join(encode(planes, factors, frame=SOF0 + 1))
        yield f"16-bit quantisation tables: {name}", join(encode(planes, factors, wide_tables=True))
    for h in (1, 2, 3, 4):
        for v in (1, 2, 3, 4):
            for seed, (height, width) in enumerate(SIZES):
                data = join(encode([photo(seed, height, width, 1)], [(h, v)]))
                yield f"grey with sampling {h}×{v}: {width}×{height}", data


def _colour_spaces() -> Iterator[NamedFile]:
    """Numbers and names of components with and without JFIF and Adobe segments, which determine the colour space."""
    headers: dict[str, list[Part]] = {
        "none": [],
        "JFIF": [JFIF],
        **{f"Adobe {transform}": [adobe(transform)] for transform in (0, 1, 2, 3, 255)},
        **{f"JFIF and Adobe {transform}": [JFIF, adobe(transform)] for transform in (0, 1, 2)},
        "Adobe 0 and JFIF": [adobe(0), JFIF],
        "Adobe 0 and Adobe 1": [adobe(0), adobe(1)],
        "short Adobe": [(APP14, b"Adobe\0\x64\0\0\0\0")],
        "long Adobe": [(APP14, b"Adobe\0\x64\0\0\0\0\0more")],
    }
    ids = {
        "usual": (1, 2, 3, 4),
        "RGB": tuple(b"RGBA"),
        "from 0": (0, 1, 2, 3),
        "big gamut": (1, 34, 35, 36),
        "rgb": tuple(b"rgba"),
    }
    for name, before in headers.items():
        for numbers, components in ids.items():
            for channels in (1, 2, 3, 4):
                planes = list(np.moveaxis(np.atleast_3d(photo(channels, 19, 22, channels)), -1, 0))
                for factor in ((1, 1), (2, 2)):
                    factors = [factor, (1, 1), (1, 1), factor][:channels]
                    data = join(encode(planes, factors, ids=components, before=before))
                    yield f"colour space: {channels} components {numbers}, {name}, {factor[0]}×{factor[1]}", data
    for mode, channels in (("CMYK", 4), (None, 3)):
        for way in _WAYS:
            parts = split(save(photo(3, 26, 31, channels), mode, **way))
            rest = [part for part in parts if part[0] not in (APP0, APP14)]
            for transform in (0, 1, 2):
                yield f"colour space: {channels} components, Adobe {transform}, {way}", join([adobe(transform), *rest])
            yield f"colour space: {channels} components without Adobe, {way}", join(rest)


def _with_metadata() -> Iterator[NamedFile]:
    """Segments that do not change the pixels, and such as look as if they did."""
    thumbnail = save(photo(9, 12, 16))
    profile = b"ICC_PROFILE\0\1\1" + bytes(300)
    segments: dict[str, list[Part]] = {
        "comment": [(COM, b"a comment")],
        "empty comment": [(COM, b"")],
        "largest comment": [(COM, bytes(65533))],
        "profile": [(APP2, profile)],
        "profile in two": [(APP2, b"ICC_PROFILE\0\1\2abc"), (APP2, b"ICC_PROFILE\0\2\2def")],
        "profile without its second part": [(APP2, b"ICC_PROFILE\0\1\2abc")],
        "short profile": [(APP2, b"ICC_PROFILE\0")],
        "thumbnail in EXIF": [(APP1, b"Exif\0\0" + exif(1, thumbnail=thumbnail))],
        "thumbnail in JFIF": [(APP0, JFIF[1][:-2] + b"\2\2" + bytes(12)), (APP0, b"JFXX\0\x10" + thumbnail)],
        "JFIF with wrong thumbnail size": [(APP0, JFIF[1][:-2] + b"\xff\xff")],
        "short JFIF": [(APP0, b"JFIF\0")],
        "old JFIF": [(APP0, b"JFIF\0\0\1\0\0\1\0\1\0\0")],
        "empty APP0": [(APP0, b"")],
        "Photoshop": [(0xED, b"Photoshop 3.0\0008BIM\x04\x04\0\0\0\0\0\4abcd")],
        "damaged Photoshop": [(0xED, b"Photoshop 3.0\0008BIM\x04\x04\xff")],
        "MPF": [(APP2, b"MPF\0II*\0damaged")],
        "FlashPix": [(APP2, b"FPXR\0content")],
        "empty EXIF": [(APP1, b"Exif\0\0")],
        "damaged EXIF": [(APP1, b"Exif\0\0II*\0damaged")],
        "EXIF with a loop": [(APP1, b"Exif\0\0II*\0\x08\0\0\0\0\0\x08\0\0\0")],
        **{f"APP{number}": [(0xE0 + number, b"unknown\0content")] for number in range(3, 16)},
        **{f"JPG{number}": [(0xF0 + number, b"content")] for number in (0, 7, 13)},
        "many comments": [(COM, b"comment")] * 100,
    }
    for way in _WAYS:
        parts = split(save(photo(4, 21, 27), **way))
        for name, more in segments.items():
            yield f"segment: {name}, first, {way}", join([*more, *parts])
            yield f"segment: {name}, after JFIF, {way}", join([parts[0], *more, *parts[1:]])
            yield f"segment: {name}, before the scan, {way}", join([*parts[:-1], *more, *parts[-1:]])
    images = [Image.fromarray(photo(seed, 20, 30)) for seed in (1, 2)]
    stream = io.BytesIO()
    images[0].save(stream, "MPO", save_all=True, append_images=images[1:])
    yield "MPO", stream.getvalue()
    yield "MPO: second file alone", stream.getvalue()[stream.getvalue().rindex(b"\xff\xd8\xff") :]


def _oriented() -> Iterator[NamedFile]:
    parts = split(save(photo(5, 18, 27)))
    for value in (*range(10), 255, 65535):
        metadata: dict[str, bytes] = {
            "EXIF": b"Exif\0\0" + exif(value),
            "big-endian EXIF": b"Exif\0\0" + exif(value, order=">"),
            "EXIF as LONG": b"Exif\0\0" + exif(value, kind=4),
            "EXIF as big-endian LONG": b"Exif\0\0" + exif(value, kind=4, order=">"),
            "EXIF as BYTE": b"Exif\0\0" + exif(value, kind=1),
            "EXIF as ASCII": b"Exif\0\0" + exif(value, kind=2),
            "EXIF as FLOAT": b"Exif\0\0" + exif(value, kind=11),
            "EXIF of an unknown type": b"Exif\0\0" + exif(value, kind=99),
            "EXIF with padding byte": b"Exif\0\xff" + exif(value),
            "EXIF with thumbnail": b"Exif\0\0" + exif(value, thumbnail=b"\xff\xd8\xff\xd9"),
            "XMP": b"http://ns.adobe.com/xap/1.0/\0" + xmp(value),
        }
        for name, content in metadata.items():
            yield f"orientation by {name}: {value}", join([(APP1, content), *parts])
        first, other = (APP1, metadata["EXIF"]), (APP1, b"Exif\0\0" + exif(9 - value if value < 9 else 3))
        yield f"two EXIF segments: {value}", join([first, other, *parts])
        yield f"EXIF and XMP: {value}", join([other, (APP1, metadata["XMP"]), *parts])
        yield f"EXIF before the scan: {value}", join([*parts[:-1], first, *parts[-1:]])
        yield f"EXIF after the scan: {value}", join([*parts, first])
        halves = metadata["EXIF"][:20], metadata["EXIF"][20:]
        yield f"EXIF in two segments: {value}", join([(APP1, halves[0]), (APP1, b"Exif\0\0" + halves[1]), *parts])


def _large() -> Iterator[NamedFile]:
    """Photographs larger than the model's input, with odd sides."""
    for seed, (height, width) in enumerate(
        ((200, 300), (201, 299), (256, 256), (257, 340), (481, 641), (64, 500), (1, 300))
    ):
        for subsampling in (0, 1, 2):
            for progressive in (False, True):
                data = save(photo(seed, height, width), quality=85, subsampling=subsampling, progressive=progressive)
                yield f"photo: {width}×{height}, subsampling {subsampling}, progressive {progressive}", data
        yield f"photo: {width}×{height}, grey", save(photo(seed, height, width, 1))
        data = save(photo(seed, height, width), exif=b"Exif\0\0" + exif(6))
        yield f"photo: {width}×{height}, turned", data
