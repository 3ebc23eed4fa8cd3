"""Look at a service under load from outside, as an orchestrator does: is it ready, and how much memory does it hold."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from qualms.bench.closed_loop import Connection

_PROBE_SECONDS = 1.0
"""how long a probe waits for its answer, as Kubernetes' do"""


@dataclass(frozen=True)
class Look:
    """What one look found."""

    ready: bool
    seconds: float
    """that readiness took to answer, or to be given up"""
    memory: int | None
    """bytes"""


async def watch(url: str, memory: Callable[[], int | None], interval: float, looks: list[Look]) -> None:
    """Add a look every `interval` seconds, until cancelled."""
    start = time.perf_counter()
    while True:
        asked = time.perf_counter()
        ready = await _is_ready(url)
        looks.append(Look(ready, time.perf_counter() - asked, memory()))
        since = time.perf_counter() - start
        await asyncio.sleep(interval - since % interval)


async def _is_ready(url: str) -> bool:
    probe = _Probe()
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            await probe.open(url)
            probe.send(f"GET /readyz HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n\r\n".encode())
            return await probe.status == 200
    except OSError:  # TimeoutError is one
        return False
    finally:
        probe.close()


class _Probe(Connection):
    """A connection for one question."""

    def __init__(self) -> None:
        super().__init__()
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def answered(self, status: int, headers: dict[bytes, bytes]) -> None:
        if not self.status.done():
            self.status.set_result(status)

    def broken(self) -> None:
        if not self.status.done():
            self.status.set_result(0)
