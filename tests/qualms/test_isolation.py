"""The service runs without what training needs, and training knows of the service only the bundle."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import qualms
import qualms_training

FORBIDDEN = {"torch", "torchvision", "sklearn", "scipy", "onnx", "qualms_training"}


SHARED = {"bundle", "decisions", "errors", "files", "images"}
"""the packages and modules of qualms that training builds on"""


def imported(source: str) -> set[str]:
    """Every module an import statement names, at any depth; `from a import b` may mean a.b and counts as it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return found


def files_of(package: object) -> list[Path]:
    files = [file for folder in getattr(package, "__path__", ()) for file in Path(folder).rglob("*.py")]
    assert len(files) > 10
    return files


def names(file: Path) -> set[str]:
    return imported(file.read_text(encoding="utf-8"))


def test_the_scan_sees_every_kind_of_import() -> None:
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


def test_no_import_statement_of_the_service_names_what_training_needs() -> None:
    found = {
        file: sorted(bad)
        for file in files_of(qualms)
        if (bad := {name for name in names(file) if name.partition(".")[0] in FORBIDDEN})
    }
    assert found == {}


def test_training_imports_nothing_of_the_service_but_the_bundle() -> None:
    found = {
        file: sorted(bad)
        for file in files_of(qualms_training)
        if (
            bad := {
                name for name in names(file) if name.partition(".")[0] == "qualms" and name.split(".")[1] not in SHARED
            }
        )
    }
    assert found == {}


def test_importing_all_of_the_service_loads_nothing_training_needs() -> None:
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
