"""The outputs of an exported graph in ONNX Runtime against PyTorch's, on real images.

Thresholds are calibrated with the exported graph itself, so that a difference that is accepted here does not move them.
"""

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qualms.bundle.agreement import (
    OUTPUT_TOLERANCE,
    SPREAD_TOLERANCE,
    accepted_difference,
    differing_predictions,
    largest_difference,
)
from qualms.bundle.runtime import GraphRunner, Images, batch_size
from qualms_training.errors import ExportError
from qualms_training.meta.graph import BundleGraph

LOG_ALPHA_TOLERANCE = 1e-4
PROBE_IMAGES, PROBE_NOISE = 16, 1e-6
"""images, and relative changes of a tap, by which the tap that amplifies rounding errors most is found"""
Outputs = dict[str, NDArray[Any]]


def compare(graph: BundleGraph, runner: GraphRunner, images: Images, drawn: int = 0) -> dict[str, float]:
    """Largest differences between PyTorch and ONNX Runtime by output; ExportError if one exceeds its tolerance.

    `images` (N, H, W, C) are compared one batch at a time. The first `drawn` of them are no known images.
    """
    expected, actual = by_torch(graph, images), runner(images)
    if missing := [name for name in expected if name not in actual]:
        raise ExportError(f"The exported graph has no output {missing[0]}.")
    with np.errstate(divide="ignore", invalid="ignore"):
        for outputs in (expected, actual):
            outputs["log_alpha"] = np.log(outputs["alpha"])
    _check_predictions(expected, actual, graph)
    differences, accepted = dict[str, float](), dict[str, float]()
    for name, value in expected.items():
        tolerance = _tolerance(name, value, _spread(name, {key: rows[drawn:] for key, rows in expected.items()}))
        differences[name], accepted[name] = _largest_difference(actual[name], value, tolerance)
    worst = max(differences, key=lambda name: differences[name] / accepted[name])
    if differences[worst] > accepted[worst]:
        term = _differing_term(expected, actual, graph)
        tap = None if term is None else _amplifying_tap(term, graph, images[drawn:] if drawn < len(images) else images)
        raise ExportError(
            _sentence(worst, differences[worst], accepted[worst]) + _reason(term, tap) + _remedy(graph, tap)
        )
    return differences


@torch.inference_mode()
def by_torch(graph: BundleGraph, images: Images) -> dict[str, NDArray[Any]]:
    """PyTorch's outputs for images (N, H, W, C)."""
    graph, batch = graph.cpu().eval(), batch_size(images)
    parts = [
        graph.named(torch.from_numpy(np.asarray(images[start : start + batch])))
        for start in range(0, len(images), batch)
    ]
    return {name: np.concatenate([part[name].numpy() for part in parts]) for name in graph.outputs}


def _check_predictions(expected: Outputs, actual: Outputs, graph: BundleGraph) -> None:
    """ExportError if predictions differ, except where the two classes are equally likely up to rounding."""
    probabilities = expected["base_probabilities" if graph.predicts_by == "base" else "meta_alpha"]
    predictions = actual["prediction"]
    if wrong := differing_predictions(predictions, expected["prediction"], probabilities):
        raise ExportError(
            f"The exported graph differs from PyTorch: in {wrong} of {len(predictions)} predictions.{_remedy(graph, None)}"
        )


def _spread(name: str, known: Outputs) -> Any:
    """Standard deviation of an output over known images; for α that of its logarithm, which the evidence dominates."""
    values = known[name]
    if len(values) < 2 or name in ("prediction", "probabilities", "base_probabilities"):
        return 0.0
    if name in ("alpha", "log_alpha", "meta_alpha"):
        alpha = known["meta_alpha" if name == "meta_alpha" else "alpha"]
        return np.log(alpha.sum(axis=1, dtype=np.float64)).std()
    return values.std(axis=0, dtype=np.float64)


def _tolerance(name: str, expected: NDArray[Any], spread: Any) -> Any:
    """The accepted absolute difference of each value of an output."""
    if name == "prediction":
        return np.inf  # checked by itself
    if name == "log_alpha":
        return max(LOG_ALPHA_TOLERANCE, SPREAD_TOLERANCE * spread)
    return accepted_difference(name, expected, spread)


def _largest_difference(actual: NDArray[Any], expected: NDArray[Any], tolerance: Any) -> tuple[float, float]:
    """As `largest_difference`, and infinite if types differ."""
    if actual.dtype != expected.dtype:
        return float("inf"), OUTPUT_TOLERANCE
    return largest_difference(actual, expected, tolerance)


def _differing_term(expected: Outputs, actual: Outputs, graph: BundleGraph) -> str | None:
    """The term of the flag score that differs most, if one differs by more than its tolerance."""
    ours, theirs = actual["fused_terms"], expected["fused_terms"]
    if ours.shape != theirs.shape or not np.isfinite(ours).all():
        return None
    excess = (np.abs(ours - theirs) / (OUTPUT_TOLERANCE * np.maximum(1.0, np.abs(theirs)))).max(axis=0)
    return graph.flag_score.names[int(excess.argmax())] if excess.max() > 1 else None


@torch.inference_mode()
def _amplifying_tap(term: str, graph: BundleGraph, images: Images) -> str | None:
    """The tap whose small changes change a term most; None for the softmax, which depends on the logits alone."""
    source = {"evidence": graph.meta_model, "distance": graph.flag_score.density}.get(term)
    names = graph.extractor.tapped.names
    if source is None or len(names) < 2:
        return None
    function = copy.deepcopy(source).double()
    generator = torch.Generator().manual_seed(0)
    taps = [tap.double() for tap in graph.extractor(torch.from_numpy(np.asarray(images[:PROBE_IMAGES])))[1]]
    before, changes = function(taps), []
    for index, tap in enumerate(taps):
        noise = torch.randn(tap.shape, generator=generator, dtype=tap.dtype)
        changed = [*taps[:index], tap * (1 + PROBE_NOISE * noise), *taps[index + 1 :]]
        changes.append(float((function(changed) - before).abs().max()))
    return names[int(np.argmax(changes))]


def _sentence(name: str, difference: float, accepted: float) -> str:
    title = "log α" if name == "log_alpha" else name
    return f"The exported graph differs from PyTorch: {title} by {difference:.1e} (at most {accepted:.1e} is accepted)."


def _reason(term: str | None, tap: str | None) -> str:
    if term is None:
        return ""
    most = f", to which tap {tap!r} adds the largest rounding errors" if tap else ""
    return f" The term of the flag score that differs most is {term}{most}."


def _remedy(graph: BundleGraph, tap: str | None) -> str:
    """Ways out; `tap` is the one to leave out, if it is known."""
    others = [name for name in graph.extractor.tapped.names if name != tap]
    taps = f"--taps {','.join(others)}, without that tap" if tap else "choose other taps with --taps"
    distance = graph.flag_score.density is not None
    without = ", or --no-distance (distance = false at the top level of a recipe)" if distance else ""
    return (
        f" If the base's weights are not float32, convert them; otherwise {taps} (taps of [base] in a recipe){without}."
    )
