"""The command `qualms score`; its dependencies are imported only when it runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from qualms.cluster.options import Address, Cpus, Engine, Gpus
from qualms.terminal import default_console


def score(
    model: Annotated[str, typer.Argument(help="Path of a bundle or name of an embedded model.")],
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Image files, folders, globs in quotes, lists of paths (.txt, .lst, or - for standard input), archives "
            "(.zip, .tar, .tar.gz, .tar.bz2, .tar.xz) and URIs of files and folders (s3://, gs://, file://).",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output file: .csv, .jsonl, .ndjson or .parquet.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an output that exists, and discard another unfinished run.")
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Scoring processes, each with a model of its own; the output does not depend on it.",
            min=1,
            max=100_000,
            show_default="one per core, or as many as fit into the cluster",
        ),
    ] = None,
    alpha: Annotated[bool, typer.Option("--alpha", help="Add all entries of α to each row.")] = False,
    score: Annotated[str | None, typer.Option(help="Score that flags; by default the model's.")] = None,
    target_fpr: Annotated[float | None, typer.Option(help="Target rate of flagged in-distribution images.")] = None,
    guarantee: Annotated[
        Literal["confident", "marginal", "by-class"] | None, typer.Option(help="Guarantee of the flag.")
    ] = None,
    target_risk: Annotated[float | None, typer.Option(help="Target error rate of accepted predictions.")] = None,
    coverage: Annotated[float | None, typer.Option(help="Add a prediction set of this coverage to each row.")] = None,
    target_fdr: Annotated[
        float | None,
        typer.Option(
            help="Add the column flag_fdr: flags with at most this share of in-distribution images among them, on average "
            "over calibration sets."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write a page with the summary and the most uncertain images, .html or .htm."),
    ] = None,
    engine: Engine = "local",
    address: Address = None,
    cpus_per_model: Cpus = 1,
    gpus_per_model: Gpus = 0,
) -> None:
    """Score the images in folders, lists and archives; one row each in FILE. Exit code 1 if a file could not be read."""
    from functools import partial

    from qualms.bundle.embedded import resolve_model
    from qualms.bundle.file import open_bundle
    from qualms.cluster.options import cluster_options
    from qualms.decisions.operating_point import OperatingPoint
    from qualms.machine.cpu import available_cores
    from qualms.score.report.summary_table import printable
    from qualms.score.run import score as run
    from qualms.score.scorer import ScoreOptions

    cluster = cluster_options(engine, address, cpus_per_model, gpus_per_model)
    point = OperatingPoint(score, target_fpr, guarantee, target_risk, coverage)
    console = Console(stderr=True)
    bundle = open_bundle(resolve_model(model))
    start = partial(
        run,
        bundle,
        paths,
        out,
        target_fdr=target_fdr,
        html=html,
        overwrite=overwrite,
        console=console,
    )
    if cluster is None:
        outcome = start(ScoreOptions(point, alpha), processes=processes or available_cores())
    else:
        from qualms.cluster.connection import connected_if
        from qualms.score.ray_executor import RayExecutor

        with connected_if(cluster):  # before anything is written
            executor = partial(RayExecutor, digest=bundle.digest, cluster=cluster)
            options = ScoreOptions(point, alpha, cluster.threads, cuda=cluster.gpus > 0)
            outcome = start(options, processes=processes or 0, executor=executor)
    default_console().print(outcome.summary.as_table())
    if outcome.others:
        console.print(
            f"{outcome.others:,} {'file' if outcome.others == 1 else 'files'} in folders and archives left out: no ending of "
            "images.",
            highlight=False,
            soft_wrap=True,
        )
    if outcome.first_error is not None:
        typer.echo(
            f"qualms: {outcome.unreadable:,} of {outcome.files:,} files could not be read, the first is "
            f"{printable(outcome.first_error)}",
            err=True,
        )
        raise typer.Exit(1)
