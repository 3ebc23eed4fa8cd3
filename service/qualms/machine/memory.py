"""The memory of this process: how much it may use, and returning what it does not.

In a container, proc/meminfo describes the host, so the limits of the cgroup are used as well.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from qualms.machine.cgroups import cgroup_folders, read


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes this process may use: the smallest limit of its cgroups, or the machine's memory if smaller.

    `root` is the folder that contains proc/ and sys/. On systems without these folders the result is `sys.maxsize`.
    """
    return min([*_group_limits(root), *_machine_memory(root)], default=sys.maxsize)


def return_free_memory() -> None:
    """Return freed memory to the system. glibc keeps it, which after loading a model is as much as the model itself.

    With another C library, this function does nothing.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _group_limits(root: Path) -> Iterator[int]:
    """Yield every memory limit of this process's cgroup and of the groups above it.

    No limit is "max" in v2, a value close to 2**63 in v1, or a missing file.
    """
    for version, folder in cgroup_folders(root, "memory"):
        limit = read(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if limit.isdecimal():
            yield int(limit)


def _machine_memory(root: Path) -> Iterator[int]:
    for line in read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if name == "MemTotal" and number and number[0].isdecimal():
            yield int(number[0]) * 1024
