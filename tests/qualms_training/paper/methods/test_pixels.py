"""The control: pixel statistics separate a set from itself only under the mismatched protocol."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from qualms_training.data import load
from qualms_training.data.prepare import itself_half
from qualms_training.paper.evaluation_protocol import Protocol, Role, normaliser
from qualms_training.paper.inputs import Images
from qualms_training.paper.methods.pixels import Pixels
from qualms_training.recipe import load_recipe
from qualms_training.reporting.evaluation import detection


def auroc_between_halves(protocol: Protocol, score: str) -> float:
    """AUROC between two draws of the same distribution, one normalised as in-distribution and one as OOD images."""
    rng = np.random.default_rng(0)
    contrast = rng.uniform(0.3, 1, size=(800, 1, 1, 1))
    images = (127 + contrast * rng.normal(0, 60, (800, 32, 32, 3))).clip(0, 255).astype(np.uint8)
    section = load_recipe("cifar10-resnet20").input
    negatives = Pixels().score(Images(images[:400], normaliser(protocol, Role.in_distribution, section)))
    positives = Pixels().score(Images(images[400:], normaliser(protocol, Role.ood, section)))
    scores = np.concatenate([negatives.scores[score], positives.scores[score]])
    return float(roc_auc_score(np.arange(800) >= 400, scores))


@pytest.mark.parametrize("score", ["pixel_deviation", "pixel_maximum"])
def test_only_the_published_protocol_separates_a_set_from_itself(score: str) -> None:
    assert auroc_between_halves(Protocol.fair, score) == pytest.approx(0.5, abs=0.05)
    assert auroc_between_halves(Protocol.as_published, score) > 0.9


@pytest.mark.slow
def test_only_the_published_protocol_separates_cifar10_from_itself(data_dir: Path) -> None:
    """CIFAR-10's test set, with one half normalised as in-distribution and the other as OOD images."""
    section = load_recipe("cifar10-resnet20").input
    images = load("cifar10", "test", data_dir).conformed(section.spec)
    half = np.isin(np.arange(len(images)), itself_half(len(images)))
    aurocs = {}
    for protocol in Protocol:
        negatives = Pixels().score(Images(images[~half], normaliser(protocol, Role.in_distribution, section)))
        positives = Pixels().score(Images(images[half], normaliser(protocol, Role.ood, section)))
        for score in negatives.scores:
            aurocs[protocol, score] = detection(negatives.scores[score], positives.scores[score])[0]
    assert aurocs[Protocol.fair, "pixel_deviation"] == pytest.approx(50, abs=2)
    assert aurocs[Protocol.fair, "pixel_maximum"] == pytest.approx(50, abs=2)
    assert aurocs[Protocol.as_published, "pixel_deviation"] > 95
    assert aurocs[Protocol.as_published, "pixel_maximum"] > 99.9


def test_statistics_agree_with_numpy_on_the_normalised_image() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    section = load_recipe("mnist-lenet").input
    verdict = Pixels().score(Images(images, normaliser(Protocol.fair, Role.in_distribution, section)))
    x = (images / 255 - 0.5) / 0.5
    np.testing.assert_allclose(verdict.scores["pixel_deviation"], [-np.std(one, ddof=1) for one in x], rtol=1e-5)
    np.testing.assert_allclose(verdict.scores["pixel_maximum"], -np.abs(x).max(axis=(1, 2, 3)), rtol=1e-5)
    assert verdict.predictions.tolist() == [-1, -1, -1]
