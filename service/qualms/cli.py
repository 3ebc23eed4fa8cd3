"""The `qualms` command: its own subcommands, and those that other packages register as entry points.

Training joins through the entry-point group `qualms.commands`, so that this package never imports it.
"""

import sys
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from qualms.demo.cli import app as demo
from qualms.errors import ExtraMissingError, QualmsError

_EXTRAS = {
    "onnxruntime": "cpu",
    "torch": "train",
    "torchvision": "train",
    "onnx": "train",
    "onnxscript": "train",
    "sklearn": "train",
    "scipy": "train",
    "matplotlib": "train",
    "mpmath": "train",
}
"""which extra brings which module"""

_INTERRUPTED = 130
"""the exit code of Ctrl-C, by convention 128 + SIGINT; typer exits with it too, but without a word"""

app = typer.Typer(
    name="qualms",
    help="Tell every application when its image classifier does not know.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(demo)


class _ServeCommand(TyperCommand):
    """Its help ends with every variable; only who asks for it waits for the settings to be imported."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help of any command, and then what is special to this one."""
        from qualms.settings import variables

        super().format_help(ctx, formatter)
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column(no_wrap=True, style="bold cyan")
        for variable, description in variables():
            table.add_row(Text(variable), Text(description))
        Console().print(Panel(table, title="Variables and their defaults", title_align="left", border_style="dim"))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qualms {metadata.version('qualms')}")
        raise typer.Exit


@app.callback()
def _options(
    # A callback of its own: the function's body would run only once a command is given as well.
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


@app.command()
def inspect(
    model: Annotated[str | None, typer.Argument(help="A bundle's path, or an embedded model's name.")] = None,
    json: Annotated[bool, typer.Option("--json", help="The whole manifest as JSON instead.")] = False,
) -> None:
    """Show what a bundle says about itself, readably; without MODEL, the embedded default."""
    from qualms.bundle.embedded import resolve
    from qualms.bundle.file import open_bundle
    from qualms.inspection import show

    bundle = open_bundle(resolve(model))
    if json:
        typer.echo(bundle.manifest.model_dump_json(indent=2))
    else:
        show(bundle, Console())


@app.command(cls=_ServeCommand)
def serve(
    model: Annotated[str | None, typer.Argument(help="A bundle's path, or an embedded model's name.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on (QUALMS_HOST).", show_default="127.0.0.1")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (QUALMS_PORT).", show_default="8000")] = None,
) -> None:
    """Answer POST /predict; without MODEL, with the embedded default. Everything else is set by QUALMS_* variables."""
    from qualms.settings import load_settings
    from qualms.web.lifecycle import serve as run

    run(load_settings(model=model, host=host, port=port))


@app.command()
def bench(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL|URL]",
            help="A bundle's path, an embedded model's name, or http://… of a service that runs on this machine.",
        ),
    ] = None,
    bundle: Annotated[
        str | None, typer.Option(help="With a URL: the bundle that is served there, to compare with its limit.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long each server is kept busy at a time.", min=0.1)] = 5.0,
    rounds: Annotated[int, typer.Option(help="How often all take their turn; medians are shown.", min=1)] = 3,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(help="Requests at a time; may be given again.", min=1, max=4096, show_default="1, 8, 64"),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also show where the time goes.")] = False,
    overload: Annotated[
        float | None,
        typer.Option(help="Instead: offer 3 times what the service can do, for so many seconds.", min=1.0, max=3600.0),
    ] = None,
    deadline: Annotated[
        float, typer.Option(help="With --overload: seconds in which each request is to be answered.", min=0.01, max=60)
    ] = 0.5,
) -> None:
    """Compare the service with the machine's limit and with a plain FastAPI server; without MODEL, the default's."""
    from qualms.bench.processes import BenchError

    if overload is not None:
        from qualms.bench.overload import overload as attack

        if idle := _first_given(context, "bundle", "seconds", "rounds", "concurrency", "profile"):
            raise BenchError(f"The option --{idle} means nothing to --overload; leave one of the two out.")
        attack(target, seconds=overload, deadline=deadline)
        return
    if _first_given(context, "deadline"):
        raise BenchError("The option --deadline is for an overload; give --overload too.")
    from qualms.bench.comparison import CONCURRENCIES
    from qualms.bench.comparison import bench as run

    run(
        target,
        bundle=bundle,
        seconds=seconds,
        rounds=rounds,
        concurrencies=concurrency or CONCURRENCIES,
        profile=profile,
    )


def _first_given(context: typer.Context, *options: str) -> str | None:
    """The first of these options that is on the command line, if any is."""
    sources = {option: context.get_parameter_source(option) for option in options}
    return next((option for option, source in sources.items() if source and source.name == "COMMANDLINE"), None)


def main() -> None:
    """Run the command line; a user's mistake is one sentence on stderr and exit code 2."""
    try:
        for entry in metadata.entry_points(group="qualms.commands"):
            entry.load()(app)
        app()
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRAS:
            raise
        _fail(ExtraMissingError(f"This command needs {module}: run pip install 'qualms[{_EXTRAS[module]}]'."))
    except QualmsError as error:
        _fail(error)
    except (KeyboardInterrupt, SystemExit) as leaving:
        if isinstance(leaving, SystemExit) and leaving.code != _INTERRUPTED:
            raise
        typer.echo("qualms: interrupted; run the same command again to go on.", err=True)
        sys.exit(_INTERRUPTED)


def _fail(error: QualmsError) -> None:
    typer.echo(f"qualms: {error}", err=True)
    sys.exit(2)
