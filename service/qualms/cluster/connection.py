"""The connection to a Ray cluster: RAY_ADDRESS or an address, an error within a minute if there is none, and no telemetry."""

import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from threading import Thread
from typing import Any

from qualms.errors import ExtraMissingError, QualmsError, first_line

ADDRESS = "RAY_ADDRESS"
"""the environment variable of Ray that names the cluster; jobs of `ray job submit` have it"""
_OOM_RETRIES = 10
"""of a task that Ray ends because its node has too little memory, with pauses of up to a minute; Ray's default is no limit"""
_TCP_SECONDS, _CONNECT_SECONDS = 10.0, 60.0
_WHERE = "start one with `ray start --head`, or name its address, HOST:PORT, by --address or RAY_ADDRESS"


class ClusterError(QualmsError):
    """The cluster cannot be reached, or work on it failed."""


@dataclass(frozen=True)
class ClusterOptions:
    """Which cluster, and what one model uses of it."""

    address: str | None = None
    """HOST:PORT, `auto` for the cluster of this machine, `local` to start one; None for RAY_ADDRESS, or `local` without it"""
    cpus: float = 1
    """cores that are reserved for a model; it runs with as many threads"""
    gpus: float = 0
    """GPUs, or the share of one"""

    @property
    def threads(self) -> int:
        """Threads of a model."""
        return max(1, int(self.cpus))


@contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """The module `ray`, connected to a cluster until the end of the block; ClusterError if it cannot be reached.

    Without an address and RAY_ADDRESS, a cluster of this machine alone is started, and ended with the block. A connection that
    exists already is used and kept.
    """
    if find_spec("ray") is None:
        raise ExtraMissingError("--engine ray needs Ray: run pip install 'qualms[ray]'.")
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        yield sys.modules["ray"]
        return
    address = address or os.environ.get(ADDRESS) or "local"
    _check(address)  # before the import, which takes seconds
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # it prints stack traces at SIGTERM
    os.environ.setdefault("RAY_task_oom_retries", str(_OOM_RETRIES))
    try:
        import ray  # noqa: PLC0415  # an extra
        import ray.data  # noqa: PLC0415
    except ImportError as error:  # Ray alone is there, without what its data library needs
        raise ExtraMissingError(
            f"--engine ray needs Ray Data ({first_line(error)}): run pip install 'qualms[ray]'."
        ) from error

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors are raised, too
    try:
        _init(ray, address)
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def connected_if(options: ClusterOptions | None) -> Iterator[None]:
    """Connected to a cluster until the end of the block, if there is one; for commands, before they write anything."""
    if options is None:
        yield
    else:
        with connected(options.address) as ray:
            check_resources([node["Resources"] for node in ray.nodes() if node["Alive"]], options)
            yield


def check_resources(nodes: Sequence[Mapping[str, float]], options: ClusterOptions) -> None:
    """ClusterError if no node is large enough for a model, because Ray would wait for such a node without end."""
    if not any(node.get("CPU", 0) >= options.cpus and node.get("GPU", 0) >= options.gpus for node in nodes):
        sizes = sorted({(node.get("CPU", 0), node.get("GPU", 0)) for node in nodes})
        raise ClusterError(
            f"No node of the cluster has the {_size(options.cpus, options.gpus)} that a model is given; its nodes have "
            f"{'; '.join(_size(*size) for size in sizes)}."
        )


def _size(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU and {gpus:g} GPU"


def _init(ray: Any, address: str) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if address == "local":
        try:
            ray.init(address="local", include_dashboard=False, **options)
        except Exception as error:  # Ray has no common class of errors
            raise ClusterError(
                f"Ray cannot start a cluster on this machine: {first_line(error)}. Run the command again, or without "
                "--engine ray."
            ) from error
        return
    errors: list[Exception] = []

    def connect() -> None:
        try:
            ray.init(address=address, **options)
        except Exception as error:  # Ray has no common class of errors
            errors.append(error)

    # In a thread, because Ray tries again for minutes if something else listens at the address.
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_SECONDS)
    if thread.is_alive():
        raise ClusterError(
            f"There is no Ray cluster at {address} that answers within {_CONNECT_SECONDS:g} s; {_WHERE}."
        )
    if errors:
        raise ClusterError(f"The Ray cluster at {address} cannot be used: {first_line(errors[0])}.") from errors[0]


def _check(address: str) -> None:
    """ClusterError unless something listens at the address."""
    if "://" in address:
        raise ClusterError(
            f"The address {address} is that of Ray Client or of a dashboard; accepted are HOST:PORT, auto and local. Run the "
            "command on a node of the cluster, or submit it with `ray job submit`."
        )
    if address in ("local", "auto"):
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not host:
        raise ClusterError(f"The address of the Ray cluster is {address!r}; accepted are HOST:PORT, auto and local.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_TCP_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ClusterError(f"There is no Ray cluster at {address} ({reason}); {_WHERE}.") from None


def versions(*packages: str) -> dict[str, str]:
    """The versions of Python and of packages, which must be the same on all nodes for results to be the same."""
    installed = {}
    for package in packages:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "none"
    return {"Python": f"{sys.version_info.major}.{sys.version_info.minor}", **installed}


def check_versions(expected: dict[str, str]) -> None:
    """ClusterError if this node has other versions than the one that started the work."""
    present = versions(*(name for name in expected if name != "Python"))
    for name, version in expected.items():
        if present[name] != version:
            raise ClusterError(
                f"Node {socket.gethostname()} has {name} {present[name]}, and {version} is needed, as where the command runs."
            )
