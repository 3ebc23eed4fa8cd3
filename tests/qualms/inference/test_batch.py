"""Runs have at most `max_batch` images, even for one request with more; their outputs are joined."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.inference.admission import Admission
from qualms.inference.batch import Job, run_jobs
from qualms.inference.cost import CostCurve


class Engine:
    """Returns each image's first value, and all values doubled."""

    def __init__(self, max_batch: int, seconds: tuple[float, float] = (1.0, 1.0)) -> None:
        self.max_batch = max_batch
        self.cost = CostCurve((1, max_batch), seconds)
        self.sizes: list[int] = []

    def run(self, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
        self.sizes.append(len(images))
        return [images[:, 0].astype(int), 2.0 * images]


def job(*values: int) -> Job:
    images = [np.array([value, 0], np.uint8) for value in values]
    return Job(lambda: images, len(images), 0.0, lambda: False, lambda _: None, 0.0, images)


@pytest.mark.parametrize(("max_batch", "sizes"), [(9, [6]), (6, [6]), (4, [4, 2]), (1, 6 * [1])])
def test_runs_are_limited_to_max_batch_and_their_outputs_joined(max_batch: int, sizes: list[int]) -> None:
    engine = Engine(max_batch)
    batch = run_jobs([job(1, 2, 3), job(4), job(5, 6)], engine)
    assert engine.sizes == [rows for rows, _ in batch.runs] == sizes
    assert batch.rows == 6
    assert batch.outputs[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.outputs[1].shape == (6, 2)


def test_rows_beyond_max_batch_cost_further_runs() -> None:
    def cost(engine: Engine, rows: int) -> float:
        return Admission(engine, lambda: 0, lambda: 0, clock=lambda: 0.0).cost(rows)

    rising, flat = Engine(4, (1.0, 4.0)), Engine(4, (1.0, 1.0))
    assert [cost(rising, rows) for rows in (1, 4, 5, 8, 11)] == [1.0, 4.0, 5.0, 8.0, 11.0]
    assert [cost(flat, rows) for rows in (1, 4, 5, 8, 11)] == [1.0, 1.0, 2.0, 2.0, 3.0]
