"""The commands of `qualms demo`; their dependencies are imported only when they run."""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from qualms.demo.traffic import Tally

app = typer.Typer(
    name="demo",
    help="Draw digits and send them to a service.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
def draw(
    out: Annotated[Path, typer.Option("--out", help="Folder to create; it gets one subfolder of PNG files per digit.")],
    count: Annotated[int, typer.Option(min=10, help="Total number of images.")] = 5000,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; equal seeds give equal images.")] = 0,
) -> None:
    """Write drawn digits to a folder with one subfolder per class, as `qualms calibrate` expects it."""
    from qualms.demo.digits import write_folder

    write_folder(out, count, seed)
    typer.echo(f"wrote {count:,} images to {out}")


@app.command()
def traffic(
    url: Annotated[str, typer.Option(help="URL of the service.")] = "http://127.0.0.1:8000",
    rate: Annotated[float, typer.Option(min=0.1, max=200, help="Maximum number of images per second.")] = 20.0,
    period: Annotated[
        float, typer.Option(min=1, help="Seconds from the start of one drift to the start of the next.")
    ] = 900.0,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop after this many seconds.", show_default="never")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; equal seeds give equal images.")] = 1,
    as_sent: Annotated[
        str, typer.Option("--as-sent", help="Encoding of the images, for example jpeg:50 or resize:2+webp:80.")
    ] = "png",
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with an API key of the service.", show_default="the variable QUALMS_API_KEY; without it, no key"
        ),
    ] = None,
) -> None:
    """Send drawn digits to a service with the model `demo`; once per period, the images drift and recover."""
    import numpy as np

    from qualms.demo.traffic import Sender, TrafficError, read_api_key, stream
    from qualms.images.encodings import parse_encoding

    # The kernel does not end process 1 of a container on SIGTERM unless a handler is installed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    rng = np.random.default_rng((seed, 1))  # independent of the drawn images
    send = Sender(url, parse_encoding(as_sent), rng, read_api_key(api_key_file, os.environ))
    replies = stream(send, rate=rate, period=period, seconds=seconds, seed=seed, report=_report)
    if not replies:
        raise TrafficError(
            f"{url} returned no prediction for any image{send.reason}; start a service there, or give another URL with --url."
        )


def _report(dose: float, tally: "Tally") -> None:
    failures = f", {tally.failed} failed" if tally.failed else ""
    typer.echo(f"dose {dose:.2f}: {tally.sent} images, {tally.flagged} flagged{failures}")
    sys.stdout.flush()
