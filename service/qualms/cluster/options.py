"""The options of commands that can run on a Ray cluster."""

from typing import Annotated, Literal, TypeAlias

import typer

from qualms.cluster.connection import ClusterError, ClusterOptions

EngineName: TypeAlias = Literal["local", "ray"]
Engine = Annotated[EngineName, typer.Option(help="Where to compute: on this machine, or on a Ray cluster.")]
Address = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster, HOST:PORT, or auto for the one of this machine.",
        show_default="RAY_ADDRESS, or a cluster that is started here",
    ),
]
Cpus = Annotated[float, typer.Option(help="With --engine ray: cores for each model, which has as many threads.")]
Gpus = Annotated[float, typer.Option(help="With --engine ray: GPUs for each model, or the share of one.")]


def cluster_options(engine: EngineName, address: str | None, cpus: float, gpus: float) -> ClusterOptions | None:
    """The options of the cluster; None for this machine. ClusterError for values that are not accepted."""
    if engine == "local":
        if address is not None or cpus != 1 or gpus != 0:
            raise ClusterError("--address, --cpus-per-model and --gpus-per-model need --engine ray.")
        return None
    if not 0 < cpus <= 1024 or (cpus > 1 and cpus != int(cpus)):
        raise ClusterError(
            f"--cpus-per-model is {cpus:g}; accepted are shares of one core and whole numbers up to 1024."
        )
    if not 0 <= gpus <= 64 or (gpus > 1 and gpus != int(gpus)):
        raise ClusterError(f"--gpus-per-model is {gpus:g}; accepted are shares of one GPU and whole numbers up to 64.")
    return ClusterOptions(address, cpus, gpus)
