"""What all parts of the manifest share: their base class and the types of their fields."""

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

Guarantee = Literal["confident", "marginal", "by-class"]
"""Guarantee on the false-alarm rate, explained in `qualms.decisions.flag`."""

T = TypeVar("T")
ListOf: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
"""A list whose validation ends at the first invalid item, because millions of errors would take gigabytes."""

_MAX_DEPTH = 32


def _check_depth(value: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inner = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")


FreeObject = Annotated[dict[str, Any], AfterValidator(_check_depth)]
"""An object with any members, nested at most 32 levels deep, so that it can be written and printed again."""


class ManifestPart(BaseModel):
    """Base class of all parts of the manifest: immutable, finite numbers only, no unknown fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False, protected_namespaces=()
    )


def is_none(value: object) -> bool:
    """Fields that are left out of the JSON, so that programs of an earlier version can read a bundle without them."""
    return value is None


def is_empty(values: list[Any] | dict[str, Any]) -> bool:
    """As `is_none`, for lists and objects."""
    return not values
