"""The fields of replies: their only definition, from which schemas, OpenAPI, replies and the client's objects derive.

`Result` is the result for one image. To add a field, declare it here: with `Output(name)` if it is an output of the graph, else
with its value in `qualms.decisions.results.ResultBuilder.columns`. An output that not every bundle has belongs in `Explanation`.

Of third-party packages this module needs pydantic alone, because the client imports it.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from qualms.bundle.parts import Fraction, Guarantee

AlphaDetail: TypeAlias = Literal["top10", "all", "none"]
"""how much of α a result contains: the ten largest entries, all K entries, or none"""
TOP_ENTRIES = 10


@dataclass(frozen=True)
class Output:
    """Marks a field whose value is a row of this graph output."""

    name: str


Probability = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class ReplyPart(BaseModel):
    """Base of all parts of a reply: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class Prediction(ReplyPart):
    """The predicted class."""

    index: Annotated[int, Field(ge=0)]
    label: str
    probability: Probability


Alpha = Annotated[list[NotNegative], BeforeValidator(list)]


class ClassAlpha(ReplyPart):
    """The entry of α that belongs to one class."""

    index: Annotated[int, Field(ge=0)]
    label: str
    alpha: NotNegative


TopAlpha = Annotated[list[ClassAlpha], Field(min_length=1, max_length=TOP_ENTRIES)]


class Dirichlet(ReplyPart):
    """Dir(α) over class probabilities. Labels determine only its mean α/α₀; the size of the precision α₀ is a convention."""

    alpha: Annotated[Alpha | None, Output("alpha")] = None
    """all K entries; left out unless all are returned"""
    top: TopAlpha | None = None
    """the largest entries, in descending order; left out unless only these are returned"""
    precision: Annotated[NotNegative, Output("precision")]
    """the sum of all K entries"""


class Total(ReplyPart):
    """Total uncertainty."""

    entropy: Annotated[float, Output("entropy")]
    max_probability: Annotated[Probability, Output("max_probability")]


class Epistemic(ReplyPart):
    """Uncertainty due to a lack of similar training data."""

    mutual_information: Annotated[float, Output("mutual_information")]
    differential_entropy: Annotated[float, Output("differential_entropy")]
    precision: Annotated[NotNegative, Output("precision")]


class Uncertainty(ReplyPart):
    """All uncertainties; entropies are in nats."""

    total: Total
    epistemic: Epistemic
    aleatoric: Annotated[float, Output("expected_entropy")]


class ThresholdGroup(ReplyPart):
    """The calibration images that the threshold of a predicted class comes from."""

    classes: list[str]
    """labels of the predicted classes that share the threshold; several if they have too few calibration images"""
    n: Annotated[int, Field(ge=1)]
    """number of calibration images predicted as one of them"""


class Ood(ReplyPart):
    """Whether the image is unlike the training data, and the guarantee for the flag."""

    flag: bool
    score: str
    value: float
    threshold: float
    p_value: Annotated[float, Field(gt=0, le=1)]
    target_fpr: Fraction
    guarantee: Guarantee
    guarantee_text: str
    """the guarantee in words, with the images that it is for"""
    group: ThresholdGroup | None = None
    """left out unless the guarantee is by-class"""


class Trust(ReplyPart):
    """Whether the prediction can be relied on at the target risk; `accept` is null if that cannot be guaranteed.

    A prediction is accepted only if the image is not flagged and the trust score's uncertainty is at or below the threshold.
    """

    accept: bool | None
    score: str
    value: float
    threshold: float | None
    target_risk: Fraction
    refusal: str | None = None
    """left out if there is a verdict"""


class PredictionSet(ReplyPart):
    """Classes among which the true class is with a probability of at least `coverage`, for in-distribution images."""

    labels: list[str]
    """most probable first; may be empty"""
    coverage: Fraction
    method: Literal["lac", "raps"]
    note: str | None
    """why the set is empty"""


class MetaDirichlet(ReplyPart):
    """The Dirichlet distribution that the meta-model alone predicts."""

    alpha: Annotated[Alpha | None, Output("meta_alpha")] = None
    """as in `Dirichlet`"""
    top: TopAlpha | None = None
    """as in `Dirichlet`"""
    precision: NotNegative | None = None
    """the sum of all K entries; left out if `alpha` is returned"""
    mutual_information: Annotated[float, Output("meta_mutual_information")]


class Explanation(ReplyPart):
    """The terms whose sum is the score `fused`, all scores, and the meta-model's own distribution."""

    flag_terms: dict[str, float]
    scores: dict[str, float]
    """the model's scores by name; `/models/{name}/calibration` has their distributions"""
    meta: MetaDirichlet


class Result(ReplyPart):
    """The result for one image."""

    prediction: Prediction
    dirichlet: Dirichlet
    uncertainty: Uncertainty
    ood: Ood
    trust: Trust
    prediction_set: PredictionSet | None = None
    """left out unless a coverage was requested"""
    explanation: Explanation | None = None
    """left out unless it was requested"""


class ModelId(ReplyPart):
    """The model that answered."""

    name: str
    version: str
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class PredictReply(ReplyPart):
    """A reply to /predict: one result per image, in the order they were sent."""

    model: ModelId
    request_id: str
    results: Annotated[list[Result], Field(min_length=1)]


class RequestLimits(ReplyPart):
    """The maximum of what one request may contain. The defaults are those of services that do not publish their limits."""

    max_images: Annotated[int, Field(ge=1)] = 64
    max_body_bytes: Annotated[int, Field(ge=1)] = 16 * 2**20
    max_pixels: Annotated[int, Field(ge=1)] = 2**24
    """of one image"""
    max_request_timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """of X-Request-Timeout"""


class ProblemReply(BaseModel):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    request_id: str | None = None
    field: str | None = None
    accepted: str | None = None
