"""The command `qualms score`; its dependencies are imported only when it runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console


def score(
    model: Annotated[str, typer.Argument(help="Path of a bundle or name of an embedded model.")],
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Image files, folders, globs in quotes, lists of paths (.txt, .lst, or - for standard input) and archives "
            "(.zip, .tar, .tar.gz, .tar.bz2, .tar.xz).",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output file: .csv, .jsonl, .ndjson or .parquet.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an output that exists, and discard another unfinished run.")
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Scoring processes, each with a model of its own on one core; the output does not depend on it.",
            min=1,
            max=1024,
            show_default="one per core",
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
        Path | None, typer.Option(help="Also write a page with the summary and the most uncertain images.")
    ] = None,
) -> None:
    """Score the images in folders, lists and archives; one row each in FILE. Exit code 1 if a file could not be read."""
    from qualms.bundle.embedded import resolve_model
    from qualms.bundle.file import open_bundle
    from qualms.decisions.operating_point import OperatingPoint
    from qualms.inference.cpu import available_cores
    from qualms.score.run import score as run
    from qualms.score.scorer import ScoreOptions

    point = OperatingPoint(score, target_fpr, guarantee, target_risk, coverage)
    console = Console(stderr=True)
    outcome = run(
        open_bundle(resolve_model(model)),
        paths,
        out,
        ScoreOptions(point, alpha),
        target_fdr=target_fdr,
        html=html,
        overwrite=overwrite,
        processes=processes or available_cores(),
        console=console,
    )
    Console().print(outcome.summary.as_table())
    if outcome.others:
        console.print(
            f"{outcome.others:,} {'file' if outcome.others == 1 else 'files'} in folders and archives left out: no ending of "
            "images.",
            highlight=False,
            soft_wrap=True,
        )
    if outcome.unreadable:
        typer.echo(
            f"qualms: {outcome.unreadable:,} of {outcome.files:,} files could not be read, the first is "
            f"{outcome.first_error}",
            err=True,
        )
        raise typer.Exit(1)
