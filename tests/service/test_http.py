"""Replies leave together, whole, and in order; nothing is held for longer than a pass of the loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from service.http import JoiningTransport, Outbox


class Wire:
    """A transport that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.told.append(data)

    def close(self) -> None:
        self.told.append("close")

    def is_closing(self) -> bool:
        return "close" in self.told


def play(scene: Callable[[Callable[[Wire], JoiningTransport], set[Any]], Coroutine[Any, Any, None]]) -> None:
    """Run a scene with a maker of transports and the set of requests that are in progress."""

    async def whole() -> None:
        tasks = set[Any]()
        outbox = Outbox.of(asyncio.get_running_loop())
        await scene(lambda wire: JoiningTransport(cast(asyncio.Transport, wire), outbox, tasks), tasks)

    asyncio.run(whole())


def test_head_and_body_of_a_lone_reply_are_one_write_at_once() -> None:
    async def scene(make: Callable[[Wire], JoiningTransport], tasks: set[Any]) -> None:
        wire = Wire()
        transport = make(wire)
        tasks.add(1)
        transport.write(b"head")
        transport.write(b"body")
        assert wire.told == [b"headbody"]
        await asyncio.sleep(0)
        assert wire.told == [b"headbody"]

    play(scene)


def test_replies_of_one_pass_leave_together_in_the_next() -> None:
    async def scene(make: Callable[[Wire], JoiningTransport], tasks: set[Any]) -> None:
        wires = [Wire(), Wire()]
        tasks.update(range(2))
        for wire in wires:
            transport = make(wire)
            transport.write(b"head")
            transport.write(b"body")
            transport.write(b"more")
        assert [wire.told for wire in wires] == [[], []]
        await asyncio.sleep(0)
        assert [wire.told for wire in wires] == [[b"headbodymore"]] * 2

    play(scene)


def test_a_head_without_a_body_is_not_held_beyond_the_pass() -> None:
    async def scene(make: Callable[[Wire], JoiningTransport], _: set[Any]) -> None:
        wire = Wire()
        transport = make(wire)
        transport.write(b"head")
        await asyncio.sleep(0)
        assert wire.told == [b"head"]
        transport.write(b"body")
        await asyncio.sleep(0)
        assert wire.told == [b"head", b"body"]

    play(scene)


def test_what_was_written_is_sent_before_the_end() -> None:
    async def scene(make: Callable[[Wire], JoiningTransport], tasks: set[Any]) -> None:
        wire = Wire()
        transport = make(wire)
        tasks.update(range(2))
        transport.write(b"head")
        transport.close()
        assert wire.told == [b"head", "close"]
        assert transport.is_closing()
        await asyncio.sleep(0)
        assert wire.told == [b"head", "close"]

    play(scene)


def test_each_loop_has_an_outbox_of_its_own() -> None:
    async def mine() -> Outbox:
        loop = asyncio.get_running_loop()
        assert Outbox.of(loop) is Outbox.of(loop)
        return Outbox.of(loop)

    assert asyncio.run(mine()) is not asyncio.run(mine())
