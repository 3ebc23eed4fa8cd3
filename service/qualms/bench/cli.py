"""The command `qualms bench`; its dependencies are imported only when it runs."""

from typing import Annotated, Literal

import typer
from rich.console import Console

Pictures = Literal["digits", "colour", "photo-224", "photo-640", "photo-12mp"]
"""as in qualms.bench.load.sample_images, which is not imported here, because it needs Pillow"""
_COMPARISON = ("bundle", "seconds", "rounds", "concurrency", "profile", "instructions", "cores", "pid")
"""options that the overload and the attacks do not have"""
_NOT_WHEN_SCORING = (
    *_COMPARISON,
    "startup",
    "overload",
    "attack",
    "deadline",
    "photos",
    "photo_deadline",
    "attack_seconds",
)
_NOT_AT_START = ("bundle", "concurrency", "profile", "instructions", "cores", "pid", "overload", "attack")


def bench(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL|URL]",
            help="Path of a bundle, name of an embedded model, or http:// URL of a service on this machine.",
        ),
    ] = None,
    bundle: Annotated[
        str | None, typer.Option(help="With a URL: the bundle served there, needed for the comparison.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds per measurement.", min=0.1)] = 5.0,
    rounds: Annotated[
        int, typer.Option(help="Measurements per server and concurrency; medians are printed.", min=1)
    ] = 3,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            help="Number of simultaneous requests; repeat for more values.",
            min=1,
            max=4096,
            show_default="1, 8, 64; for photo-12mp 1, 8",
        ),
    ] = None,
    pictures: Annotated[
        Pictures,
        typer.Option(
            help="Images to send: digits in the model's size and colour, 32 × 32 RGB images of 2.6 kB (PNG), or photographs "
            "of 224 × 224, 640 × 480 or 4000 × 3000 pixels (JPEG), which need longer --seconds."
        ),
    ] = "digits",
    profile: Annotated[bool, typer.Option("--profile", help="Also print the time spent in each stage.")] = False,
    instructions: Annotated[
        bool,
        typer.Option(
            "--instructions",
            help="Also count instructions per request with valgrind, if the processor's counters cannot be read. "
            "Takes minutes.",
        ),
    ] = False,
    cores: Annotated[
        int,
        typer.Option(
            help="Number of cores of the server; the limit is that of one core. If none is left, the load generator "
            "shares them.",
            min=1,
            max=1024,
        ),
    ] = 1,
    pid: Annotated[
        int | None,
        typer.Option(
            help="With a URL: process of the service, if it does not listen itself, as in a container.", min=1
        ),
    ] = None,
    startup: Annotated[
        bool,
        typer.Option(
            "--startup",
            help="Instead: compare start time and memory with the plain server, with photo-640 unless --pictures is "
            "given, at concurrency 1 and 16.",
        ),
    ] = False,
    client: Annotated[
        bool,
        typer.Option(
            "--client", help="Instead: compare the Python clients with wrk, in a loop and with 32 concurrent requests."
        ),
    ] = False,
    access: Annotated[
        bool,
        typer.Option(
            "--access", help="Instead: compare the service with keys and with TLS with the service without, with wrk."
        ),
    ] = False,
    overload: Annotated[
        float | None,
        typer.Option(help="Instead: offer 3 times the capacity for this many seconds.", min=1.0, max=3600.0),
    ] = None,
    deadline: Annotated[
        float, typer.Option(help="With --overload: deadline of each request in seconds.", min=0.01, max=60)
    ] = 0.5,
    photos: Annotated[
        float | None,
        typer.Option(
            help="With --overload: share of requests that are photographs of 12 megapixels, for example 0.1; capacity is "
            "that of the mix.",
            min=0.001,
            max=0.999,
        ),
    ] = None,
    photo_deadline: Annotated[
        float, typer.Option(help="With --photos: deadline of each photograph in seconds.", min=0.1, max=60)
    ] = 10.0,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Instead: attack a service beside a well-behaved client; exit code 1 if an attack succeeds. Repeat "
            "for more attacks; `all` runs all, `list` prints their names.",
        ),
    ] = None,
    attack_seconds: Annotated[float, typer.Option(help="With --attack: seconds per attack.", min=1.0, max=600.0)] = 8.0,
    score: Annotated[
        bool,
        typer.Option(
            "--score",
            help="Instead: compare `qualms score` with a plain loop, on one and two cores; exit code 1 if a killed and "
            "continued run differs from another.",
        ),
    ] = False,
    files: Annotated[int, typer.Option(help="With --score: number of files.", min=1000, max=10_000_000)] = 10_000,
) -> None:
    """Compare the service with the machine's limit and a plain FastAPI server; without MODEL, for the default model."""
    if score:
        from qualms.bench.scoring import run_scoring

        _refuse(context, "--score", *_NOT_WHEN_SCORING)
        if not run_scoring(target, files=files, pictures=pictures).resumed_equal:
            raise typer.Exit(1)
        return
    _require(context, "files", "--score")
    if startup:
        from qualms.bench.startup import run_startup

        _refuse(context, "--startup", *_NOT_AT_START)
        run_startup(
            target,
            pictures=pictures if _is_given(context, "pictures") else "photo-640",
            seconds=seconds,
            rounds=rounds,
        )
        return
    if client:
        from qualms.bench.client_rates import run_client_rates

        _refuse(context, "--client", *_NOT_AT_START)
        run_client_rates(target, seconds=seconds, rounds=rounds, pictures=pictures)
        return
    if access:
        from qualms.bench.access import run_access

        _refuse(context, "--access", *_NOT_AT_START)
        run_access(target, seconds=seconds, rounds=rounds, pictures=pictures)
        return
    if overload is not None:
        _refuse(context, "--overload", *_COMPARISON, "attack", "attack_seconds")
        _overload(context, target, overload, deadline, photos, photo_deadline, pictures)
        return
    if attack:
        from qualms.bench.attacks.report import print_list
        from qualms.bench.attacks.run import failed, run_attacks

        _refuse(context, "--attack", *_COMPARISON, "deadline", "photos", "photo_deadline")
        if "list" in attack:
            print_list(Console())
        elif failed(run_attacks(attack, target, seconds=attack_seconds, pictures=pictures)):
            raise typer.Exit(1)
        return
    for option in ("deadline", "photos", "photo_deadline"):
        _require(context, option, "--overload")
    _require(context, "attack_seconds", "--attack")
    from qualms.bench.comparison import compare

    compare(
        target,
        bundle=bundle,
        seconds=seconds,
        rounds=rounds,
        concurrencies=concurrency or None,
        pictures=pictures,
        profile=profile,
        instructions=instructions,
        cores=cores,
        pid=pid,
    )


