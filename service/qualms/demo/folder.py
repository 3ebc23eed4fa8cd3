"""Drawn digits as a folder of class folders: what `qualms calibrate` takes."""

from pathlib import Path

from PIL import Image

from qualms.demo.digits import draw_many
from qualms.errors import DataError


def write_folder(out: Path, count: int, seed: int) -> None:
    """Write OUT/CLASS/NUMBER.png, `count` in all; a folder that holds something else is left alone."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is there already; give a folder that is empty or does not exist.")
    for digit in range(10):
        (out / str(digit)).mkdir(parents=True, exist_ok=True)
    for index, (digit, image) in enumerate(draw_many(count, seed)):
        Image.fromarray(image).save(out / str(digit) / f"{index:06}.png")
