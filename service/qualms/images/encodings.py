"""Encodings: how an image is sent, written as text, to simulate it for calibration and evaluation.

    png                      a lossless file; also bmp, tiff and gif (256 colours)
    jpeg:75-95               a JPEG file of a quality from 75 to 95; also webp:80
    resize:1.5-3             the image enlarged by a factor from 1.5 to 3, as a PNG file; factors below 1 reduce it
    resize:2:bilinear        the same with one resampling method; otherwise it is bilinear, bicubic or Lanczos
    brightness:0.85-1.15     the pixel values multiplied by a factor, as a PNG file
    resize:2+jpeg:85         several steps, of which the last one may be a file format

An encoded image is the bytes of a file, which `qualms.images.preprocess.preprocess` decodes like every other file.
"""

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance

from qualms.errors import EncodingError
from qualms.images.pillow_decoder import MAX_PIXELS, RESAMPLING, flatten

FORMATS = {"png": "PNG", "bmp": "BMP", "tiff": "TIFF", "gif": "GIF", "jpeg": "JPEG", "webp": "WEBP"}
"""file formats by step, each with Pillow's name"""
_LOSSLESS = ("png", "bmp", "tiff")
RANGES = {"jpeg": (1, 100), "webp": (1, 100), "resize": (0.1, 8), "brightness": (0.1, 4)}
"""steps with a parameter, and its accepted range: the quality or the factor"""
STEPS = (*FORMATS, "resize", "brightness")
SMOOTH_FILTERS = ("bilinear", "bicubic", "lanczos")
"""resampling methods of programs that enlarge photographs, from the blurriest to the sharpest"""
MAX_SETTINGS = 64
"""settings that one list of encodings may expand to: each is run and stored"""
_BETWEEN = {"resize": (0.5, 0.0), "jpeg": (10.0, 5.0)}
"""Step and offset of the values at which a range is tested beside its ends: integer and half factors, because they blur more or
less than those between them; and one quality in each band of `qualms.images.observed`."""
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True)
class Step:
    """One step of an encoding; `low` and `high` are None if it has no parameter."""

    name: str
    low: float | None = None
    high: float | None = None
    method: str | None = None
    """the resampling method of a resize; None for any of SMOOTH_FILTERS"""

    @property
    def text(self) -> str:
        """The step as it is written."""
        if self.low is None:
            return self.name
        values = f"{self.low:.12g}" if self.low == self.high else f"{self.low:.12g}-{self.high:.12g}"
        return f"{self.name}:{values}" + (f":{self.method}" if self.method else "")

    def settings(self) -> "list[Step]":
        """Steps without a range that represent this one: both ends, values between them (_BETWEEN), and two resampling methods."""
        if self.low is None or self.high is None:
            return [self]
        values = {self.low, self.high}
        methods: Sequence[str | None] = (self.method,)
        if self.name in _BETWEEN:
            step, offset = _BETWEEN[self.name]
            first, last = math.floor((self.low - offset) / step) + 1, math.ceil((self.high - offset) / step)
            values.update(offset + step * i for i in range(first, last))
        if self.name == "resize" and not self.method:
            methods = (SMOOTH_FILTERS[0], SMOOTH_FILTERS[-1])
        return [Step(self.name, value, value, method) for value in sorted(values) for method in methods]


@dataclass(frozen=True)
class Encoding:
    """A chain of steps; without a file format at the end, the file is a PNG."""

    steps: tuple[Step, ...]

    @property
    def text(self) -> str:
        """The encoding as it is written."""
        return "+".join(step.text for step in self.steps)

    def settings(self) -> "list[Encoding]":
        """Encodings without a range that represent this one."""
        return [Encoding(steps) for steps in product(*(step.settings() for step in self.steps))]

    def encode(self, image: Image.Image, rng: np.random.Generator) -> bytes:
        """The bytes of the image's file; parameters are drawn uniformly from their ranges."""
        image = flatten(image)
        for step in self.steps:
            low, high = step.low or 0.0, step.high or 0.0
            if step.name == "resize":
                method = step.method or SMOOTH_FILTERS[rng.integers(len(SMOOTH_FILTERS))]
                image = _resize(image, rng.uniform(low, high), method)
            elif step.name == "brightness":
                image = ImageEnhance.Brightness(image).enhance(rng.uniform(low, high))
            elif step.low is None:
                return _save(image, FORMATS[step.name], {})
            else:
                return _save(image, FORMATS[step.name], {"quality": int(rng.integers(int(low), int(high) + 1))})
        return _save(image, "PNG", {})


