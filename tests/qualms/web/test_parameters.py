"""Query parameters, timeouts and request ids of /predict."""

import re
from dataclasses import fields

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint
from qualms.replies import AlphaDetail
from qualms.web.parameters import QUERY_PARAMETERS, parse_query, parse_request_id, parse_timeout
from qualms.web.problems import Problem
from qualms.web.reply import DEFAULT_QUERY, Query


def test_no_query_selects_the_default_operating_point_without_explanation() -> None:
    assert parse_query(b"") is DEFAULT_QUERY == Query(OperatingPoint(None, None, None, None, None), explain=False)


def test_parameters_are_accepted_in_any_order() -> None:
    query = parse_query(b"target_risk=1e-2&explain=true&guarantee=by-class&coverage=.9&score=entropy&target_fpr=%30.05")
    assert query == Query(OperatingPoint("entropy", 0.05, "by-class", 0.01, 0.9), explain=True)


@pytest.mark.parametrize(("text", "explain"), [("true", True), ("false", False)])
def test_an_explanation_does_not_change_the_operating_point(text: str, explain: bool) -> None:
    assert parse_query(f"explain={text}".encode()) == Query(DEFAULT_OPERATING_POINT, explain)


@pytest.mark.parametrize("alpha", ["top10", "all", "none"])
def test_the_detail_of_alpha_does_not_change_the_operating_point(alpha: AlphaDetail) -> None:
    query = parse_query(f"alpha={alpha}".encode())
    assert query == Query(DEFAULT_OPERATING_POINT, alpha=alpha) != DEFAULT_QUERY


def test_the_same_query_is_parsed_once() -> None:
    assert parse_query(b"target_fpr=0.07") is parse_query(b"target_fpr=0.07")
    assert len({parse_query(b"target_fpr=0.07"), Query(OperatingPoint(target_fpr=0.07))}) == 1


@pytest.mark.parametrize("text", ["0.5", ".5", "5e-1", "+0.5", "0.50"])
def test_all_decimal_notations_of_a_number_are_accepted(text: str) -> None:
    assert parse_query(f"target_fpr={text.replace('+', '%2B')}".encode()).point.target_fpr == 0.5


@pytest.mark.parametrize("name", ["target_fpr", "target_risk", "coverage"])
@pytest.mark.parametrize(
    "text", ["0", "1", "-0.1", "1.5", "nan", "inf", "1e999", "", "abc", "0_1", "1e-999", "0." + "0" * 40 + "1", "٠.٥"]
)
def test_a_rate_that_is_not_a_number_between_0_and_1_is_422(name: str, text: str) -> None:
    with pytest.raises(Problem) as caught:
        parse_query(f"{name}={text}".encode())
    problem = caught.value
    assert (problem.status, problem.field) == (422, name)
    assert problem.accepted == "a number strictly between 0 and 1"


@pytest.mark.parametrize(
    ("query", "field", "detail"),
    [
        (
            b"targetfpr=0.1",
            "targetfpr",
            "unknown; accepted: score, target_fpr, guarantee, target_risk, coverage, explain, alpha",
        ),
        (b"score=entropy&score=entropy", "score", "more than once"),
        (b"guarantee=sure", "guarantee", "accepted: confident, marginal, by-class"),
        (b"guarantee=", "guarantee", "accepted: confident, marginal, by-class"),
        (b"explain=1", "explain", "explain is '1'; accepted: true or false."),
        (b"explain=", "explain", "accepted: true or false"),
        (b"explain=True", "explain", "accepted: true or false"),
        (b"explain=true&explain=true", "explain", "more than once"),
        (b"alpha=top5", "alpha", "alpha is 'top5'; accepted: top10, all, none."),
        (b"alpha=", "alpha", "accepted: top10, all, none"),
        (b"alpha=ALL", "alpha", "accepted: top10, all, none"),
        (b"alpha=all&alpha=all", "alpha", "more than once"),
        (b"guarantee=by_class", "guarantee", "accepted: confident, marginal, by-class"),
        (b"coverage=0.9&coverage=0.9", "coverage", "more than once"),
        (b"score=", "score", "accepted: the name of"),
        (b"score=a%20b", "score", "accepted: the name of"),
        (b"score", None, "name=value"),
        (b"&score=entropy", None, "name=value"),
        (b"%FF=1", "\ufffd", "unknown"),
    ],
)
def test_an_invalid_query_is_422_and_names_the_parameter(query: bytes, field: str | None, detail: str) -> None:
    with pytest.raises(Problem) as caught:
        parse_query(query)
    assert (caught.value.status, caught.value.field) == (422, field)
    assert detail in caught.value.detail


@given(st.binary(max_size=200))
@example(b"&" * 60_000)
@example(b"score=" + b"a" * 60_000)
def test_any_bytes_give_a_query_or_a_problem(raw: bytes) -> None:
    try:
        parse_query(raw)
    except Problem as problem:
        assert problem.status == 422
        assert len(problem.body("r1")) < 2000


def test_the_query_parameters_are_the_fields_of_a_query_and_an_operating_point() -> None:
    names = {field.name for kind in (Query, OperatingPoint) for field in fields(kind)}
    assert set(QUERY_PARAMETERS) == names - {"point"}


def test_the_timeout_is_that_of_the_header_or_the_default() -> None:
    assert parse_timeout({}, 5.0, 60.0) == 5.0
    assert parse_timeout({b"x-request-timeout": b"0.25"}, 5.0, 60.0) == 0.25
    assert parse_timeout({b"x-request-timeout": b"60"}, 5.0, 60.0) == 60.0


@pytest.mark.parametrize("text", [b"", b"0", b"-1", b"60.001", b"inf", b"nan", b"soon", b"\xff"])
def test_an_invalid_timeout_is_422_and_names_the_maximum(text: bytes) -> None:
    with pytest.raises(Problem) as caught:
        parse_timeout({b"x-request-timeout": text}, 5.0, 60.0)
    assert (caught.value.status, caught.value.field) == (422, "X-Request-Timeout")
    assert caught.value.accepted == "seconds, more than 0 and at most 60"


@pytest.mark.parametrize("given", [b"a", b"b2f1c5d0-9c1e-4d57", b"trace:1.2_3", b"x" * 128])
def test_a_valid_request_id_is_returned(given: bytes) -> None:
    assert parse_request_id({b"x-request-id": given}) == given.decode()


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"a b", b"a\n", b"\xc3\xa9", b'"', b"a/b"])
def test_an_invalid_request_id_is_replaced(given: bytes) -> None:
    assert re.fullmatch("[0-9a-f]{32}", parse_request_id({b"x-request-id": given}))


def test_each_request_without_an_id_gets_a_new_one() -> None:
    assert len({parse_request_id({}) for _ in range(100)}) == 100
