"""Whole graphs with untrained networks, whose flag score and joined α are fitted to random images."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qualms.bundle.manifest import Predictor
from qualms_training.meta.extractor import Extractor, Normalise, Reduce
from qualms_training.meta.flag_score import FlagScore
from qualms_training.meta.graph import BundleGraph
from qualms_training.meta.joined_alpha import JoinedAlpha
from qualms_training.meta.meta_model import MetaModel, PooledMeta, PublishedMeta
from qualms_training.meta.taps.tapped import Tapped
from qualms_training.models import build, freeze

FIT_IMAGES = 200
MakeGraph = Callable[[Predictor], BundleGraph]


def random_images(n: int, shape: tuple[int, int, int], seed: int) -> NDArray[np.uint8]:
    """Random images of many contrasts, (n, H, W, C)."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, (n, *shape))
    return (noise * rng.random((n, 1, 1, 1)) * rng.random((n, 1, 1, shape[2]))).astype(np.uint8)


def whole_graph(
    extractor: Extractor,
    meta: MetaModel,
    images: NDArray[np.uint8],
    classes: int,
    prediction: Predictor,
    *,
    distance: bool,
) -> BundleGraph:
    """The graph of an extractor and a meta-model, fitted to images (N, H, W, C) with random labels."""
    extractor.eval()
    with torch.inference_mode():
        logits, taps = extractor(torch.from_numpy(images))
        log_alpha = meta.eval()(taps).numpy()
    source, features = (logits.numpy() if prediction == "base" else log_alpha), [tap.numpy() for tap in taps]
    labels = np.random.default_rng(1).integers(classes, size=len(images))
    flag_score = FlagScore([tap.shape[1] for tap in features], classes, len(images), distance=distance)
    flag_score.fit_density(features, labels)
    flag_score.fit(source, log_alpha, features)
    joined_alpha = JoinedAlpha(classes, len(images))
    joined_alpha.fit(source, labels, flag_score.of_arrays(source, log_alpha, features))
    return BundleGraph(extractor, meta, flag_score, joined_alpha, prediction).eval()


@pytest.fixture(scope="session")
def pooled_graph() -> MakeGraph:
    """The form of the tiny recipe: a pooled meta-model on images of 16 × 16 × 3 with four classes, and the distance."""

    def make(prediction: Predictor) -> BundleGraph:
        torch.manual_seed(0)
        base = freeze(build("small", 4 if prediction == "base" else 7, 3, 16, 16))
        reduce = Reduce("pool", 2, ("mean", "max", "std"))
        extractor = Extractor(Normalise([0.5] * 3, [0.5] * 3), Tapped(base, ["pool1", "pool2"]), reduce)
        widths = [reduce.output_shape(shape) for shape in ((8, 8, 8), (16, 4, 4))]
        images = random_images(FIT_IMAGES, (16, 16, 3), seed=1)
        return whole_graph(extractor, PooledMeta(widths, 4, [32]), images, 4, prediction, distance=True)

    return make


@pytest.fixture(scope="session")
def published_graph() -> MakeGraph:
    """The paper's form, without the distance: flattened taps of images of 32 × 32 × 1 with ten classes."""

    def make(prediction: Predictor) -> BundleGraph:
        torch.manual_seed(0)
        base = freeze(build("lenet", 10, 1, 32, 32))
        extractor = Extractor(Normalise([0.13], [0.31]), Tapped(base, ["pool1", "pool2"]), Reduce("flatten"))
        meta = PublishedMeta([(1176,), (400,)], 10, ["120-P-84-10", "120-84-10"])
        images = random_images(FIT_IMAGES, (32, 32, 1), seed=1)
        return whole_graph(extractor, meta, images, 10, prediction, distance=False)

    return make
