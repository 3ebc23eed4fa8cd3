import io
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from qualms.bundle.file import open_bundle, write_bundle
from qualms_training.console import Display
from qualms_training.recipe import Recipe, check_recipe, load_recipe
from qualms_training.run import train_recipe

torch.set_num_threads(1)  # one order of summation, so that runs can be compared bit by bit


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the tiny recipe, shared by all tests; it must not be written to."""
    out = tmp_path_factory.mktemp("tiny")
    train_recipe(
        load_recipe("tiny"),
        out=out,
        cache=out / "cache",
        data_dir=None,
        seeds=[0],
        device=torch.device("cpu"),
        display=Display(),
    )
    return out


@pytest.fixture
def tiny_bundle(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of the tiny recipe's bundle, which a test may change."""
    return Path(shutil.copy(tiny_run / "seed-0" / "model.onnx", tmp_path / "tiny.onnx"))


@pytest.fixture
def earlier_bundle(tiny_bundle: Path) -> Path:
    """The tiny recipe's bundle as version 1 of the schema has it: each score sorted, and counts of the trust score alone."""
    bundle = open_bundle(tiny_bundle)
    calibration = bundle.manifest.calibration
    levels = len(calibration.trust.levels)
    later = ("wrong", "predictions", "label_scores", "fingerprints", "as_sent")
    earlier = calibration.model_copy(
        update={
            **dict.fromkeys(later),
            "observed": {},
            "trust": calibration.trust.model_copy(update={"accepted": [400] * levels, "errors": [0] * levels}),
            "scores": {name: np.sort(values) for name, values in calibration.scores.items()},
        }
    )
    update = {"schema_version": 1, "calibration": earlier, "evaluation": None}
    write_bundle(tiny_bundle, bundle.graph, bundle.manifest.model_copy(update=update))
    return tiny_bundle


@pytest.fixture
def display() -> Display:
    """A display without a terminal."""
    return Display(Console(file=io.StringIO()))


@pytest.fixture
def tiny() -> Callable[[Mapping[str, Any]], Recipe]:
    """A function that returns the tiny recipe with some values changed, by dotted key."""

    def alter(changes: Mapping[str, Any]) -> Recipe:
        document = load_recipe("tiny").model_dump(mode="json")
        for key, value in changes.items():
            *sections, name = key.split(".")
            section = document
            for part in sections:
                section = section[part]
            section[name] = value
        return check_recipe(document, "of a test")

    return alter


@pytest.fixture
def data_dir() -> Path:
    """The folder of real data sets; the test is skipped if there is none."""
    folder = os.environ.get("QUALMS_DATA")
    if not folder:
        pytest.skip("QUALMS_DATA is not set")
    return Path(folder)
