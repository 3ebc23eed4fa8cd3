"""The `qualms` command: its own subcommands, and those that other packages register.

Training registers its commands in the entry-point group `qualms.commands`, so this package never imports training.
"""

from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from qualms.access.cli import app as keys
from qualms.bench.cli import bench
from qualms.demo.cli import app as demo
from qualms.entry import reported_errors
from qualms.score.cli import score
from qualms.signing.cli import sign, signing_key, verify

app = typer.Typer(
    name="qualms",
    help="Calibrated uncertainty for image classifiers: train, inspect, serve, score, benchmark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(demo)
app.add_typer(signing_key)
app.add_typer(keys)


class _ServeCommand(TyperCommand):
    """Adds all settings to the end of the help; the settings are imported only when the help is printed."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the usual help, then a table of all QUALMS_* variables."""
        from qualms.settings import variables

        super().format_help(ctx, formatter)
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column(no_wrap=True, style="bold cyan")
        for variable, description in variables():
            table.add_row(Text(variable), Text(description))
        Console().print(
            Panel(table, title="Environment variables and their defaults", title_align="left", border_style="dim")
        )


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qualms {metadata.version('qualms')}")
        raise typer.Exit


@app.callback()
def _options(
    # Handled in a callback, because the body of this function runs only if a command is given.
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


@app.command()
def inspect(
    model: Annotated[str | None, typer.Argument(help="Path of a bundle or name of an embedded model.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole manifest as JSON.")] = False,
) -> None:
    """Print the contents of a bundle's manifest; without MODEL, those of the embedded default."""
    from qualms.bundle.embedded import resolve_model
    from qualms.bundle.file import open_bundle
    from qualms.inspection import print_bundle
    from qualms.terminal import default_console

    bundle = open_bundle(resolve_model(model))
    if json:
        typer.echo(bundle.manifest.model_dump_json(indent=2))
    else:
        print_bundle(bundle, default_console())


@app.command(cls=_ServeCommand)
def serve(
    model: Annotated[str | None, typer.Argument(help="Path of a bundle or name of an embedded model.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on (QUALMS_HOST).", show_default="127.0.0.1")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (QUALMS_PORT).", show_default="8000")] = None,
) -> None:
    """Serve a model over HTTP; without MODEL, the embedded default. All other settings are QUALMS_* variables."""
    from qualms.settings import load_settings
    from qualms.web.lifecycle import serve as run

    run(load_settings(model=model, host=host, port=port))


app.command()(bench)
app.command()(score)
app.command()(sign)
app.command()(verify)


def main() -> None:
    """Run the command line."""
    with reported_errors():
        for entry in metadata.entry_points(group="qualms.commands"):
            entry.load()(app)
        app()
