"""The work of a node on its tasks; the whole pipeline is tested in tests/qualms/score/test_ray_executor.py."""

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow
import pytest

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
    assert str(caught.value) == f"The work on the Ray cluster failed: {reason}."
