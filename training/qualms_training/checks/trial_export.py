"""A trial export: the whole graph with an untrained meta-model, compared with PyTorch on a few images.

A network that cannot be exported is reported before the base runs over all images.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from qualms.bundle.manifest import Predictor
from qualms.bundle.runtime import GraphRunner
from qualms.errors import BundleError
from qualms_training.errors import ExportError
from qualms_training.meta.export.onnx_export import to_onnx
from qualms_training.meta.extractor import Extractor
from qualms_training.meta.flag_score import FlagScore
from qualms_training.meta.graph import BundleGraph
from qualms_training.meta.joined_alpha import JoinedAlpha
from qualms_training.meta.meta_model import MetaModel

TOLERANCE = 1e-4
"""of the base's probabilities"""
FIT_IMAGES = 64
"""size of the noise that flag score and α are fitted to"""


@dataclass(frozen=True)
class TrialExport:
    """The result of the trial."""

    bytes: int
    """of the graph"""
    difference: float
    """largest difference of the base's probabilities from PyTorch's"""
    seconds: float
    """per image in ONNX Runtime"""


def try_export(
    extractor: Extractor,
    meta: MetaModel,
    images: NDArray[np.uint8],
    *,
    classes: int,
    prediction: Predictor,
    distance: bool,
) -> TrialExport:
    """Export the graph and run it on `images` (N ≥ 2, H, W, C); ExportError if ONNX Runtime's probabilities differ."""
    graph = trial_graph(extractor, meta, images, classes=classes, prediction=prediction, distance=distance)
    data = to_onnx(graph, np.asarray(images[:2]), graph.outputs)
    try:
        runner = GraphRunner(data)
    except BundleError as error:
        raise ExportError(
            f"{str(error).rstrip('.')}; remove conversions to other types than float32, such as torch.autocast, from the network's "
            "forward, or replace the operation."
        ) from error
    runner(images[:1])  # the first run allocates memory
    start = time.perf_counter()
    actual = runner(images)["base_probabilities"]
    seconds = (time.perf_counter() - start) / len(images)
    with torch.inference_mode():
        expected = torch.cat([extractor(torch.from_numpy(np.asarray(image[None])))[0].softmax(1) for image in images])
    difference = float(np.abs(actual - expected.numpy()).max())
    if not difference <= TOLERANCE:
        raise ExportError(
            f"ONNX Runtime's class probabilities differ from PyTorch's by {difference:.1e} on {len(images)} images (at most "
            f"{TOLERANCE:.0e} is accepted); the network computes something that its export does not, such as a branch on "
            "values, random numbers or statistics of the batch."
        )
    return TrialExport(len(data), difference, seconds)


def trial_graph(
    extractor: Extractor,
    meta: MetaModel,
    images: NDArray[np.uint8],
    *,
    classes: int,
    prediction: Predictor,
    distance: bool,
) -> BundleGraph:
    """The graph with a flag score and α that are fitted to noise, as they need some scale."""
    with torch.inference_mode():
        widths = [tap.shape[1] for tap in extractor(torch.from_numpy(np.asarray(images[:1])))[1]]
    rng = np.random.default_rng(0)
    flag_score = FlagScore(widths, classes, FIT_IMAGES, distance=distance)
    joined_alpha = JoinedAlpha(classes, FIT_IMAGES)
    flag_score.fit_scores(rng.exponential(size=(FIT_IMAGES, 1 + len(flag_score.names))))
    joined_alpha.surprisal.fit(rng.exponential(size=(FIT_IMAGES, 1)))
    return BundleGraph(extractor, meta, flag_score, joined_alpha, prediction).eval()
