"""The commands of `qualms keys`."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="keys",
    help="Add, list and remove the API keys of a service. It reads the file again within about a second.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

File = Annotated[
    Path, typer.Option("--file", envvar="QUALMS_KEYS_FILE", help="The file of keys.", show_default="QUALMS_KEYS_FILE")
]


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the key in logs and metrics.")],
    file: File,
    rate: Annotated[
        float | None, typer.Option(help="Maximum number of requests per second.", show_default="no limit")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Maximum number of simultaneous requests.", show_default="no limit")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="predict|read|metrics",
            help="What the key may be used for: predictions; models, status and documentation; /metrics. Repeat for more.",
            show_default="everything",
        ),
    ] = None,
) -> None:
    """Make a key and print its token. It is printed only once, and the file has only its SHA-256."""
    from qualms.access.keys import SCOPES, Key
    from qualms.access.keys_file import add_key

    scopes = tuple(sorted(set(only), key=lambda scope: (*SCOPES, scope).index(scope))) if only else SCOPES
    typer.echo(add_key(file, lambda digest: Key(name, digest, rate, concurrency, scopes)))


@app.command("list")
def list_keys(file: File) -> None:
    """Print the name, the limits and the uses of each key, without its digest."""
    from qualms.access.keys import SCOPES
    from qualms.access.keys_file import read_keys

    for key in read_keys(file):
        limits = [f"rate={key.rate:g}"] if key.rate is not None else []
        limits += [f"concurrency={key.concurrency}"] if key.concurrency is not None else []
        limits += [f"only={','.join(key.only)}"] if key.only != SCOPES else []
        typer.echo(" ".join([key.name, *limits]))


@app.command()
def remove(name: Annotated[str, typer.Argument(help="Name of the key.")], file: File) -> None:
    """Remove a key. Requests with it get 401 within about a second; those in progress are finished."""
    from qualms.access.keys_file import remove_key

    remove_key(file, name)
    typer.echo(f"removed {name} from {file}")
