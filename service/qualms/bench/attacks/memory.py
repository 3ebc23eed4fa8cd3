"""Resident memory of a process, from Linux's /proc."""

import re
from pathlib import Path

from qualms.bench.processes import BenchError

_KIB = 1024
_RESET_PEAK = "5"


def reset_peak(pid: int) -> None:
    """Let `peak` start again from the present memory; if that is not permitted, it counts from the process's start."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)
    except FileNotFoundError:
        raise BenchError(
            f"The memory of process {pid} cannot be measured: there is no /proc/{pid}/clear_refs."
        ) from None
    except PermissionError:
        pass


def peak(pid: int) -> int | None:
    """Maximum resident memory in bytes since `reset_peak`; None if the process has ended."""
    return _status(pid, "VmHWM")


def resident(pid: int) -> int | None:
    """Resident memory in bytes; None if the process has ended."""
    return _status(pid, "VmRSS")


def _status(pid: int, name: str) -> int | None:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    match = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) * _KIB if match else None
