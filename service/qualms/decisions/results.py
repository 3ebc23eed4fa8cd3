"""From outputs of the graph and verdicts to the fields of `qualms.replies.Result`, for many images at once."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import repeat
from typing import Any, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import Outputs
from qualms.decisions.by_class import ClassFlags
from qualms.decisions.prediction_sets import EMPTY, SetPoint
from qualms.decisions.verdicts import Rule, Verdicts
from qualms.errors import BundleError, ExplanationError, ParameterError
from qualms.replies import TOP_ENTRIES, AlphaDetail, Output, ReplyPart, Result

ResultRow: TypeAlias = tuple[Any, ...]
"""the values of one result in the order of its fields, without nesting"""
ALL_UP_TO_CLASSES = 100
"""replies of models with more classes have the largest entries of α by default: 1000 entries are most of a reply"""


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
            "explanation.flag_terms": [dict(zip(names, terms, strict=True)) for terms in outputs["fused_terms"]],
            "explanation.scores": [
                dict(zip(self._manifest.scores, values, strict=True))
                for values in zip(*(outputs[name] for name in self._manifest.scores), strict=True)
            ],
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

    def fields(self, rule: Rule, *, explain: bool = False, alpha: AlphaDetail | None = None) -> list[str]:
        """The path of the field of each value of a row, such as ood.p_value."""
        return _layout(_left_out(rule, explain, self.alpha_detail(alpha)))[2]


def field_types() -> list[tuple[str, Any]]:
    """Path and type of every field of `Result` that has no fields of its own, in their order."""

    def walk(part: type[ReplyPart], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, field in part.model_fields.items():
            if inner := _reply_part(field.annotation):
                yield from walk(inner, f"{prefix}{name}.")
            else:
                yield prefix + name, field.annotation

    return list(walk(Result, ""))


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
def _layout(left_out: frozenset[str]) -> tuple[list[str], Callable[[ResultRow], dict[str, Any]], list[str]]:
    """The columns of a row, which are names of graph outputs or paths of fields; a function that nests a row; its fields.

    The function is compiled from `Result`, as a dataclass's methods are: that is four times as fast as nesting by loops.
    """
    columns: list[str] = []
    fields: list[str] = []

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
                fields.append(path)
        return f"{{{', '.join(items)}}}"

    nested = eval(f"lambda row: {source(Result, '')}")  # only names of fields
    return columns, nested, fields


def _reply_part(annotation: Any) -> type[ReplyPart] | None:
    """The part of a reply that an annotation names, which may be optional; None for any other type."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, ReplyPart)), None)
