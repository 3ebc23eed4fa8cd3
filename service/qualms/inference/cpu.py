"""How many cores this process may really use, so that threads are neither throttled nor idle.

In a container `os.cpu_count()` is the host's. What counts is the cgroup's CPU quota and the affinity mask.
"""

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath


def available_cores(root: Path = Path("/"), affinity: int | None = None) -> int:
    """Whole cores within the CPU quota and the affinity mask, at least 1.

    A quota of 2.5 cores is 2: a third thread would spend half its time throttled, in the middle of a batch.
    `root` is where /proc and /sys are; `affinity` replaces the number of cores in the mask.
    """
    cores = _affinity() if affinity is None else affinity
    for quota in _quotas(root):
        cores = min(cores, int(quota))
    return max(1, cores)


def yield_to_other_threads() -> None:
    """Let this thread wake up without interrupting another one that runs on its core; it has its share all the same.

    A thread that reads requests would otherwise interrupt the model for each of them, which costs the model more than the
    request; now it finds several when its turn comes. Where the system knows no such policy, nothing changes.
    """
    if hasattr(os, "sched_setscheduler"):  # Linux; 0 is the calling thread
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> list[float]:
    """Every quota, in cores, that binds this process: its group's own and those of the groups above it."""
    mount = root / "sys/fs/cgroup"
    quotas = []
    for controllers, group in _memberships(root):
        for folder in (group, *group.parents):
            if controllers == "":
                quotas.append(_quota_v2(mount / folder))
            elif "cpu" in controllers.split(","):
                quotas.append(_quota_v1(mount / "cpu" / folder))
    return [quota for quota in quotas if quota is not None]


def _memberships(root: Path) -> list[tuple[str, PurePosixPath]]:
    """Controllers ("" for version 2) and group of each hierarchy; the top group where nothing is said."""
    groups = [("", PurePosixPath()), ("cpu", PurePosixPath())]
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, found, group = line.partition(":")[2].partition(":")
        if found:
            groups.append((controllers, PurePosixPath(group.lstrip("/"))))
    return groups


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return _cores(quota, period)


def _quota_v1(folder: Path) -> float | None:
    return _cores(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _cores(quota: str, period: str) -> float | None:
    """Microseconds of CPU a period; no quota is "max" in version 2, -1 in version 1, or no file at all."""
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
