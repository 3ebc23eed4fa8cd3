"""The query of `POST /predict`, the writer of its replies, and the schemas of all other replies.

`qualms.replies` has the schema of its reply.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from qualms.bundle.file import Bundle
from qualms.bundle.manifest import AlphaKind, Predictor
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint
from qualms.decisions.results import ResultBuilder, ResultRow
from qualms.decisions.verdicts import Decider, Verdicts, decide
from qualms.images.observed import ObservedEncoding
from qualms.inference.batch import Answer, Batch
from qualms.replies import AlphaDetail, ModelId, ReplyPart, RequestLimits


@dataclass(frozen=True, slots=True)
class Query:
    """The query parameters of a request to /predict."""

    point: OperatingPoint = DEFAULT_OPERATING_POINT
    explain: bool = False
    alpha: AlphaDetail | None = None
    """None means the default for the model's number of classes"""


DEFAULT_QUERY = Query()


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
    alpha: AlphaKind
    flag_terms: list[str]
    operating: dict[str, Any]
    calibration: dict[str, Any]
    provider: str
    max_batch: int
    cost_seconds: dict[str, float]


class ModelList(ReplyPart):
    """The models being served, and the limits on requests to any of them."""

    models: list[ModelSummary]
    limits: RequestLimits


class ModelReply(ModelSummary):
    """One model with its manifest, without calibration scores and golden vectors."""

    manifest: dict[str, Any]


_ENCODINGS = "encodings"
"""key of a batch's cache"""
_Decided: TypeAlias = tuple[Verdicts, list[ResultRow], Callable[[ResultRow], dict[str, Any]]]


class ReplyWriter:
    """Writes the replies of one model. Outputs, verdicts and rows are computed once per batch and query."""

    def __init__(self, bundle: Bundle, decider: Decider, output_names: list[str]) -> None:
        manifest = bundle.manifest
        self._model = ModelId(name=manifest.name, version=manifest.version, digest=bundle.digest).model_dump()
        self._builder = ResultBuilder(manifest, output_names)
        self._decider = decider
        self._sizes = decider.sizes
        self._output_names = output_names

    def outputs(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """A batch's outputs by name."""
        outputs: dict[str, NDArray[Any]] | None = batch.cache.get("outputs")
        if outputs is None:
            outputs = batch.cache["outputs"] = dict(zip(self._output_names, batch.outputs, strict=True))
        return outputs

    def verdicts(self, batch: Batch) -> Verdicts:
        """The verdicts on a batch at the default operating point; an image without a reply is decided as one of unknown size."""
        if not self._decider.sizes:
            return self._decide(batch, DEFAULT_QUERY)[0]
        known = self.encodings(batch)
        sizes = [known[row].size if row in known else None for row in range(batch.rows)]
        if len(set(sizes)) == 1:
            return self._decide(batch, DEFAULT_QUERY, sizes[0])[0]
        return self._decider.decide_by_size(DEFAULT_OPERATING_POINT, self.outputs(batch), sizes)

    @staticmethod
    def encodings(batch: Batch) -> dict[int, ObservedEncoding]:
        """The encodings of a batch's images by row, as far as their replies were written."""
        encodings: dict[int, ObservedEncoding] = batch.cache.setdefault(_ENCODINGS, {})
        return encodings

    def check(self, query: Query) -> None:
        """Raise OperatingPointError or ExplanationError if `write` would do so."""
        for size in (None, *self._decider.sizes):
            self._decider.rule(query.point, size)
        if query.explain:
            self._builder.check_explainable()

    def write(self, answer: Answer, query: Query, request_id: str, encodings: Sequence[ObservedEncoding] = ()) -> bytes:
        """The JSON body for one request, whose images have these encodings."""
        known = self.encodings(answer.batch)
        for row, encoding in enumerate(encodings, answer.start):
            known[row] = encoding
        if self._sizes and encodings:
            results = self._results_by_size(answer, query, encodings)
        else:
            _, rows, nested = self._decide(answer.batch, query)
            results = [nested(row) for row in rows[answer.start : answer.start + answer.count]]
        reply = {"model": self._model, "request_id": request_id, "results": results}
        return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)

    def _results_by_size(
        self, answer: Answer, query: Query, encodings: Sequence[ObservedEncoding]
    ) -> list[dict[str, Any]]:
        """The results of images whose rules depend on their size; the whole batch is decided once by each rule."""
        results = []
        for row, encoding in enumerate(encodings, start=answer.start):
            _, rows, nested = self._decide(answer.batch, query, encoding.size)
            results.append(nested(rows[row]))
        return results

    def _decide(self, batch: Batch, query: Query, size: str | None = None) -> _Decided:
        # Hashing a query takes a microsecond.
        key = size if query is DEFAULT_QUERY else query if size is None else (query, size)
        decided: _Decided | None = batch.cache.get(key)
        if decided is None:
            rule, outputs = self._decider.rule(query.point, size), self.outputs(batch)
            verdicts = decide(rule, outputs)
            rows = self._builder.rows(outputs, rule, verdicts, explain=query.explain, alpha=query.alpha)
            nested = self._builder.nested(rule, explain=query.explain, alpha=query.alpha)
            decided = batch.cache[key] = (verdicts, rows, nested)
        return decided
