"""The manifest: a bundle's metadata as versioned JSON. Unknown fields are errors."""

import math
from typing import Annotated, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator

from qualms.bundle.arrays import Float32Array
from qualms.bundle.calibration_data import Calibration, PairedScores
from qualms.bundle.checks.manifest_text import parse_object
from qualms.bundle.evaluation_results import Evaluation
from qualms.bundle.parts import (
    Fraction,
    FreeObject,
    Guarantee,
    ListOf,
    ManifestPart,
    Name,
    Sha256,
    is_empty,
    is_none,
)
from qualms.bundle.scores import DEFAULT_FLAG_SCORE, DEFAULT_TRUST_SCORE, DIRICHLET_SCORES, ScoreSpec
from qualms.errors import BundleError
from qualms.images.input_spec import InputSpec

SCHEMA_VERSION: Final = 2
"""Version 2 added how calibration images were sent, their fingerprints and predictions, and prediction sets."""
REQUIRED_SCORES: Final = frozenset(DIRICHLET_SCORES)
"""scores of every bundle of this schema version; later additions to `SCORES` are optional, so that old bundles still open"""
MAX_CLASSES: Final = 50_000
"""ImageNet-21k has 21,841"""
MAX_SCORES: Final = 100
"""`SCORES` has 12; every score has metrics and thresholds of its own"""
MAX_CLASS_SETTINGS: Final = 2_500_000
"""classes × settings of the calibration, each with thresholds of its own; 21,841 classes in 100 settings are fewer"""
MAX_GOLDEN_PIXELS: Final = 2**25
"""values of all golden images; 8 images of 1024 × 1024 pixels in colour have 25 million"""

Predictor = Literal["base", "meta"]
"""Model whose class is served: the base model, or the meta-model (transfer)."""
AlphaKind = Literal["meta", "joined"]
"""The served α: the meta-model's own (earlier bundles), or 1 + n(x)·p(x) with p the tempered softmax of the network
that predicts and n decreasing in the fused score."""


class OperatingDefaults(ManifestPart):
    """The default operating point."""

    score: str = DEFAULT_FLAG_SCORE
    target_fpr: Fraction = 0.01
    guarantee: Guarantee = "confident"
    trust_score: str = DEFAULT_TRUST_SCORE
    target_risk: Fraction = 0.01


class SetMethod(ManifestPart):
    """How prediction sets are formed, explained in `qualms.decisions.prediction_sets`."""

    method: Literal["lac", "raps"] = "lac"
    penalty: Annotated[float, Field(ge=0, le=1000)] = 0.01
    """raps: added to the score of a class for each rank beyond `free_ranks`"""
    free_ranks: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """raps: the number of most probable classes without a penalty"""


class Reference(ManifestPart):
    """Distribution of scores and classes on in-distribution images, to compare live traffic with."""

    levels: ListOf[float] = Field(min_length=1)
    quantiles: dict[str, ListOf[float]]
    """by score: its quantiles at `levels`"""
    class_shares: ListOf[float]
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
    recipe: FreeObject
    seed: int
    versions: dict[str, str]
    base: FreeObject
    meta: FreeObject
    data: FreeObject


class Manifest(ManifestPart):
    """The whole manifest."""

    schema_version: Literal[1, 2] = SCHEMA_VERSION
    name: Name
    version: Name
    classes: ListOf[str] = Field(min_length=2, max_length=MAX_CLASSES)
    input: InputSpec
    prediction: Predictor = "base"
    alpha: AlphaKind = Field("meta", exclude_if=lambda kind: kind == "meta")
    flag_terms: ListOf[str] = Field([], exclude_if=is_empty, max_length=MAX_SCORES)
    """names of the columns of the output `fused_terms`, whose sum is the score `fused`; empty if alpha is `meta`"""
    scores: dict[str, ScoreSpec] = Field(max_length=MAX_SCORES)
    operating: OperatingDefaults
    sets: SetMethod = Field(SetMethod(), exclude_if=lambda sets: sets == SetMethod())
    calibration: Calibration
    labelled_calibration: Calibration | None = Field(None, exclude_if=is_none)
    """an earlier calibration with labels, whose guarantees on errors are kept; only if `calibration` has no labels"""
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
        for name in (self.operating.score, self.operating.trust_score):
            if name not in self.scores:
                raise ValueError(f"the operating score {name} is not among the scores")
        self._check_calibrations()
        self._check_sizes()
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

    def _check_calibrations(self) -> None:
        """Scores and predicted classes of all calibration images must be those of the model."""
        kept = self.labelled_calibration
        if kept is not None and (self.calibration.has_labels or not kept.has_labels):
            raise ValueError("labelled_calibration must have labels and calibration none")
        for calibration in filter(None, (self.calibration, kept)):
            parts: list[Calibration | PairedScores] = [calibration, *calibration.settings]
            for part in parts:
                if unknown := sorted(set(part.scores) - set(self.scores)):
                    raise ValueError(f"the calibrated scores {', '.join(unknown)} are not among the scores")
                for name in (self.operating.score, self.operating.trust_score):
                    if name not in part.scores:
                        raise ValueError(f"the operating score {name} is missing in a calibration")
                predicted = part.predictions
                if predicted is not None and not ((predicted >= 0) & (predicted < len(self.classes))).all():
                    raise ValueError(f"predictions must be from 0 to {len(self.classes) - 1}")

    def _check_sizes(self) -> None:
        """Products of sizes, each of which is accepted by itself."""
        settings = max(len(one.settings) for one in (self.calibration, self.labelled_calibration) if one is not None)
        if len(self.classes) * settings > MAX_CLASS_SETTINGS:
            raise ValueError(
                f"{len(self.classes):,} classes in {settings:,} settings are too many: at most {MAX_CLASS_SETTINGS:,} "
                "classes × settings are accepted"
            )
        values = self.golden.count * math.prod(self.input.shape)
        if values > MAX_GOLDEN_PIXELS:
            raise ValueError(
                f"golden.count is {self.golden.count}, which are {values:,} values of pixels, and at most "
                f"{MAX_GOLDEN_PIXELS:,} are accepted"
            )

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
        document = parse_object(text, source)
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
