"""Stage 4: the distance from the training data, and the weights of the fused flag score."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qualms_training.data.noise import NOISES
from qualms_training.files import fingerprint, save_json, save_torch
from qualms_training.fitting.feature_cache import Features
from qualms_training.fitting.meta_trainer import head_outputs
from qualms_training.meta.dirichlet import dirichlet_scores
from qualms_training.meta.fusion import FusionData
from qualms_training.meta.ood_scores import OodScores
from qualms_training.models import identity, load_weights
from qualms_training.stages import fit
from qualms_training.stages.context import RunContext
from qualms_training.stages.features import features, noisy_fit_features

FORMAT = 2
"""format of ood_scores.pt; a new number makes the stage run again in existing run folders"""


def run(context: RunContext) -> None:
    """Fit the OOD scores, if the recipe has them, and display the weights of the fused score."""
    if context.recipe.fuses:
        ood_scores(context)
        weights = {name: weight for name, weight in results(context)["weights"].items() if weight > 0}
        context.display.note("  fused: " + ", ".join(f"{weight:.2f} {name}" for name, weight in weights.items()))


def ood_scores(context: RunContext) -> OodScores | None:
    """The fitted distance and fused score, or None if the recipe does not have them."""
    return context.get_or_make("ood_scores", lambda: _load_or_fit(context)) if context.recipe.fuses else None


def results(context: RunContext) -> dict[str, Any]:
    """The weights of the fused score, and its AUROC on the fit split by kind of noise."""
    content: dict[str, Any] = json.loads((context.folder / "combine.json").read_text())
    return content


def inputs_fingerprint(context: RunContext) -> str:
    """Fingerprint of all settings, weights and data that determine the OOD scores."""
    meta = [fit.inputs_fingerprint(context), identity(fit.fitted_meta(context))]
    return fingerprint(*meta, list(NOISES), context.data.record, FORMAT)


def misclassified(context: RunContext, images: Features, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the bundle will misclassify each of N images, (N,)."""
    source = images.logits
    if context.recipe.prediction == "meta":
        source = head_outputs(fit.fitted_meta(context), images, torch.device("cpu")).numpy()
    return np.asarray(source.argmax(axis=1) != labels)


def _load_or_fit(context: RunContext) -> OodScores:
    train, held_out = features(context, "train"), context.data.parts["fit"]
    model = OodScores([tap.shape[1] for tap in train.taps], len(context.data.classes), len(held_out.labels))
    file = context.folder / "ood_scores.pt"
    if context.is_up_to_date("combine", inputs_fingerprint(context), file, context.folder / "combine.json"):
        load_weights(model, file)
    else:
        context.check_may_run("combine")
        _fit(context, model, train, file)
    return model.eval()


def _fit(context: RunContext, model: OodScores, train: Features, file: Path) -> None:
    labels, fit_labels = context.data.parts["train"].labels, context.data.parts["fit"].labels
    model.density.fit([np.asarray(tap, dtype=np.float32) for tap in train.taps], labels)
    clean = features(context, "fit")
    data = FusionData(
        clean=_components(context, model, clean),
        wrong=misclassified(context, clean, fit_labels),
        noisy={kind: _components(context, model, noisy) for kind, noisy in noisy_fit_features(context).items()},
    )
    auroc = model.fusion.fit(data)
    weights = dict(zip(model.names(len(train.taps)), model.fusion.weights.tolist(), strict=True))
    save_json(context.folder / "combine.json", {"weights": weights, "auroc": auroc})
    save_torch(file, model.state_dict())
    context.record_stage("combine", inputs_fingerprint(context))


def _components(context: RunContext, model: OodScores, images: Features) -> NDArray[np.float64]:
    """The scores that are fused, (N, J)."""
    log_alpha = head_outputs(fit.fitted_meta(context), images, torch.device("cpu"))
    return model.all_components(images.logits, dirichlet_scores(log_alpha).mutual_information, images.taps)
