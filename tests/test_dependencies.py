"""Every imported module belongs to a dependency in pyproject.toml, and each of these has a lower bound and a reason."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = ROOT / "pyproject.toml"
OURS = {"qualms", "qualms_training", "tests", "docker"}
SERVICE = ("cpu", "parquet", "ray")
TRAINING = (*SERVICE, "train", "transfer")
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[\w,-]+\])?(?P<versions>[^;]*)")
"""a requirement such as `uvicorn[standard]>=0.53,<1; python_version >= '3.11'`"""


def project() -> dict[str, Any]:
    document: dict[str, Any] = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    return document


def requirements() -> list[str]:
    """All requirements, except those that name another extra of this project."""
    lists = [project()["dependencies"], *project()["optional-dependencies"].values()]
    return [entry for entries in lists for entry in entries if split(entry)[0] != "qualms"]


def split(requirement: str) -> tuple[str, str]:
    """The normalised name and the version range of a requirement."""
    match = REQUIREMENT.match(requirement)
    assert match, requirement
    return normalise(match["name"]), match["versions"].strip()


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def listed(extras: tuple[str, ...]) -> set[str]:
    """The distributions that are installed with these extras."""
    entries, rest = list(project()["dependencies"]), list(extras)
    for extra in rest:
        entries += project()["optional-dependencies"][extra]
        rest += [
            match[1] for entry in entries if (match := re.fullmatch(r"qualms\[(\w+)\]", entry)) and match[1] not in rest
        ]
    return {split(entry)[0] for entry in entries}


def third_party_imports(source: str) -> Iterator[str]:
    """The top-level modules that a file imports, without ours and the standard library's."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if top not in OURS and top not in sys.stdlib_module_names:
                yield top


def unlisted_imports(folder: Path, distributions: set[str]) -> list[str]:
    """`file: module` for each imported module of a distribution that is not among these."""
    owners = packages_distributions()
    return [
        f"{path.relative_to(folder)}: {module}"
        for path in sorted(folder.rglob("*.py"))
        for module in third_party_imports(path.read_text(encoding="utf-8"))
        if distributions.isdisjoint(map(normalise, owners.get(module, [module])))
    ]


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("service", SERVICE),
        ("training", TRAINING),
        ("docker", (*TRAINING, "dev")),
        ("tests", (*TRAINING, "dev")),
    ],
)
def test_every_imported_module_is_listed_as_a_dependency(folder: str, extras: tuple[str, ...]) -> None:
    assert unlisted_imports(ROOT / folder, listed(extras)) == []


def test_an_import_that_is_not_listed_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "import os, numpy as np\nfrom PIL import Image\nfrom . import sibling\ndef f():\n    import yaml.nodes\n"
    )
    assert unlisted_imports(tmp_path, {"numpy", "pillow"}) == ["module.py: yaml"]


@pytest.mark.parametrize("requirement", requirements())
def test_every_dependency_has_a_lower_bound(requirement: str) -> None:
    assert re.search(r"(>=|==)\s*\d", split(requirement)[1]), f"{requirement} has no lower bound"


@pytest.mark.parametrize("requirement", requirements())
def test_every_dependency_has_a_comment_with_its_reason(requirement: str) -> None:
    lines = PYPROJECT.read_text(encoding="utf-8").splitlines()
    comments = [
        line.partition(f'"{requirement}"')[2].partition("#")[2].strip() for line in lines if requirement in line
    ]
    assert any(comments), f"{requirement} has no comment that gives its reason"
