"""The result for one image: the only definition of its fields.

The JSON schema, the OpenAPI document, the service's replies and the objects that `qualms.open_model` returns all derive from
`Result`. To add a field, declare it here: with `Output(name)` if it is an output of the graph, else with its value in
`ResultBuilder.columns`. An output that not every bundle has belongs in `Explanation`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import Annotated, Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from qualms.bundle.manifest import Manifest
from qualms.bundle.parts import Fraction, Guarantee
from qualms.bundle.runtime import Outputs
from qualms.decisions.by_class import ClassFlags
from qualms.decisions.prediction_sets import EMPTY, SetPoint
from qualms.decisions.verdicts import Rule, Verdicts
from qualms.errors import BundleError, ExplanationError, ParameterError

ResultRow: TypeAlias = tuple[Any, ...]
"""the values of one result in the order of its fields, without nesting"""
AlphaDetail: TypeAlias = Literal["top10", "all", "none"]
"""how much of α a result contains: the ten largest entries, all K entries, or none"""
TOP_ENTRIES = 10
ALL_UP_TO_CLASSES = 100
"""replies of models with more classes have the largest entries of α by default: 1000 entries are most of a reply"""


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
    """The terms whose sum is the score `fused`, and the meta-model's own distribution."""

    flag_terms: dict[str, float]
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


class ResultBuilder:
    """Builds the results of one model from the graph's outputs and the verdicts of a rule."""

    def __init__(self, manifest: Manifest, output_names: Iterable[str]) -> None:
        """BundleError if a field of `Result` is an output that the graph does not have."""
        self._manifest = manifest
        self._probabilities = "base_probabilities" if manifest.prediction == "base" else "probabilities"
        explained = manifest.alpha == "joined"
        left_out = frozenset(_OPTIONAL) - ({"explanation"} if explained else set())
        needed = {name for name in _layout(left_out | _ALPHA_LEFT_OUT["all"])[0] if "." not in name}
        if missing := sorted(needed - set(output_names)):
            raise BundleError(f"The graph of {manifest.name} has no output {missing[0]}, which every result contains.")

    def check_explainable(self) -> None:
        """Raise ExplanationError if the model's results cannot be explained."""
        if self._manifest.alpha == "meta":
            raise ExplanationError(
                f"The model {self._manifest.name} cannot explain its flags: it was made with an earlier version of qualms "
                "and has no flag terms; `qualms convert` makes one that has them."
            )

    def alpha_detail(self, requested: AlphaDetail | None) -> AlphaDetail:
        """How much of α results contain; without a request, it depends on the number of classes."""
        if requested is None:
            return "all" if len(self._manifest.classes) <= ALL_UP_TO_CLASSES else "top10"
        if requested not in get_args(AlphaDetail):
            raise ParameterError(f"alpha is {requested!r}; accepted: {', '.join(get_args(AlphaDetail))}.")
        return requested

    def rows(
        self,
        outputs: Outputs,
        rule: Rule,
        verdicts: Verdicts,
        *,
        explain: bool = False,
        alpha: AlphaDetail | None = None,
    ) -> list[ResultRow]:
        """One row per image; float32 values stay NumPy scalars, so that they are printed with float32 precision."""
        detail = self.alpha_detail(alpha)
        columns = {**outputs, **self.columns(outputs, rule, verdicts)}
        if detail == "top10":
            columns["dirichlet.top"] = self._top(outputs["alpha"])
        if explain:
            columns |= self._explanation_columns(outputs, detail)
        return list(zip(*(columns[name] for name in _layout(_left_out(rule, explain, detail))[0]), strict=False))

    def columns(self, outputs: Outputs, rule: Rule, verdicts: Verdicts) -> dict[str, Iterable[Any]]:
        """The values of all fields that are not outputs of the graph, by path, without the explanation."""
        indices = outputs["prediction"].tolist()
        probabilities = outputs[self._probabilities]
        classes = self._manifest.classes
        accepts = repeat(None) if verdicts.accepts is None else verdicts.accepts.tolist()
        columns: dict[str, Iterable[Any]] = {
            "prediction.index": indices,
            "prediction.label": [classes[index] for index in indices],
            "prediction.probability": [probabilities[row, index] for row, index in enumerate(indices)],
            "ood.flag": verdicts.flags.tolist(),
            "ood.score": repeat(rule.flag.score),
            "ood.value": verdicts.values,
            "ood.threshold": repeat(rule.flag.threshold),
            "ood.guarantee_text": repeat(rule.guarantee_text),
            "ood.p_value": verdicts.p_values.tolist(),
            "ood.target_fpr": repeat(rule.flag.target_fpr),
            "ood.guarantee": repeat(rule.flag.guarantee),
            "trust.accept": accepts,
            "trust.score": repeat(rule.trust_score),
            "trust.value": verdicts.trust_values,
            "trust.threshold": repeat(None if rule.trust is None else rule.trust.threshold),
            "trust.target_risk": repeat(rule.target_risk),
            "trust.refusal": repeat(rule.refusal),
        }
        if rule.classes is not None:
            columns |= self._class_columns(outputs, rule.classes)
        if rule.sets is not None:
            columns |= self._set_columns(outputs, rule.sets)
        return columns

    def _class_columns(self, outputs: Outputs, flags: ClassFlags) -> dict[str, Iterable[Any]]:
        predictions, classes = outputs["prediction"], self._manifest.classes
        names = [[classes[index] for index in group.classes] for group in flags.groups]
        groups = flags.group_of[predictions].tolist()
        return {
            "ood.threshold": flags.thresholds[predictions].tolist(),
            "ood.group.classes": [names[group] for group in groups],
            "ood.group.n": [flags.groups[group].n for group in groups],
        }

    def _set_columns(self, outputs: Outputs, point: SetPoint) -> dict[str, Iterable[Any]]:
        classes = self._manifest.classes
        members = point.members(outputs["probabilities"])
        return {
            "prediction_set.labels": [[classes[index] for index in row] for row in members],
            "prediction_set.coverage": repeat(point.coverage),
            "prediction_set.method": repeat(point.method.method),
            "prediction_set.note": [None if row else EMPTY for row in members],
        }

    def _explanation_columns(self, outputs: Outputs, detail: AlphaDetail) -> dict[str, Iterable[Any]]:
        names, alpha = self._manifest.flag_terms, outputs["meta_alpha"]
        columns: dict[str, Iterable[Any]] = {
            "explanation.flag_terms": [dict(zip(names, terms, strict=True)) for terms in outputs["fused_terms"]]
        }
        if detail != "all":
            columns["explanation.meta.precision"] = alpha.sum(axis=-1)
        if detail == "top10":
            columns["explanation.meta.top"] = self._top(alpha)
        return columns

    def _top(self, alpha: NDArray[np.float32]) -> list[list[dict[str, Any]]]:
        """The largest entries of each row of α, (N, K), as `ClassAlpha`; equal ones in the order of their classes."""
        classes, first = self._manifest.classes, max(0, alpha.shape[-1] - TOP_ENTRIES)
        tops = []
        for row in alpha:
            # A partition of the values takes half the time of one of the indices.
            candidates = (row >= np.partition(row, first)[first]).nonzero()[0]
            indices = candidates[(-row[candidates]).argsort(kind="stable")[:TOP_ENTRIES]]
            entries = zip(indices.tolist(), row[indices], strict=True)
            tops.append([{"index": index, "label": classes[index], "alpha": value} for index, value in entries])
        return tops

    def nested(
        self, rule: Rule, *, explain: bool = False, alpha: AlphaDetail | None = None
    ) -> Callable[[ResultRow], dict[str, Any]]:
        """A function that nests a row as `Result` does, for JSON."""
        return _layout(_left_out(rule, explain, self.alpha_detail(alpha)))[1]


