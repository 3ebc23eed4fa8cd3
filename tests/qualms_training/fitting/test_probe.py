"""Probes detect networks with different outputs and tolerate rounding."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms_training.fitting import probe

OUTPUTS: list[NDArray[Any]] = [np.random.default_rng(0).normal(0, 3, (4, 10)), np.zeros((4, 2), np.float32)]


def test_outputs_that_differ_by_rounding_agree() -> None:
    assert probe.agree([values.astype(np.float16) for values in OUTPUTS], OUTPUTS)
    assert probe.agree(OUTPUTS, [values.astype(np.float16) for values in OUTPUTS])


@pytest.mark.parametrize(
    "other",
    [
        [OUTPUTS[0] * 1.1, OUTPUTS[1]],
        [OUTPUTS[0], OUTPUTS[1] + 1e-3],
        [OUTPUTS[0][:, :9], OUTPUTS[1]],
        OUTPUTS[:1],
        [OUTPUTS[0] * np.nan, OUTPUTS[1]],
    ],
    ids=["value", "no longer zero", "shape", "fewer", "not a number"],
)
def test_outputs_that_differ_by_more_than_rounding_disagree(other: list[NDArray[Any]]) -> None:
    assert not probe.agree(other, OUTPUTS)


def test_saved_outputs_are_compared_and_a_missing_file_counts_as_agreement(tmp_path: Path) -> None:
    file = tmp_path / "new" / "probe.npz"
    assert probe.agrees_with_saved(file, OUTPUTS)
    probe.save(file, OUTPUTS)
    assert [path.name for path in file.parent.iterdir()] == ["probe.npz"]
    assert probe.agrees_with_saved(file, OUTPUTS)
    assert not probe.agrees_with_saved(file, [-OUTPUTS[0], OUTPUTS[1]])
