import math
from datetime import UTC, datetime

import pytest

from qualms.client.errors import ClientError, DeadlineError, ProblemError, ReplyError, UnreachableError
from qualms.client.retries import Attempts, retry_after
from qualms.replies import ProblemReply

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def problem(status: int, after: float | None = None) -> ProblemError:
    return ProblemError(ProblemReply(type="t", title="title", status=status, detail="Detail."), after)


def attempts(clock: Clock, seconds: float = 10.0, retries: int | None = None, jitter: float = 0.0) -> Attempts:
    return Attempts(clock.now + seconds, seconds, retries, clock, lambda: jitter)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("0", 0.0),
        ("Fri, 02 Jan 2026 03:04:15 GMT", 10.0),
        ("Fri, 02 Jan 2026 03:04:00 GMT", 0.0),
        ("soon", None),
        ("-1", None),
        ("", None),
        ("9" * 400, math.inf),
        ("Fri, 31 Dec 99999999999999999999 23:59:59 GMT", None),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after(value, NOW) == seconds


def test_the_wait_is_at_least_retry_after_and_jitter_only_lengthens_it() -> None:
    assert attempts(Clock()).wait_before_retry(problem(429, 3.0)) == 3.0
    assert 3.0 < attempts(Clock(), jitter=1.0).wait_before_retry(problem(429, 3.0)) <= 3.25


def test_waits_without_retry_after_grow_up_to_a_bound() -> None:
    many = attempts(Clock(), seconds=1e6, jitter=1.0)
    waits = [many.wait_before_retry(UnreachableError("no")) for _ in range(40)]
    assert waits == sorted(waits)
    assert waits[0] == 0.05
    assert waits[-1] == 2.0


@pytest.mark.parametrize("error", [problem(400), problem(413), problem(422), problem(500), ReplyError("no")])
def test_errors_that_would_repeat_are_raised_at_once(error: ClientError) -> None:
    with pytest.raises(type(error)) as caught:
        attempts(Clock()).wait_before_retry(error)
    assert caught.value is error


@pytest.mark.parametrize("status", [408, 429, 502, 503])
def test_errors_that_may_pass_are_retried(status: int) -> None:
    assert attempts(Clock()).wait_before_retry(problem(status)) > 0


def test_a_wait_beyond_the_deadline_raises_the_error_at_once() -> None:
    with pytest.raises(ProblemError) as caught:
        attempts(Clock(), seconds=2.0).wait_before_retry(problem(429, 2.0))
    assert caught.value.retry_after == 2.0


def test_retries_are_limited_by_their_number() -> None:
    two = attempts(Clock(), retries=2)
    for _ in range(2):
        two.wait_before_retry(problem(503))
    with pytest.raises(ProblemError):
        two.wait_before_retry(problem(503))


def test_the_deadline_error_has_the_last_error() -> None:
    clock, last = Clock(), problem(503)
    some = attempts(clock)
    some.wait_before_retry(last)
    clock.now += 10
    with pytest.raises(DeadlineError, match="no result within 10 s; the last attempt failed: .*503: Detail") as caught:
        some.remaining()
    assert caught.value.last is last


def test_a_missed_deadline_of_the_service_is_a_deadline_error() -> None:
    with pytest.raises(DeadlineError) as caught:
        attempts(Clock()).wait_before_retry(problem(504))
    assert isinstance(caught.value.last, ProblemError)
    assert caught.value.last.status == 504
