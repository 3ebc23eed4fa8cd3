"""Bodies of requests: sizes, chunks, limits and the memory of all bodies."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualms.http1.body import FREE_BYTES, BodyMemory, BodyReader, Reservation, memory_used_up, too_large
from qualms.http1.chunked import CHUNKS_PER_CALL
from qualms.http1.messages import Refusal


class Reading:
    """A reader, and what it has reported."""

    def __init__(self, length: int | None, max_bytes: int = 2**20, memory: BodyMemory | None = None) -> None:
        self.bodies: list[bytes] = []
        self.failures: list[Refusal | None] = []
        self.memory = memory or BodyMemory(2**20)
        self.reservation = Reservation(self.memory)
        self.reader = BodyReader(
            length, max_bytes, 7.0, 5.0, self.reservation, self.bodies.append, self.failures.append
        )

    def feed(self, *pieces: bytes) -> bytes:
        """Feed pieces until the body is complete; returns what follows it in the last piece."""
        complete: Callable[[], None] | None
        for piece in pieces:
            rest, again, complete = self.reader.feed(piece)
            while again:
                rest, again, complete = self.reader.feed(b"")
            if complete is not None:
                complete()
                return rest
            assert rest == b""
        return b""


def encode(body: bytes, size: int) -> bytes:
    chunks = [body[begin : begin + size] for begin in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


@given(
    body=st.binary(min_size=1, max_size=200),
    step=st.integers(1, 250),
    chunk=st.none() | st.integers(1, 100),
    rest=st.binary(max_size=50),
)
def test_a_body_in_pieces_of_any_size_is_complete_with_its_last_byte(
    body: bytes, step: int, chunk: int | None, rest: bytes
) -> None:
    data = body if chunk is None else encode(body, chunk)
    reading = Reading(len(body) if chunk is None else None)
    reading.feed(*(data[begin : begin + step] for begin in range(0, len(data) - 1, step) if begin + step < len(data)))
    assert reading.bodies == []
    last = data[((len(data) - 1) // step) * step :]
    assert reading.feed(last + rest) == rest
    assert (reading.bodies, reading.failures) == ([body], [])


@pytest.mark.parametrize("chunk", [None, 10, 100_000])
def test_the_memory_of_a_body_is_its_size_above_the_free_bytes(chunk: int | None) -> None:
    body = bytes(200_000)
    data = body if chunk is None else encode(body, chunk)
    reading = Reading(len(body) if chunk is None else None)
    reading.feed(data[:50_000])
    assert reading.memory.used == 0
    reading.feed(data[50_000:])
    assert len(reading.bodies) == 1
    needed = len(body) - FREE_BYTES
    assert needed <= reading.memory.used <= needed + 2 * 50_000, "undecoded chunks count while they wait"
    reading.reservation.release()
    assert reading.memory.used == 0
    reading.reservation.release()
    assert reading.memory.used == 0


@pytest.mark.parametrize("chunk", [None, 1000])
def test_a_body_that_does_not_fit_the_memory_is_429(chunk: int | None) -> None:
    memory = BodyMemory(100_000)
    other = Reservation(memory)
    assert other.grow(FREE_BYTES + 90_000)
    reading = Reading(200_000 if chunk is None else None, memory=memory)
    data = bytes(200_000) if chunk is None else encode(bytes(200_000), chunk)
    with pytest.raises(Refusal) as caught:
        reading.feed(*(data[begin : begin + 5000] for begin in range(0, len(data), 5000)))
    assert (caught.value.status, caught.value.reason) == (429, "body_memory")
    assert memory.used <= 100_000
    reading.reservation.release()
    assert memory.used == 90_000


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    memory = BodyMemory(1000)
    assert memory.reserve(1000)
    assert not memory.reserve(1)
    assert memory.used == 1000
    memory.release(1000)
    reservation = Reservation(memory)
    assert reservation.grow(FREE_BYTES + 600)
    assert not reservation.grow(FREE_BYTES + 1001)
    assert memory.used == 600
    assert reservation.grow(FREE_BYTES + 1000)
    assert reservation.grow(10), "a body does not shrink"
    assert memory.used == 1000


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_chunked_body_of_the_maximum_size_is_accepted_and_a_larger_one_is_413(chunk: int) -> None:
    """Also if many chunks and the next request are in the same piece."""
    size = 3 * CHUNKS_PER_CALL
    for length in (size, size + 1):
        reading = Reading(None, max_bytes=size)
        data = encode(bytes(length), chunk) + bytes(5000)
        if length == size:
            assert reading.feed(data) == bytes(5000)
            assert reading.bodies == [bytes(length)]
        else:
            with pytest.raises(Refusal) as caught:
                reading.feed(data)
            assert (caught.value.status, caught.value.accepted) == (413, f"at most {size:,} bytes")


def test_malformed_chunks_are_400_with_the_reason() -> None:
    with pytest.raises(Refusal, match=r"^The size of a chunk is not a hexadecimal number\.$") as caught:
        Reading(None).feed(b"hello\r\n")
    assert (caught.value.status, caught.value.reason) == (400, "malformed")


def test_a_body_that_expires_reports_its_time() -> None:
    reading = Reading(10)
    assert reading.reader.deadline == 7.0
    reading.reader.expire()
    (refusal,) = reading.failures
    assert refusal is not None
    assert (refusal.status, refusal.detail) == (408, "The body did not arrive within the request's 5 s.")


def test_refusals_state_what_is_accepted() -> None:
    assert too_large(1234567).detail == "The body is too large; accepted: at most 1,234,567 bytes."
    assert memory_used_up().status == 429
