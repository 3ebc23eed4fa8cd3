"""What all parts of the manifest share: their base class and the types of their fields."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from qualms.bundle.arrays import Float32Values

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

Guarantee = Literal["confident", "marginal", "by-class"]
"""Guarantee on the false-alarm rate, explained in `qualms.decisions.flag`."""


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


def is_ascending(values: Float32Values) -> bool:
    """Whether values (N,) are sorted."""
    return bool((values[1:] >= values[:-1]).all())
