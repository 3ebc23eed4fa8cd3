"""The shapes of replies, for the OpenAPI document; replies themselves are written without these models."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Probability = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Prediction(_Schema):
    """The predicted class."""

    index: Annotated[int, Field(ge=0)]
    label: str
    probability: Probability


class Dirichlet(_Schema):
    """Dir(α) over class probabilities."""

    alpha: list[NotNegative]
    precision: NotNegative


class Total(_Schema):
    """Doubt of every kind."""

    entropy: float
    max_probability: Probability


class Epistemic(_Schema):
    """Doubt for want of similar training data."""

    mutual_information: float
    differential_entropy: float
    precision: NotNegative


class Uncertainty(_Schema):
    """All uncertainties, in nats where they are entropies."""

    total: Total
    epistemic: Epistemic
    aleatoric: float


class Ood(_Schema):
    """Whether the image is unlike the training data, and what is promised for the flag."""

    flag: bool
    score: str
    value: float
    threshold: float
    p_value: Annotated[float, Field(gt=0, le=1)]
    target_fpr: Annotated[float, Field(gt=0, lt=1)]
    guarantee: Literal["confident", "marginal"]


class Trust(_Schema):
    """Whether the prediction may be relied on at the target risk; no verdict where that cannot be promised."""

    accept: bool | None
    score: str
    value: float
    threshold: float | None
    target_risk: Annotated[float, Field(gt=0, lt=1)]
    refusal: str | None = None


class Result(_Schema):
    """What is said about one image."""

    prediction: Prediction
    dirichlet: Dirichlet
    uncertainty: Uncertainty
    ood: Ood
    trust: Trust


class ModelId(_Schema):
    """Which model answered."""

    name: str
    version: str
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class PredictReply(_Schema):
    """A reply to /predict: one result an image, in the order they were sent."""

    model: ModelId
    request_id: str
    results: Annotated[list[Result], Field(min_length=1)]


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


class PredictRequest(_Schema):
    """Images as JSON: base64 of image files, or arrays of pixels (H×W, or H×W×C with C = 1, 3 or 4)."""

    images: Annotated[list[str | list[Any]], Field(min_length=1)]


class Status(_Schema):
    """A health check's good answer."""

    status: Literal["alive", "ready"]
    provider: str | None = None


class ModelSummary(BaseModel):
    """What an application needs to know of a model."""

    name: str
    version: str
    digest: str
    classes: list[str]
    input: dict[str, Any]
    prediction: Literal["base", "meta"]
    operating: dict[str, Any]
    calibration: dict[str, Any]
    provider: str
    max_batch: int
    cost_seconds: dict[str, float]


class ModelList(_Schema):
    """The models being served."""

    models: list[ModelSummary]


class ModelReply(ModelSummary):
    """One model, with its manifest (calibration scores and golden vectors left out)."""

    manifest: dict[str, Any]
