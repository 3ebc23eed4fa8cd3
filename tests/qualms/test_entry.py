"""Signals that arrive while `qualms` imports its modules. A module that blocks when imported keeps the process there."""

import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from qualms.entry import serve_settings

TIMEOUT = 30.0
MODULE = [sys.executable, "-m", "qualms"]
SCRIPT = [sys.executable, "-c", "import sys; from qualms.entry import main; sys.exit(main())"]
"""the same as the installed script"""
PID_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]
Process = subprocess.Popen[str]
Start = Callable[..., Process]


@pytest.fixture
def importing(tmp_path: Path) -> Iterator[Start]:
    """(command, module) → process of the command while it imports the module."""
    with ExitStack() as stack:

        def start(command: list[str], module: str) -> Process:
            blocking = "import sys; print('importing', flush=True); sys.stdin.read(); raise ImportError\n"
            (tmp_path / f"{module}.py").write_text(blocking)
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONPATH": str(tmp_path)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    preexec_fn=_default_sigint,  # noqa: PLW1509  # it only sets a signal
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "importing\n"
            return process

        yield start


def _default_sigint() -> None:
    """A shell ignores SIGINT for commands in the background, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def finished(process: Process) -> tuple[int, str]:
    """Exit code and stderr."""
    _, stderr = process.communicate(timeout=TIMEOUT)
    return process.returncode, stderr


def test_the_installed_script_uses_the_entry_point() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert tomllib.loads(project.read_text("utf-8"))["project"]["scripts"] == {"qualms": "qualms.entry:main"}


@pytest.mark.parametrize(
    ("command", "module", "number"),
    [
        (SCRIPT, "pydantic", signal.SIGTERM),
        (SCRIPT, "uvicorn", signal.SIGINT),
        (MODULE, "pydantic", signal.SIGINT),
        (MODULE, "uvicorn", signal.SIGTERM),
    ],
)
def test_serve_exits_with_0_on_a_signal_during_its_imports(
    importing: Start, command: list[str], module: str, number: signal.Signals
) -> None:
    process = importing([*command, "serve"], module)
    process.send_signal(number)
    assert finished(process) == (0, "")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a PID namespace needs root and unshare"
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_exits_with_0_on_a_signal_as_pid_1(importing: Start, number: signal.Signals) -> None:
    outer = importing([*PID_NAMESPACE, *SCRIPT, "serve"], "pydantic")
    os.kill(only_child(outer.pid), number)
    assert finished(outer) == (0, "")


def only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    status = Path(f"/proc/{child}/status").read_text().splitlines()
    (namespaced,) = (line.split()[-1] for line in status if line.startswith("NSpid:"))
    assert namespaced == "1"
    return int(child)


def test_sigterm_ends_other_commands_as_usual(importing: Start) -> None:
    process = importing([*SCRIPT, "inspect"], "numpy")
    process.send_signal(signal.SIGTERM)
    assert finished(process) == (-signal.SIGTERM, "")


def test_ctrl_c_interrupts_other_commands_with_130(importing: Start) -> None:
    process = importing([*SCRIPT, "inspect"], "numpy")
    process.send_signal(signal.SIGINT)
    code, stderr = finished(process)
    assert (code, stderr.strip()) == (130, "qualms: interrupted; run the same command again to continue.")


# Serving without the command line


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ([], {}),
        (["model.onnx"], {"model": "model.onnx"}),
        (["--port", "80", "a=b.onnx", "--host=::1"], {"model": "a=b.onnx", "host": "::1", "port": "80"}),
    ],
)
def test_plain_arguments_of_serve_are_settings(arguments: list[str], settings: dict[str, str]) -> None:
    assert serve_settings(arguments) == settings


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--port"], ["--port", "x"], ["--port=-1"], ["a", "b"], ["--host", "--port"], ["--prot", "1"], ["-h"]],
)
def test_all_other_arguments_of_serve_are_left_to_the_command_line(arguments: list[str]) -> None:
    assert serve_settings(arguments) is None


def test_serving_does_not_import_the_command_line() -> None:
    code = "import sys, qualms.entry, qualms.web.lifecycle; print(*sorted({'typer', 'rich', 'qualms.cli'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT)
    assert run.stdout.strip() == ""
