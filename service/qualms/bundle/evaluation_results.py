"""The manifest's evaluation: results on test images that were not used for any choice."""

from typing import Literal

from pydantic import Field

from qualms.bundle.parts import ListOf, ManifestPart, is_empty, is_none


class OodResult(ManifestPart):
    """How well one score separates one OOD set from the in-distribution test set, in percent."""

    data: str
    score: str
    auroc: float
    aupr: float
    fpr95: float
    n_id: int
    n_ood: int


class ErrorResult(ManifestPart):
    """How well one score separates wrong predictions from correct ones, in percent."""

    score: str
    auroc: float
    aupr: float


class GuaranteeResult(ManifestPart):
    """A guaranteed rate as measured on held-out in-distribution data."""

    promise: Literal["false_alarm_rate", "selective_risk"]
    target: float
    realised: float | None
    """the measured rate; None if the calibration set cannot support the target"""
    n: int


class ProbabilityResult(ManifestPart):
    """How well class probabilities agree with the labels of the test set."""

    distribution: Literal["alpha", "base", "meta_alpha"]
    """mean of the served Dirichlet distribution, softmax of the base, or mean of the meta-model's own Dirichlet distribution"""
    ece: float
    """expected calibration error in percent: 15 bins of equal width of the largest probability"""
    nll: float
    """mean negative log-likelihood of the true class, in nats"""


class DetectionResult(ManifestPart):
    """The share of OOD images that are flagged at a target false-alarm rate, as a mean over the OOD sets."""

    target: float
    realised: float | None
    """None if the calibration set cannot support the target"""
    sets: int


class EncodingResult(ManifestPart):
    """The test set and the OOD sets, sent in one encoding (`qualms.images.encodings`)."""

    encoding: str
    calibrated: bool
    """whether the guarantees include images in this encoding"""
    n: int
    accuracy: float
    realised: ListOf[GuaranteeResult]
    detected: ListOf[DetectionResult]


class ClassResult(ManifestPart):
    """False alarms among the test images of one class, at the default operating point."""

    by: Literal["predicted", "true"]
    label: str
    target: float
    n: int
    flagged: int
    flagged_by_class: int | None
    """the same with the guarantee by-class; None if the calibration set cannot support it"""


class SetResult(ManifestPart):
    """Prediction sets on the test set."""

    coverage: float
    realised: float | None
    """the share of images whose set holds the true class; None if the calibration set cannot support the coverage"""
    mean_size: float | None
    empty: float | None
    """the share of empty sets"""
    worst_class: float | None
    """the smallest share over the true classes"""
    n: int


class ServedOodResult(ManifestPart):
    """Decisions on one OOD set at the default operating point."""

    data: str
    n: int
    flagged: int
    accepted: int | None
    """number of predictions that are accepted; None if the calibration set cannot support the target risk"""
    softmax_accepted: int | None
    """the same by the softmax of the base (`ServedTrust.softmax_accepted`); None if the meta-model predicts"""


class ServedTrust(ManifestPart):
    """Accepted predictions for test images at the default operating point, and those that the softmax of the base can accept."""

    target_risk: float
    accepted: int
    wrong: int
    """number of wrong predictions among the accepted ones"""
    softmax_accepted: int | None
    """the largest number of predictions that a threshold on the largest softmax probability of the base accepts with at most the
    same measured error rate, chosen with the labels of the test set; None if the meta-model predicts"""
    softmax_wrong: int | None


class ServedResult(ManifestPart):
    """Decisions at the default operating point, the one that is served."""

    score: str
    """the flag score"""
    target_fpr: float
    n: int
    flagged: int
    """number of flagged test images"""
    trust: ServedTrust | None
    """None if the calibration set cannot support the default target risk"""
    ood: ListOf[ServedOodResult]


class Evaluation(ManifestPart):
    """Results on test data that were not used for any choice."""

    protocol: Literal["fair", "as-published"] = "fair"
    test_data: str
    n: int
    calibrated_on: int = Field(0, exclude_if=lambda count: count == 0)
    """number of test images that are also calibration images"""
    base_accuracy: float | None
    """None if the meta-model predicts, because the base model then has other classes"""
    accuracy: float
    """accuracy of the served predictions"""
    identical_predictions: bool | None
    """whether the graph predicts the same classes as the base model; None if the meta-model predicts"""
    compared: int | None = Field(None, exclude_if=is_none)
    """number of test images on which the predictions were compared; None for all"""
    ood: ListOf[OodResult]
    misclassification: ListOf[ErrorResult]
    realised: ListOf[GuaranteeResult]
    probabilities: ListOf[ProbabilityResult] = Field([], exclude_if=is_empty)
    encodings: ListOf[EncodingResult] = Field([], exclude_if=is_empty)
    classes: ListOf[ClassResult] = Field([], exclude_if=is_empty)
    sets: ListOf[SetResult] = Field([], exclude_if=is_empty)
    served: ServedResult | None = Field(None, exclude_if=is_none)
    """None if the calibration set cannot support the default false-alarm rate, and in earlier bundles"""
