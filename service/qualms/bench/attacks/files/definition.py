"""What a hostile file is: a function that makes it, at its full size or as a small version with the same structure."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

SIDE = 4096
"""side of the largest square that is accepted by default, QUALMS_MAX_PIXELS"""
PIXELS = SIDE * SIDE


class Make(Protocol):
    """Makes the file; `scale` multiplies its number of pixels or pieces, and 1 is the hostile file."""

    def __call__(self, scale: float = 1.0) -> bytes:
        """The bytes of the file."""
        ...


@dataclass(frozen=True)
class HostileFile:
    """One file; making it takes at most about two seconds and gives the same bytes each time."""

    name: str
    """begins with the format"""
    description: str
    make: Make

    @property
    def content_type(self) -> str:
        """The media type of the format."""
        return f"image/{self.name.partition('-')[0]}"


FILES: dict[str, HostileFile] = {}
"""all files by name; filled when the modules that define them are imported"""


def hostile_file(name: str, description: str) -> Callable[[Make], Make]:
    """Register a function as the maker of a file."""

    def register(make: Make) -> Make:
        assert name not in FILES
        FILES[name] = HostileFile(name, description, make)
        return make

    return register


def scaled(full: int, scale: float) -> int:
    """A number of pixels, pieces or bytes."""
    return max(1, round(full * scale))


def scaled_side(scale: float, full: int = SIDE) -> int:
    """The side of a square."""
    return max(1, round(full * math.sqrt(scale)))
