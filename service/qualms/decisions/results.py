"""The result for one image: the only definition of its fields.

The JSON schema, the OpenAPI document, the service's replies and the objects that `qualms.open_model` returns all derive from
`Result`. To add a field, declare it here: with `Output(name)` if it is an output of the graph, else with its value in
`ResultBuilder.columns`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from operator import itemgetter
from typing import Annotated, Any, TypeAlias

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from qualms.bundle.manifest import Fraction, Guarantee, Manifest
from qualms.bundle.runtime import Outputs
from qualms.decisions.verdicts import Rule, Verdicts

Row: TypeAlias = tuple[Any, ...]
"""the values of one result in the order of its fields, without nesting"""


@dataclass(frozen=True)
class Output:
    """Marks a field whose value is a row of this graph output."""

    name: str


Probability = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


def _to_list(values: Any) -> Any:
    return values.tolist() if isinstance(values, np.ndarray) else values


class ReplyPart(BaseModel):
    """Base of all parts of a reply: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class Prediction(ReplyPart):
    """The predicted class."""

    index: Annotated[int, Field(ge=0)]
    label: str
    probability: Probability


class Dirichlet(ReplyPart):
    """Dir(α) over class probabilities."""

    alpha: Annotated[list[NotNegative], BeforeValidator(_to_list), Output("alpha")]
    precision: Annotated[NotNegative, Output("precision")]


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


class Ood(ReplyPart):
    """Whether the image is unlike the training data, and the guarantee for the flag."""

    flag: bool
    score: str
    value: float
    threshold: float
    p_value: Annotated[float, Field(gt=0, le=1)]
    target_fpr: Fraction
    guarantee: Guarantee


class Trust(ReplyPart):
    """Whether the prediction can be relied on at the target risk; `accept` is null if that cannot be guaranteed."""

    accept: bool | None
    score: str
    value: float
    threshold: float | None
    target_risk: Fraction
    refusal: str | None = None
    """left out if there is a verdict"""


class Result(ReplyPart):
    """The result for one image."""

    prediction: Prediction
    dirichlet: Dirichlet
    uncertainty: Uncertainty
    ood: Ood
    trust: Trust


class ResultBuilder:
    """Builds the results of one model from the graph's outputs and the verdicts of a rule."""

    def __init__(self, manifest: Manifest) -> None:
        self._classes = manifest.classes
        self._probabilities = "base_probabilities" if manifest.prediction == "base" else "probabilities"

    def rows(self, outputs: Outputs, rule: Rule, verdicts: Verdicts) -> list[Row]:
        """One row per image; float32 values stay NumPy scalars, so that they are printed with float32 precision."""
        columns = {**outputs, **self.columns(outputs, rule, verdicts)}
        return list(zip(*(columns[name] for name in _columns(_omitted(rule))), strict=False))

    def columns(self, outputs: Outputs, rule: Rule, verdicts: Verdicts) -> dict[str, Iterable[Any]]:
        """The values of all fields that are not outputs of the graph, by path."""
        indices = outputs["prediction"]
        accepts = repeat(None) if verdicts.accepts is None else verdicts.accepts.tolist()
        return {
            "prediction.index": indices.tolist(),
            "prediction.label": [self._classes[index] for index in indices],
            "prediction.probability": outputs[self._probabilities][np.arange(len(indices)), indices],
            "ood.flag": verdicts.flags.tolist(),
            "ood.score": repeat(rule.flag.score),
            "ood.value": verdicts.values,
            "ood.threshold": repeat(rule.flag.threshold),
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

    @staticmethod
    def nested(rule: Rule) -> Callable[[Row], dict[str, Any]]:
        """A function that nests a row as `Result` does, for JSON."""
        return _nest(_omitted(rule))


def _omitted(rule: Rule) -> frozenset[str]:
    """Paths of optional fields that have no value."""
    return frozenset({"trust.refusal"} if rule.refusal is None else ())


@lru_cache
def _columns(omitted: frozenset[str]) -> list[str]:
    """The column of each field, in the order of the fields: an output's name or the field's path."""
    return [column for path, column in _fields(Result) if path not in omitted]


@lru_cache
def _nest(omitted: frozenset[str]) -> Callable[[Row], dict[str, Any]]:
    return _nested(Result, omitted)[0]


def _fields(model: type[ReplyPart], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        path = prefix + name
        if (part := _part(field.annotation)) is not None:
            yield from _fields(part, path + ".")
        else:
            outputs = [note.name for note in field.metadata if isinstance(note, Output)]
            yield path, outputs[0] if outputs else path


def _nested(
    model: type[ReplyPart], omitted: frozenset[str], prefix: str = "", start: int = 0
) -> tuple[Callable[[Row], dict[str, Any]], int]:
    """A function from a row to the dict of `model`, whose values begin at `start`; and where they end."""
    parts: dict[str, Callable[[Row], Any]] = {}
    end, flat = start, True
    for name, field in model.model_fields.items():
        if (part := _part(field.annotation)) is not None:
            parts[name], end = _nested(part, omitted, f"{prefix}{name}.", end)
            flat = False
        elif prefix + name not in omitted:
            parts[name] = itemgetter(end)
            end += 1
    if flat:  # slicing is twice as fast as one call per value
        names, values = tuple(parts), slice(start, end)
        return lambda row: dict(zip(names, row[values], strict=True)), end
    return lambda row: {name: part(row) for name, part in parts.items()}, end


def _part(annotation: object) -> type[ReplyPart] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, ReplyPart) else None
