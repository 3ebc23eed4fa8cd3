"""The manifest: everything a bundle says about itself, versioned, with unknown fields refused."""

import json
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qualms.bundle.arrays import Float32Array, Float32Values
from qualms.bundle.scores import DEFAULT_FLAG_SCORE, DEFAULT_TRUST_SCORE, DIRICHLET_SCORES
from qualms.errors import BundleError
from qualms.images.input_spec import InputSpec

SCHEMA_VERSION: Final = 1

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Part(BaseModel):
    """What all parts of the manifest share: immutable, finite, and no unknown fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False, protected_namespaces=()
    )


class ScoreSpec(Part):
    """A graph output that can flag: which end of it means doubt, and what kind of doubt it is."""

    direction: Literal["higher", "lower"]
    kind: Literal["total", "epistemic", "aleatoric"]


class Operating(Part):
    """What the service does when a request asks for nothing else."""

    score: str = DEFAULT_FLAG_SCORE
    target_fpr: Fraction = 0.01
    guarantee: Literal["confident", "marginal"] = "confident"
    trust_score: str = DEFAULT_TRUST_SCORE
    target_risk: Fraction = 0.01


class Trust(Part):
    """Evidence for the selective-risk threshold: a grid from the fit split, counted on the calibration split."""

    levels: Float32Array
    """(J,) share of the fit split at or below each threshold, ascending"""
    thresholds: Float32Array
    """(J,) doubt of the trust score, ascending"""
    accepted: list[int]
    """(J,) calibration images whose doubt is at most the threshold"""
    errors: list[int]
    """(J,) wrong predictions among them"""

    @model_validator(mode="after")
    def _one_value_a_threshold(self) -> Self:
        shapes = {self.levels.shape, self.thresholds.shape, (len(self.accepted),), (len(self.errors),)}
        if len(shapes) != 1 or not self.accepted:
            raise ValueError("levels, thresholds, accepted and errors must have one length, at least 1")
        if not _ascending(self.levels) or not _ascending(self.thresholds):
            raise ValueError("levels and thresholds must be ascending")
        if any(not 0 <= wrong <= taken for wrong, taken in zip(self.errors, self.accepted, strict=True)):
            raise ValueError("errors must lie between 0 and accepted")
        return self


class Calibration(Part):
    """Scores of images that neither the base nor the meta-model has seen, from the exported graph itself."""

    n: int = Field(gt=0)
    split: str
    data: str
    data_sha256: Sha256
    scores: dict[str, Float32Array]
    """each (n,), ascending, in the score's own units"""
    trust: Trust

    @model_validator(mode="after")
    def _sorted(self) -> Self:
        for name, values in self.scores.items():
            if values.shape != (self.n,) or not _ascending(values):
                raise ValueError(f"the calibration scores of {name} must be {self.n} ascending values")
        if max(self.trust.accepted) > self.n:
            raise ValueError(f"trust.accepted must be at most n, {self.n}")
        return self


class Reference(Part):
    """In-distribution behaviour to compare live traffic with."""

    levels: list[float] = Field(min_length=1)
    quantiles: dict[str, list[float]]
    """each score's quantiles at `levels`"""
    class_shares: list[float]
    """how often each class was predicted"""

    @model_validator(mode="after")
    def _one_quantile_a_level(self) -> Self:
        if sorted(self.levels) != self.levels:
            raise ValueError("levels must be ascending")
        for name, quantiles in self.quantiles.items():
            if len(quantiles) != len(self.levels):
                raise ValueError(f"the quantiles of {name} must be {len(self.levels)} values, one a level")
        return self


class Golden(Part):
    """Outputs of the exported graph on the drawn inputs (qualms.bundle.golden)."""

    count: int = Field(gt=0, le=64)
    input_sha256: Sha256
    outputs: dict[str, Float32Array] = Field(min_length=1)


