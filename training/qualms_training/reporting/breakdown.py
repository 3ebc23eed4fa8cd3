"""Parts of an evaluation: the guarantees by encoding and by class, and prediction sets."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.evaluation_results import (
    ClassResult,
    DetectionResult,
    EncodingResult,
    GuaranteeResult,
    SetResult,
)
from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import Outputs
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.verdicts import Decider, Verdicts
from qualms.errors import OperatingPointError
from qualms.images.encodings import FORMATS, Encoding, covers, parse_encoding
from qualms.images.observed import ObservedEncoding
from qualms_training.console import Display
from qualms_training.data.dataset import Selection
from qualms_training.data.prepare import LabelledSplit
from qualms_training.reporting.graph_runs import EvaluationRunner

SET_COVERAGES = (0.9, 0.95, 0.99)
MIN_BY_ENCODING = 500
"""test images that are sent in each encoding, however slow the graph is"""
_SEED = 1
"""of encodings with a range"""


@dataclass(frozen=True, eq=False)
class Sent:
    """The graph's outputs for N images, and their encodings (N,); None if they are not known."""

    outputs: Outputs
    observed: Sequence[ObservedEncoding] | None = None

    @property
    def sizes(self) -> list[str | None]:
        """(N,) sizes of the images relative to the model's input."""
        if self.observed is None:
            return [None] * len(self.outputs["prediction"])
        return [one.size for one in self.observed]

    def verdicts(self, decider: Decider, point: OperatingPoint) -> Verdicts | None:
        """The verdicts at an operating point; None if the calibration does not support it."""
        try:
            return decider.decide_by_size(point, self.outputs, self.sizes)
        except OperatingPointError:
            return None

    def flags(self, decider: Decider, point: OperatingPoint) -> NDArray[np.bool_] | None:
        """The flags (N,) at an operating point; None if the calibration does not support it."""
        verdicts = self.verdicts(decider, point)
        return None if verdicts is None else verdicts.flags


def guarantee_results(
    decider: Decider, sent: Sent, labels: NDArray[np.int64], targets: Sequence[float]
) -> list[GuaranteeResult]:
    """False-alarm rate and selective risk as measured, for each target."""
    measures = (_false_alarm_rate, _selective_risk)
    return [measure(decider, sent, labels, target) for target in targets for measure in measures]


