"""Outputs that are no logits are recognised on held-out images."""

import numpy as np
import pytest

from qualms_training.checks.given_base import check_logits
from qualms_training.errors import ModelError


def test_outputs_of_a_sigmoid_are_refused() -> None:
    with pytest.raises(ModelError, match=r"as those of a sigmoid.*let it return the logits\. --allow-chance goes on"):
        check_logits(np.full((64, 3), [0.1, 0.9, 0.2], dtype=np.float32))


@pytest.mark.parametrize("row", [[-0.1, 0.9], [0.1, 1.1]])
def test_logits_are_accepted(row: list[float]) -> None:
    check_logits(np.full((64, 2), row, dtype=np.float32))
