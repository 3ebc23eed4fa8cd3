"""The comparison of JPEG files decoded whole and at a reduced size."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import Bundle, open_bundle
from qualms.errors import DataError
from qualms_training.bench.scaled_jpegs import compare, print_table


@pytest.fixture
def bundle() -> Bundle:
    return open_bundle(resolve_model("cifar10"))


def write_photo(path: Path, side: int, seed: int) -> None:
    corners = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), np.uint8)
    Image.fromarray(corners).resize((side, side), Image.Resampling.BICUBIC).save(path)


def test_large_photos_are_compared_once(tmp_path: Path, bundle: Bundle) -> None:
    for name, side, seed in (("a.jpg", 300, 0), ("b.jpeg", 400, 1), ("copy.jpg", 300, 0), ("small.jpg", 100, 2)):
        write_photo(tmp_path / name, side, seed)
    scaled, encoded = compare(bundle, tmp_path)
    assert len(scaled) == len(encoded) == 2
    assert all(0 < change.pixels < 5 for change in scaled)
    assert all(change.alpha > 0 for change in (*scaled, *encoded))
    console = Console(record=True, width=150)
    print_table(scaled, encoded, console)
    assert "2 photos" in console.export_text()


def test_a_folder_without_large_photos_is_refused(tmp_path: Path, bundle: Bundle) -> None:
    write_photo(tmp_path / "small.jpg", 100, 0)
    with pytest.raises(DataError, match="no JPEG file that would be reduced"):
        compare(bundle, tmp_path)
