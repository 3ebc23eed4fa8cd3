import os
import threading
from pathlib import Path

import pytest

from qualms.inference.cpu import available_cores, yield_to_other_threads


def machine(root: Path, files: dict[str, str]) -> Path:
    """A file system with these files under it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_version_2_quota_is_whole_cores_within_the_affinity(tmp_path: Path, quota: str, cores: int) -> None:
    root = machine(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota}\n"})
    assert available_cores(root, affinity=8) == cores


def test_version_2_tightest_group_above_the_process_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pods/pod/container\n",
        "sys/fs/cgroup/pods/cpu.max": "600000 100000\n",
        "sys/fs/cgroup/pods/pod/cpu.max": "300000 100000\n",
        "sys/fs/cgroup/pods/pod/container/cpu.max": "max 100000\n",
    }
    assert available_cores(machine(tmp_path, files), affinity=8) == 3


def test_quota_is_found_at_the_top_when_the_groups_path_is_the_hosts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/0123\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}
    assert available_cores(machine(tmp_path, files), affinity=8) == 2


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("200000", 2), ("150000", 1)])
def test_version_1_quota(tmp_path: Path, quota: str, cores: int) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": f"{quota}\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
    }
    assert available_cores(machine(tmp_path, files), affinity=8) == cores


@pytest.mark.parametrize("quota", ["", "nonsense", "1000 0", "max"])
def test_unreadable_quota_is_no_quota(tmp_path: Path, quota: str) -> None:
    root = machine(tmp_path, {"proc/self/cgroup": "no such line\n", "sys/fs/cgroup/cpu.max": quota})
    assert available_cores(root, affinity=3) == 3


def test_no_cgroups_leave_the_affinity_and_never_less_than_one(tmp_path: Path) -> None:
    assert available_cores(tmp_path, affinity=5) == 5
    assert available_cores(tmp_path, affinity=0) == 1


def test_this_machine_has_between_one_and_all_of_its_cores() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="only Linux has scheduling policies")
def test_yielding_is_for_the_calling_thread_alone() -> None:
    found = list[int]()

    def work() -> None:
        yield_to_other_threads()
        found.append(os.sched_getscheduler(0))

    before = os.sched_getscheduler(0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == before


def test_a_system_that_does_not_allow_it_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not in this container")

    monkeypatch.setattr(os, "sched_setscheduler", refuse, raising=False)
    yield_to_other_threads()
