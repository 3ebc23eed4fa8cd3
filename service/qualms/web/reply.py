"""The bodies of replies: their schemas, and the writer of `POST /predict`."""

from typing import Annotated, Any, Literal, NamedTuple

import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from qualms.bundle.file import Bundle
from qualms.bundle.manifest import Predictor
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint
from qualms.decisions.results import ReplyPart, Result, ResultBuilder, ResultRow
from qualms.decisions.verdicts import Decider, Rule, Verdicts, decide
from qualms.inference.batch import Answer, Batch


class Reply(NamedTuple):
    """A whole HTTP reply."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


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


class PredictRequest(ReplyPart):
    """Images as JSON: base64 of image files, or arrays of pixels (H×W, or H×W×C with C = 1, 3 or 4)."""

    images: Annotated[list[str | list[Any]], Field(min_length=1)]


class Status(ReplyPart):
    """The reply of a health check that succeeded."""

    status: Literal["alive", "ready"]
    provider: str | None = None


class ModelSummary(BaseModel):
    """The facts about a model that an application needs."""

    name: str
    version: str
    digest: str
    classes: list[str]
    input: dict[str, Any]
    prediction: Predictor
    operating: dict[str, Any]
    calibration: dict[str, Any]
    provider: str
    max_batch: int
    cost_seconds: dict[str, float]


class ModelList(ReplyPart):
    """The models being served."""

    models: list[ModelSummary]


class ModelReply(ModelSummary):
    """One model with its manifest, without calibration scores and golden vectors."""

    manifest: dict[str, Any]


class ReplyWriter:
    """Writes the replies of one model. Outputs, verdicts and rows are computed once per batch and operating point."""

    def __init__(self, bundle: Bundle, decider: Decider, output_names: list[str]) -> None:
        manifest = bundle.manifest
        self._model = ModelId(name=manifest.name, version=manifest.version, digest=bundle.digest).model_dump()
        self._builder = ResultBuilder(manifest, output_names)
        self._decider = decider
        self._output_names = output_names

    def outputs(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """A batch's outputs by name."""
        outputs: dict[str, NDArray[Any]] | None = batch.cache.get("outputs")
        if outputs is None:
            outputs = batch.cache["outputs"] = dict(zip(self._output_names, batch.outputs, strict=True))
        return outputs

    def verdicts(self, batch: Batch, point: OperatingPoint = DEFAULT_OPERATING_POINT) -> tuple[Rule, Verdicts]:
        """The verdicts on a batch at an operating point, and the rule behind them."""
        verdicts: tuple[Rule, Verdicts] | None = batch.cache.get(point)
        if verdicts is None:
            rule = self._decider.rule(point)
            verdicts = batch.cache[point] = (rule, decide(rule, self.outputs(batch)))
        return verdicts

    def write(self, answer: Answer, point: OperatingPoint, request_id: str) -> bytes:
        """The JSON body for one request."""
        rule, verdicts = self.verdicts(answer.batch, point)
        rows: list[ResultRow] | None = answer.batch.cache.get(("rows", point))
        if rows is None:
            rows = self._builder.rows(self.outputs(answer.batch), rule, verdicts)
            answer.batch.cache["rows", point] = rows
        results = list(map(self._builder.nested(rule), rows[answer.start : answer.start + answer.count]))
        reply = {"model": self._model, "request_id": request_id, "results": results}
        return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)
