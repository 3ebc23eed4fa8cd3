import os
import threading
from pathlib import Path

import pytest

from qualms.machine.cpu import available_cores, yield_to_other_threads


def write_files(root: Path, files: dict[str, str]) -> Path:
    """Write the files of a simulated /proc and /sys."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_v2_quota_is_rounded_down_to_whole_cores_within_the_affinity(tmp_path: Path, quota: str, cores: int) -> None:
    root = write_files(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota}\n"})
    assert available_cores(root, affinity=8) == cores


def test_v2_smallest_quota_of_the_parent_groups_applies(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pods/pod/container\n",
        "sys/fs/cgroup/pods/cpu.max": "600000 100000\n",
        "sys/fs/cgroup/pods/pod/cpu.max": "300000 100000\n",
        "sys/fs/cgroup/pods/pod/container/cpu.max": "max 100000\n",
    }
    assert available_cores(write_files(tmp_path, files), affinity=8) == 3


def test_v2_quota_of_the_root_group_applies_when_the_groups_path_does_not_exist(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/0123\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}
    assert available_cores(write_files(tmp_path, files), affinity=8) == 2


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("200000", 2), ("150000", 1)])
def test_v1_quota(tmp_path: Path, quota: str, cores: int) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": f"{quota}\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
    }
    assert available_cores(write_files(tmp_path, files), affinity=8) == cores


@pytest.mark.parametrize("quota", ["", "nonsense", "1000 0", "max"])
def test_unreadable_quota_is_ignored(tmp_path: Path, quota: str) -> None:
    root = write_files(tmp_path, {"proc/self/cgroup": "no such line\n", "sys/fs/cgroup/cpu.max": quota})
    assert available_cores(root, affinity=3) == 3


def test_without_cgroups_the_affinity_applies_with_a_minimum_of_one(tmp_path: Path) -> None:
    assert available_cores(tmp_path, affinity=5) == 5
    assert available_cores(tmp_path, affinity=0) == 1


def test_available_cores_of_this_machine_are_between_one_and_cpu_count() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="only Linux has scheduling policies")
def test_yield_to_other_threads_affects_the_calling_thread_only() -> None:
    policies = list[int]()

    def work() -> None:
        yield_to_other_threads()
        policies.append(os.sched_getscheduler(0))

    before = os.sched_getscheduler(0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert policies == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == before


def test_yield_to_other_threads_ignores_a_permission_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not in this container")

    monkeypatch.setattr(os, "sched_setscheduler", refuse, raising=False)
    yield_to_other_threads()
