"""The entry point of the `qualms` command.

It handles signals before the slow imports: the kernel discards SIGTERM to the first process of a container, PID 1, until the
process has a handler, so a container that is stopped while it starts would run until it is killed. It also starts the
service without the command line, whose imports take a tenth of the service's memory and of its time to start.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from qualms.errors import ExtraMissingError, QualmsError

_SERVICE = "cryptography fastapi fastapi_offline httptools numpy orjson PIL prometheus_client pydantic_settings pyspng "
_SERVICE += "python_multipart rich simplejpeg starlette typer uvicorn uvloop"

EXTRAS = {
    **dict.fromkeys(_SERVICE.split(), "cpu"),
    "onnxruntime": "cpu",
    "pyarrow": "parquet",
    "ray": "ray",
    "torch": "train",
    "torchvision": "train",
    "onnx": "train",
    "onnxscript": "train",
    "sklearn": "train",
    "scipy": "train",
    "matplotlib": "train",
    "mpmath": "train",
    "filelock": "train",
    "safetensors": "train",
}
"""the extra that installs each optional module"""

_INTERRUPTED = 130
"""exit code after Ctrl-C, by convention 128 + SIGINT; typer uses it too, but prints no message"""


def main() -> None:
    """Run the command line. `qualms serve` exits with code 0 on SIGTERM and SIGINT until the server handles them."""
    if sys.argv[1:2] == ["serve"]:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _exit)
        settings = serve_settings(sys.argv[2:])
        if settings is not None:
            _serve(settings)
            return
    with reported_errors():
        from qualms.cli import main as run  # noqa: PLC0415  # takes tenths of a second
    run()


def serve_settings(arguments: Sequence[str]) -> dict[str, str] | None:
    """The settings in the arguments of `qualms serve`; None if the command line has to handle them, for example --help."""
    settings: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, is_pair, value = rest.pop(0).partition("=")
        if name in ("--host", "--port"):
            if not is_pair:
                if not rest:
                    return None
                value = rest.pop(0)
            key = name.removeprefix("--")
        else:
            key, value = "model", name + is_pair + value
        if key in settings or value.startswith("-") or (key == "port" and not value.isdecimal()):
            return None
        settings[key] = value
    return settings


@contextmanager
def reported_errors() -> Iterator[None]:
    """Print a QualmsError as one sentence on stderr, and exit with code 2."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        _fail(ExtraMissingError(missing_extra("This command", module)))
    except QualmsError as error:
        _fail(error)
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code != _INTERRUPTED:
            raise
        print("qualms: interrupted; run the same command again to continue.", file=sys.stderr)
        sys.exit(_INTERRUPTED)


def missing_extra(thing: str, module: str) -> str:
    """One sentence: what needs this module, and how to install it."""
    return f"{thing} needs {module}: run pip install 'qualms[{EXTRAS[module]}]'."


def _serve(settings: dict[str, str]) -> None:
    with reported_errors():
        from qualms.settings import load_settings  # noqa: PLC0415  # after the signal handlers
        from qualms.web.lifecycle import serve  # noqa: PLC0415

        serve(load_settings(**settings))


def _fail(error: QualmsError) -> None:
    print(f"qualms: {error}", file=sys.stderr)
    sys.exit(2)


def _exit(number: int, frame: object) -> None:
    """Exit at once: an exception could be caught by a module that is being imported."""
    os._exit(0)
