"""`pip install qualms` alone is enough for the client, and installs little."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qualms.entry import EXTRAS

ROOT = Path(__file__).parents[3]
HEAVY = set(EXTRAS) | {"qualms_training"}
OPTIONAL = {"rich"}
"""httpx imports it if it is installed, for its own command line"""

PREDICT = """
import json, sys, qualms
with qualms.Client(sys.argv[1]) as client:
    result = client.predict(sys.argv[2])
    results = client.predict([open(sys.argv[2], "rb").read()] * 3)
print(json.dumps([result.prediction.label, len(results), sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def run(python: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python without the packages of this environment."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, *arguments], capture_output=True, text=True, check=False, timeout=300, env=variables, cwd="/"
    )


def test_the_client_imports_no_package_of_the_service_or_of_training() -> None:
    program = "import sys, qualms; qualms.Client, qualms.AsyncClient, qualms.Result, qualms.ProblemError\n"
    program += "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "httpx" in loaded
    assert loaded & (HEAVY - OPTIONAL) == set()


@pytest.mark.slow
def test_the_client_works_in_an_environment_with_the_bare_install(
    tmp_path: Path, service_process: Callable[..., tuple[subprocess.Popen[str], str]], digit_file: Path
) -> None:
    assert run(sys.executable, "-m", "venv", str(tmp_path / "venv")).returncode == 0
    python = tmp_path / "venv" / "bin" / "python"
    installed = run(python, "-m", "pip", "install", "--quiet", str(ROOT))
    if installed.returncode:
        pytest.skip(f"pip cannot install the dependencies here: {installed.stderr.strip().splitlines()[-1]}")
    listed = run(python, "-m", "pip", "list", "--format=json", "--exclude", "pip", "--exclude", "setuptools")
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert {"qualms", "httpx", "pydantic"} <= names
    assert len(names) <= 15

    _, url = service_process()
    done = run(python, "-c", PREDICT, url, str(digit_file))
    assert done.returncode == 0, done.stderr
    label, count, loaded = json.loads(done.stdout)
    assert label
    assert count == 3
    assert HEAVY.isdisjoint(loaded)

    for command in (["serve"], ["serve", "--help"], ["score", "mnist"]):
        refused = run(python, "-m", "qualms", *command)
        assert refused.returncode == 2
        assert len(refused.stderr.splitlines()) == 1
        assert "pip install 'qualms[cpu]'" in refused.stderr
    refused = run(python, "-c", "import qualms; qualms.open_model('mnist')")
    assert "ExtraMissingError: qualms.open_model needs numpy: run pip install 'qualms[cpu]'." in refused.stderr
