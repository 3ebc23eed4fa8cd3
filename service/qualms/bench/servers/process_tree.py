"""CPU time and memory of a process with all its descendants, from Linux's /proc."""

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = "/proc"
_KIB = 1024
_RESET_PEAK = "5"
_SAMPLE_SECONDS = 0.02
_SAMPLES_PER_TREE = 5
"""samples until new descendants are looked for, which takes longer than a sample"""
_LISTENING = "0A"
_MEMORY_FIELD = re.compile(r"^(VmHWM|VmRSS|RssAnon|RssFile|RssShmem):\s+(\d+) kB$", re.MULTILINE)


def pids_of_tree(root: int) -> list[int]:
    """The process and its descendants; empty if it has ended or the system has no /proc."""
    children: dict[int, list[int]] = {}
    for pid in _all_pids():
        fields = _stat(pid)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(pid)
    tree = [root] if _stat(root) is not None else []
    for pid in tree:  # grows while it is read
        tree += children.get(pid, [])
    return tree


def cpu_seconds(root: int) -> float | None:
    """User and system time of the process, its descendants, and those descendants that have ended; None if it has ended."""
    found = [fields for fields in map(_stat, pids_of_tree(root)) if fields is not None]
    if not found:
        return None
    # utime, stime, and cutime and cstime, which are those of children that have ended.
    return sum(int(ticks) for fields in found for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def resident(root: int) -> int | None:
    """Memory of the tree in bytes; None if the process has ended.

    Anonymous and shared memory is added up over all processes, so that pages which several of them share count for each:
    the sum is an upper bound. Pages of files, which are mostly the libraries that all of them load, count only once: as
    many as the process with most of them has.
    """
    return _sum_of_memory(pids_of_tree(root))


def _sum_of_memory(pids: list[int]) -> int | None:
    found = [fields for fields in map(_memory, pids) if fields]
    if not found:
        return None
    return sum(fields["RssAnon"] + fields["RssShmem"] for fields in found) + max(fields["RssFile"] for fields in found)


class PeakMemory:
    """The maximum of a process tree's memory in bytes, sampled every 20 ms by a thread of its own.

    The kernel's record of the first process's own maximum is included, so that its short peaks are not missed.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._has_record = reset_peak(root)
        self._highest = resident(root)
        self._ended = threading.Event()

    @property
    def value(self) -> int | None:
        """The maximum so far; None if the process has ended."""
        record = _memory(self._root).get("VmHWM")
        if record is None or self._highest is None:
            return None
        return max(self._highest, record) if self._has_record else self._highest

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample while the block runs."""
        thread = threading.Thread(target=self._sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _sample(self) -> None:
        tree: list[int] = []
        samples = 0
        while not self._ended.wait(_SAMPLE_SECONDS):
            if samples % _SAMPLES_PER_TREE == 0:
                tree = pids_of_tree(self._root)
            samples += 1
            size = _sum_of_memory(tree)
            if size is not None and self._highest is not None:
                self._highest = max(self._highest, size)


@dataclass(frozen=True)
class RequestMemory:
    """Memory that requests take, in bytes."""

    idle: int
    """of the idle process tree"""
    rise: int
    """maximum above that during requests"""


def measure_requests(root: int, send: Callable[[], object]) -> RequestMemory | None:
    """How much memory rises while `send` sends requests, from the kernel's records; None if it cannot be measured.

    The rises of all processes of the tree are added up. That is exact if one process at a time works on a request, and
    otherwise an upper bound. Nothing is missed by sampling, however short it lasts.
    """
    tree = pids_of_tree(root)
    before = {pid: fields["VmRSS"] for pid in tree if reset_peak(pid) and (fields := _memory(pid))}
    idle = _sum_of_memory(tree)
    send()
    if idle is None or len(before) < len(tree):
        return None
    rise = 0
    for pid in pids_of_tree(root):
        fields = _memory(pid)
        if fields:
            # Of a process that was started meanwhile, pages of files are those of libraries that others have loaded.
            rise += fields["VmHWM"] - before.get(pid, fields["RssFile"])
    return RequestMemory(idle, rise)


def reset_peak(pid: int) -> bool:
    """Let the kernel's record of maximum memory start again from the present; returns whether that is permitted."""
    try:
        Path(_PROC, str(pid), "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def find_listener(port: int) -> int | None:
    """The process that listens on a TCP port of this machine; None if there is none or its files cannot be read.

    If several processes share the socket, because it was inherited, it is the one that the others descend from.
    """
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    owners = {pid for pid in _all_pids() if inodes & set(_open_files(pid))}
    oldest = [pid for pid in owners if (fields := _stat(pid)) and int(fields[1]) not in owners]
    return min(oldest, default=None)


def _all_pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_PROC) if name.isdigit()]  # noqa: PTH208  (twice as fast)
    except OSError:
        return []


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat after the name, which may contain spaces: state, parent, …"""
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as file:  # noqa: PTH123  (as above)
            text = file.read()
    except OSError:
        return None
    return text[text.rindex(b")") + 2 :].split()


def _memory(pid: int) -> dict[str, int]:
    """Memory of one process in bytes by the kernel's names; empty if it has ended."""
    try:
        with open(f"{_PROC}/{pid}/status") as file:  # noqa: PTH123  (as above)
            text = file.read()
    except OSError:
        return {}
    return {name: int(value) * _KIB for name, value in _MEMORY_FIELD.findall(text)}


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(_PROC, "net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _open_files(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for file in Path(_PROC, str(pid), "fd").iterdir():
            with suppress(OSError):
                yield str(file.readlink())
