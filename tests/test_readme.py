"""The README says only what is true: its commands are those that exist, and its test command is what CI runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
LINES = [line.partition("  #")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]


def qualms(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from qualms.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    command = next(line for line in LINES if "pytest" in line)
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", [line for line in LINES if re.match(r"(\.venv/bin/)?qualms ", line)])
def test_every_command_and_option_of_the_readme_exists(line: str) -> None:
    words = shlex.split(line)[1:]
    command = words[: 2 if words[0] == "demo" else 1]  # the only one that has commands of its own
    helped = qualms(*command, "--help")
    assert helped.returncode == 0, helped.stderr
    for option in (word for word in words if word.startswith("--")):
        assert option in helped.stdout


def test_every_recipe_the_readme_names_exists() -> None:
    from qualms_training.recipe import available

    named = {line.split()[2] for line in LINES if re.match(r"(\.venv/bin/)?qualms train (?!my)", line)}
    assert named <= set(available())
    assert "tiny" in named


def test_the_recipe_that_the_readme_shows_is_one(tmp_path: Path) -> None:
    from qualms_training.recipe import load_recipe

    (block,) = re.findall(r"```toml\n(.*?)```", README, flags=re.DOTALL)
    (tmp_path / "my.toml").write_text(block, encoding="utf-8")
    recipe = load_recipe(str(tmp_path / "my.toml"))
    assert recipe.base.weights_saw == "all"
    assert recipe.fuses


def test_every_file_the_readme_links_to_exists() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_from_the_clone_to_a_moving_dashboard_it_is_three_lines() -> None:
    """The last one names a model, a profile and nothing else that is not there."""
    from qualms.bundle.embedded import available

    (block,) = (block.splitlines() for block in BLOCKS if "git clone" in block)
    assert len(block) == 3
    found = re.fullmatch(r"QUALMS_MODEL=(\w+) docker compose --profile (\w+) up", block[2])
    assert found
    assert found[1] in available()
    assert f"profiles: [{found[2]}]" in (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
