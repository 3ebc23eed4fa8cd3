"""The work of a node on its tasks; the whole pipeline is tested in tests/qualms/score/test_ray_executor.py."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow
import pytest

from qualms.cluster.ordered_map import _run
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


def test_an_error_for_the_user_is_a_result_and_any_other_is_raised() -> None:
    (number, error), (_, next_result) = results(Doubles("errors", []), -1, 2)
    assert (number, type(error), str(error), next_result) == (0, BundleError, "-1 is negative.", 4)
    with pytest.raises(TypeError):
        results(Doubles("errors", []), "text")  # type: ignore[arg-type]