_OPTIONAL = ("trust.refusal", "ood.group", "prediction_set", "explanation")
"""fields that some results do not have"""
_ALPHA_LEFT_OUT: dict[AlphaDetail, frozenset[str]] = {
    "all": frozenset(("dirichlet.top", "explanation.meta.top", "explanation.meta.precision")),
    "top10": frozenset(("dirichlet.alpha", "explanation.meta.alpha")),
    "none": frozenset(("dirichlet.alpha", "dirichlet.top", "explanation.meta.alpha", "explanation.meta.top")),
}
"""fields that results do not have, by the detail of α"""


def _left_out(rule: Rule, explain: bool, alpha: AlphaDetail) -> frozenset[str]:
    present = (rule.refusal is not None, rule.classes is not None, rule.sets is not None, explain)
    return _ALPHA_LEFT_OUT[alpha].union(name for name, there in zip(_OPTIONAL, present, strict=True) if not there)


@cache
def _layout(left_out: frozenset[str]) -> tuple[list[str], Callable[[ResultRow], dict[str, Any]]]:
    """The columns of a row, which are names of graph outputs or paths of fields; and a function that nests a row.

    The function is compiled from `Result`, as a dataclass's methods are: that is four times as fast as nesting by loops.
    """
    columns: list[str] = []

    def source(part: type[ReplyPart], prefix: str) -> str:
        items = []
        for name, field in part.model_fields.items():
            path = prefix + name
            if path in left_out:
                continue
            if inner := _reply_part(field.annotation):
                items.append(f"{name!r}: {source(inner, path + '.')}")
            else:
                items.append(f"{name!r}: row[{len(columns)}]")
                columns.append(next((note.name for note in field.metadata if isinstance(note, Output)), path))
        return f"{{{', '.join(items)}}}"

    nested = eval(f"lambda row: {source(Result, '')}")  # only names of fields
    return columns, nested


def _reply_part(annotation: Any) -> type[ReplyPart] | None:
    """The part of a reply that an annotation names, which may be optional; None for any other type."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, ReplyPart)), None)
