"""`qualms demo`: draw digits, and send them to a service; what they need is imported when they run."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from qualms.demo.traffic import Tally

app = typer.Typer(
    name="demo",
    help="Digits drawn by our own code, and traffic made of them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
def draw(
    out: Annotated[Path, typer.Option("--out", help="Folder to fill with a folder of PNG files a digit.")],
    count: Annotated[int, typer.Option(min=10, help="How many images in all.")] = 5000,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same images.")] = 0,
) -> None:
    """Write drawn digits as a folder of class folders, as `qualms calibrate` takes it."""
    from qualms.demo.folder import write_folder

    write_folder(out, count, seed)
    typer.echo(f"wrote {count:,} images to {out}")


@app.command()
def traffic(
    url: Annotated[str, typer.Option(help="The service.")] = "http://127.0.0.1:8000",
    rate: Annotated[float, typer.Option(min=0.1, max=200, help="Most images a second.")] = 20.0,
    period: Annotated[float, typer.Option(min=1, help="Seconds from one drift to the next.")] = 900.0,
    seconds: Annotated[float | None, typer.Option(min=0, help="Stop after so long.", show_default="never")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same images.")] = 1,
) -> None:
    """Send drawn digits to a service that serves `demo`; once a period they drift and come back."""
    from qualms.demo.traffic import Sender, TrafficError, stream

    # As process 1 of a container, Python would not end on SIGTERM by itself.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    answered = stream(Sender(url), rate=rate, period=period, seconds=seconds, seed=seed, report=_report)
    if not answered:
        raise TrafficError(f"{url} answered none of the images; start a service there, or name another with --url.")


def _report(dose: float, tally: "Tally") -> None:
    unanswered = f", {tally.failed} without an answer" if tally.failed else ""
    typer.echo(f"dose {dose:.2f}: {tally.sent} images, {tally.flagged} flagged{unanswered}")
    sys.stdout.flush()
