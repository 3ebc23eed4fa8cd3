import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from qualms import cli, entry
from qualms.bench import comparison, overload
from qualms.bundle import file
from qualms.bundle.manifest import Manifest
from qualms.errors import DataError
from qualms.settings import variables
from qualms.web import lifecycle

VERSION = f"qualms {importlib.metadata.version('qualms')}\n"


def run(*arguments: object, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command in a new interpreter in which some modules cannot be imported."""
    program = f"""
import sys

class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {without!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing)

from qualms.cli import main
main()
"""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs `main` in this process, without the commands of training; returns exit code and stderr."""

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
        monkeypatch.setattr(sys, "argv", ["qualms", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, capsys.readouterr().err

    return call


# The installed command


@pytest.mark.parametrize(
    "command",
    [[Path(sysconfig.get_path("scripts")) / "qualms"], [sys.executable, "-m", "qualms"]],
    ids=["script", "-m"],
)
def test_the_script_and_the_module_print_the_version(command: list[str]) -> None:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == VERSION


def test_the_help_lists_the_commands_of_training() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert {"inspect", "train", "calibrate"} <= set(re.findall(r"^\W*([a-z-]+) ", done.stdout, re.MULTILINE))


def test_a_file_that_is_not_a_bundle_is_reported_in_one_line_with_exit_code_2(tmp_path: Path, graph: bytes) -> None:
    path = tmp_path / "not-a-bundle.onnx"
    path.write_bytes(graph)
    done = run("inspect", path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"qualms: {path} is not a Qualms bundle: it has no manifest.\n"


def test_inspect_works_without_any_extra(bundle_file: Path) -> None:
    done = run("inspect", bundle_file, without=("onnxruntime", "torch", "onnx", "scipy", "sklearn", "matplotlib"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "tiny 1.2" in done.stdout


def test_a_missing_extra_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run("train", "tiny", "--out", out, without=("torch",))
    assert done.returncode == 2
    assert done.stderr == "qualms: This command needs torch: run pip install 'qualms[train]'.\n"
    assert not out.exists()


# Commands, run in this process


@pytest.mark.parametrize("more", [[], ["inspect", "nothing.onnx"]])
def test_the_version_is_printed_even_if_a_command_follows(more: list[str]) -> None:
    result = CliRunner().invoke(cli.app, ["--version", *more])
    assert (result.exit_code, result.stdout) == (0, VERSION)


def test_inspect_json_prints_the_whole_manifest(bundle_file: Path, manifest: Manifest) -> None:
    result = CliRunner().invoke(cli.app, ["inspect", str(bundle_file), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(manifest.to_json())
    assert Manifest.from_json(result.stdout).to_json() == manifest.to_json()


def test_inspect_prints_the_digest_of_the_file(bundle_file: Path) -> None:
    result = CliRunner().invoke(cli.app, ["inspect", str(bundle_file)])
    assert result.exit_code == 0
    assert file.open_bundle(bundle_file).digest in result.stdout


def test_an_unknown_option_gives_exit_code_2(main: Callable[..., tuple[int, str]]) -> None:
    code, stderr = main("inspect", "--jsn")
    assert code == 2
    assert "--jsn" in stderr


@pytest.mark.parametrize("name", ["missing.onnx", "folder"])
def test_a_path_that_is_not_a_file_is_reported_in_one_line(
    main: Callable[..., tuple[int, str]], tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    code, stderr = main("inspect", tmp_path / name)
    assert code == 2
    assert re.fullmatch(rf"qualms: .*{re.escape(str(tmp_path / name))}.*\.\n", stderr)


@pytest.mark.parametrize("columns", [80, 100])
def test_the_help_of_serve_lists_every_setting_with_its_default(columns: int) -> None:
    result = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    rows = [line.strip("│ ") for line in result.stdout.splitlines()]
    names = max(len(variable) for variable, _ in variables()) + 1
    described = " ".join(row[names:] if row.startswith("QUALMS_") else row for row in rows)
    for variable, description in variables():
        assert any(row.startswith(f"{variable} ") for row in rows), variable
        assert description in described
    assert max(map(len, result.stdout.splitlines())) <= columns


def test_serve_rejects_an_empty_host(main: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "serve", lambda settings: None)
    code, stderr = main("serve", "--host", "")
    assert code == 2
    assert stderr.startswith("qualms: The setting host is ''; it should be an address, ")


@pytest.mark.parametrize(
    ("option", "value"),
    [("bundle", "mnist"), ("seconds", 5), ("rounds", 3), ("concurrency", 1), ("profile", None)],
)
def test_options_that_overload_ignores_are_rejected_even_with_their_default_value(
    main: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, option: str, value: object
) -> None:
    monkeypatch.setattr(overload, "run_overload", lambda *_, **__: None)
    given = [f"--{option}", *([] if value is None else [value])]
    assert main("bench", "mnist", "--overload", 1, *given) == (
        2,
        f"qualms: The options --{option} and --overload cannot be combined; leave one of them out.\n",
    )


def test_deadline_without_overload_is_rejected(
    main: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "compare", lambda *_, **__: None)
    stderr = "qualms: The option --deadline is accepted only together with --overload.\n"
    assert main("bench", "mnist", "--deadline", 0.5) == (2, stderr)


# Errors in any command


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (DataError("The folder 'x' is empty."), 2, "qualms: The folder 'x' is empty.\n"),
        (
            ModuleNotFoundError("No module named 'scipy.ndimage'", name="scipy.ndimage"),
            2,
            "qualms: This command needs scipy: run pip install 'qualms[train]'.\n",
        ),
        (
            ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime"),
            2,
            "qualms: This command needs onnxruntime: run pip install 'qualms[cpu]'.\n",
        ),
        (KeyboardInterrupt(), 130, "qualms: interrupted; run the same command again to continue.\n"),
        (typer.Exit(3), 3, ""),
    ],
)
def test_user_errors_are_printed_as_one_line_with_an_exit_code(
    main: Callable[..., tuple[int, str]],
    bundle_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    stderr: str,
) -> None:
    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr(file, "open_bundle", fail)
    assert main("inspect", bundle_file) == (code, stderr)


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'nmupy'", name="nmupy"), ZeroDivisionError()])
def test_unexpected_errors_are_raised(bundle_file: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr(file, "open_bundle", fail)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(sys, "argv", ["qualms", "inspect", os.fspath(bundle_file)])
    with pytest.raises(type(error)):
        cli.main()


def test_an_extra_missing_while_commands_are_registered_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Entry:
        def load(self) -> None:
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: (Entry(),))
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err == "qualms: This command needs torch: run pip install 'qualms[train]'.\n"


def test_every_package_of_the_extras_is_in_the_table() -> None:
    """An optional package that is not in the table would cause a traceback if it is not installed."""

    def normalised(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    modules: dict[str, set[str]] = {}
    for module, distributions in importlib.metadata.packages_distributions().items():
        for distribution in distributions:
            modules.setdefault(normalised(distribution), set()).add(module)
    requirements = importlib.metadata.requires("qualms") or []
    packages = {
        extra: {
            normalised(re.split(r"[^\w.-]", line)[0])
            for line in requirements
            if re.search(rf"extra == ['\"]{extra}['\"]", line)
        }
        for extra in ("service", "cpu", "train", "parquet")
    }
    assert all(packages.values())
    # The extras with a runtime or training include the service's packages; without these, `cpu` is the extra to install.
    for extra, names in packages.items():
        for name in names - (packages["service"] if extra != "service" else set()):
            advice = "cpu" if extra == "service" else extra
            assert any(entry.EXTRAS.get(module) == advice for module in modules[name]), name
