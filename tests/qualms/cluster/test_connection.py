"""A cluster that cannot be used is one sentence, and nothing is written; Ray is not imported until it is needed."""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qualms import cli
from qualms.cluster.connection import (
    ClusterError,
    ClusterOptions,
    check_resources,
    check_versions,
    connected,
    connected_if,
    versions,
)
from qualms.cluster.options import cluster_options
from qualms.errors import ExtraMissingError

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'qualms[ray]'")


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("by_variable", [False, True])
def test_an_unreachable_cluster_is_named_with_its_address(monkeypatch: pytest.MonkeyPatch, by_variable: bool) -> None:
    address = f"127.0.0.1:{closed_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address if by_variable else "")
    message = f"^There is no Ray cluster at {address} .*; start one with `ray start --head`, or name its address"
    with pytest.raises(ClusterError, match=message), connected(None if by_variable else address):
        pass


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://head:10001", "of Ray Client or of a dashboard; accepted are HOST:PORT, auto and local"),
        ("http://127.0.0.1:8265", "of Ray Client or of a dashboard; accepted are HOST:PORT, auto and local"),
        ("head", "'head'; accepted are HOST:PORT, auto and local"),
        ("head:port", "'head:port'; accepted"),
        (":6379", "':6379'; accepted"),
        ("127.0.0.1:99999", "There is no Ray cluster at 127.0.0.1:99999"),
    ],
)
def test_an_address_of_another_form_is_refused(address: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message), connected(address):
        pass


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ExtraMissingError, match=r"^--engine ray needs Ray: run pip install 'qualms\[ray\]'\.$"):
        connected("127.0.0.1:1").__enter__()


def test_ray_without_its_data_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.data", None)  # as if one of its dependencies were missing
    with pytest.raises(
        ExtraMissingError, match=r"^--engine ray needs Ray Data \(.*\): run pip install 'qualms\[ray\]'\.$"
    ):
        connected("local").__enter__()


def test_an_unreachable_cluster_leaves_no_files(bundle_file: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    out = tmp_path / "new"
    out.mkdir()
    address = f"127.0.0.1:{closed_port()}"
    arguments = ["score", str(bundle_file), str(images), "--out", str(out / "out.csv"), "--engine", "ray"]
    result = CliRunner().invoke(cli.app, [*arguments, "--address", address])
    assert isinstance(result.exception, ClusterError)
    assert list(out.iterdir()) == []


def test_options_of_a_cluster_need_the_engine() -> None:
    assert cluster_options("local", None, 1, 0) is None
    for given in ((None, 2, 0), (None, 1, 1), ("head:6379", 1, 0)):
        with pytest.raises(ClusterError, match="need --engine ray"):
            cluster_options("local", *given)


@pytest.mark.parametrize(("cpus", "gpus"), [(0, 0), (-1, 0), (1.5, 0), (2000, 0), (float("nan"), 0), (1, -1), (1, 1.5)])
def test_shares_of_several_cores_or_gpus_are_refused(cpus: float, gpus: float) -> None:
    with pytest.raises(ClusterError, match="accepted are shares of one"):
        cluster_options("ray", None, cpus, gpus)


@pytest.mark.parametrize(("cpus", "threads"), [(0.5, 1), (1, 1), (4, 4)])
def test_a_model_has_as_many_threads_as_cores(cpus: float, threads: int) -> None:
    options = cluster_options("ray", "head:6379", cpus, 0.25)
    assert options is not None
    assert options.threads == threads


HEAD, WORKER = {"node:head": 1.0}, {"CPU": 4.0, "GPU": 1.0, "memory": 1e9}


@pytest.mark.parametrize(("cpus", "gpus"), [(1, 0), (4, 1), (0.5, 0.25)])
def test_a_model_that_fits_into_a_node_is_accepted(cpus: float, gpus: float) -> None:
    check_resources([HEAD, WORKER], ClusterOptions(None, cpus, gpus))


@pytest.mark.parametrize(("cpus", "gpus"), [(5, 0), (1, 2)])
def test_a_model_that_fits_into_no_node_is_refused_because_ray_would_wait_for_one(cpus: float, gpus: float) -> None:
    message = f"has the {cpus} CPU and {gpus} GPU that .*; its nodes have 0 CPU and 0 GPU; 4 CPU and 1 GPU\\.$"
    with pytest.raises(ClusterError, match=message):
        check_resources([HEAD, WORKER], ClusterOptions(None, cpus, gpus))


def test_a_cluster_that_does_not_start_here_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nLog lines follow.")  # noqa: TRY002  # as Ray does

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ClusterError, match="^Ray cannot start a cluster on this machine: The current .* startup. Run"):
        connected("local").__enter__()


def test_tasks_that_need_too_much_memory_are_not_repeated_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    during: dict[str, str] = {}

    def init(**_: object) -> None:
        during.update(os.environ)

    monkeypatch.setenv("RAY_task_oom_retries", "")  # restored after the test, whatever is set in between
    monkeypatch.delenv("RAY_task_oom_retries")
    monkeypatch.setattr(ray, "init", init)
    with connected("local"):
        assert int(during["RAY_task_oom_retries"]) == 10


def test_nodes_with_other_versions_are_refused() -> None:
    present = versions("qualms", "numpy", "no-such-package")
    check_versions(present)
    assert present["no-such-package"] == "none"
    with pytest.raises(ClusterError, match=r"has numpy .*, and 0\.1 is needed"):
        check_versions({**present, "numpy": "0.1"})


def test_without_a_cluster_nothing_is_connected() -> None:
    program = "import sys; from qualms import cli; import qualms.score.ray_executor; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
    with connected_if(None):
        pass
