"""Stage 4: the flag score, with the distance from the training data, and the joined α."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qualms_training.files import fingerprint, save_json, save_torch
from qualms_training.fitting.feature_cache import Features
from qualms_training.fitting.meta_trainer import head_outputs
from qualms_training.meta.flag_score import FlagScore
from qualms_training.meta.joined_alpha import JoinedAlpha
from qualms_training.models import identity, load_weights
from qualms_training.stages import fit
from qualms_training.stages.context import RunContext
from qualms_training.stages.features import features

FORMAT = 5
"""format of flag_score.pt and joined_alpha.pt; a new number makes the stage run again in existing run folders"""
FLAG_FILE, ALPHA_FILE, RESULTS_FILE = "flag_score.pt", "joined_alpha.pt", "combine.json"


def run(context: RunContext) -> None:
    """Fit flag score and joined α, and display the terms and the temperature."""
    fitted(context)
    terms, temperature = " + ".join(flag_terms(context)), results(context)["temperature"]
    context.display.note(f"  flag score: {terms}; α = 1 + n·p with temperature {temperature:.2f}")


def fitted(context: RunContext) -> tuple[FlagScore, JoinedAlpha]:
    """The fitted flag score and joined α."""
    return context.get_or_make("flag score and joined α", lambda: _load_or_fit(context))


def flag_terms(context: RunContext) -> list[str]:
    """Names of the terms of the flag score."""
    return fitted(context)[0].names


def results(context: RunContext) -> dict[str, Any]:
    """The terms of the flag score and the temperature."""
    content: dict[str, Any] = json.loads((context.folder / RESULTS_FILE).read_text())
    return content


def inputs_fingerprint(context: RunContext) -> str:
    """Fingerprint of all settings, weights and data that determine the flag score and α."""
    meta = [fit.inputs_fingerprint(context), identity(fit.fitted_meta(context))]
    return fingerprint(meta, context.data.record, context.recipe.uses_distance, context.recipe.prediction, FORMAT)


def _load_or_fit(context: RunContext) -> tuple[FlagScore, JoinedAlpha]:
    images, classes = len(context.data.parts["fit"].labels), len(context.data.classes)
    widths = [tap.shape[1] for tap in features(context, "train").taps]
    flag_score = FlagScore(widths, classes, images, distance=context.recipe.uses_distance)
    joined_alpha = JoinedAlpha(classes, images)
    files = [context.folder / name for name in (FLAG_FILE, ALPHA_FILE)]
    if context.is_up_to_date("combine", inputs_fingerprint(context), *files, context.folder / RESULTS_FILE):
        for module, file in zip((flag_score, joined_alpha), files, strict=True):
            load_weights(module, file)
    else:
        context.check_may_run("combine")
        _fit(context, flag_score, joined_alpha, files)
    return flag_score.eval(), joined_alpha.eval()


def _fit(context: RunContext, flag_score: FlagScore, joined_alpha: JoinedAlpha, files: list[Path]) -> None:
    flag_score.fit_density(features(context, "train").taps, context.data.parts["train"].labels)
    images = features(context, "fit")
    log_alpha = _log_alpha(context, images)
    logits = images.logits if context.recipe.prediction == "base" else log_alpha
    flag_score.fit(logits, log_alpha, images.taps)
    joined_alpha.fit(logits, context.data.parts["fit"].labels, flag_score.of_arrays(logits, log_alpha, images.taps))
    temperature = 1 / float(joined_alpha.inverse_temperature)
    save_json(context.folder / RESULTS_FILE, {"terms": flag_score.names, "temperature": temperature})
    for module, file in zip((flag_score, joined_alpha), files, strict=True):
        save_torch(file, module.state_dict())
    context.record_stage("combine", inputs_fingerprint(context))


def _log_alpha(context: RunContext, images: Features) -> NDArray[np.float32]:
    """log α of the meta-model, (N, K)."""
    return head_outputs(fit.fitted_meta(context), images, torch.device("cpu")).float().numpy()
