"""A Ray cluster of several nodes on this machine, in a process of its own: `python -m tests.qualms.cluster.ray_nodes 2 [0 1]`.

The head has no cores, so that all work is done by the other nodes, which have one each. With numbers of cores, each node is pinned
to one of them with all its processes; the head, and the command that uses the cluster, are not. The process prints the address,
kills one node for each line "kill" that it reads, and ends the cluster at the end of its input.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STORE = 100 * 2**20
STARTS = 4
"""attempts to start a cluster: a node of Ray ends itself if its agents need more than 15 s to start, as on a busy machine"""
ROOT = Path(__file__).parents[3]


class Nodes:
    """A cluster that runs in another process."""

    def __init__(self, process: "subprocess.Popen[str]", address: str) -> None:
        self._process, self.address = process, address

    def kill(self) -> None:
        """Kill one node with all its processes."""
        assert self._process.stdin is not None
        self._process.stdin.write("kill\n")
        self._process.stdin.flush()
        assert _line(self._process) == "killed"


@contextmanager
def nodes(number: int, *, pinned: bool = False) -> Iterator[Nodes]:
    """A cluster with so many nodes of one core, each on a core of its own if they are `pinned`."""
    cores = sorted(os.sched_getaffinity(0))[:number] if pinned else []
    assert not pinned or len(cores) == number, f"{number} nodes cannot be pinned to {len(cores)} cores"
    for _ in range(STARTS):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.qualms.cluster.ray_nodes", str(number), *map(str, cores)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        with process:
            try:
                if address := _line(process):
                    yield Nodes(process, address)
                    return
            finally:
                assert process.stdin is not None
                process.stdin.close()
    raise AssertionError(f"the cluster did not start in {STARTS} attempts")


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def main() -> None:
    """Serve the commands."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    everything = os.sched_getaffinity(0)
    workers = []
    for number in range(int(sys.argv[1])):
        if sys.argv[2:]:
            os.sched_setaffinity(0, {int(sys.argv[2 + number])})  # the processes of the node inherit it
        workers.append(cluster.add_node(num_cpus=1, object_store_memory=STORE))
        os.sched_setaffinity(0, everything)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(workers.pop(), allow_graceful=False)
            print("killed", flush=True)
    cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
