import shutil
from pathlib import Path

import pytest
import torch

from training.console import Display
from training.pipeline import train_recipe
from training.recipe import load_recipe

torch.set_num_threads(1)  # one order of summation, so that runs can be compared bit by bit


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the tiny recipe; read it, do not write to it."""
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
    """A copy of the tiny recipe's bundle that a test may do anything to."""
    return Path(shutil.copy(tiny_run / "seed-0" / "model.onnx", tmp_path / "tiny.onnx"))
