"""The source of a pipeline of Ray Data: one task that iterates over the work and pauses while the cluster is busy."""

import os
import pickle
from collections.abc import Iterable, Iterator
from typing import Any


def task_source(tasks: Iterable[Any]) -> Any:
    """A `ray.data.Datasource` with the tasks in blocks of one row; they are iterated in the folder of this process."""
    import pyarrow  # noqa: PLC0415  # comes with Ray
    from ray.data import Datasource, ReadTask  # noqa: PLC0415  # an extra
    from ray.data.block import BlockMetadata  # noqa: PLC0415

    folder = os.getcwd()  # noqa: PTH109

    def read() -> Iterator[Any]:
        os.chdir(folder)  # relative paths are those of the command
        for numbered in enumerate(tasks):
            yield pyarrow.table({"task": pyarrow.array([pickle.dumps(numbered)], pyarrow.large_binary())})

    class TaskSource(Datasource):
        """One reading task, because the order of the work is that of its list."""

        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_read_tasks(self, *_: Any, **__: Any) -> list[Any]:
            unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
            return [ReadTask(read, unknown)]

    return TaskSource()  # type: ignore[no-untyped-call]  # Ray's class has few types
