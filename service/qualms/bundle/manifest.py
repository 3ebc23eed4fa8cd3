"""The manifest: a bundle's metadata as versioned JSON. Unknown fields are errors."""

import json
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qualms.bundle.arrays import Float32Array, Float32Values
from qualms.bundle.scores import DEFAULT_FLAG_SCORE, DEFAULT_TRUST_SCORE, DIRICHLET_SCORES, ScoreSpec
from qualms.errors import BundleError
from qualms.images.input_spec import InputSpec

SCHEMA_VERSION: Final = 1
REQUIRED_SCORES: Final = frozenset(DIRICHLET_SCORES)
"""scores of every bundle of this schema version; later additions to `SCORES` are optional, so that old bundles still open"""

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

Guarantee = Literal["confident", "marginal"]
"""Guarantee on the false-alarm rate, explained in `qualms.decisions.flag`."""
Predictor = Literal["base", "meta"]
"""Model whose class is served: the base model, or the meta-model (transfer)."""
AlphaKind = Literal["meta", "joined"]
"""The served α: the meta-model's own (earlier bundles), or 1 + n(x)·p(x) with p the tempered softmax of the network
that predicts and n decreasing in the fused score."""


def _is_none(value: object) -> bool:
    """Fields that are left out of the JSON, so that programs of an earlier version can read a bundle without them."""
    return value is None


def _is_empty(values: list[Any]) -> bool:
    return not values


