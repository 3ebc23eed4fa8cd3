"""What a request asks for in its query string, strictly: a misspelt target must not be silently ignored.

Clients repeat the same few queries, so each is parsed once; the empty one, nearly all of them, not at all.
"""

import re
from functools import lru_cache
from typing import get_args
from urllib.parse import parse_qsl

from qualms.decisions.flag import Guarantee
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint
from qualms.web.problems import Kind, Problem, shown

_GUARANTEES: dict[str, Guarantee] = {name: name for name in get_args(Guarantee)}
_NAMES = ", ".join(OperatingPoint.__slots__)
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SCORE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_LONGEST_NUMBER = 32
"""characters; the cache keeps what was accepted, so what is accepted must be short"""


def parse_query(raw: bytes) -> OperatingPoint:
    """Read a raw query string (without the question mark); a Problem names the parameter that is wrong."""
    return _parse(raw) if raw else DEFAULT_OPERATING_POINT


@lru_cache(maxsize=1024)
def _parse(raw: bytes) -> OperatingPoint:
    values = _parameters(raw)
    return OperatingPoint(
        score=_score(values["score"]) if "score" in values else None,
        target_fpr=_fraction("target_fpr", values["target_fpr"]) if "target_fpr" in values else None,
        guarantee=_guarantee(values["guarantee"]) if "guarantee" in values else None,
        target_risk=_fraction("target_risk", values["target_risk"]) if "target_risk" in values else None,
    )


def _parameters(raw: bytes) -> dict[str, str]:
    """Names and values, each name known and given once."""
    try:
        pairs = parse_qsl(raw.decode("latin-1"), keep_blank_values=True, strict_parsing=True)
    except ValueError:
        raise Problem.refused(
            Kind.INVALID, None, "The query string is not of the form name=value&name=value", _NAMES
        ) from None
    values: dict[str, str] = {}
    for name, value in pairs:
        if name not in OperatingPoint.__slots__:
            raise Problem.refused(Kind.INVALID, name, f"The query parameter {shown(name)} is unknown", _NAMES)
        if name in values:
            raise Problem.refused(
                Kind.INVALID, name, f"The query parameter {name} is given more than once", "one value"
            )
        values[name] = value
    return values


def _score(value: str) -> str:
    """A score's name by its form; whether the model has it, the model knows."""
    if not _SCORE.fullmatch(value):
        raise Problem.invalid("score", value, "the name of one of the model's scores")
    return value


def _fraction(name: str, value: str) -> float:
    well_formed = len(value) <= _LONGEST_NUMBER and _NUMBER.fullmatch(value)
    if not well_formed or not 0.0 < float(value) < 1.0:
        raise Problem.invalid(name, value, "a number strictly between 0 and 1")
    return float(value)


def _guarantee(value: str) -> Guarantee:
    if value not in _GUARANTEES:
        raise Problem.invalid("guarantee", value, " or ".join(_GUARANTEES))
    return _GUARANTEES[value]
