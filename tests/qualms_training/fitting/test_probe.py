"""Two networks are told apart by what they say, and rounding is no difference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms_training.fitting import probe

SAID: list[NDArray[Any]] = [np.random.default_rng(0).normal(0, 3, (4, 10)), np.zeros((4, 2), np.float32)]


def test_rounding_is_no_difference() -> None:
    assert probe.agree([values.astype(np.float16) for values in SAID], SAID)
    assert probe.agree(SAID, [values.astype(np.float16) for values in SAID])


@pytest.mark.parametrize(
    "other",
    [
        [SAID[0] * 1.1, SAID[1]],
        [SAID[0], SAID[1] + 1e-3],
        [SAID[0][:, :9], SAID[1]],
        SAID[:1],
        [SAID[0] * np.nan, SAID[1]],
    ],
    ids=["value", "no longer zero", "shape", "fewer", "not a number"],
)
def test_what_differs_by_more_does_not_agree(other: list[NDArray[Any]]) -> None:
    assert not probe.agree(other, SAID)


def test_what_was_kept_is_compared_and_what_was_not_is_taken_on_trust(tmp_path: Path) -> None:
    file = tmp_path / "new" / "probe.npz"
    assert probe.agrees_with_kept(file, SAID)
    probe.save(file, SAID)
    assert [path.name for path in file.parent.iterdir()] == ["probe.npz"]
    assert probe.agrees_with_kept(file, SAID)
    assert not probe.agrees_with_kept(file, [-SAID[0], SAID[1]])
