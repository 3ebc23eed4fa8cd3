"""Distances from the training data are Mahalanobis distances of unit features."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.covariance import EmpiricalCovariance

import qualms_training.meta.density
from qualms_training.meta.density import MIN_VARIANCE, Density, TapDensity


@pytest.fixture
def labels() -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(3, size=600)


@pytest.fixture
def features(labels: NDArray[np.int64]) -> NDArray[np.float32]:
    """Three clusters in eight dimensions with different variances."""
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
    expected = np.stack([oracle.mahalanobis(rows - mean) for mean in means], axis=1)
    distances = fitted(features, labels)(torch.from_numpy(features))
    np.testing.assert_allclose(distances, expected, rtol=2e-3)


def test_distances_do_not_depend_on_feature_length_and_are_finite_for_zero_features(
    features: NDArray[np.float32], labels: NDArray[np.int64]
) -> None:
    density = fitted(features, labels)
    some = torch.from_numpy(features[:20])
    torch.testing.assert_close(density(some), density(17 * some), rtol=1e-4, atol=1e-4)
    assert torch.isfinite(density(torch.zeros(1, 8))).all()


def test_a_direction_without_variance_is_ignored(features: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
    constant = np.concatenate([features, np.zeros((len(features), 1), np.float32)], axis=1)
    some = torch.from_numpy(constant[:20])
    torch.testing.assert_close(
        fitted(constant, labels)(some), fitted(features, labels)(some[:, :8]), rtol=1e-3, atol=1e-3
    )


def test_a_class_without_images_does_not_change_the_others(
    features: NDArray[np.float32], labels: NDArray[np.int64]
) -> None:
    density = TapDensity(8, 4)
    density.fit(features, labels)
    distances = density(torch.from_numpy(features))
    torch.testing.assert_close(distances[:, :3], fitted(features, labels)(torch.from_numpy(features)))
    assert torch.isfinite(distances).all()


def test_a_wide_tap_keeps_the_directions_of_largest_variance(
    features: NDArray[np.float32], labels: NDArray[np.int64], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fitted(features, labels)
    monkeypatch.setattr(qualms_training.meta.density, "MAX_FACTOR_SIZE", 3 * 8)
    part = fitted(features, labels)
    assert part.factor.shape == (3, 8)
    torch.testing.assert_close(part.factor, whole.factor[:3])
    lengths = whole.factor.norm(dim=1)  # inverse standard deviations
    assert (lengths.diff() >= 0).all()


def test_taps_are_independent_and_stacked(features: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
    taps = [features, features[:, :5]]
    density = Density([8, 5], 3)
    density.fit(taps, labels)
    distances = density.by_tap([torch.from_numpy(tap) for tap in taps])
    assert distances.shape == (len(labels), 2, 3)
    for index, tap in enumerate(taps):
        torch.testing.assert_close(distances[:, index], fitted(tap, labels)(torch.from_numpy(tap)))


def clusters(rng: np.random.Generator, labels: NDArray[np.int64], width: int, separation: float) -> NDArray[np.float32]:
    """Features of a trained network: classes apart compared with the variance inside a class."""
    centres = separation * np.random.default_rng(7).normal(size=(3, width))
    return (centres[labels] + rng.normal(size=(len(labels), width)) * np.geomspace(0.3, 2, width)).astype(np.float32)


def nearest_by_brute_force(
    train: list[NDArray[np.float32]], labels: NDArray[np.int64], test: list[NDArray[np.float32]]
) -> NDArray[np.float64]:
    """The squared Mahalanobis distance to the nearest class, all taps summed, in float64 and with differences."""
    total = np.zeros((len(test[0]), 3))
    for fit, images in zip(train, test, strict=True):
        rows, others = (
            values / np.linalg.norm(values.astype(np.float64), axis=1, keepdims=True) for values in (fit, images)
        )
        means = np.stack([rows[labels == label].mean(axis=0) for label in range(3)])
        centred = rows - means[labels]
        values, vectors = np.linalg.eigh(centred.T @ centred / len(rows))
        kept = values >= MIN_VARIANCE
        for label, mean in enumerate(means):
            whitened = (others - mean) @ vectors[:, kept] / np.sqrt(values[kept])
            total[:, label] += (whitened**2).sum(axis=1)
    return np.asarray(total.min(axis=1))


@pytest.mark.parametrize(("separation", "tolerance"), [(1, 1e-5), (10, 1e-4)], ids=["typical", "collapsed classes"])
@pytest.mark.parametrize("widths", [(8,), (24, 96, 400)], ids=["one tap", "wide taps"])
def test_the_distance_is_that_to_the_nearest_class_over_all_taps(
    widths: tuple[int, ...], separation: float, tolerance: float
) -> None:
    rng = np.random.default_rng(3)
    labels = rng.integers(3, size=2000)
    train = [clusters(rng, labels, width, separation) for width in widths]
    near = [clusters(rng, labels[:100], width, separation) for width in widths]
    between = [(one[:50] + one[50:]) / np.float32(2) for one in near]
    opposite = [-values for values in near]
    noise = [rng.normal(size=(100, width)).astype(np.float32) for width in widths]
    density = Density(widths, 3)
    density.fit(train, labels)
    for images in (near, between, opposite, noise):
        taps = [torch.from_numpy(values) for values in images]
        distance = density(taps)
        assert distance.shape == (len(taps[0]), 1)
        exact = nearest_by_brute_force(train, labels, images)
        np.testing.assert_allclose(distance.squeeze(1), exact, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(density.by_tap(taps).sum(dim=1).amin(dim=1), exact, rtol=tolerance, atol=tolerance)


def test_ood_features_are_farther_than_training_features(
    features: NDArray[np.float32], labels: NDArray[np.int64]
) -> None:
    ood_features = np.random.default_rng(2).normal(size=(200, 8)).astype(np.float32)
    density = fitted(features, labels)
    id_distances = density(torch.from_numpy(features)).amin(dim=1)
    ood_distances = density(torch.from_numpy(ood_features)).amin(dim=1)
    assert ood_distances.median() > torch.quantile(id_distances, 0.95)