class Provenance(Part):
    """Where the model came from, enough to make it again."""

    created: str
    qualms: str
    recipe_name: str
    recipe: dict[str, Any]
    seed: int
    versions: dict[str, str]
    base: dict[str, Any]
    meta: dict[str, Any]
    data: dict[str, Any]


class OodResult(Part):
    """How well one score tells one data set from the in-distribution test set; percentages."""

    data: str
    score: str
    auroc: float
    aupr: float
    fpr95: float
    n_id: int
    n_ood: int


class ErrorResult(Part):
    """How well one score tells the classifier's wrong predictions from its right ones; percentages."""

    score: str
    auroc: float
    aupr: float


class Realised(Part):
    """What a promise came to on held-out in-distribution data."""

    promise: Literal["false_alarm_rate", "selective_risk"]
    target: float
    realised: float | None
    """None where the calibration set could not support the target"""
    n: int


class Evaluation(Part):
    """Results on test data that nothing was chosen on."""

    protocol: Literal["fair", "as-published"] = "fair"
    test_data: str
    n: int
    base_accuracy: float | None
    """None where the meta-model predicts: the base's classes are not ours, and it has none"""
    accuracy: float
    """of the predictions the bundle serves"""
    identical_predictions: bool | None
    """the graph predicts exactly what the base did before; None where the meta-model predicts"""
    ood: list[OodResult]
    misclassification: list[ErrorResult]
    realised: list[Realised]


class Manifest(Part):
    """The whole manifest."""

    schema_version: Literal[1] = SCHEMA_VERSION
    name: Name
    version: Name
    classes: list[str] = Field(min_length=2)
    input: InputSpec
    prediction: Literal["base", "meta"] = "base"
    """whose class is served: the base's own, or the meta-model's (transfer)"""
    scores: dict[str, ScoreSpec]
    operating: Operating
    calibration: Calibration
    reference: Reference
    golden: Golden
    provenance: Provenance
    evaluation: Evaluation | None = None
    graph_sha256: Sha256

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("class names must differ from each other")
        if missing := sorted(set(DIRICHLET_SCORES) - set(self.scores)):
            raise ValueError(f"the scores lack {', '.join(missing)}, which every model has")
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
            raise ValueError("reference.class_shares must have one value a class")
        self._check_golden_shapes()
        return self

    def _check_golden_shapes(self) -> None:
        """The graph's outputs must be such as classes and scores say: a row an image, a column a class."""
        images, classes = self.golden.count, len(self.classes)
        shapes = {
            **dict.fromkeys(("alpha", "probabilities"), (images, classes)),
            **({"base_probabilities": (images, classes)} if self.prediction == "base" else {}),
            **dict.fromkeys(self.scores, (images,)),
        }
        for name, values in self.golden.outputs.items():
            if values.shape != shapes.get(name, values.shape):
                raise ValueError(
                    f"golden.outputs.{name} must have the shape {list(shapes[name])} for {images} images and "
                    f"{classes} classes, not {list(values.shape)}"
                )

    def to_json(self) -> str:
        """Compact JSON, as it stands in the file."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str, source: str = "The file") -> Self:
        """Read and check; BundleError in one sentence on `source` naming the first field that is wrong."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{source} has a damaged manifest: it is not JSON ({error}).") from None
        if not isinstance(document, dict):
            raise BundleError(f"{source} has a damaged manifest: it is not a JSON object.")
        version = document.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise BundleError(
                f"{source} has a manifest of schema version {version}, and this program reads up to "
                f"{SCHEMA_VERSION}: update qualms to open it."
            )
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise BundleError(f"{source} has a damaged manifest: {first_problem(error)}.") from None


def first_problem(error: ValidationError) -> str:
    """The first problem pydantic found, as `field: what is wrong`."""
    problem = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in problem["loc"]) or "the document"
    if problem["type"] == "extra_forbidden":
        return f"{field}: this field is unknown"
    return f"{field}: {problem['msg'].removeprefix('Value error, ')}"


def _ascending(values: Float32Values) -> bool:
    return bool((values[1:] >= values[:-1]).all())
