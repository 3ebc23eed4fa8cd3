"""The number of CPU cores available to this process, and its scheduling policy.

In a container `os.cpu_count()` returns the host's cores, so the cgroup's CPU quota and the affinity mask are used instead.
"""

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from qualms.machine.cgroups import cgroup_folders, read


def available_cores(root: Path = Path("/"), affinity: int | None = None) -> int:
    """Return the whole cores within the CPU quota and the affinity mask, at least 1.

    A quota of 2.5 cores gives 2, because a third thread would be throttled half of the time and delay every batch.
    `root` is the folder that contains proc/ and sys/. `affinity` replaces the number of cores in the affinity mask.
    """
    cores = _affinity() if affinity is None else affinity
    for quota in _quotas(root):
        cores = min(cores, int(quota))
    return max(1, cores)


def yield_to_other_threads() -> None:
    """Schedule the calling thread as SCHED_BATCH: it does not preempt other threads when it wakes up.

    With the default policy, the thread that reads requests would preempt the model for every request, which costs more
    than the request itself. With this policy it reads several requests at once, and its CPU share does not change. On
    systems without the policy, this function does nothing.
    """
    if hasattr(os, "sched_setscheduler"):  # Linux; 0 is the calling thread
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def lower_priority() -> None:
    """Give the calling thread a tenth of the CPU share of other threads: large images must not delay small requests.

    If no other thread needs the core, the thread gets all of it. On systems other than Linux, this function does nothing.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> list[float]:
    """Return every CPU quota, in cores, of this process's cgroup and of the groups above it."""
    quotas = []
    for version, folder in cgroup_folders(root, "cpu"):
        if version == 2:
            quota, _, period = read(folder / "cpu.max").partition(" ")
        else:
            quota, period = read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")
        quotas.append(_cores(quota, period))
    return [quota for quota in quotas if quota is not None]


def _cores(quota: str, period: str) -> float | None:
    """Return quota / period, both in microseconds. No quota is "max" in v2, -1 in v1, or an empty string (no file)."""
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None
