"""Folders of images for `qualms score`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

Draw = Callable[[int, int], NDArray[np.uint8]]


@pytest.fixture
def images(tmp_path: Path, draw_images: Draw, encode: Callable[..., bytes]) -> Path:
    """A folder with 300 images in two folders, two of them broken, and files that are no images."""
    folder = tmp_path / "images"
    for index, pixels in enumerate(draw_images(5, 300)):
        below = folder / ("b" if index % 2 else "a/deeper")
        below.mkdir(parents=True, exist_ok=True)
        data = encode(np.ascontiguousarray(pixels), "PNG" if index % 5 else "WEBP")
        (below / f"{index:04}.png").write_bytes(b"broken" if index in (7, 250) else data)
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_bytes(b"hidden")
    return folder
