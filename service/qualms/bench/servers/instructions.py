"""Instructions that a server executes in user space per request, which other work on the machine hardly changes.

They are counted by the processor (`perf stat`) if the machine has counters, as most virtual machines have not. Otherwise
the server runs under valgrind's callgrind, about 50 times slower. callgrind attributes instructions to libraries, and
offers no AVX-512, so that inference takes more instructions than without it.
"""

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qualms.bench.load.closed_loop import send_requests
from qualms.bench.servers.processes import (
    BenchError,
    Cores,
    ServerProcess,
    choose_cores,
    pinned,
    plain_command,
    server,
    service_command,
)

_MIN_REQUESTS = 64
_REQUESTS_PER_CONNECTION = 2
_PERF = ("perf", "stat", "-x,", "-e", "instructions:u")
_END_SECONDS = 30.0
_READY_SECONDS = 600.0
"""time in which a server must start under valgrind"""
_SLOW_SERVER = {"QUALMS_REQUEST_TIMEOUT_SECONDS": "600"}
"""no request is refused because valgrind is slow"""
_DECODERS = ("/PIL/", "/pillow.libs/", "/simplejpeg", "/pyspng")
"""parts of the paths of the decoders' libraries"""
_CALLGRIND_COST = re.compile(r"[+*0-9-]\S* (\d+)$")


@dataclass(frozen=True)
class Instructions:
    """Number of instructions; the parts are None if the tool does not attribute them."""

    total: float
    inference: float | None = None
    """in ONNX Runtime's libraries"""
    decode: float | None = None
    """in the libraries of image decoders, without the Python code that calls them"""

    @property
    def rest(self) -> float | None:
        """Everything but inference and decoding: HTTP, the event loop, decisions, replies, metrics."""
        return None if self.inference is None or self.decode is None else self.total - self.inference - self.decode

    def per(self, requests: int) -> "Instructions":
        """The number per request."""
        parts = (None if part is None else part / requests for part in (self.inference, self.decode))
        return Instructions(self.total / requests, *parts)


@dataclass(frozen=True)
class InstructionsRow:
    """Instructions per request at one concurrency."""

    concurrency: int
    ours: Instructions
    plain: Instructions


Load = Callable[[], int]
"""sends requests and returns their number"""
Count = Callable[[Load], Instructions]
"""runs a load and returns the instructions per request that the server executed meanwhile"""


class Perf:
    """`perf stat`: the processor's own counters, at full speed."""

    name = "perf"

    @contextmanager
    def start(self, arguments: Callable[[int], list[str]], cores: Cores) -> Iterator[tuple[ServerProcess, Count]]:
        """Start the server as usual."""
        with server(arguments, cores) as process:
            yield process, lambda load: self._count(process.pid, load)

    def _count(self, pid: int, load: Load) -> Instructions:
        # perf starts the command after it has started counting; the command prints a line, and ends with its input.
        command = [*_PERF, "-p", str(pid), "--", "sh", "-c", "echo; cat"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as perf:
            assert perf.stdout
            requests = load() if perf.stdout.readline() else 0
            _, output = perf.communicate(timeout=_END_SECONDS)
        counted = parse_perf(output.decode())
        if counted is None:
            raise BenchError(f"perf counted no instructions of process {pid}: {output.decode().strip()}")
        return Instructions(counted).per(requests)


class Callgrind:
    """valgrind's callgrind: every instruction is simulated."""

    name = "callgrind"

    @contextmanager
    def start(self, arguments: Callable[[int], list[str]], cores: Cores) -> Iterator[tuple[ServerProcess, Count]]:
        """Start the server under valgrind; it is instrumented only while instructions are counted."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "callgrind.out"
            wrapper = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
            with server(
                arguments, cores, wrapper=wrapper, variables=_SLOW_SERVER, ready_seconds=_READY_SECONDS
            ) as process:
                yield process, lambda load: self._count(process.pid, out, load)

    def _count(self, pid: int, out: Path, load: Load) -> Instructions:
        self._control("--instr=on", pid)
        try:
            self._control("--zero", pid)
            requests = load()
            self._control("--dump", pid)
        finally:
            self._control("--instr=off", pid)
        dump = max(out.parent.glob(f"{out.name}.*"), key=lambda file: int(file.suffix[1:]))
        with dump.open() as lines:
            return parse_callgrind(lines).per(requests)

    def _control(self, action: str, pid: int) -> None:
        done = subprocess.run(
            ["callgrind_control", action, str(pid)], capture_output=True, text=True, check=False, timeout=_END_SECONDS
        )
        if done.returncode or "OK." not in done.stdout:
            raise BenchError(f"callgrind_control {action} failed: {(done.stdout + done.stderr).strip()}")


def find_perf() -> Perf | None:
    """perf, if it is installed and the machine lets it count instructions."""
    if shutil.which("perf") is None or shutil.which("cat") is None:
        return None
    done = subprocess.run([*_PERF, "--", "cat"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return None if parse_perf(done.stderr) is None else Perf()


def find_callgrind() -> Callgrind | None:
    """callgrind, if valgrind is installed."""
    return Callgrind() if shutil.which("valgrind") and shutil.which("callgrind_control") else None


def parse_perf(output: str) -> int | None:
    """The count in the output of `perf stat -x,`; None if the event is not supported or not counted."""
    for line in output.splitlines():
        value, *fields = line.split(",")
        if "instructions:u" in fields:
            return int(value) if value.isdigit() else None
    return None


def parse_callgrind(lines: Iterable[str]) -> Instructions:
    """Sum the costs of a callgrind file by library.

    A line of a position and a cost belongs to the library of the last `ob=` line, except after a `calls=` line, where
    it is the cost of the called function, which is listed elsewhere.
    """
    names: dict[str, str] = {}
    by_library: Counter[str] = Counter()
    library, is_call = "", False
    for line in map(str.rstrip, lines):
        if line.startswith(("ob=", "cob=")):
            number, _, name = line.partition("=")[2].partition(" ")
            names.setdefault(number, name)
            library = names[number] if line.startswith("ob=") else library
        elif line.startswith("calls="):
            is_call = True
        elif match := _CALLGRIND_COST.match(line):
            if not is_call:
                by_library[library] += int(match[1])
            is_call = False
    return Instructions(
        by_library.total(),
        sum(cost for name, cost in by_library.items() if "onnxruntime" in name),
        sum(cost for name, cost in by_library.items() if any(decoder in name for decoder in _DECODERS)),
    )


def count_instructions(
    path: str, files: list[bytes], concurrencies: Sequence[int], tool: Perf | Callgrind
) -> list[InstructionsRow]:
    """Start the service and the plain server, and count their instructions per request at each concurrency."""
    ours, plain = (
        _count_one(command(path), files, concurrencies, tool) for command in (service_command, plain_command)
    )
    return [InstructionsRow(*row) for row in zip(concurrencies, ours, plain, strict=True)]


def _count_one(
    arguments: Callable[[int], list[str]],
    files: list[bytes],
    concurrencies: Sequence[int],
    tool: Perf | Callgrind,
) -> list[Instructions]:
    server_cores, load_cores = choose_cores()
    counts = []
    with tool.start(arguments, server_cores) as (process, count), pinned(load_cores):
        url = f"{process.url}/predict"
        for concurrency in concurrencies:
            requests = max(_MIN_REQUESTS, _REQUESTS_PER_CONNECTION * concurrency)
            send_requests(url, files, requests // 2, concurrency)  # fills caches before instructions are counted
            counts.append(count(partial(send_requests, url, files, requests, concurrency)))
    return counts
