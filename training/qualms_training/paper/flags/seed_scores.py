"""Scores of the images that `qualms compare-flags` compares, and the quality of α, for one seed.

The meta-model is trained once; all methods that need it share it.
"""

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from scipy.special import softmax
from torch import Tensor

from qualms.files import atomic_path
from qualms_training.fitting.feature_cache import Features
from qualms_training.meta.dirichlet import dirichlet_scores
from qualms_training.paper.detection import check_finite
from qualms_training.paper.inputs import BaseOutputs, InputBuilder, LabelledOutputs
from qualms_training.paper.method import PostHocMethod
from qualms_training.paper.methods.post_hoc.base_softmax import BaseSoftmax
from qualms_training.paper.methods.post_hoc.gen import GEN
from qualms_training.paper.methods.score_functions import dirichlet_output
from qualms_training.paper.methods.trained_heads.density_evidence import DensityEvidence
from qualms_training.paper.methods.trained_heads.dirichlet_meta import DirichletMeta
from qualms_training.paper.methods.trained_heads.fused import Fused, JoinedOutputs
from qualms_training.paper.methods.trained_heads.selected_weights import SelectedWeights
from qualms_training.paper.registry import METHODS, PAPER_SCORE_NAMES
from qualms_training.reporting.evaluation import calibration_error, negative_log_likelihood

TEST = "test"
JOINED, TEMPERED, BASE, META = "joined α", "tempered softmax", "softmax of the base", "α of the meta-model"
"""distributions over the classes whose calibration is measured"""


class ComparedScore(NamedTuple):
    """A row of the comparison."""

    key: str
    """the method's key in the registry"""
    score: str

    @property
    def title(self) -> str:
        """Method and score in words, as in the tables."""
        return f"{METHODS[self.key].title} · {PAPER_SCORE_NAMES.get(self.score, self.score.replace('_', ' '))}"


NEW_DEFAULT = ComparedScore("fused", "fused")
OLD_DEFAULT = ComparedScore("fused-selected", "fused")
MUTUAL_INFORMATION = ComparedScore("fused", "mutual_information")
DISTANCE = ComparedScore("fused", "distance")


