"""qualms never imports training dependencies, and qualms_training imports only the shared packages of qualms."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import qualms
import qualms_training

FORBIDDEN = {"torch", "torchvision", "sklearn", "scipy", "onnx", "qualms_training"}
SHARED = {"bundle", "cluster", "decisions", "errors", "files", "images", "machine", "terminal"}
"""the packages and modules of qualms that training may import"""
SCORING = {
    "bundle",
    "cluster",
    "decisions",
    "errors",
    "files",
    "images",
    "machine",
    "model",
    "replies",
    "score",
    "terminal",
}
"""the packages and modules of qualms that `qualms score` may import: it needs no server"""


def imported(source: str) -> set[str]:
    """All names in import statements at any depth; `from a import b` gives a.b."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return modules


def files_of(package: object) -> list[Path]:
    files = [file for folder in getattr(package, "__path__", ()) for file in Path(folder).rglob("*.py")]
    assert len(files) > 10
    return files


def names(file: Path) -> set[str]:
    return imported(file.read_text(encoding="utf-8"))


def test_every_kind_of_import_statement_is_recognised() -> None:
    source = """
import torch.nn as nn, os
from qualms_training import recipe
from qualms.bundle.file import open_bundle
from . import sibling
def late():
    if True:
        import scipy
"""
    assert imported(source) == {
        "torch.nn",
        "os",
        "qualms_training.recipe",
        "qualms.bundle.file.open_bundle",
        "..sibling",
        "scipy",
    }


def test_qualms_has_no_import_statement_for_training_dependencies() -> None:
    forbidden_imports = {
        file: sorted(bad)
        for file in files_of(qualms)
        if (bad := {name for name in names(file) if name.partition(".")[0] in FORBIDDEN})
    }
    assert forbidden_imports == {}


def test_training_imports_only_the_shared_packages_of_qualms() -> None:
    forbidden_imports = {
        file: sorted(bad)
        for file in files_of(qualms_training)
        if (
            bad := {
                name for name in names(file) if name.partition(".")[0] == "qualms" and name.split(".")[1] not in SHARED
            }
        )
    }
    assert forbidden_imports == {}


def test_scoring_imports_nothing_of_the_server() -> None:
    files = [file for file in files_of(qualms) if file.parent.name == "score"]
    assert len(files) > 10
    imports = {name.removeprefix("qualms.") for file in files for name in names(file) if name.startswith("qualms.")}
    assert {name for name in imports if not any(f"{name}.".startswith(f"{one}.") for one in SCORING)} == set()


def test_importing_all_modules_of_qualms_loads_no_training_dependencies() -> None:
    program = """
import importlib, json, pkgutil, sys
import qualms
def fail(name):
    raise
modules = [info.name for info in pkgutil.walk_packages(qualms.__path__, "qualms.", onerror=fail)]
for name in modules:
    importlib.import_module(name)
print(json.dumps([modules, sorted({name.partition(".")[0] for name in sys.modules})]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        pytest.fail(done.stderr)
    modules, loaded = json.loads(done.stdout)
    assert {"qualms.cli", "qualms.inspection", "qualms.bundle.file", "qualms.images.preprocess"} <= set(modules)
    assert FORBIDDEN.isdisjoint(loaded)
