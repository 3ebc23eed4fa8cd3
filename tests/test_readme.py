"""The commands, examples, links and tables of README.md and of the READMEs beside the code are true."""

import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from qualms.bundle.embedded import available as embedded_models
from qualms.settings import variables
from qualms_training.recipe import available as recipe_names
from qualms_training.recipe import load_recipe

ROOT = Path(__file__).parents[1]
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in (
        "README.md",
        "service/README.md",
        "service/CLIENT.md",
        "service/GUARANTEES.md",
        "training/README.md",
        "training/GUIDE.md",
    )
}
README = PAGES["README.md"]
STARTUP_SECONDS = 60.0


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


def command_lines(page: str) -> list[str]:
    """The commands of the page, each on one line if a backslash continues it on the next."""
    joined = (block.replace("\\\n", " ") for block in blocks(page, "sh"))
    lines = (line.partition("  #")[0].strip() for block in joined for line in block.splitlines())
    return [line for line in lines if line]


COMMANDS = [
    re.sub(r".*\.venv/bin/(?=qualms )", "", line)
    for page in PAGES
    for line in command_lines(page)
    if re.search(r"(^|\.venv/bin/)qualms ", line)
]


def qualms(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "qualms", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def folder_with_digits(tmp_path: Path) -> Path:
    """A working directory after the README's `qualms demo draw`."""
    command = next(line for line in COMMANDS if line.startswith("qualms demo draw"))
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return tmp_path


def test_the_readme_is_short_and_its_test_command_is_run_by_ci() -> None:
    assert len(README.splitlines()) <= 150
    command = next(line for line in command_lines("README.md") if "pytest" in line)
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_and_option_exists(line: str) -> None:
    words = shlex.split(line)[1:]
    command = words[: 2 if words[0] == "demo" else 1]  # only `demo` has subcommands
    helped = qualms(*command, "--help")
    assert helped.returncode == 0, helped.stderr
    for option in (word for word in words if word.startswith("--")):
        assert option in helped.stdout


@pytest.mark.slow
def test_the_curl_command_gets_an_answer_from_the_served_model(folder_with_digits: Path) -> None:
    """The request that `curl` makes, sent to the server that the first command starts, on a free port."""
    curl = shlex.split(next(line for line in command_lines("README.md") if line.startswith("curl ")))
    file, header, url = curl[curl.index("--data-binary") + 1], curl[curl.index("-H") + 1], curl[-1]
    name, value = header.split(": ")
    environment = {**os.environ, "QUALMS_PORT": "0", "QUALMS_DRAIN_SECONDS": "0"}
    command = [sys.executable, "-m", "qualms", "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            port = next(int(match[1]) for line in server.stdout if (match := re.search(r'"port":(\d+)', line)))
            body = (folder_with_digits / file.removeprefix("@")).read_bytes()
            request = urllib.request.Request(url.replace(":8000", f":{port}"), body, {name: value})
            reply = _retried(request)
        finally:
            server.terminate()
    for shown in re.findall(
        r'"(?:label|probability|entropy|p_value|precision)": [^,}]+', blocks("README.md", "json")[0]
    ):
        assert shown.replace('": ', '":') in reply


def _retried(request: urllib.request.Request) -> str:
    """The body of the first reply of status 200; the model may still be loading."""
    give_up = time.monotonic() + STARTUP_SECONDS
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                text: str = response.read().decode()
                return text
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)


def test_the_python_example_runs(folder_with_digits: Path) -> None:
    (example,) = blocks("README.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=folder_with_digits, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^class (\d)", done.stdout, re.MULTILINE) == ["3", "7"]
    assert len(done.stdout.splitlines()) == 8


def test_every_named_recipe_exists() -> None:
    named = {match[1] for page in PAGES.values() for match in re.finditer(r"qualms train (?!my|mine)([\w.-]+)", page)}
    assert "tiny" in named
    assert named <= {*recipe_names(), "RECIPE"}


def test_the_recipe_for_an_own_model_is_valid(tmp_path: Path) -> None:
    (block,) = blocks("training/README.md", "toml")
    (tmp_path / "my.toml").write_text(block, encoding="utf-8")
    recipe = load_recipe(str(tmp_path / "my.toml"))
    assert recipe.base.weights_saw == "all"
    assert recipe.uses_distance


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "docker/README.md", "training/results/README.md"])
def test_every_linked_file_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target


def test_every_module_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders = (ROOT, ROOT / "service" / "qualms", ROOT / "training" / "qualms_training")
    named = set(re.findall(r"`([\w./]+(?:\.py|/))`", text))
    assert len(named) > 50
    assert [name for name in sorted(named) if not any((folder / name).exists() for folder in folders)] == []


def test_the_settings_table_lists_every_variable_with_its_default() -> None:
    rows = re.findall(r"^\| `(QUALMS_\w+)` \| (?:`(.*)`)? ?\| (.*) \|$", PAGES["service/README.md"], re.MULTILINE)
    expected = [(*variable.partition("=")[::2], description) for variable, description in variables()]
    assert rows == expected


def test_three_lines_start_the_demo_with_its_dashboard() -> None:
    (block,) = (block.splitlines() for block in blocks("README.md", "sh") if "git clone" in block)
    assert len(block) == 3
    match = re.fullmatch(r"QUALMS_MODEL=(\w+) docker compose --profile (\w+) up", block[2])
    assert match
    assert match[1] in embedded_models()
    assert f"profiles: [{match[2]}]" in (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