class AlphaQuality(BaseModel):
    """Quality of the joined α with one seed, beside that of other distributions over the classes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float
    accuracy: float
    """test accuracy of the served classes, in percent"""
    ece: dict[str, float]
    """expected calibration error on the test set, in percent, by distribution"""
    nll: dict[str, float]
    """mean negative log-likelihood of the test labels, in nats, by distribution"""
    served_class: dict[str, float]
    """by set of images: share, in percent, whose largest α in float32 is that of the served class"""
    ties: int
    """test images less distinct values of the precision in float32"""


@dataclass(frozen=True)
class SeedScores:
    """The scores of every set of images with one seed."""

    scores: Mapping[str, Mapping[ComparedScore, NDArray[Any]]]
    """by set, first the test set; (N,) each, larger for more uncertain images"""
    alpha: AlphaQuality

    def save(self, path: Path, fingerprint: str) -> None:
        """Write a file that `load` reads."""
        arrays: dict[str, Any] = {
            f"{name}/{row.key}/{row.score}": values
            for name, scores in self.scores.items()
            for row, values in scores.items()
        }
        arrays |= {"fingerprint": np.array(fingerprint), "alpha": np.array(self.alpha.model_dump_json())}
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> "SeedScores | None":
        """Read a file, or return None if there is none, it is damaged or its fingerprint is another."""
        try:
            # np.load given a path does not close a damaged file.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
                arrays = dict(content)
            alpha = AlphaQuality.model_validate_json(str(arrays.pop("alpha")))
            if str(arrays.pop("fingerprint")) != fingerprint:
                return None
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, ValidationError):
            return None
        scores: dict[str, dict[ComparedScore, NDArray[Any]]] = {}
        for name, values in arrays.items():
            image_set, key, score = name.rsplit("/", 2)
            scores.setdefault(image_set, {})[ComparedScore(key, score)] = values
        return cls(scores, alpha)


def compute_scores(builder: InputBuilder, columns: Sequence[str], folder: Path) -> SeedScores:
    """Fit all methods, and score the test set and the OOD sets `columns`. Checkpoints are written to `folder`."""
    outputs, fitted = builder.scored_outputs(), _fit(builder, folder)
    scores: dict[str, dict[ComparedScore, NDArray[Any]]] = {}
    joined: dict[str, JoinedOutputs] = {}
    with builder.context.display.bar("scoring", sum(len(outputs[name]) for name in (TEST, *columns))) as advance:
        for name in (TEST, *columns):
            joined[name] = fitted.fused.joined(outputs[name])
            scores[name] = fitted.scores(outputs[name], joined[name])
            check_finite({name: {row.title: values for row, values in scores[name].items()}})
            advance(len(outputs[name]))
    return SeedScores(scores, _alpha_quality(joined, builder.test_labels, fitted.fused))


@dataclass(frozen=True)
class _Fitted:
    """The methods of one seed."""

    fused: Fused
    old_default: SelectedWeights
    single: Mapping[str, PostHocMethod]
    """methods with a score of one kind, by key"""
    density: DensityEvidence

    def scores(self, outputs: BaseOutputs, joined: JoinedOutputs) -> dict[ComparedScore, NDArray[Any]]:
        """All scores of N images, (N,) each, in the order of the tables."""
        predictor = _with_logits(outputs, joined.logits)
        made = {NEW_DEFAULT: joined.flag_scores}
        made |= _named(OLD_DEFAULT.key, self.old_default.score(outputs).scores)
        for key, method in self.single.items():
            made |= _named(key, method.score(predictor).scores)
        made[DISTANCE] = _distance(self.fused, outputs)
        made |= _named(NEW_DEFAULT.key, _dirichlet(joined.alpha))
        return made | _named("density-evidence", self.density.score(predictor).scores)


def _named(key: str, scores: Mapping[str, NDArray[Any]]) -> dict[ComparedScore, NDArray[Any]]:
    return {ComparedScore(key, name): values for name, values in scores.items()}


def _fit(builder: InputBuilder, folder: Path) -> _Fitted:
    note, inputs = builder.context.display.note, builder.post_hoc_inputs(folder)
    meta, fused, selected, density = DirichletMeta(), Fused(), SelectedWeights(), DensityEvidence()
    note(f"  seed {builder.seed}: training the meta-model")
    meta.fit(inputs)
    note(f"  seed {builder.seed}: fitting flag score and joined α, the selected weights, and evidence by density")
    fused.fit_with(meta, inputs)
    selected.fit_with(meta, inputs)
    fit = inputs.fit
    predictor = _with_logits(fit.outputs, fused.joined(fit.outputs).logits)
    density.fit(replace(inputs, fit=LabelledOutputs(predictor, fit.labels)))
    single: dict[str, PostHocMethod] = {"gen": GEN(), "ours-pooled": meta}
    if inputs.recipe.prediction == "base":
        single = {"base": BaseSoftmax(), **single}
    return _Fitted(fused, selected, single, density)


def _with_logits(outputs: BaseOutputs, logits: NDArray[np.float32]) -> BaseOutputs:
    """The outputs with the logits (N, K) of the network that predicts."""
    return replace(outputs, features=Features(outputs.features.taps, logits, outputs.features.folder))


def _dirichlet(alpha: Tensor) -> dict[str, NDArray[Any]]:
    """The paper's scores of α (N, K) and the expected entropy, (N,) each."""
    expected_entropy = dirichlet_scores(alpha.log()).expected_entropy.numpy()
    return {**dirichlet_output(alpha.log()).scores, "expected_entropy": expected_entropy}


def _distance(fused: Fused, outputs: BaseOutputs) -> NDArray[Any]:
    """The distance that is a term of the flag score, (N,)."""
    density = fused.flag_score.density
    assert density is not None  # the method always has it
    with torch.inference_mode():
        distance = density([torch.from_numpy(np.array(tap, dtype=np.float32)) for tap in outputs.features.taps])
    return np.asarray(distance.squeeze(1).numpy())


def _alpha_quality(joined: Mapping[str, JoinedOutputs], labels: NDArray[np.int64], fused: Fused) -> AlphaQuality:
    test, inverse_temperature = joined[TEST], float(fused.joined_alpha.inverse_temperature)
    logits, meta = test.logits.astype(np.float64), softmax(test.log_alpha.astype(np.float64), axis=1)
    served = dirichlet_scores(test.alpha.log())
    distributions = {
        JOINED: served.probabilities.double().numpy(),
        TEMPERED: softmax(logits * inverse_temperature, axis=1),
        **({BASE: softmax(logits, axis=1)} if fused.predicts_by == "base" else {}),
        META: meta,
    }
    return AlphaQuality(
        temperature=1 / inverse_temperature,
        accuracy=100 * float((logits.argmax(axis=1) == labels).mean()),
        ece={name: calibration_error(values, labels) for name, values in distributions.items()},
        nll={name: negative_log_likelihood(values, labels) for name, values in distributions.items()},
        served_class={name: _served_class(outputs) for name, outputs in joined.items()},
        ties=len(labels) - len(np.unique(served.precision.numpy())),
    )


def _served_class(outputs: JoinedOutputs) -> float:
    """Share of images, in percent, whose largest α in float32 is that of the served class."""
    largest = outputs.alpha.float().argmax(dim=1).numpy()
    return 100 * float((largest == outputs.logits.argmax(axis=1)).mean())
