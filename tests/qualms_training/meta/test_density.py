"""Distances from the training data are Mahalanobis distances of unit features."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.covariance import EmpiricalCovariance, LedoitWolf

import qualms_training.meta.density
import qualms_training.meta.within_class
from qualms_training.meta.density import MIN_LENGTH, MIN_VARIANCE, Density, TapDensity
from qualms_training.meta.within_class import WithinClass


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


@pytest.mark.parametrize("separation", [1, 10], ids=["typical", "collapsed classes"])
@pytest.mark.parametrize("widths", [(8,), (24, 96, 400)], ids=["one tap", "wide taps"])
def test_the_distance_is_that_to_the_nearest_class_over_all_taps(widths: tuple[int, ...], separation: float) -> None:
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
        by_differences = density.by_tap(taps).sum(dim=1).amin(dim=1)
        np.testing.assert_allclose(by_differences, exact, rtol=1e-5, atol=1e-5)
        errors = np.abs(distance.squeeze(1).numpy() - exact)
        # Squared lengths cancel in the product form; the rounding of those that remains depends on the CPU's instructions.
        lengths = torch.cat([part.whiten(tap) for part, tap in zip(density._taps, taps, strict=True)], dim=1)
        rounding = 32 * np.finfo(np.float32).eps * lengths.square().sum(dim=1).numpy()
        assert (errors <= 1e-5 * (1 + exact) + rounding).all()


def test_ood_features_are_farther_than_training_features(
    features: NDArray[np.float32], labels: NDArray[np.int64]
) -> None:
    ood_features = np.random.default_rng(2).normal(size=(200, 8)).astype(np.float32)
    density = fitted(features, labels)
    id_distances = density(torch.from_numpy(features)).amin(dim=1)
    ood_distances = density(torch.from_numpy(ood_features)).amin(dim=1)
    assert ood_distances.median() > torch.quantile(id_distances, 0.95)


def many_classes(rng: np.random.Generator, labels: NDArray[np.int64], widths: tuple[int, ...]) -> list[NDArray[Any]]:
    """Features whose class means differ in fewer directions than the features have."""
    place = np.random.default_rng(5)
    centres = place.normal(size=(300, 20))
    return [
        (centres[labels] @ place.normal(size=(20, width)) + rng.normal(size=(len(labels), width))).astype(np.float32)
        for width in widths
    ]


@pytest.mark.parametrize("classes", [3, 300])
def test_the_folded_distance_is_the_same(classes: int) -> None:
    rng = np.random.default_rng(3)
    labels = rng.integers(classes, size=3000)
    density = Density([24, 200], classes)
    density.fit(many_classes(rng, labels, (24, 200)), labels)
    images = [torch.from_numpy(tap) for tap in many_classes(rng, labels[:100], (24, 200))]
    torch.testing.assert_close(density.folded()(images), density(images), rtol=1e-4, atol=1e-3)


def test_many_classes_get_fewer_weights_and_almost_the_same_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    labels = rng.integers(300, size=6000)
    widths = (24, 120)
    train, images = many_classes(rng, labels, widths), many_classes(rng, labels[:500], widths)
    narrow = Density(widths, 300)
    monkeypatch.setattr(qualms_training.meta.density, "MANY_CLASSES", 300)
    wide = Density(widths, 300)
    wide.fit(train, labels)
    monkeypatch.undo()
    narrow.fit(train, labels)
    taps = [torch.from_numpy(tap) for tap in images]
    assert np.corrcoef(narrow(taps).squeeze(1), wide(taps).squeeze(1))[0, 1] > 0.98

    def weights(density: Density) -> int:
        return sum(buffer.numel() for buffer in density.folded().buffers())

    assert weights(Density([1280], 1000)) < 1280 * 129 + 128 * 65 + 1000 * 66
    assert weights(narrow) == (24 * 25 + 120 * 121) + 64 * (300 + 144) + 300


def test_features_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    labels = rng.integers(3, size=2000)
    rows = clusters(rng, labels, 24, 1).astype(np.float16)
    np.save(tmp_path / "tap.npy", rows)
    at_once = fitted(rows.astype(np.float32), labels)
    monkeypatch.setattr(qualms_training.meta.within_class, "PART", 24 * 100)
    in_parts = TapDensity(24, 3)
    in_parts.fit(np.load(tmp_path / "tap.npy", mmap_mode="r"), labels)
    some = torch.from_numpy(rows[:50].astype(np.float32))
    torch.testing.assert_close(in_parts(some), at_once(some), rtol=1e-4, atol=1e-3)


def test_variances_of_many_rows_are_estimated_from_a_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    labels = rng.integers(3, size=9000)
    rows = clusters(rng, labels, 8, 1)
    whole = fitted(rows, labels)
    monkeypatch.setattr(qualms_training.meta.within_class, "MAX_ROWS", 3000)
    monkeypatch.setattr(qualms_training.meta.within_class, "PART", 8 * 1000)
    some = torch.from_numpy(rows[:50])
    torch.testing.assert_close(fitted(rows, labels)(some), whole(some), rtol=0.2, atol=0.1)


def test_a_wide_tap_has_the_same_directions_without_its_covariance_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    labels = rng.integers(3, size=3000)
    decay = np.geomspace(0.01, 1, 200, dtype=np.float32)  # the variances of a network's features fall about as fast
    rows = decay * clusters(rng, labels, 200, 1)
    monkeypatch.setattr(qualms_training.meta.density, "MAX_FACTOR_SIZE", 20 * 200)
    exact = fitted(rows, labels)
    monkeypatch.setattr(qualms_training.meta.within_class, "MAX_COVARIANCE_WIDTH", 100)
    randomised = fitted(rows, labels)
    assert randomised.factor.shape == (20, 200)
    some = torch.from_numpy(rows[:200])
    torch.testing.assert_close(randomised(some), exact(some), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("exact", [True, False], ids=["covariance", "randomised"])
def test_images_that_were_not_in_a_small_training_set_are_hardly_farther(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exact:
        monkeypatch.setattr(qualms_training.meta.within_class, "MAX_COVARIANCE_WIDTH", 100)
    rng = np.random.default_rng(3)
    labels = rng.integers(3, size=100)
    train, test = clusters(rng, labels, 300, 1), clusters(rng, labels, 300, 1)
    density = fitted(train, labels)
    seen, unseen = (density(torch.from_numpy(rows)).amin(dim=1).median() for rows in (train, test))
    assert unseen < 2 * seen


@pytest.mark.parametrize("per_class", [1, 2])
def test_classes_with_one_or_two_images_give_finite_distances_that_detect_ood_features(per_class: int) -> None:
    rng = np.random.default_rng(3)
    labels = np.tile(np.arange(300), per_class)
    train = many_classes(rng, labels, (24, 60))
    density = Density([24, 60], 301)
    density.fit(train, labels)
    known = density([torch.from_numpy(tap) for tap in many_classes(rng, np.arange(300), (24, 60))])
    ood = density([torch.from_numpy(rng.normal(size=(300, width)).astype(np.float32)) for width in (24, 60)])
    assert torch.isfinite(known).all()
    assert known.median() > 0
    assert ood.median() > torch.quantile(known, 0.9)


def test_the_largest_variances_of_few_rows_are_those_of_ledoit_and_wolf() -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(80, 120)) * np.geomspace(0.3, 2, 120)
    labels = np.zeros(80, np.int64)
    within = WithinClass(rows, labels, 1, MIN_LENGTH)
    values, vectors = within.largest_variances(5)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    expected = LedoitWolf(assume_centered=True).fit(unit - unit.mean(axis=0)).covariance_
    np.testing.assert_allclose(values, np.linalg.eigvalsh(expected)[::-1][:5], rtol=1e-6)
    np.testing.assert_allclose(expected @ vectors, vectors * values, atol=1e-8)
