"""Stage 4: the distance from the training data, and how all doubts are fused into one flag score."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qualms_training.data.noise import NOISES
from qualms_training.files import fingerprint, save_json, save_torch
from qualms_training.fitting.feature_cache import Features
from qualms_training.fitting.meta_trainer import outputs
from qualms_training.meta.dirichlet import scores
from qualms_training.meta.fusion import Shown
from qualms_training.meta.ood_scores import OodScores
from qualms_training.models import identity, load_weights
from qualms_training.stages import fit
from qualms_training.stages.context import RunContext
from qualms_training.stages.features import features, noisy_fit_features


def run(context: RunContext) -> None:
    """Make the doubter and say what it weighs."""
    if context.recipe.fuses:
        doubter(context)
        weights = {name: weight for name, weight in facts(context)["weights"].items() if weight > 0}
        context.display.note("  fused: " + ", ".join(f"{weight:.2f} {name}" for name, weight in weights.items()))


def doubter(context: RunContext) -> OodScores | None:
    """The fitted doubter, or None where the recipe fuses nothing."""
    return context.once("doubter", lambda: _fitted(context)) if context.recipe.fuses else None


def facts(context: RunContext) -> dict[str, Any]:
    """The weights, and the AUROC they reach on the fit split by kind of noise."""
    found: dict[str, Any] = json.loads((context.folder / "combine.json").read_text())
    return found


def mark(context: RunContext) -> str:
    """Fingerprint of all that decides the doubter."""
    return fingerprint(fit.mark(context), identity(fit.fitted_meta(context)), list(NOISES), context.data.record)


def _fitted(context: RunContext) -> OodScores:
    train, held_out = features(context, "train"), context.data.parts["fit"]
    made = OodScores([tap.shape[1] for tap in train.taps], len(context.data.classes), len(held_out.labels))
    file = context.folder / "doubter.pt"
    if context.done("combine", mark(context), file, context.folder / "combine.json"):
        load_weights(made, file)
    else:
        context.must_make("combine")
        _fit(context, made, train, file)
    return made.eval()


def _fit(context: RunContext, made: OodScores, train: Features, file: Path) -> None:
    labels = context.data.parts["train"].labels
    held_out = context.data.parts["fit"]
    made.density.fit([np.asarray(tap, dtype=np.float32) for tap in train.taps], labels)
    known = features(context, "fit")
    noisy = noisy_fit_features(context)
    doubts = _doubts(context, made, known)
    shown = Shown(
        doubts, errors(context, known, held_out.labels), {kind: _doubts(context, made, noisy[kind]) for kind in noisy}
    )
    reached = made.fusion.fit(shown)
    weights = dict(zip(made.names(len(train.taps)), made.fusion.weights.tolist(), strict=True))
    save_json(context.folder / "combine.json", {"weights": weights, "auroc": reached})
    save_torch(file, made.state_dict())
    context.record("combine", mark(context))


def errors(context: RunContext, found: Features, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of N images the bundle will misclassify, (N,): its class is the base's, or for transfer the meta-model's."""
    source = found.logits
    if context.recipe.prediction == "meta":
        source = outputs(fit.fitted_meta(context), found, torch.device("cpu")).numpy()
    return np.asarray(source.argmax(axis=1) != labels)


def _doubts(context: RunContext, made: OodScores, found: Features) -> NDArray[np.float64]:
    """What is fused, (N, J), for images whose features are known."""
    log_alpha = outputs(fit.fitted_meta(context), found, torch.device("cpu"))
    return made.all_doubts(found, scores(log_alpha).mutual_information)
