"""A slow link between two network namespaces: delay with jitter, a rate, a short queue and optionally loss.

Each namespace has a TUN device, and packets between the devices are forwarded by the event loop, which works on kernels without
`netem`, too. The namespaces have no names: the kernel removes them when the last process or descriptor that uses them ends.
"""

import asyncio
import ctypes
import fcntl
import io
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache

SERVER, CLIENT = "10.77.0.1", "10.77.0.2"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_DEVICE = "narrow0"
_MAX_PACKET = 65536
_libc = ctypes.CDLL(None, use_errno=True)


@cache
def unavailable() -> str | None:
    """Why this machine cannot have a narrow link; None if it can."""
    if shutil.which("ip") is None:
        return "the command ip is not installed"
    with ThreadPoolExecutor(1) as thread:  # which leaves its namespace when it ends
        try:
            thread.submit(_open_device).result().close()
        except OSError as error:
            return f"network namespaces with TUN devices are not available, or only for root: {error}"
    return None


@dataclass(frozen=True)
class LinkSettings:
    """Properties of both directions of a link."""

    delay: float
    """seconds"""
    jitter: float
    """seconds that are added at most; packets are not reordered"""
    rate: float
    """bits per second"""
    queue: int
    """packets that wait to be sent; further ones are dropped"""
    loss: float = 0.0
    """share of the packets that is dropped at random"""

    @classmethod
    def draw(cls, rng: random.Random, loss: float) -> "LinkSettings":
        """Settings of one run."""
        return cls(rng.uniform(0.02, 0.08), rng.uniform(0, 0.02), rng.uniform(1e6, 5e6), rng.randint(40, 120), loss)


class NarrowLink:
    """Forwards packets between the TUN devices of two namespaces; `start` it on an event loop."""

    def __init__(self, settings: LinkSettings, rng: random.Random, server: int, devices: tuple[int, int]) -> None:
        self._settings, self._rng = settings, rng
        self._server = server
        self.devices = devices
        """descriptors of the TUN devices in the namespaces of the server and of the clients"""
        self.dropped = 0

    @contextmanager
    def server_side(self) -> Iterator[None]:
        """Processes that are started in this context run in the namespace of the server."""
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _check(_libc.setns(self._server, _CLONE_NEWNET))
            yield
            _check(_libc.setns(here, _CLONE_NEWNET))
        finally:
            os.close(here)

    def start(self) -> None:
        """Forward packets for as long as the event loop runs."""
        loop = asyncio.get_running_loop()
        for source, target in (self.devices, self.devices[::-1]):
            loop.add_reader(source, _Direction(self, loop, source, target, self._settings, self._rng).forward)


class _Direction:
    def __init__(
        self,
        link: NarrowLink,
        loop: asyncio.AbstractEventLoop,
        source: int,
        target: int,
        settings: LinkSettings,
        rng: random.Random,
    ) -> None:
        self._link, self._loop, self._source, self._target = link, loop, source, target
        self._settings, self._rng = settings, rng
        self._sent: list[float] = []
        """when each waiting packet is sent"""
        self._arrival = 0.0

    def forward(self) -> None:
        """Read one packet from the device, and schedule its arrival at the other one or drop it."""
        packet = os.read(self._source, _MAX_PACKET)
        settings, now = self._settings, self._loop.time()
        self._sent = [time for time in self._sent if time > now]
        if len(self._sent) >= settings.queue or self._rng.random() < settings.loss:
            self._link.dropped += 1
            return
        sent = max([now, *self._sent[-1:]]) + len(packet) * 8 / settings.rate
        self._sent.append(sent)
        delay = settings.delay + self._rng.uniform(0, settings.jitter)
        self._arrival = max(self._arrival, sent + delay)
        self._loop.call_at(self._arrival, os.write, self._target, packet)


@contextmanager
def narrow_link(settings: LinkSettings, rng: random.Random) -> Iterator[NarrowLink]:
    """Move this thread to a new namespace, linked with another one for the server."""
    with ExitStack() as stack:

        def namespace(address: str) -> tuple[int, int]:
            """Enter a new namespace; returns descriptors of it and of its device."""
            device = stack.enter_context(_open_device())
            descriptor = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            stack.callback(os.close, descriptor)
            _ip("address", "add", f"{address}/24", "dev", _DEVICE)
            for name in ("lo", _DEVICE):
                _ip("link", "set", name, "up")
            return descriptor, device.fileno()

        outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        stack.callback(os.close, outside)
        stack.callback(_libc.setns, outside, _CLONE_NEWNET)
        server, server_device = namespace(SERVER)
        _, client_device = namespace(CLIENT)
        yield NarrowLink(settings, rng, server, (server_device, client_device))


def _open_device() -> io.FileIO:
    """Move this thread to a new namespace and create its TUN device, which exists until the file is closed."""
    _check(_libc.unshare(_CLONE_NEWNET))
    device = io.FileIO(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), "r+")
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
