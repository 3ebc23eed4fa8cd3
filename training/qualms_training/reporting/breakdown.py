"""Parts of an evaluation: the guarantees by encoding and by class, and prediction sets."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.calibration_data import Calibration
from qualms.bundle.evaluation_results import (
    ClassResult,
    DetectionResult,
    EncodingResult,
    GuaranteeResult,
    SetResult,
)
from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import GraphRunner, Outputs
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.verdicts import Decider, Rule, decide
from qualms.errors import OperatingPointError
from qualms.images.encodings import Encoding, covers, parse_encoding
from qualms_training.console import Display
from qualms_training.data.dataset import Selection
from qualms_training.data.prepare import LabelledSplit

SET_COVERAGES = (0.9, 0.95, 0.99)
_SEED = 1
"""of encodings with a range"""


def guarantee_results(
    decider: Decider, outputs: Outputs, labels: NDArray[np.int64], targets: Sequence[float]
) -> list[GuaranteeResult]:
    """False-alarm rate and selective risk as measured, for each target."""
    measures = (_false_alarm_rate, _selective_risk)
    return [measure(decider, outputs, labels, target) for target in targets for measure in measures]


def encoding_results(
    runner: GraphRunner,
    manifest: Manifest,
    test: LabelledSplit,
    ood: Mapping[str, Selection],
    *,
    encodings: Sequence[str],
    targets: Sequence[float],
    limit: int,
    display: Display,
) -> list[EncodingResult]:
    """The guarantees, accuracy and detection with all images sent in each of the encodings.

    At most `limit` test images and a tenth as many images of each OOD set are used.
    """
    decider, results = Decider(manifest), []
    images, labels = test.stored.first(limit), test.labels[:limit]
    sets = {name: selection.first(max(1, limit // 10)) for name, selection in ood.items()}
    total = len(encodings) * 2 * (len(images) + sum(map(len, sets.values())))
    with display.bar("evaluating by encoding", total) as advance:
        for text in encodings:
            encoding = parse_encoding(text)

            def run(selection: Selection, encoding: Encoding = encoding) -> Outputs:
                received = selection.received(manifest.input, [encoding], _SEED, advance)
                return runner(received.images, progress=advance)

            outputs = run(images)
            results.append(
                EncodingResult(
                    encoding=text,
                    calibrated=is_calibrated(manifest.calibration, encoding),
                    n=len(images),
                    accuracy=100 * float((outputs["prediction"] == labels).mean()),
                    realised=guarantee_results(decider, outputs, labels, targets),
                    detected=_detection(decider, [run(one) for one in sets.values()], targets),
                )
            )
    return results


def is_calibrated(calibration: Calibration, encoding: Encoding) -> bool:
    """Whether the guarantees include images in this encoding, in the form `mixture` as one part of them."""
    listed = ["png"] if calibration.as_sent is None else calibration.as_sent.encodings
    return any(covers(parse_encoding(text), encoding) for text in listed)


def class_results(manifest: Manifest, outputs: Outputs, labels: NDArray[np.int64]) -> list[ClassResult]:
    """False alarms at the default operating point, by predicted and by true class."""
    decider, target = Decider(manifest), manifest.operating.target_fpr
    flags = _flags(decider, outputs, OperatingPoint())
    if flags is None:
        return []
    by_class = _flags(decider, outputs, OperatingPoint(guarantee="by-class"))
    results = []
    for by, classes in (("predicted", outputs["prediction"]), ("true", labels)):
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


def set_results(manifest: Manifest, outputs: Outputs, labels: NDArray[np.int64]) -> list[SetResult]:
    """Coverage and size of prediction sets; none if the model has no scores for them."""
    decider, results = Decider(manifest), []
    if manifest.calibration.label_scores is None and not any(
        one.label_scores is not None for one in manifest.calibration.settings
    ):
        return []
    for coverage in SET_COVERAGES:
        rule = _rule(decider, OperatingPoint(coverage=coverage))
        if rule is None or rule.sets is None:
            nothing = dict.fromkeys(("realised", "mean_size", "empty", "worst_class"))
            results.append(SetResult(coverage=coverage, n=len(labels), **nothing))
            continue
        contained = rule.sets.contains(outputs["probabilities"])
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


def _rule(decider: Decider, point: OperatingPoint) -> Rule | None:
    try:
        return decider.rule(point)
    except OperatingPointError:
        return None


def _flags(decider: Decider, outputs: Outputs, point: OperatingPoint) -> NDArray[np.bool_] | None:
    rule = _rule(decider, point)
    return None if rule is None else decide(rule, outputs).flags


def _false_alarm_rate(decider: Decider, outputs: Outputs, _: NDArray[np.int64], target: float) -> GuaranteeResult:
    """The share of test images that are flagged at a target false-alarm rate."""
    flags = _flags(decider, outputs, OperatingPoint(target_fpr=target))
    if flags is None:
        return GuaranteeResult(promise="false_alarm_rate", target=target, realised=None, n=0)
    return GuaranteeResult(promise="false_alarm_rate", target=target, realised=float(flags.mean()), n=len(flags))


def _selective_risk(decider: Decider, outputs: Outputs, labels: NDArray[np.int64], target: float) -> GuaranteeResult:
    """The error rate among test images that are not flagged by default, and accepted at a target risk."""
    rule = _rule(decider, OperatingPoint(target_risk=target))
    if rule is None:
        return GuaranteeResult(promise="selective_risk", target=target, realised=None, n=0)
    accepted = decide(rule, outputs).accepts
    assert accepted is not None  # if a requested risk is not supported, the rule is an error
    wrong = outputs["prediction"] != labels
    risk = float(wrong[accepted].mean()) if accepted.any() else 0.0
    return GuaranteeResult(promise="selective_risk", target=target, realised=risk, n=int(accepted.sum()))


def _detection(decider: Decider, sets: Sequence[Outputs], targets: Sequence[float]) -> list[DetectionResult]:
    """The mean over OOD sets of the share of flagged images, for each target."""
    results = []
    for target in targets if sets else ():
        flags = [_flags(decider, outputs, OperatingPoint(target_fpr=target)) for outputs in sets]
        rates = [float(one.mean()) for one in flags if one is not None]
        realised = float(np.mean(rates)) if rates else None
        results.append(DetectionResult(target=target, realised=realised, sets=len(sets)))
    return results