def _overload(
    context: typer.Context,
    target: str | None,
    seconds: float,
    deadline: float,
    photos: float | None,
    photo_deadline: float,
    pictures: Pictures,
) -> None:
    """Overload by small requests, or by a mix of them with photographs."""
    from qualms.bench.servers.processes import BenchError

    if pictures not in ("digits", "colour"):
        raise BenchError(
            f"--pictures {pictures} and --overload cannot be combined; digits and colour can, and --photos adds photographs."
        )
    if photos is None:
        from qualms.bench.overload import run_overload

        _require(context, "photo_deadline", "--photos")
        run_overload(target, seconds=seconds, deadline=deadline, pictures=pictures)
        return
    from qualms.bench.mixed_overload import run_mixed_overload

    run_mixed_overload(
        target, seconds=seconds, photos=photos, deadline=deadline, photo_deadline=photo_deadline, pictures=pictures
    )


def _refuse(context: typer.Context, mode: str, *options: str) -> None:
    """Raise BenchError if one of these options was given, because `mode` does not have it."""
    from qualms.bench.servers.processes import BenchError

    for option in options:
        if _is_given(context, option):
            name = option.replace("_", "-")
            raise BenchError(f"The options --{name} and {mode} cannot be combined; leave one of them out.")


def _require(context: typer.Context, option: str, mode: str) -> None:
    """Raise BenchError if this option was given, because it belongs to `mode`."""
    from qualms.bench.servers.processes import BenchError

    if _is_given(context, option):
        raise BenchError(f"The option --{option.replace('_', '-')} is accepted only together with {mode}.")


def _is_given(context: typer.Context, option: str) -> bool:
    """Whether the option was given on the command line."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"