def encoding_results(
    runner: EvaluationRunner,
    manifest: Manifest,
    test: LabelledSplit,
    ood: Mapping[str, Selection],
    *,
    encodings: Sequence[str],
    targets: Sequence[float],
    limit: int,
    display: Display,
    seconds: float | None = None,
) -> list[EncodingResult]:
    """The guarantees, accuracy and detection with all images sent in each of the encodings.

    At most `limit` test images and a tenth as many images of each OOD set are used; fewer if the graph would take more than
    `seconds` for them at the speed of the runs before, but not fewer than MIN_BY_ENCODING.
    """
    decider, results = Decider(manifest), []
    if seconds is not None:
        limit = min(limit, affordable(runner, seconds, len(encodings), len(ood)))
    images, labels = test.stored.first(limit), test.labels[:limit]
    sets = {name: selection.first(max(1, limit // 10)) for name, selection in ood.items()}
    total = len(encodings) * (len(images) + sum(map(len, sets.values())))
    with display.bar("evaluating by encoding", total) as advance:
        for text in encodings:
            encoding = parse_encoding(text)

            def run(selection: Selection, encoding: Encoding = encoding) -> Sent:
                return Sent(*runner.received(selection, encoding, _SEED, advance))

            sent = run(images)
            results.append(
                EncodingResult(
                    encoding=text,
                    calibrated=is_calibrated(manifest, encoding, sent.observed or []),
                    n=len(images),
                    accuracy=100 * float((sent.outputs["prediction"] == labels).mean()),
                    realised=guarantee_results(decider, sent, labels, targets),
                    detected=_detection(decider, [run(one) for one in sets.values()], targets),
                )
            )
    return results


def affordable(runner: EvaluationRunner, seconds: float, encodings: int, sets: int) -> int:
    """The number of test images in each encoding, with a tenth of each OOD set, that the graph can run on in `seconds`."""
    if not runner.seconds or not encodings:
        return MIN_BY_ENCODING
    images = seconds * runner.images / runner.seconds
    return max(MIN_BY_ENCODING, int(images / (encodings * (1 + sets / 10))))


def is_calibrated(manifest: Manifest, encoding: Encoding, observed: Sequence[ObservedEncoding]) -> bool:
    """Whether the guarantees include images in this encoding, in the form `mixture` as one part of them.

    If the calibration images were used as stored, they do if at least 1 % of them had the most frequent of the `observed` encodings
    and nothing but the file format is changed.
    """
    as_sent, seen = manifest.calibration.as_sent, manifest.calibration.seen_encodings
    if as_sent is not None:
        return any(covers(parse_encoding(text), encoding) for text in as_sent.encodings)
    if seen is None:  # earlier versions calibrated on arrays or lossless files
        return covers(parse_encoding("png"), encoding)
    only_format = len(encoding.steps) == 1 and encoding.steps[0].name in FORMATS
    return only_format and Counter(one.text for one in observed).most_common(1)[0][0] in seen


def class_results(manifest: Manifest, sent: Sent, labels: NDArray[np.int64]) -> list[ClassResult]:
    """False alarms at the default operating point, by predicted and by true class."""
    decider, target = Decider(manifest), manifest.operating.target_fpr
    flags = sent.flags(decider, OperatingPoint())
    if flags is None:
        return []
    by_class = sent.flags(decider, OperatingPoint(guarantee="by-class"))
    results = []
    for by, classes in (("predicted", sent.outputs["prediction"]), ("true", labels)):
        for index, label in enumerate(manifest.classes):
            of_class = classes == index
            results.append(
                ClassResult.model_validate(
                    {
                        "by": by,
                        "label": label,
                        "target": target,
                        "n": int(of_class.sum()),
                        "flagged": int(flags[of_class].sum()),
                        "flagged_by_class": None if by_class is None else int(by_class[of_class].sum()),
                    }
                )
            )
    return results


def set_results(
    manifest: Manifest, sent: Sent, labels: NDArray[np.int64], coverages: Sequence[float] = SET_COVERAGES
) -> list[SetResult]:
    """Coverage and size of prediction sets; none if the model has no scores for them."""
    decider, results = Decider(manifest), []
    labelled = manifest.labelled_calibration or manifest.calibration
    if labelled.label_scores is None and not any(one.label_scores is not None for one in labelled.settings):
        return []
    for coverage in coverages:
        contained = _contained(decider, sent, coverage)
        if contained is None:
            nothing = dict.fromkeys(("realised", "mean_size", "empty", "worst_class"))
            results.append(SetResult(coverage=coverage, n=len(labels), **nothing))
            continue
        covered, sizes = contained[np.arange(len(labels)), labels], contained.sum(axis=1)
        by_class = [float(covered[labels == label].mean()) for label in np.unique(labels)]
        results.append(
            SetResult(
                coverage=coverage,
                realised=float(covered.mean()),
                mean_size=float(sizes.mean()),
                empty=float((sizes == 0).mean()),
                worst_class=min(by_class),
                n=len(labels),
            )
        )
    return results


def _contained(decider: Decider, sent: Sent, coverage: float) -> NDArray[np.bool_] | None:
    """Whether each class is in the set of each image, (N, K); None if the calibration does not support the coverage."""
    probabilities = sent.outputs["probabilities"]
    result = np.zeros(probabilities.shape, bool)
    sizes = np.array([size or "" for size in sent.sizes])
    for size in np.unique(sizes):
        try:
            point = decider.rule(OperatingPoint(coverage=coverage), str(size) or None).sets
        except OperatingPointError:
            return None
        assert point is not None  # the operating point has a coverage
        result[sizes == size] = point.contains(probabilities[sizes == size])
    return result


def _false_alarm_rate(decider: Decider, sent: Sent, _: NDArray[np.int64], target: float) -> GuaranteeResult:
    """The share of test images that are flagged at a target false-alarm rate."""
    flags = sent.flags(decider, OperatingPoint(target_fpr=target))
    if flags is None:
        return GuaranteeResult(promise="false_alarm_rate", target=target, realised=None, n=0)
    return GuaranteeResult(promise="false_alarm_rate", target=target, realised=float(flags.mean()), n=len(flags))


def _selective_risk(decider: Decider, sent: Sent, labels: NDArray[np.int64], target: float) -> GuaranteeResult:
    """The error rate among test images that are not flagged by default, and accepted at a target risk."""
    verdicts = sent.verdicts(decider, OperatingPoint(target_risk=target))
    if verdicts is None:
        return GuaranteeResult(promise="selective_risk", target=target, realised=None, n=0)
    accepted = verdicts.accepts
    assert accepted is not None  # if a requested risk is not supported, the rule is an error
    wrong = sent.outputs["prediction"] != labels
    risk = float(wrong[accepted].mean()) if accepted.any() else 0.0
    return GuaranteeResult(promise="selective_risk", target=target, realised=risk, n=int(accepted.sum()))


def _detection(decider: Decider, sets: Sequence[Sent], targets: Sequence[float]) -> list[DetectionResult]:
    """The mean over OOD sets of the share of flagged images, for each target."""
    results = []
    for target in targets if sets else ():
        flags = [sent.flags(decider, OperatingPoint(target_fpr=target)) for sent in sets]
        rates = [float(one.mean()) for one in flags if one is not None]
        realised = float(np.mean(rates)) if rates else None
        results.append(DetectionResult(target=target, realised=realised, sets=len(sets)))
    return results
