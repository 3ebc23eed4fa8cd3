"""Features of a run are resolved once and filled by their own stage only."""

from pathlib import Path

import pytest
import torch

from qualms_training.console import Display
from qualms_training.errors import QualmsError
from qualms_training.models import freeze
from qualms_training.recipe import load_recipe
from qualms_training.stages import base, features
from qualms_training.stages.context import RunContext


def new_context(folder: Path, display: Display, only: str | None = None) -> RunContext:
    """A run of the tiny recipe with an untrained base."""
    context = RunContext(
        load_recipe("tiny"), 0, folder / "seed-0", folder / "cache", None, torch.device("cpu"), display, only
    )
    return context.with_base(freeze(base.new_base(context)))


def test_later_stages_of_a_run_reuse_the_resolved_features(tmp_path: Path, display: Display) -> None:
    context = new_context(tmp_path, display)
    first, again = ([features.features(context, "validation"), *features.noisy_features(context)] for _ in range(2))
    assert all(left is right for left, right in zip(first, again, strict=True))
    assert len({cached.folder for cached in first}) == len(first) > 1


@pytest.mark.slow
def test_another_stage_does_not_fill_the_cache_but_reads_it(tmp_path: Path, display: Display) -> None:
    with pytest.raises(QualmsError, match="run --stage features first"):
        features.features(new_context(tmp_path, display, only="fit"), "validation")
    assert not (tmp_path / "cache").exists()
    filled = features.features(new_context(tmp_path, display, only="features"), "validation")
    assert features.features(new_context(tmp_path, display, only="fit"), "validation").folder == filled.folder
