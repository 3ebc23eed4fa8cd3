"""A manifest's calibration images: the thresholds of any operating point are chosen from them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from qualms.bundle.calibration_data import Calibration, PairedScores
from qualms.bundle.manifest import Manifest
from qualms.bundle.scores import ScoreSpec, as_uncertainty
from qualms.decisions.by_class import ByClass, ClassFlags, sort_by_class
from qualms.decisions.flag import FlagPoint, choose_flag_point
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint
from qualms.decisions.prediction_sets import SetPoint, choose_set_point
from qualms.decisions.trust import RiskEvidence, TrustPoint, choose_trust_point, count_accepted
from qualms.errors import OperatingPointError

_CACHED = 64
"""thresholds of recent operating points: requests that differ in one parameter share the others"""
_NO_LABELS = (
    "The calibration images have no labels, so {what} can be guaranteed; calibrate on labelled images, or keep an earlier "
    "guarantee with --keep-trust."
)


class Uncertainties(Mapping[str, npt.NDArray[np.float64]]):
    """Scores (n,) as uncertainties, converted whenever they are used: kept, they would take twice the manifest's memory."""

    def __init__(self, scores: Mapping[str, npt.NDArray[np.float32]], specs: Mapping[str, ScoreSpec]) -> None:
        self._scores, self._specs = scores, specs

    def __getitem__(self, name: str) -> npt.NDArray[np.float64]:
        return as_uncertainty(self._scores[name], self._specs[name].direction)

    def __contains__(self, name: object) -> bool:
        return name in self._scores

    def __iter__(self) -> Iterator[str]:
        return iter(self._scores)

    def __len__(self) -> int:
        return len(self._scores)


@dataclass(frozen=True, eq=False)
class Sample:
    """The calibration images in one setting; every array is (n,), in the order of the images."""

    encoding: str | None
    """None if the images were not sent in several settings"""
    size: str | None
    """of the images relative to the model's input, in the form `by-size`"""
    uncertainty: Mapping[str, npt.NDArray[np.float64]]
    """by score; in the form `worst` only the scores of the default operating point"""
    predictions: npt.NDArray[np.int32] | None
    wrong: npt.NDArray[np.bool_] | None
    label_scores: npt.NDArray[np.float32] | None
    trust_score: str

    @cached_property
    def trust_order(self) -> npt.NDArray[np.intp]:
        """The order of the images by their trust score."""
        return np.argsort(self.uncertainty[self.trust_score])


