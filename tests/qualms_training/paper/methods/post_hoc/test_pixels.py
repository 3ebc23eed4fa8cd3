"""The control: on identical images, only a protocol's mismatch can tell the two halves apart."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from qualms_training.data import load
from qualms_training.data.prepare import itself_half
from qualms_training.paper.material import Shown
from qualms_training.paper.methods.post_hoc.pixels import Pixels
from qualms_training.paper.protocol import Protocol, Role, normaliser
from qualms_training.recipe import load_recipe
from qualms_training.reporting.evaluation import detection


def halves(protocol: Protocol, score: str) -> float:
    """AUROC between two draws of the same images, one shown as known and one as a stranger."""
    rng = np.random.default_rng(0)
    contrast = rng.uniform(0.3, 1, size=(800, 1, 1, 1))
    images = (127 + contrast * rng.normal(0, 60, (800, 32, 32, 3))).clip(0, 255).astype(np.uint8)
    section = load_recipe("cifar10-resnet20").input
    known = Pixels().score(Shown(images[:400], normaliser(protocol, Role.known, section)))
    other = Pixels().score(Shown(images[400:], normaliser(protocol, Role.stranger, section)))
    doubts = np.concatenate([known.scores[score], other.scores[score]])
    return float(roc_auc_score(np.arange(800) >= 400, doubts))


@pytest.mark.parametrize("score", ["pixel_deviation", "pixel_maximum"])
def test_only_the_published_protocol_tells_a_set_from_itself(score: str) -> None:
    assert halves(Protocol.fair, score) == pytest.approx(0.5, abs=0.05)
    assert halves(Protocol.as_published, score) > 0.9


def test_real_images_are_told_from_themselves_by_the_published_protocol_alone(data_dir: Path) -> None:
    """CIFAR-10's test set, one half through each path: what any score finds beyond this is its own."""
    section = load_recipe("cifar10-resnet20").input
    images = load("cifar10", "test", data_dir).conformed(section.spec)
    half = np.isin(np.arange(len(images)), itself_half(len(images)))
    found = {}
    for protocol in Protocol:
        known = Pixels().score(Shown(images[~half], normaliser(protocol, Role.known, section)))
        other = Pixels().score(Shown(images[half], normaliser(protocol, Role.stranger, section)))
        for score in known.scores:
            found[protocol, score] = detection(known.scores[score], other.scores[score])[0]
    assert found[Protocol.fair, "pixel_deviation"] == pytest.approx(50, abs=2)
    assert found[Protocol.fair, "pixel_maximum"] == pytest.approx(50, abs=2)
    assert found[Protocol.as_published, "pixel_deviation"] > 95
    assert found[Protocol.as_published, "pixel_maximum"] > 99.9


def test_statistics_are_numpys_on_the_normalised_image() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    section = load_recipe("mnist-lenet").input
    found = Pixels().score(Shown(images, normaliser(Protocol.fair, Role.known, section)))
    x = (images / 255 - 0.5) / 0.5
    np.testing.assert_allclose(found.scores["pixel_deviation"], [-np.std(one, ddof=1) for one in x], rtol=1e-5)
    np.testing.assert_allclose(found.scores["pixel_maximum"], -np.abs(x).max(axis=(1, 2, 3)), rtol=1e-5)
    assert found.predictions.tolist() == [-1, -1, -1]
