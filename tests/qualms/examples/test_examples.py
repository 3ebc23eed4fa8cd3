"""Every file of service/examples/ runs against a real service."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qualms
from qualms.replies import Ood, Trust

EXAMPLES = Path(__file__).parents[3] / "service" / "examples"
RUNNERS: dict[str, tuple[str, ...]] = {".py": (sys.executable,), ".sh": ("sh",), ".mjs": ("node",)}


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = RUNNERS[Path(name).suffix]
    needed = "curl" if command == ("sh",) else command[0]
    if shutil.which(needed) is None:
        pytest.skip(f"{needed} is not installed")
    return subprocess.run(
        [*command, str(EXAMPLES / name), *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture
def files(tmp_path: Path, encode: Callable[..., bytes]) -> list[Path]:
    """A drawn 3, a drawn 7, and noise."""
    command = [sys.executable, "-m", "qualms", "demo", "draw", "--out", str(tmp_path / "digits"), "--count", "10"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    noise = tmp_path / "noise.png"
    noise.write_bytes(encode(np.random.default_rng(0).integers(0, 256, (28, 28), np.uint8)))
    return [tmp_path / "digits" / "3" / "000003.png", tmp_path / "digits" / "7" / "000007.png", noise]


@pytest.fixture
def url(service_process: Callable[..., tuple[Any, str]]) -> str:
    return service_process("mnist")[1]


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    examples = [file.name for file in EXAMPLES.iterdir() if file.suffix in RUNNERS]
    assert len(examples) >= 5
    assert [name for name in examples if f'"{name}"' not in source] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["predict.py", "predict_async.py", "predict.mjs"])
def test_an_example_prints_class_flag_and_trust(name: str, url: str, files: list[Path]) -> None:
    done = run(name, url, *files)
    assert done.returncode == 0, done.stderr
    lines = [line.lower().split() for line in done.stdout.splitlines()]
    assert [line[1:3] for line in lines[:2]] == [["class", "3"], ["class", "7"]]
    assert [line[-3] for line in lines] == ["false", "false", "true"]
    assert [line[-1] for line in lines] == ["true", "true", "false"]


@pytest.mark.slow
def test_the_curl_example_prints_one_reply_per_line(url: str, files: list[Path]) -> None:
    done = run("predict.sh", url, *files)
    assert done.returncode == 0, done.stderr
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert [reply["results"][0]["ood"]["flag"] for reply in replies] == [False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["predict.sh", "predict.mjs"])
def test_an_example_reports_the_sentence_of_a_problem(name: str, url: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no image")
    done = run(name, url, tmp_path / "text")
    assert done.returncode != 0
    assert "are not an image in an accepted format" in done.stdout + done.stderr


@pytest.mark.slow
def test_the_flag_decides_between_accept_and_abstain(url: str, files: list[Path]) -> None:
    done = run("act_on_flag.py", url, *files)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["accept", "accept", "abstain"]


@pytest.mark.slow
def test_the_program_in_the_documentation_of_the_client_runs(url: str, files: list[Path]) -> None:
    page = (EXAMPLES.parent / "CLIENT.md").read_text(encoding="utf-8")
    program = page.partition("```python\n")[2].partition("```")[0].replace("http://127.0.0.1:8000", url)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=files[0].parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["3", *"0123456789"]


@pytest.mark.parametrize(
    ("flag", "accept", "expected"),
    [(False, True, "accept"), (False, False, "person"), (False, None, "person"), (True, False, "abstain")],
)
def test_a_prediction_that_is_neither_flagged_nor_trusted_goes_to_a_person(
    flag: bool, accept: bool | None, expected: str
) -> None:
    spec = importlib.util.spec_from_file_location("act_on_flag", EXAMPLES / "act_on_flag.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    trust = Trust.model_construct(accept=accept)  # type: ignore[call-arg]  # the example reads nothing else
    result = qualms.Result.model_construct(ood=Ood.model_construct(flag=flag), trust=trust)  # type: ignore[call-arg]
    assert module.action(result) == expected
