"""Operating points: the parameters that select thresholds."""

from dataclasses import dataclass
from typing import TypedDict

from qualms.bundle.parts import Guarantee


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The parameters a request may set; None means the manifest's default."""

    score: str | None = None
    target_fpr: float | None = None
    guarantee: Guarantee | None = None
    target_risk: float | None = None
    coverage: float | None = None
    """of prediction sets, which only a request with a coverage gets"""


DEFAULT_OPERATING_POINT = OperatingPoint()


class Selection(TypedDict, total=False):
    """The fields of an OperatingPoint, as keyword arguments of `Model.predict` and `Client.predict`."""

    score: str
    target_fpr: float
    guarantee: Guarantee
    target_risk: float
    coverage: float
