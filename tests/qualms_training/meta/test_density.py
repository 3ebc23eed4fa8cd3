import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.covariance import EmpiricalCovariance

import qualms_training.meta.density
from qualms_training.meta.density import Density, TapDensity


@pytest.fixture
def labels() -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(3, size=600)


@pytest.fixture
def features(labels: NDArray[np.int64]) -> NDArray[np.float32]:
    """Three clusters in eight dimensions, no two directions alike."""
    rng = np.random.default_rng(1)
    centres = 3 * rng.normal(size=(3, 8))
    return (centres[labels] + rng.normal(size=(len(labels), 8)) * np.linspace(0.2, 2, 8)).astype(np.float32)


def fitted(features: NDArray[np.float32], labels: NDArray[np.int64]) -> TapDensity:
    density = TapDensity(features.shape[1], 3)
    density.fit(features, labels)
    return density


def test_distances_are_mahalanobis_distances_of_unit_features(
    features: NDArray[np.float32], labels: NDArray[np.int64]
) -> None:
    rows = features / np.linalg.norm(features, axis=1, keepdims=True)
    means = np.stack([rows[labels == label].mean(axis=0) for label in range(3)])
    oracle = EmpiricalCovariance(assume_centered=True).fit(rows - means[labels])
    want = np.stack([oracle.mahalanobis(rows - mean) for mean in means], axis=1)
    found = fitted(features, labels)(torch.from_numpy(features))
    np.testing.assert_allclose(found, want, rtol=2e-3)


def test_length_does_not_matter_and_nothing_is_not_a_division_by_zero(
    features: NDArray[np.float32], labels: NDArray[np.int64]
) -> None:
    density = fitted(features, labels)
    shown = torch.from_numpy(features[:20])
    torch.testing.assert_close(density(shown), density(17 * shown), rtol=1e-4, atol=1e-4)
    assert torch.isfinite(density(torch.zeros(1, 8))).all()


def test_a_direction_that_never_varied_is_left_out(features: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
    constant = np.concatenate([features, np.zeros((len(features), 1), np.float32)], axis=1)
    shown = torch.from_numpy(constant[:20])
    torch.testing.assert_close(
        fitted(constant, labels)(shown), fitted(features, labels)(shown[:, :8]), rtol=1e-3, atol=1e-3
    )


def test_a_class_without_images_does_not_break_the_others(
    features: NDArray[np.float32], labels: NDArray[np.int64]
) -> None:
    density = TapDensity(8, 4)
    density.fit(features, labels)
    found = density(torch.from_numpy(features))
    torch.testing.assert_close(found[:, :3], fitted(features, labels)(torch.from_numpy(features)))
    assert torch.isfinite(found).all()


def test_a_wide_tap_keeps_the_directions_of_most_variance(
    features: NDArray[np.float32], labels: NDArray[np.int64], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fitted(features, labels)
    monkeypatch.setattr(qualms_training.meta.density, "LARGEST_FACTOR", 3 * 8)
    part = fitted(features, labels)
    assert part.factor.shape == (3, 8)
    torch.testing.assert_close(part.factor, whole.factor[:3])
    lengths = whole.factor.norm(dim=1)  # one over the standard deviation
    assert (lengths.diff() >= 0).all()


def test_each_tap_is_its_own_and_all_stand_side_by_side(
    features: NDArray[np.float32], labels: NDArray[np.int64]
) -> None:
    taps = [features, features[:, :5]]
    density = Density([8, 5], 3)
    density.fit(taps, labels)
    found = density([torch.from_numpy(tap) for tap in taps])
    assert found.shape == (len(labels), 2, 3)
    for index, tap in enumerate(taps):
        torch.testing.assert_close(found[:, index], fitted(tap, labels)(torch.from_numpy(tap)))


def test_strangers_are_farther_than_what_it_knows(features: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
    strangers = np.random.default_rng(2).normal(size=(200, 8)).astype(np.float32)
    density = fitted(features, labels)
    known = density(torch.from_numpy(features)).amin(dim=1)
    strange = density(torch.from_numpy(strangers)).amin(dim=1)
    assert strange.median() > torch.quantile(known, 0.95)
