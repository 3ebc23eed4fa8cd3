"""What decoding JPEG files at a reduced size does to a bundle's outputs: `python -m qualms_training.bench.scaled_jpegs BUNDLE DIR`.

Every JPEG in the folder that `scaled_jpeg` would reduce is decoded whole and reduced. As a yardstick, it is also encoded anew with
quality 95. For both, the table has the change of the model's input, of its predictions, of α and of the flag score.
"""

import argparse
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from qualms.bundle.file import Bundle, open_bundle
from qualms.bundle.runtime import GraphRunner
from qualms.errors import DataError
from qualms.images.input_spec import InputSpec
from qualms.images.pillow_decoder import decode, jpeg_scale
from qualms.images.preprocess import preprocess

_QUALITY = 95


@dataclass(frozen=True)
class Change:
    """How much one image's input and outputs change."""

    pixels: float
    """mean absolute difference, of 255"""
    same_class: bool
    same_base_class: bool
    alpha: float
    """largest absolute difference of log α"""
    flag_score: float
    """absolute difference"""


def compare(bundle: Bundle, folder: Path) -> tuple[list[Change], list[Change]]:
    """The changes by reduced decoding and by encoding anew, for each photo."""
    spec = bundle.manifest.input.model_copy(update={"scaled_jpeg": False})
    runner = GraphRunner(bundle.graph)
    scaled, encoded = list[Change](), list[Change]()
    for data in large_jpegs(folder, spec):
        whole = preprocess(data, spec)
        reduced = preprocess(data, spec.model_copy(update={"scaled_jpeg": True}))
        scaled.append(_change(bundle, runner, whole, reduced))
        encoded.append(_change(bundle, runner, whole, preprocess(_encode_anew(data), spec)))
    if not scaled:
        raise DataError(f"{folder} has no JPEG file that would be reduced; its photos should be larger.")
    return scaled, encoded


def large_jpegs(folder: Path, spec: InputSpec) -> Iterator[bytes]:
    """The bytes of the JPEG files in a folder and below that would be decoded at a reduced size, each once."""
    min_side = spec.model_copy(update={"scaled_jpeg": True}).min_jpeg_side
    seen = set[bytes]()
    for path in sorted(folder.rglob("*.jp*g")):
        data = path.read_bytes() if path.is_file() else b""
        if data and data not in seen and jpeg_scale(*decode(data).size, min_side) > 1:
            seen.add(data)
            yield data


def _encode_anew(data: bytes) -> bytes:
    file = io.BytesIO()
    decode(data).convert("RGB").save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def _change(bundle: Bundle, runner: GraphRunner, first: NDArray[np.uint8], second: NDArray[np.uint8]) -> Change:
    outputs = runner(np.stack([first, second]))
    classes, base = outputs["prediction"], outputs["base_probabilities"].argmax(axis=1)
    alpha, flags = np.log(outputs["alpha"]), outputs[bundle.manifest.operating.score]
    return Change(
        pixels=float(np.abs(first.astype(np.int16) - second).mean()),
        same_class=bool(classes[0] == classes[1]),
        same_base_class=bool(base[0] == base[1]),
        alpha=float(np.abs(alpha[0] - alpha[1]).max()),
        flag_score=float(abs(flags[0] - flags[1])),
    )


def print_table(scaled: list[Change], encoded: list[Change], console: Console) -> None:
    """Print one row per kind of change."""
    table = Table(title=f"{len(scaled)} photos", title_justify="left")
    for header in (
        "",
        "pixels",
        "same class",
        "same class of the base",
        "log α, median",
        "log α, most",
        "flag score, median",
    ):
        table.add_column(header, justify="right" if header else "left")
    for name, changes in (("decoded at a reduced size", scaled), (f"encoded anew, quality {_QUALITY}", encoded)):
        table.add_row(
            name,
            f"{np.mean([change.pixels for change in changes]):.2f}",
            str(sum(change.same_class for change in changes)),
            str(sum(change.same_base_class for change in changes)),
            f"{np.median([change.alpha for change in changes]):.4f}",
            f"{max(change.alpha for change in changes):.4f}",
            f"{np.median([change.flag_score for change in changes]):.4f}",
        )
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print_table(*compare(open_bundle(arguments.bundle), arguments.folder), Console())
