"""The rows of the output: one per file, with the fields of `qualms.decisions.results.Result` under flat names.

The name of a column is the path of the field with underscores: `ood.p_value` is `ood_p_value`. A part is a fixed number of rows,
held by column; it is what a scoring process returns and what the state folder keeps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args, get_origin, overload

import orjson

from qualms.bundle.manifest import Manifest
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.results import field_types

Kind: TypeAlias = Literal["text", "bool", "int", "float", "texts", "floats"]
PATH, ERROR, FLAG_FDR = "path", "error", "flag_fdr"
"""columns that are not fields of a result: the file, why it could not be read, and the flag of --target-fdr"""
FLAG, P_VALUE, LABEL = "ood_flag", "ood_p_value", "prediction_label"
TERMS_FIELD = "explanation.flag_terms"
_SCORES_FIELD = "explanation.scores"
"""left out: the uncertainties and `ood.value` are columns already"""
_SENTENCES = ("ood.guarantee_text", "trust.refusal", "prediction_set.note")
"""fields that are left out, because they have the same long text in all rows; the summary has the guarantee"""
_KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "float"}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the output."""

    name: str
    kind: Kind
    field: str | None = None
    """the path of the field of a result; None for columns that are not fields of a result"""


@dataclass(frozen=True, slots=True)
class Row:
    """The result for one file."""

    path: str
    error: str | None
    """why the file could not be read, in one sentence; None if it was"""
    values: Mapping[str, Any]
    """by column (`prediction_label`, `ood_flag`, `ood_p_value`, …); empty if the file could not be read"""


class Part(Sequence[Row]):
    """Consecutive rows by column, in the order of the input."""

    def __init__(self, number: int, columns: dict[str, list[Any]]) -> None:
        """`number` counts the parts of a run from 0; a file that could not be read has None in all columns but two."""
        self.number = number
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[PATH])

    @overload
    def __getitem__(self, at: int, /) -> Row: ...
    @overload
    def __getitem__(self, at: slice, /) -> list[Row]: ...
    def __getitem__(self, at: int | slice, /) -> Row | list[Row]:
        if isinstance(at, slice):
            return [self._row(index) for index in range(*at.indices(len(self)))]
        return self._row(range(len(self))[at])

    def __iter__(self) -> Iterator[Row]:
        return (self._row(index) for index in range(len(self)))

    def _row(self, index: int) -> Row:
        path, error = self.columns[PATH][index], self.columns[ERROR][index]
        if error is not None:
            return Row(path, error, {})
        values = {name: column[index] for name, column in self.columns.items() if name not in (PATH, ERROR)}
        return Row(path, None, values)

    def to_json(self) -> bytes:
        """The part as one line of JSON; float32 values have the shortest text that gives them back."""
        return orjson.dumps(
            {"part": self.number, **self.columns}, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        )

    @classmethod
    def from_json(cls, line: bytes) -> "Part":
        """The part of a line; ValueError if the line is damaged."""
        document = orjson.loads(line)
        number = document.pop("part", None) if isinstance(document, dict) else None
        if number is None or len({len(column) for column in document.values()}) != 1:
            raise ValueError("The line is not a part of a run.")
        return cls(number, document)


def result_columns(manifest: Manifest, point: OperatingPoint, *, alpha: bool) -> list[Column]:
    """The columns of a model's results at an operating point; `alpha` adds all entries of α."""
    left_out = {*_SENTENCES, _SCORES_FIELD, "dirichlet.top", "explanation.meta.top"}
    left_out |= {"explanation.meta.precision"} if alpha else {"dirichlet.alpha", "explanation.meta.alpha"}
    parts_left_out = [
        *(["ood.group."] if (point.guarantee or manifest.operating.guarantee) != "by-class" else []),
        *(["prediction_set."] if point.coverage is None else []),
        *(["explanation."] if manifest.alpha == "meta" else []),
    ]
    columns = [Column(PATH, "text"), Column(ERROR, "text")]
    for field, annotation in field_types():
        if field in left_out or field.startswith(tuple(parts_left_out)):
            continue
        if field == TERMS_FIELD:
            columns += [
                Column(flat_name(f"{field}.{term}"), "float", f"{field}.{term}") for term in manifest.flag_terms
            ]
        else:
            columns.append(Column(flat_name(field), _kind(annotation), field))
    return columns


def flat_name(field: str) -> str:
    """The name of a field's column."""
    return field.replace(".", "_")


def _kind(annotation: Any) -> Kind:
    """The kind of values of a field, from its type; a field that may be None has the kind of its other values."""
    leaves = list(_leaves(annotation))
    kind: Kind = next((_KINDS[leaf] for leaf in leaves if leaf in _KINDS), "text")
    if list in leaves:
        return "floats" if kind == "float" else "texts"
    return kind


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types in an annotation, with `list` for a list."""
    if get_origin(annotation) is list:
        yield list
    arguments = get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _leaves(argument)