class CalibrationSet:
    """A manifest's calibration images, sorted once, so that the thresholds of any operating point are chosen quickly.

    With `size`, one of `Calibration.sizes`, only the settings whose images have that size are used.
    """

    def __init__(self, manifest: Manifest, size: str | None = None) -> None:
        self._manifest = manifest
        self._size = size
        self._calibration = manifest.calibration
        self._labelled = manifest.labelled_calibration or manifest.calibration
        self._ascending: dict[str, npt.NDArray[np.float64]] = {}
        self._by_class: dict[str, list[ByClass]] = {}
        self._class_flags = lru_cache(maxsize=_CACHED)(self._make_class_flags)
        self._flag_point = lru_cache(maxsize=_CACHED)(self._choose_flag_point)
        self._trust_point = lru_cache(maxsize=_CACHED)(self._choose_trust_point)

    def ascending(self, score: str) -> npt.NDArray[np.float64]:
        """(n,) uncertainty of the calibration images, ascending; of several settings, their envelope."""
        if score not in self._ascending:
            self._ascending[score] = self._envelope(score)
        return self._ascending[score]

    def has_own(self, score: str) -> bool:
        """Whether the thresholds of a score are those of images of one size."""
        return self._size is not None and all(score in sample.uncertainty for sample in self.samples)

    def _envelope(self, score: str) -> npt.NDArray[np.float64]:
        """The envelope of the settings of one size or, for scores that these do not have and without a size, of all settings."""
        if self.has_own(score):
            envelope: npt.NDArray[np.float64] = np.max(
                [np.sort(one.uncertainty[score]) for one in self.samples], axis=0
            )
            return envelope
        return np.sort(as_uncertainty(self._calibration.scores[score], self._manifest.scores[score].direction))

    @cached_property
    def samples(self) -> list[Sample]:
        """The images whose scores determine the flag, one Sample per setting."""
        return _samples(self._manifest, self._calibration, self._size)

    @cached_property
    def _labelled_samples(self) -> list[Sample]:
        """The images whose errors determine trust and prediction sets."""
        if self._labelled is self._calibration:
            return self.samples
        return _samples(self._manifest, self._labelled, self._size)

    def flag_point(self, point: OperatingPoint = DEFAULT_OPERATING_POINT) -> FlagPoint:
        """The flag threshold of an operating point; OperatingPointError if the images cannot support it."""
        return self._flag_point(replace(point, target_risk=None, coverage=None))

    def _choose_flag_point(self, point: OperatingPoint) -> FlagPoint:
        flags = self.class_flags(point)
        if flags is not None:
            return flags.point
        defaults, score = self._manifest.operating, self._score(point)
        return choose_flag_point(
            self.ascending(score),
            score=score,
            direction=self._manifest.scores[score].direction,
            target_fpr=defaults.target_fpr if point.target_fpr is None else point.target_fpr,
            guarantee=defaults.guarantee if point.guarantee is None else point.guarantee,
        )

    def setting_points(self) -> dict[str, FlagPoint]:
        """By setting of the form `worst`: the default flag threshold that its images alone would have."""
        defaults = self._manifest.operating
        return {
            sample.encoding: choose_flag_point(
                np.sort(sample.uncertainty[defaults.score]),
                score=defaults.score,
                direction=self._manifest.scores[defaults.score].direction,
                target_fpr=defaults.target_fpr,
                guarantee="marginal" if defaults.guarantee == "marginal" else "confident",
            )
            for sample in self.samples
            if sample.encoding is not None
        }

    def class_flags(self, point: OperatingPoint = DEFAULT_OPERATING_POINT) -> ClassFlags | None:
        """The thresholds by predicted class; None if the guarantee of the operating point is another one."""
        defaults, score = self._manifest.operating, self._score(point)
        if (defaults.guarantee if point.guarantee is None else point.guarantee) != "by-class":
            return None
        return self._class_flags(score, defaults.target_fpr if point.target_fpr is None else point.target_fpr)

    def _make_class_flags(self, score: str, target_fpr: float) -> ClassFlags:
        if score not in self._by_class:
            self._by_class[score] = [self._divide(sample, score) for sample in self.samples]
        direction = self._manifest.scores[score].direction
        return ClassFlags(self._by_class[score], score=score, direction=direction, target_fpr=target_fpr)

    def _divide(self, sample: Sample, score: str) -> ByClass:
        """The images of one setting by predicted class; OperatingPointError if their scores or classes are not known."""
        uncertainty = sample.uncertainty.get(score)
        if uncertainty is None or sample.predictions is None:
            raise OperatingPointError(
                f"The guarantee 'by-class' needs the predicted classes of the calibration images together with {score}, which "
                "this model does not have; use its default score, or recalibrate it.",
                "guarantee",
            )
        return sort_by_class(uncertainty, sample.predictions, len(self._manifest.classes))

    def trust_point(self, point: OperatingPoint = DEFAULT_OPERATING_POINT) -> TrustPoint:
        """The trust threshold of an operating point; OperatingPointError if the images cannot support it or its flag."""
        return self._trust_point(replace(point, coverage=None))

    def _choose_trust_point(self, point: OperatingPoint) -> TrustPoint:
        defaults = self._manifest.operating
        flags, flag = self.class_flags(point), self.flag_point(point)
        return choose_trust_point(
            [self._evidence(sample, flag, flags) for sample in self._labelled_samples],
            score=defaults.trust_score,
            direction=self._manifest.scores[defaults.trust_score].direction,
            target_risk=defaults.target_risk if point.target_risk is None else point.target_risk,
            safety=1.0 if flags is None else (1 - flag.target_fpr) ** 2,
        )

    def set_point(self, coverage: float) -> SetPoint:
        """The threshold of prediction sets; OperatingPointError if the images cannot support the coverage."""
        scores = self._label_scores
        if scores is None:
            reason = (
                "This model was calibrated with an earlier version and has no scores for prediction sets; recalibrate it."
                if self._labelled.has_labels
                else _NO_LABELS.format(what="no coverage of prediction sets")
            )
            raise OperatingPointError(reason, "coverage")
        return choose_set_point([scores], coverage, self._manifest.sets)

    @cached_property
    def _label_scores(self) -> npt.NDArray[np.float32] | None:
        """(n,) scores of the true classes, ascending; of several settings, their envelope. None if they are not known."""
        scores = [one.label_scores for one in self._labelled_samples]
        if any(one is None for one in scores):
            return None
        envelope: npt.NDArray[np.float32] = np.max([np.sort(one) for one in scores if one is not None], axis=0)
        return envelope

    def _score(self, point: OperatingPoint) -> str:
        """The flag score of an operating point."""
        scores = self._manifest.scores
        score = self._manifest.operating.score if point.score is None else point.score
        if score not in scores:
            raise OperatingPointError(
                f"The score {score!r} is not one of this model's; accepted are {', '.join(scores)}.", "score"
            )
        return score

    def _evidence(self, sample: Sample, flag: FlagPoint, flags: ClassFlags | None) -> RiskEvidence:
        """Counts of one setting's images strictly below the flag's threshold or, in earlier bundles, of all."""
        trust = self._labelled.trust
        n, thresholds = self._labelled.n, trust.thresholds.astype(np.float64)
        expected = trust.levels.astype(np.float64) * n
        if trust.accepted is not None:
            return RiskEvidence(expected, thresholds, np.array(trust.accepted), np.array(trust.errors), n, joint=False)
        if sample.wrong is None:
            raise OperatingPointError(_NO_LABELS.format(what="no error rate"), "target_risk")
        uncertainty = sample.uncertainty.get(flag.score)
        if uncertainty is None or (flags is not None and sample.predictions is None):
            raise OperatingPointError(
                f"The error rate of predictions that are not flagged by {flag.score} cannot be guaranteed, because the "
                f"calibration has paired scores of {', '.join(sample.uncertainty)} only.",
                "target_risk",
            )
        if flags is None or sample.predictions is None:
            below = flag.is_below(uncertainty)
        else:
            below = uncertainty < flags.limits(sample.predictions)
        order = sample.trust_order[below[sample.trust_order]]
        ascending, wrong = sample.uncertainty[sample.trust_score][order], sample.wrong[order]
        accepted, errors = count_accepted(ascending, wrong, trust.thresholds)
        expected = expected * (1 - flag.target_fpr)
        return RiskEvidence(expected, thresholds, accepted, errors, n, joint=True, encoding=sample.encoding)


def _samples(manifest: Manifest, calibration: Calibration, size: str | None) -> list[Sample]:
    """The settings of a size; all settings if none has this size."""
    sized = [one for one in calibration.settings if size is not None and one.size == size]
    parts: list[Calibration | PairedScores] = [*(sized or calibration.settings)] or [calibration]
    samples = []
    for part in parts:
        wrong = None
        if part.wrong is not None:
            wrong = np.zeros(calibration.n, bool)
            wrong[part.wrong] = True
        encoding, size = (part.encoding, part.size) if isinstance(part, PairedScores) else (None, None)
        samples.append(
            Sample(
                encoding,
                size,
                Uncertainties(part.scores, manifest.scores),
                part.predictions,
                wrong,
                part.label_scores,
                manifest.operating.trust_score,
            )
        )
    return samples
