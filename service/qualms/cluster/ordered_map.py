"""A function of many tasks, computed on a Ray cluster: streamed, with back-pressure, results in the order of the tasks.

One pipeline of Ray Data: a source that runs on the node of this process, and tasks on any node. Tasks are plain ones and not those
of an actor pool, because Ray Data binds a task to its actor: a task of a node that is lost would wait until the actor can be
started again, for ever if nothing replaces the node. Plain tasks run again on other nodes. Their resources, such as a
model, are kept by the process that runs them, so that they are opened once per process.
"""

import logging
import pickle
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from qualms.cluster.connection import ClusterError, ClusterOptions
from qualms.errors import QualmsError, first_line

T_contra = TypeVar("T_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
R = TypeVar("R")


class Opener(Protocol[T_contra, R_co]):
    """Makes the function on a node; it is pickled, so large values are references to Ray's object store."""

    @property
    def key(self) -> str:
        """Identifies what `open` returns."""

    def open(self) -> Callable[[T_contra], R_co]:
        """Called once per process."""


def ordered_map(
    ray: Any, tasks: Iterable[T], opener: Opener[T, R], options: ClusterOptions, at_once: int | None = None
) -> Iterator[R]:
    """The results in the order of the tasks. `tasks` is pickled and iterated on the node of this process, as results are used.

    `at_once` bounds the tasks that run at the same time. A QualmsError in a task is raised here; a node that is lost costs the
    tasks that it ran, which run again elsewhere.
    """
    from ray.data import DataContext, TaskPoolStrategy  # noqa: PLC0415  # an extra

    from qualms.cluster.source import task_source  # noqa: PLC0415

    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = context.target_min_block_size = 1  # one task per block
    here = ray.get_runtime_context().get_node_id()
    with DataContext.current(context):
        results = ray.data.read_datasource(
            task_source(tasks), override_num_blocks=1, num_cpus=0, label_selector={"ray.io/node-id": here}
        ).map_batches(
            _run,
            fn_args=(opener,),
            batch_size=None,
            batch_format="pyarrow",
            compute=TaskPoolStrategy(at_once),
            num_cpus=options.cpus,
            num_gpus=options.gpus or None,
            max_calls=0,  # keep processes; by default, Ray ends those with GPUs after each task
        )
        number = 0
        for block in _blocks(results):
            for value in block["result"]:
                turn, result = pickle.loads(value.as_py())
                if isinstance(result, QualmsError):
                    raise result
                if turn != number:
                    raise ClusterError(
                        f"The cluster returned result {turn} in place of {number}; run the command again."
                    )
                number += 1
                yield result


def _blocks(results: Any) -> Iterator[Any]:
    try:
        yield from results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
    except Exception as error:  # Ray has no common class of errors
        cause = next((one for one in _causes(error) if isinstance(one, QualmsError)), None)
        if cause is not None:
            raise cause from error
        named = _NAMED.findall(str(error))
        reason = named[-1].rstrip(" .") if named else first_line(error)
        raise ClusterError(
            f"The work on the Ray cluster failed: {reason}; run the same command again to continue."
        ) from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those behind it, which Ray wraps."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__, getattr(one, "cause", None)]


_NAMED = re.compile(r"^(?!ray\.)[\w.]*(?:Error|Exception): .+", re.MULTILINE)
"""the line of a stack trace with the error itself; Ray adds errors of its own and advice"""
_ATTEMPTS = 6
"""of a task; Ray itself would begin a task whose process is killed again without end"""
_log = logging.getLogger(__name__)
_opened: dict[str, Callable[[Any], Any]] = {}
"""the function of this process; another one replaces it"""


def _check_attempts() -> None:
    """ClusterError if this task was begun too often."""
    if _attempt() > _ATTEMPTS:
        raise ClusterError(
            f"A task was begun {_ATTEMPTS} times, and each time its process was killed or its node was lost, perhaps because there "
            "is not enough memory; run the same command again to continue, with more --cpus-per-model, so that fewer models share "
            "a node."
        )


def _attempt() -> int:
    """The number of times that the current task was begun; 1 outside of Ray, or if this Ray does not count."""
    worker: Any = sys.modules.get("ray._private.worker")  # there is no public way
    count = getattr(
        getattr(worker and worker.global_worker, "core_worker", None), "get_current_task_attempt_number", None
    )
    return 1 if count is None else 1 + int(count())


def _run(block: Any, opener: Opener[Any, Any]) -> Any:
    """The results of a block of tasks, on any node."""
    import pyarrow  # noqa: PLC0415  # comes with Ray

    results = []
    for value in block["task"]:
        number, task = pickle.loads(value.as_py())
        try:
            _check_attempts()
            if opener.key not in _opened:
                _opened.clear()
                _opened[opener.key] = opener.open()
            result = _opened[opener.key](task)
        except QualmsError as error:
            result = error
        except Exception as error:
            _log.exception("A task failed.")  # Ray keeps it with the logs of the node
            result = ClusterError(
                f"The work failed on node {socket.gethostname()}: {type(error).__name__}: {first_line(error)}."
            )
        results.append(pickle.dumps((number, result)))
    return pyarrow.table({"result": pyarrow.array(results, pyarrow.large_binary())})
