"""The components of the fused score are computed alike for tensors and for arrays."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qualms_training.meta.ood_scores import ROWS, OodScores


def test_components_are_base_entropy_mutual_information_and_distances() -> None:
    torch.manual_seed(0)
    logits, information, taps = torch.randn(50, 3), torch.rand(50), [torch.randn(50, 8), torch.randn(50, 5)]
    ood_scores = OodScores([8, 5], 3, 50)
    ood_scores.density.fit([tap.numpy() for tap in taps], np.arange(50) % 3)
    components = ood_scores.components(logits, information, taps)
    distances = ood_scores.density(taps)
    assert components.shape == (50, len(ood_scores.names(2)))
    torch.testing.assert_close(components[:, 0], torch.special.entr(logits.softmax(dim=1)).sum(dim=1))
    torch.testing.assert_close(components[:, 1], information)
    torch.testing.assert_close(components[:, 2], distances.sum(dim=1).amin(dim=1))
    torch.testing.assert_close(components[:, 3:], distances.amin(dim=2))
    distance, fused = ood_scores(logits, information, taps)
    torch.testing.assert_close(distance, components[:, 2])
    assert fused.shape == (50,)


def test_arrays_of_any_length_and_precision_give_the_components_of_tensors() -> None:
    count = ROWS + 3  # more rows than one batch
    rng = np.random.default_rng(0)
    logits, information = rng.normal(size=(count, 3)).astype(np.float32), torch.rand(count)
    taps: list[NDArray[Any]] = [
        rng.normal(size=(count, 8)).astype(np.float16),
        rng.normal(size=(count, 5)).astype(np.float32),
    ]
    ood_scores = OodScores([8, 5], 3, 50)
    ood_scores.density.fit([tap.astype(np.float32) for tap in taps], np.arange(count) % 3)
    actual = ood_scores.all_components(logits, information, taps)
    expected = ood_scores.components(
        torch.from_numpy(logits), information, [torch.from_numpy(tap).float() for tap in taps]
    )
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
