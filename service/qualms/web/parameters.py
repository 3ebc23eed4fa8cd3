"""The query parameters and headers of `POST /predict`: their only definition, for parsing and for the OpenAPI document.

A query parameter is a field of `Query` in `qualms/web/reply.py` or, if it selects thresholds, of `OperatingPoint`; and an argument
of `Model.predict` in `qualms/model.py`.

Parsing is strict: a misspelt parameter is an error. Clients repeat the same few queries, so each is parsed once.
"""

import math
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, get_args
from urllib.parse import parse_qsl

from qualms.bundle.parts import Guarantee
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.results import ALL_UP_TO_CLASSES
from qualms.replies import AlphaDetail
from qualms.web.problems import Kind, Problem, quoted
from qualms.web.reply import DEFAULT_QUERY, Query

EXPLAIN, ALPHA = "explain", "alpha"
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SCORE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MAX_QUERY_BYTES = 2048
_MAX_NUMBER_LENGTH = 32
"""characters; accepted queries are cached, so they must be short"""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_PROCESS_ID = secrets.token_hex(8)
_COUNTER = count(secrets.randbits(32))
"""drawing a random number for each request would be one system call per request"""


@dataclass(frozen=True)
class QueryParameter:
    """One parameter of the query string: how it is documented and how it is parsed."""

    description: str
    schema: dict[str, Any]
    parse: Callable[[str, str], Any]
    """name and text to the value; Problem if it is not accepted"""


def _score(name: str, text: str) -> str:
    """A score's name; whether the model has that score is checked against its manifest."""
    if not _SCORE.fullmatch(text):
        raise Problem.invalid(name, text, "the name of one of the model's scores")
    return text


def _fraction(name: str, text: str) -> float:
    well_formed = len(text) <= _MAX_NUMBER_LENGTH and _NUMBER.fullmatch(text)
    if not well_formed or not 0.0 < float(text) < 1.0:
        raise Problem.invalid(name, text, "a number strictly between 0 and 1")
    return float(text)


def _boolean(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise Problem.invalid(name, text, "true or false")
    return text == "true"


def _one_of(description: str, literal: Any) -> QueryParameter:
    """A parameter whose values are those of a Literal."""
    accepted = get_args(literal)

    def parse(name: str, text: str) -> str:
        if text not in accepted:
            raise Problem.invalid(name, text, ", ".join(accepted))
        return text

    return QueryParameter(description, {"type": "string", "enum": list(accepted)}, parse)


_OPEN_UNIT_INTERVAL = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}

QUERY_PARAMETERS = {
    "score": QueryParameter("Another of the model's scores to flag by.", {"type": "string"}, _score),
    "target_fpr": QueryParameter("Another false-alarm rate.", _OPEN_UNIT_INTERVAL, _fraction),
    "guarantee": _one_of("Another guarantee.", Guarantee),
    "target_risk": QueryParameter("Another error rate of trusted predictions.", _OPEN_UNIT_INTERVAL, _fraction),
    "coverage": QueryParameter(
        "Probability with which the prediction set holds the true class; without it, there is no prediction set.",
        _OPEN_UNIT_INTERVAL,
        _fraction,
    ),
    EXPLAIN: QueryParameter(
        "Whether each result has an explanation: the terms of the flag score, and the meta-model's own distribution.",
        {"type": "boolean"},
        _boolean,
    ),
    ALPHA: _one_of(
        "How much of α is returned: its ten largest entries, all or none; all by default if the model has at most "
        f"{ALL_UP_TO_CLASSES} classes, else top10.",
        AlphaDetail,
    ),
}
"""by name: the fields of OperatingPoint, EXPLAIN and ALPHA"""

REQUEST_ID, REQUEST_TIMEOUT = "X-Request-ID", "X-Request-Timeout"
HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    REQUEST_ID: ("Returned in the reply, and in the log if the request is logged.", {"type": "string"}),
    REQUEST_TIMEOUT: ("Seconds this request may take.", {"type": "number", "exclusiveMinimum": 0}),
}
"""description and schema of each request header, by name"""


def parse_query(raw: bytes) -> Query:
    """The query that a raw query string (without the question mark) contains."""
    if not raw:
        return DEFAULT_QUERY
    if len(raw) > _MAX_QUERY_BYTES:
        what, accepted = f"The query string has {len(raw):,} bytes", f"at most {_MAX_QUERY_BYTES:,} bytes"
        raise Problem.refused(Kind.INVALID, None, what, accepted)
    return _parse(raw)


@lru_cache(maxsize=1024)
def _parse(raw: bytes) -> Query:
    names = ", ".join(QUERY_PARAMETERS)
    try:
        pairs = parse_qsl(raw.decode("latin-1"), keep_blank_values=True, strict_parsing=True)
    except ValueError:
        what = "The query string is not of the form name=value&name=value"
        raise Problem.refused(Kind.INVALID, None, what, names) from None
    values: dict[str, Any] = {}
    for name, text in pairs:
        if name not in QUERY_PARAMETERS:
            raise Problem.refused(Kind.INVALID, name, f"The query parameter {quoted(name)} is unknown", names)
        if name in values:
            what = f"The query parameter {name} is given more than once"
            raise Problem.refused(Kind.INVALID, name, what, "one value")
        values[name] = QUERY_PARAMETERS[name].parse(name, text)
    explain, alpha = values.pop(EXPLAIN, False), values.pop(ALPHA, None)
    return Query(OperatingPoint(**values), explain, alpha)


def parse_timeout(headers: Mapping[bytes, bytes], default: float, maximum: float) -> float:
    """Seconds that the request may take, by X-Request-Timeout or the default."""
    text = headers.get(b"x-request-timeout")
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= maximum:
        accepted = f"seconds, more than 0 and at most {maximum:g}"
        raise Problem.invalid(REQUEST_TIMEOUT, text.decode("latin-1"), accepted)
    return seconds


def parse_request_id(headers: Mapping[bytes, bytes]) -> str:
    """X-Request-ID if it is safe for logs and headers, else a new id of 32 hex digits.

    The first half is random and the same for the whole process; the second half is a counter.
    """
    given = headers.get(b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return f"{_PROCESS_ID}{next(_COUNTER):016x}"
