"""Limits of a key, with a clock that the tests set."""

import pytest

from qualms.access.key_ring import KeyHolder, KeyRing
from qualms.access.keys import Key, token_digest
from qualms.access.limits import ConcurrencyLimit, RateLimit


def test_the_requests_of_one_second_may_come_at_once() -> None:
    limit = RateLimit(5)
    assert [limit.wait(10.0) for _ in range(5)] == [0] * 5
    assert limit.wait(10.0) == pytest.approx(0.2)
    assert limit.wait(10.1) == pytest.approx(0.1)
    assert limit.wait(10.21) == 0


@pytest.mark.parametrize("rate", [0.25, 1, 3.5, 200])
def test_the_rate_is_never_exceeded_over_long_times_and_is_reached(rate: float) -> None:
    limit, accepted = RateLimit(rate), 0
    steps = 40_000
    for step in range(steps):
        accepted += limit.wait(step * 100 / rate / steps) == 0
    assert 99 <= accepted <= 100 + max(1, rate)


def test_a_request_that_waits_as_long_as_it_should_is_accepted() -> None:
    limit = RateLimit(0.5)
    assert limit.wait(0.0) == 0
    wait = limit.wait(0.0)
    assert wait == pytest.approx(2.0)
    assert limit.wait(wait) == 0


def test_places_are_taken_and_returned() -> None:
    limit = ConcurrencyLimit(2)
    for _ in range(2):
        assert limit.wait() == 0
        limit.take(0.0)
    assert limit.wait() > 0
    limit.release(1.0)
    assert limit.wait() == 0


def test_the_wait_for_a_place_follows_the_time_between_ends() -> None:
    limit = ConcurrencyLimit(2)
    limit.take(0.0)
    for start in (7.0, 1000.0, 2000.0):  # the time in which a place is free does not count
        limit.take(start)
        limit.release(start + 4.0)
        limit.take(start + 5.0)
        assert limit.wait() == pytest.approx(4.0)
        limit.release(start + 9.0)


def test_a_key_that_keeps_its_name_keeps_its_counts_and_its_requests_in_progress() -> None:
    ring = KeyRing([Key("app", token_digest(b"old"), concurrency=1)])
    holder = ring.find(b"old")
    assert holder is not None
    assert holder.acquire() is None
    holder.count(200)
    ring.replace([Key("app", token_digest(b"new"), concurrency=1)])
    assert ring.find(b"old") is None
    renewed = ring.find(b"new")
    assert renewed is not None
    assert renewed.counts[200] == 1
    assert renewed.acquire() is not None
    holder.release()
    assert renewed.acquire() is None


def test_a_request_that_exceeds_one_limit_does_not_count_towards_the_other() -> None:
    now = 0.0
    holder = KeyHolder(Key("app", bytes(32), rate=2, concurrency=1), lambda: now)
    assert holder.acquire() is None
    for _ in range(5):
        assert (holder.acquire() or [""])[0] == "concurrency"
    holder.release()
    assert holder.acquire() is None
    holder.release()
    for _ in range(5):
        assert (holder.acquire() or [""])[0] == "rate"
    now = 1.0
    assert holder.acquire() is None


def test_a_changed_line_keeps_the_state_of_the_limits_that_it_does_not_change() -> None:
    ring = KeyRing([Key("app", token_digest(b"token"), rate=1, concurrency=1)], lambda: 0.0)
    holder = ring.find(b"token")
    assert holder is not None
    assert holder.acquire() is None
    ring.replace([Key("app", token_digest(b"token"), rate=1, concurrency=3, only=("predict",))])
    assert (holder.acquire() or [""])[0] == "rate"
    ring.replace([Key("app", token_digest(b"token"), rate=100, concurrency=1)])
    assert (holder.acquire() or [""])[0] == "concurrency"


def test_a_removed_key_is_unknown_and_its_requests_may_end() -> None:
    ring = KeyRing([Key("app", token_digest(b"token"), concurrency=1)])
    holder = ring.find(b"token")
    assert holder is not None
    holder.acquire()
    ring.replace([])
    assert ring.find(b"token") is None
    assert len(ring) == 0
    holder.release()


def test_the_rate_is_measured_with_the_given_clock() -> None:
    now = 0.0
    holder = KeyHolder(Key("app", bytes(32), rate=1), lambda: now)
    assert holder.acquire() is None
    exceeded = holder.acquire()
    assert exceeded is not None
    assert exceeded[0] == "rate"
    assert exceeded[1] == pytest.approx(1.0)
    now = 1.0
    assert holder.acquire() is None
