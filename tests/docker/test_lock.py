"""The locks of the images agree with pyproject.toml, offline; `python -m docker.lock --check` also resolves them again."""

import tomllib
from typing import Any

import pytest
from docker.lock import (
    BUILD,
    EXTRAS,
    FOLDER,
    ROOT,
    LockError,
    check_names_no_place,
    disagreements,
    parse,
    requirements,
)
from packaging.requirements import Requirement

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCKS = (*EXTRAS, BUILD)
HASH = f"    --hash=sha256:{'0' * 64}"


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def lock(*packages: str) -> str:
    """A lock of packages such as `a==1 # via b`."""
    lines: list[str] = []
    for package in packages:
        pin, _, comment = package.partition(" # ")
        lines += [f"{pin} \\", HASH, *([f"    # {comment}"] if comment else [])]
    return "\n".join(lines) + "\n"


def test_there_is_no_other_lock() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.txt" for name in LOCKS}


@pytest.mark.parametrize("name", LOCKS)
def test_the_lock_satisfies_every_requirement_and_lists_nothing_else(name: str) -> None:
    needed = requirements(PROJECT, name)
    assert len(needed) >= (1 if name == BUILD else 19)
    assert disagreements(text_of(name), needed) == []


@pytest.mark.parametrize("name", LOCKS)
def test_the_lock_names_no_index_folder_or_local_build(name: str) -> None:
    check_names_no_place(text_of(name))


def test_each_image_has_its_own_runtime() -> None:
    packages = {name: set(parse(text_of(name))) for name in EXTRAS}
    assert "onnxruntime" in packages["cpu"] & packages["training"]
    assert {"onnxruntime-gpu", "nvidia-cudnn-cu13"} <= packages["gpu"]
    assert "onnxruntime" not in packages["gpu"]
    assert {"torch", "onnx"} <= packages["training"] - packages["cpu"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (lock("a==2", "b==1 # via a"), []),
        (lock("a==2", "b==1 # via a", "c==1 # via b"), []),
        (lock("a==1"), ["a 1 does not satisfy a>=2"]),
        (lock("b==1 # via a"), ["a>=2 is missing"]),
        (lock("a==2", "c==1"), ["c is not required"]),
        (lock("a==2", "c==1 # via d", "d==1 # via c"), ["c is not required", "d is not required"]),
        ("a==2 \\\n    # via x\n", ["a 2 has no hash"]),
    ],
)
def test_disagreements_are_found(text: str, expected: list[str]) -> None:
    assert disagreements(text, [Requirement("a>=2")]) == expected


@pytest.mark.parametrize(
    "text", ["a>=2\n", "a==2\n", "-r other.txt\n", "a==2 \\\n    --hash=md5:00\n", "a @ file:///a.whl\n"]
)
def test_lines_other_than_packages_with_hashes_are_refused(text: str) -> None:
    with pytest.raises(LockError, match=r"^line \d is "):
        parse(text)


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://packages.invalid/simple",
        "--find-links wheels",
        "a @ https://packages.invalid/a.whl",
        "    # via /build/pyproject.toml",
        "a==2+cpu \\",
    ],
)
def test_places_and_local_builds_are_found(line: str) -> None:
    with pytest.raises(LockError, match="names a place or a local build"):
        check_names_no_place(f"{lock('b==1')}{line}\n")