class ManifestPart(BaseModel):
    """Base class of all parts of the manifest: immutable, finite numbers only, no unknown fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False, protected_namespaces=()
    )


class OperatingDefaults(ManifestPart):
    """The default operating point."""

    score: str = DEFAULT_FLAG_SCORE
    target_fpr: Fraction = 0.01
    guarantee: Guarantee = "confident"
    trust_score: str = DEFAULT_TRUST_SCORE
    target_risk: Fraction = 0.01


class TrustGrid(ManifestPart):
    """Candidate thresholds of the trust score from the fit split."""

    levels: Float32Array
    """(J,) fraction of the fit split at or below each threshold, ascending"""
    thresholds: Float32Array
    """(J,) thresholds as uncertainty (`scores.as_uncertainty`), ascending"""
    accepted: list[int] | None = Field(None, exclude_if=_is_none)
    """(J,) calibration images whose uncertainty is at most the threshold; only if the calibration has no `wrong`"""
    errors: list[int] | None = Field(None, exclude_if=_is_none)
    """(J,) wrong predictions among them; only if the calibration has no `wrong`"""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        counts = [values for values in (self.accepted, self.errors) if values is not None]
        shapes = {self.levels.shape, self.thresholds.shape, *((len(values),) for values in counts)}
        if len(shapes) != 1 or self.levels.ndim != 1 or not self.levels.size:
            raise ValueError("levels, thresholds, accepted and errors must have the same length, at least 1")
        if not _ascending(self.levels) or not _ascending(self.thresholds):
            raise ValueError("levels and thresholds must be ascending")
        if len(counts) == 1:
            raise ValueError("accepted and errors belong together")
        if counts and any(not 0 <= errors <= accepted for accepted, errors in zip(*counts, strict=True)):
            raise ValueError("errors must lie between 0 and accepted")
        return self


class Calibration(ManifestPart):
    """Scores of the exported graph on images that were not used to train the base or the meta-model.

    With `wrong`, the scores are in the order of the images, so that flag, trust and errors can be counted together. Without
    it (earlier bundles), each score is sorted, and `trust` has counts of the trust score alone.
    """

    n: int = Field(gt=0)
    split: str
    data: str
    data_sha256: Sha256
    scores: dict[str, Float32Array]
    """by score: (n,) raw values, in the order of the images with `wrong`, else ascending"""
    wrong: list[int] | None = Field(None, exclude_if=_is_none)
    """indices of the misclassified images, ascending"""
    trust: TrustGrid

    @model_validator(mode="after")
    def _check_scores(self) -> Self:
        for name, values in self.scores.items():
            if self.wrong is None and (values.shape != (self.n,) or not _ascending(values)):
                raise ValueError(f"the calibration scores of {name} must be {self.n} ascending values")
            if values.shape != (self.n,):
                raise ValueError(f"the calibration scores of {name} must be {self.n} values")
        return self

    @model_validator(mode="after")
    def _check_errors(self) -> Self:
        accepted = self.trust.accepted
        if self.wrong is None:
            if accepted is None:
                raise ValueError("without wrong, trust must have accepted and errors")
            if max(accepted) > self.n:
                raise ValueError(f"trust.accepted must be at most n, {self.n}")
            return self
        if accepted is not None:
            raise ValueError("with wrong, trust must not have accepted and errors")
        if any(not index < following for index, following in pairwise((-1, *self.wrong, self.n))):
            raise ValueError(f"wrong must be strictly ascending indices from 0 to {self.n - 1}")
        return self


class Reference(ManifestPart):
    """Distribution of scores and classes on in-distribution images, to compare live traffic with."""

    levels: list[float] = Field(min_length=1)
    quantiles: dict[str, list[float]]
    """by score: its quantiles at `levels`"""
    class_shares: list[float]
    """fraction of images predicted as each class"""

    @model_validator(mode="after")
    def _check_quantiles(self) -> Self:
        if sorted(self.levels) != self.levels:
            raise ValueError("levels must be ascending")
        for name, quantiles in self.quantiles.items():
            if len(quantiles) != len(self.levels):
                raise ValueError(f"the quantiles of {name} must be {len(self.levels)} values, one per level")
        return self


class Golden(ManifestPart):
    """Outputs of the exported graph on the golden inputs (`qualms.bundle.golden`)."""

    count: int = Field(gt=0, le=64)
    input_sha256: Sha256
    outputs: dict[str, Float32Array] = Field(min_length=1)


class Provenance(ManifestPart):
    """Everything needed to reproduce the model."""

    created: str
    qualms: str
    recipe_name: str
    recipe: dict[str, Any]
    seed: int
    versions: dict[str, str]
    base: dict[str, Any]
    meta: dict[str, Any]
    data: dict[str, Any]


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


class Evaluation(ManifestPart):
    """Results on test data that were not used for any choice."""

    protocol: Literal["fair", "as-published"] = "fair"
    test_data: str
    n: int
    base_accuracy: float | None
    """None if the meta-model predicts, because the base model then has other classes"""
    accuracy: float
    """accuracy of the served predictions"""
    identical_predictions: bool | None
    """whether the graph predicts the same classes as the base model; None if the meta-model predicts"""
    ood: list[OodResult]
    misclassification: list[ErrorResult]
    realised: list[GuaranteeResult]
    probabilities: list[ProbabilityResult] = Field([], exclude_if=_is_empty)


class Manifest(ManifestPart):
    """The whole manifest."""

    schema_version: Literal[1] = SCHEMA_VERSION
    name: Name
    version: Name
    classes: list[str] = Field(min_length=2)
    input: InputSpec
    prediction: Predictor = "base"
    alpha: AlphaKind = Field("meta", exclude_if=lambda kind: kind == "meta")
    flag_terms: list[str] = Field([], exclude_if=_is_empty)
    """names of the columns of the output `fused_terms`, whose sum is the score `fused`; empty if alpha is `meta`"""
    scores: dict[str, ScoreSpec]
    operating: OperatingDefaults
    calibration: Calibration
    reference: Reference
    golden: Golden
    provenance: Provenance
    evaluation: Evaluation | None = None
    graph_sha256: Sha256

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("class names must be unique")
        if missing := sorted(REQUIRED_SCORES - set(self.scores)):
            raise ValueError(f"the required scores {', '.join(missing)} are missing")
        if missing := sorted(set(self.scores) - set(self.calibration.scores)):
            raise ValueError(f"the scores {', '.join(missing)} are not calibrated")
        if unknown := sorted(set(self.calibration.scores) - set(self.scores)):
            raise ValueError(f"the calibrated scores {', '.join(unknown)} are not among the scores")
        for name in (self.operating.score, self.operating.trust_score):
            if name not in self.scores:
                raise ValueError(f"the operating score {name} is not among the scores")
        if missing := sorted(set(self.scores) - set(self.reference.quantiles)):
            raise ValueError(f"the scores {', '.join(missing)} have no reference quantiles")
        if len(self.reference.class_shares) != len(self.classes):
            raise ValueError("reference.class_shares must have one value per class")
        if (self.alpha == "joined") != bool(self.flag_terms):
            raise ValueError("flag_terms and alpha = 'joined' belong together")
        if len(set(self.flag_terms)) != len(self.flag_terms):
            raise ValueError("flag_terms must be unique")
        self._check_golden_shapes()
        return self

    def _check_golden_shapes(self) -> None:
        """Golden outputs must have one row per image and, for vectors, one column per class or flag term."""
        images, classes = self.golden.count, len(self.classes)
        shapes = {
            **dict.fromkeys(("alpha", "probabilities", "meta_alpha"), (images, classes)),
            "fused_terms": (images, len(self.flag_terms)),
            **({"base_probabilities": (images, classes)} if self.prediction == "base" else {}),
            **dict.fromkeys(self.scores, (images,)),
        }
        for name, values in self.golden.outputs.items():
            if values.shape != shapes.get(name, values.shape):
                raise ValueError(
                    f"golden.outputs.{name} must have the shape {list(shapes[name])} for {images} images, "
                    f"{classes} classes and {len(self.flag_terms)} flag terms, not {list(values.shape)}"
                )

    def to_json(self) -> str:
        """Compact JSON, as stored in the file."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str, source: str = "The file") -> Self:
        """Parse and validate a manifest; the BundleError names `source` and the first invalid field."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{source} has a damaged manifest: it is not JSON ({error}).") from None
        if not isinstance(document, dict):
            raise BundleError(f"{source} has a damaged manifest: it is not a JSON object.")
        version = document.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise BundleError(
                f"{source} has a manifest of schema version {version}; this version of qualms reads up to "
                f"{SCHEMA_VERSION}: update qualms to open it."
            )
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise BundleError(f"{source} has a damaged manifest: {first_problem(error)}.") from None


def first_problem(error: ValidationError) -> str:
    """The first problem of a pydantic error, as `field: problem`."""
    problem = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in problem["loc"]) or "the document"
    if problem["type"] == "extra_forbidden":
        return f"{field}: this field is unknown"
    return f"{field}: {problem['msg'].removeprefix('Value error, ')}"


def _ascending(values: Float32Values) -> bool:
    return bool((values[1:] >= values[:-1]).all())
