"""The attacking process: `python -m qualms.bench.attacks.attacker PORT NAME`, on the loopback interface only.

It prints "ready" when its payload is made. Each line on its standard input is a number of seconds, for which it attacks;
then it prints its counts as JSON. It is a process of its own, with a low priority, so that it does not delay the
well-behaved client.
"""

import asyncio
import json
import os
import resource
import socket
import struct
import sys
from collections import Counter
from dataclasses import dataclass, field

import httptools
import uvloop

from qualms.bench.attacks.definition import Attack, Step, Wait
from qualms.bench.attacks.registry import find_attacks
from qualms.bench.servers.processes import HOST

_MAX_BYTES = 2**33
"""bytes that one attack sends at most"""
_RESERVED_FILES = 64
_RETRY_SECONDS = 0.1
"""pause after a connection that could not be opened"""
_NICE = 10
_SMALL_BUFFER = 4096
_READ = 2**16


@dataclass
class AttackCounts:
    """What the attacker did and got."""

    opened: int = 0
    """connections opened"""
    not_opened: int = 0
    closed: int = 0
    """connections that the service closed or reset"""
    invalid: int = 0
    """connections on which the service sent no valid HTTP"""
    bytes_sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    """replies by status"""

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "AttackCounts":
        """Read what `to_json` wrote."""
        values = json.loads(text)
        statuses = Counter({int(status): count for status, count in values.pop("statuses").items()})
        return cls(**values, statuses=statuses)


async def run_attack(attack: Attack, port: int, seconds: float, payload: bytes) -> AttackCounts:
    """Run the attack for `seconds`."""
    counts = AttackCounts()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = min(attack.connections, max(1, files - _RESERVED_FILES))
    tasks = [asyncio.create_task(_repeat(attack, port, payload, counts)) for _ in range(number)]
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    return counts


async def _repeat(attack: Attack, port: int, payload: bytes, counts: AttackCounts) -> None:
    """Run the script on one connection after the other."""
    while counts.bytes_sent < _MAX_BYTES:
        connection = _AttackingConnection(attack, counts)
        try:
            await connection.open(port)
        except OSError:
            counts.not_opened += 1
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            counts.opened += 1
            await connection.run(payload)
        finally:
            connection.close()
        await asyncio.sleep(attack.pause)


class _AttackingConnection:
    """One connection; it reads replies while it sends, unless the attack does not read them."""

    def __init__(self, attack: Attack, counts: AttackCounts) -> None:
        self._attack, self._counts = attack, counts
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._replies = 0
        self._reply_received = asyncio.Event()
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not attack.reads:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)

    async def open(self, port: int) -> None:
        """Connect; raises OSError if the service does not accept the connection."""
        await self._loop.sock_connect(self._socket, (HOST, port))

    async def run(self, payload: bytes) -> None:
        """Run the script until its end or until the service closes the connection."""
        tasks = [asyncio.create_task(self._send(payload))]
        if self._attack.reads:
            tasks.append(asyncio.create_task(self._read()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # After an error of sending, there may be a reply to read.
            if len(tasks) > 1 and tasks[0].done() and tasks[0].exception():
                await asyncio.wait(tasks, timeout=_RETRY_SECONDS)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [result for result in results if isinstance(result, Exception)]
        if errors:
            self._counts.closed += any(isinstance(error, OSError) for error in errors)
            self._counts.invalid += any(isinstance(error, httptools.HttpParserError) for error in errors)
            for error in errors:
                if not isinstance(error, OSError | httptools.HttpParserError):
                    raise error

    def close(self) -> None:
        """Close the connection, with RST if the attack says so or replies are unread."""
        if self._attack.resets:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def on_message_complete(self) -> None:
        """httptools callback: a reply is complete."""
        status = self._parser.get_status_code()
        self._counts.statuses[status] += 1
        if status >= 200:
            self._replies += 1
            self._reply_received.set()

    async def _send(self, payload: bytes) -> None:
        awaited = 0
        for step in self._attack.script(payload):
            if step is Wait.REPLY:
                awaited += 1
                while self._replies < awaited:
                    self._reply_received.clear()
                    await self._reply_received.wait()
            elif self._counts.bytes_sent >= _MAX_BYTES:
                return
            else:
                await self._take(step)

    async def _take(self, step: Step) -> None:
        if isinstance(step, float):
            await asyncio.sleep(step)
        elif isinstance(step, Wait):
            await asyncio.Event().wait()  # the reading task ends first
        else:
            await self._loop.sock_sendall(self._socket, step)
            self._counts.bytes_sent += len(step)
            await asyncio.sleep(0)  # sending may not have waited, and other connections must have their turn

    async def _read(self) -> None:
        while data := await self._loop.sock_recv(self._socket, _READ):
            self._parser.feed_data(data)
        raise ConnectionResetError


def main(port: str, name: str) -> None:
    """Make the payload, and attack as often as a line arrives."""
    os.nice(_NICE)
    (attack,) = find_attacks([name])
    payload = attack.payload()
    print("ready", flush=True)
    for seconds in sys.stdin:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            counts = runner.run(run_attack(attack, int(port), float(seconds), payload))
        print(counts.to_json(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