def parse_encoding(text: str) -> Encoding:
    """The encoding that a text describes; EncodingError names the step that is not accepted."""
    steps = tuple(_parse_step(part.strip(), text) for part in text.split("+"))
    for step in steps[:-1]:
        if step.name in FORMATS:
            raise EncodingError(
                f"The encoding {text!r} goes on after {step.text}; a file format must be the last step."
            )
    return Encoding(steps)


def parse_encodings(texts: Iterable[str]) -> list[Encoding]:
    """The encodings of a list; EncodingError if they expand to too many settings."""
    encodings = [parse_encoding(text) for text in texts]
    # Counted before they are listed: a long chain of ranges would not fit into memory.
    count = sum(math.prod(len(step.settings()) for step in encoding.steps) for encoding in encodings)
    if count > MAX_SETTINGS:
        raise EncodingError(
            f"The encodings {', '.join(encoding.text for encoding in encodings)} expand to {count} settings; at most "
            f"{MAX_SETTINGS} are accepted: use narrower ranges, or name the resampling method of a resize."
        )
    return encodings


def all_settings(encodings: Iterable[Encoding]) -> list[Encoding]:
    """Encodings without a range that represent all of these, each once."""
    return list(dict.fromkeys(setting for encoding in encodings for setting in encoding.settings()))


def covers(listed: Encoding, sent: Encoding) -> bool:
    """Whether every image that is sent as `sent` may also come from `listed`; lossless files have the same pixels."""
    steps = _lossy_steps(listed), _lossy_steps(sent)
    return len(steps[0]) == len(steps[1]) and all(_step_covers(a, b) for a, b in zip(*steps, strict=True))


def _lossy_steps(encoding: Encoding) -> list[Step]:
    return [step for step in encoding.steps if step.name not in _LOSSLESS]


def _step_covers(listed: Step, sent: Step) -> bool:
    if listed.name != sent.name or None in (listed.low, listed.high, sent.low, sent.high):
        return listed == sent
    assert listed.low is not None and listed.high is not None and sent.low is not None and sent.high is not None
    methods = (listed.method,) if listed.method else (None, *SMOOTH_FILTERS)
    return listed.low <= sent.low and sent.high <= listed.high and (listed == sent or sent.method in methods)


def _parse_step(text: str, whole: str) -> Step:
    name, colon, rest = text.partition(":")
    if name not in STEPS:
        raise EncodingError(
            f"The encoding {whole!r} is unknown: {name!r} is not one of {', '.join(STEPS)}; "
            "examples are png, jpeg:75-95, resize:1.5-3 and resize:2+jpeg:85."
        )
    if name not in RANGES:
        if colon:
            raise EncodingError(f"The encoding {whole!r} is not accepted: {name} takes no parameter.")
        return Step(name)
    values, colon, method = rest.partition(":")
    if colon and (name != "resize" or method not in RESAMPLING):
        accepted = f"accepted are {', '.join(RESAMPLING)}" if name == "resize" else f"{name} takes one parameter"
        raise EncodingError(f"The encoding {whole!r} is not accepted: {method!r} after {name}:{values}; {accepted}.")
    low, dash, high = values.partition("-")
    smallest, largest = RANGES[name]
    try:
        first, last = _number(low, name), _number(high if dash else low, name)
    except ValueError:
        first = last = math.nan
    if not smallest <= first <= last <= largest:
        kind = "a whole number" if name in FORMATS else "a number"
        raise EncodingError(
            f"The encoding {whole!r} is not accepted: {name} takes {kind} from {smallest:g} to {largest:g}, or a range "
            f"LOW-HIGH of them, not {values!r}."
        )
    return Step(name, first, last, method or None)


def _number(text: str, name: str) -> float:
    """The value of plain ASCII digits; ValueError for anything else."""
    if not text.isascii() or not _NUMBER.fullmatch(text) or (name in FORMATS and not text.isdigit()):
        raise ValueError(text)
    return float(text)


def _resize(image: Image.Image, factor: float, method: str) -> Image.Image:
    """Resize by a factor, which is reduced if the result would have more pixels than preprocessing accepts."""
    largest = math.sqrt(MAX_PIXELS / (image.width * image.height))
    rounding = 0.5 if factor * 1.001 < largest else 0.0  # down, where rounding up could exceed the limit
    factor = min(factor, largest)
    size = (max(1, int(image.width * factor + rounding)), max(1, int(image.height * factor + rounding)))
    return image.resize(size, RESAMPLING[method])


def _save(image: Image.Image, kind: str, options: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
