"""Problem details: bodies, headers and the mapping from errors to statuses."""

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any, Literal

import pytest

from qualms.errors import BundleError, ImageError, OperatingPointError
from qualms.http1.messages import Refusal
from qualms.web.problems import (
    Kind,
    Problem,
    from_error,
    overloaded_reply,
    quoted,
    send_reply,
)


def document(problem: Problem, request_id: str = "r1") -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(problem.body(request_id))
    return parsed


def test_body_is_problem_details_with_field_and_accepted() -> None:
    assert document(Problem.invalid("target_fpr", "2", "a number strictly between 0 and 1")) == {
        "type": "/problems/invalid",
        "title": "A value is not accepted",
        "status": 422,
        "detail": "target_fpr is '2'; accepted: a number strictly between 0 and 1.",
        "instance": "/requests/r1",
        "request_id": "r1",
        "field": "target_fpr",
        "accepted": "a number strictly between 0 and 1",
    }


def test_members_without_a_value_are_left_out() -> None:
    members = {"type", "title", "status", "detail", "instance", "request_id"}
    assert set(document(Problem(Kind.NOT_FOUND, "Nothing."))) == members


def test_kinds_have_distinct_types_and_known_statuses() -> None:
    assert len({kind.slug for kind in Kind}) == len(Kind)
    assert {kind.status for kind in Kind} == {
        *(400, 401, 403, 404, 405, 408, 413, 414, 415, 422, 429, 431, 500, 501, 503, 504)
    }


@pytest.mark.parametrize(
    ("reason", "status"), [("malformed", 400), ("unsupported", 415), ("too_large", 413), ("shape", 422)]
)
def test_an_image_error_becomes_the_status_of_its_reason(
    reason: Literal["malformed", "unsupported", "too_large", "shape"], status: int
) -> None:
    problem = from_error(ImageError("The image is damaged.", reason=reason), "images[1]")
    assert (problem.status, problem.detail, problem.field) == (status, "The image is damaged.", "images[1]")


def test_an_unsupported_operating_point_is_422() -> None:
    problem = from_error(OperatingPointError("Too few images.", "target_fpr"))
    assert (problem.status, problem.detail, problem.kind) == (422, "Too few images.", Kind.OPERATING_POINT)


@pytest.mark.parametrize("error", [BundleError("secret path"), RuntimeError("secret path"), KeyError("secret path")])
def test_any_other_error_is_500_without_details(error: Exception) -> None:
    problem = from_error(error)
    assert problem.status == 500
    assert b"secret" not in problem.body("r1")


@pytest.mark.parametrize(("wait", "header"), [(0.0, "1"), (1.0, "1"), (1.2, "2"), (60.0, "60")])
def test_retry_after_is_rounded_up_to_whole_seconds(wait: float, header: str) -> None:
    problem = Problem.overloaded(wait)
    assert (problem.status, problem.headers) == (429, {"retry-after": header})


@pytest.mark.parametrize("status", [400, 408, 413, 414, 429, 431, 501, 503])
def test_a_refusal_of_the_protocol_becomes_a_problem_that_closes_the_connection(status: int) -> None:
    problem = Problem.from_refusal(Refusal(status, "malformed", "A sentence.", "something else"))
    assert (problem.status, problem.detail, problem.accepted) == (status, "A sentence.", "something else")
    assert problem.headers == ({"retry-after": "1"} if status in (429, 503) else {})
    assert problem.reply("r1").close


def test_wrong_method_names_the_allowed_methods() -> None:
    problem = Problem.wrong_method("GET", "POST")
    assert (problem.status, problem.headers, problem.accepted) == (405, {"allow": "POST"}, "POST")


def test_unavailable_is_503_and_too_late_is_504() -> None:
    assert (Problem(Kind.UNAVAILABLE, "Loading.").status, Problem(Kind.UNAVAILABLE, "Loading.").detail) == (
        503,
        "Loading.",
    )
    assert (Problem.too_late(0.25).status, Problem.too_late(0.25).kind.title) == (504, "The deadline has passed")
    assert "0.25 s" in Problem.too_late(0.25).detail


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, Kind.NOT_FOUND), (405, Kind.WRONG_METHOD), (422, Kind.INVALID), (418, Kind.MALFORMED), (507, Kind.INTERNAL)],
)
def test_a_status_of_the_framework_is_mapped_to_a_kind(status: int, kind: Kind) -> None:
    assert Problem.from_status(status, "Detail.").kind is kind


def test_a_clients_text_is_quoted_and_shortened() -> None:
    assert quoted("a\nb") == r"'a\nb'"
    assert len(quoted("x" * 10_000)) == 66
    assert len(Problem.invalid("f" * 10_000, "v" * 10_000, "less").field or "") == 64


def test_a_problem_can_pass_through_a_context_manager() -> None:
    async def raise_in_timeout() -> None:
        async with asyncio.timeout(10):
            raise Problem(Kind.NOT_FOUND, "Nothing.")

    with pytest.raises(Problem, match="Nothing"):
        asyncio.run(raise_in_timeout())


def test_a_reply_is_sent_with_all_headers() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    problem = Problem.overloaded(3)
    asyncio.run(send_reply(send, problem.reply("r1")._replace(close=True)))
    start, end = sent
    body = problem.body("r1")
    assert start == {
        "type": "http.response.start",
        "status": 429,
        "headers": [
            (b"content-type", b"application/problem+json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", b"r1"),
            (b"retry-after", b"3"),
            (b"connection", b"close"),
        ],
    }
    assert end == {"type": "http.response.body", "body": body}


@pytest.mark.parametrize("request_id", ["a", "0123-4567.89:ab_cd", "f" * 128])
def test_the_template_of_the_429_equals_the_problem(request_id: str) -> None:
    for seconds in (1, 30):
        expected = Problem.overloaded(seconds).reply(request_id)
        reply = overloaded_reply(seconds, request_id)
        assert (reply.status, sorted(reply.headers), reply.body) == (429, sorted(expected.headers), expected.body)
