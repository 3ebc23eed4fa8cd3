"""The work of a node on its tasks; the whole pipeline is tested in tests/qualms/score/test_ray_executor.py."""

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pyarrow
import pytest
from tests.qualms.cluster.ray_nodes import ROOT, nodes

from qualms.cluster import ordered_map
from qualms.cluster.connection import ClusterError
from qualms.cluster.ordered_map import _blocks, _run
from qualms.errors import BundleError


@dataclass(frozen=True)
class Doubles:
    key: str
    opened: list[str]

    def open(self) -> Callable[[int], int]:
        self.opened.append(self.key)
        return self.double

    def double(self, value: int) -> int:
        if value < 0:
            raise BundleError(f"{value} is negative.")
        return 2 * value


def results(opener: Any, *tasks: int) -> list[Any]:
    block = pyarrow.table({"task": pyarrow.array([pickle.dumps(task) for task in enumerate(tasks)])})
    return [pickle.loads(value.as_py()) for value in _run(block, opener)["result"]]


def test_a_process_opens_a_function_once_until_another_is_needed() -> None:
    opened: list[str] = []
    first, second = Doubles("first", opened), Doubles("second", opened)
    assert results(first, 3, 4) == [(0, 6), (1, 8)]
    assert results(first, 5) == [(0, 10)]
    assert results(second, 5) == [(0, 10)]
    assert results(first, 5) == [(0, 10)]
    assert opened == ["first", "second", "first"]


def test_an_error_of_a_task_is_its_result() -> None:
    (number, error), (_, next_result) = results(Doubles("errors", []), -1, 2)
    assert (number, type(error), str(error), next_result) == (0, BundleError, "-1 is negative.", 4)


def test_an_unexpected_error_is_a_result_that_names_the_node() -> None:
    ((_, error),) = results(Doubles("errors", []), "text")  # type: ignore[arg-type]
    assert isinstance(error, ClusterError)
    assert re.match(r"The work failed on node \S+: TypeError: '<' not supported .*'int'\.$", str(error))


@pytest.mark.parametrize(("attempt", "failed"), [(6, False), (7, True)])
def test_a_task_whose_processes_are_killed_again_and_again_is_an_error(
    monkeypatch: pytest.MonkeyPatch, attempt: int, failed: bool
) -> None:
    monkeypatch.setattr(ordered_map, "_attempt", lambda: attempt)
    ((_, result),) = results(Doubles("attempts", []), 4)
    assert isinstance(result, ClusterError) == failed
    assert failed or result == 8


CRASHING = """
import os
from qualms.cluster.connection import ClusterError, ClusterOptions, connected
from qualms.cluster.ordered_map import ordered_map

class Crashing:
    key = "crashing"
    def open(self):
        return lambda task: os._exit(1) if task == 2 else task

with connected() as ray:
    try:
        for result in ordered_map(ray, range(9), Crashing(), ClusterOptions()):
            print(result)
    except ClusterError as error:
        print(error)
"""


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'qualms[ray]'")
@pytest.mark.slow
def test_a_task_that_ends_its_process_each_time_ends_the_run_though_ray_would_repeat_it_without_end() -> None:
    with nodes(1) as cluster:
        done = subprocess.run(
            [sys.executable, "-c", CRASHING],
            env={**os.environ, "RAY_ADDRESS": cluster.address},
            capture_output=True, text=True, check=True, timeout=300, cwd=ROOT,
        )  # fmt: skip
    first, second, error = [line for line in done.stdout.splitlines() if "(raylet)" not in line]
    assert (first, second) == ("0", "1")
    assert re.match(
        "A task was begun 6 times, and each time its process was killed .* run the same command again", error
    )


class Failing:
    def __init__(self, text: str) -> None:
        self._text = text

    def iter_batches(self, **_: object) -> None:
        raise RuntimeError(self._text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "ray::MapBatches(_run)() (pid=1, ip=10.0.0.1)\nModuleNotFoundError: No module named 'qualms'\n\n"
            "The above exception was the direct cause of the following exception:\n"
            "ray.exceptions.UserCodeException: UDF failed to process a data block.\nTo change retry attempts, configure it.",
            "ModuleNotFoundError: No module named 'qualms'",
        ),
        ("The object is lost.\nMore about it.", "The object is lost"),
    ],
)
def test_an_error_of_ray_is_one_sentence_with_its_cause(text: str, reason: str) -> None:
    with pytest.raises(ClusterError) as caught:
        next(_blocks(Failing(text)))
    assert str(caught.value) == f"The work on the Ray cluster failed: {reason}; run the same command again to continue."
