"""Lock the Python packages of the images: exact versions with the SHA-256 of every file that may be installed.

python -m docker.lock               after a change of pyproject.toml; versions that still fit are kept
python -m docker.lock --upgrade     the newest versions that pyproject.toml allows
python -m docker.lock --check       compare the locks with pyproject.toml, then resolve again: fails if a file would change

The locks are requirements files of pip in docker/requirements/. They name neither an index nor a folder: those are settings of pip
and uv on the machine that resolves or installs, and the hashes make sure that all of them deliver the same files.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docker" / "requirements"
EXTRAS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "gpu": ("gpu",), "training": ("cpu", "train")}
"""the extras in each image"""
BUILD = "build"
"""the lock of what builds our own wheel"""
PLATFORM = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28")
"""of the images; the hashes of other platforms' files are in the locks, too"""


class LockError(Exception):
    """A lock does not agree with pyproject.toml, cannot be resolved, or would name a host or a folder."""


@dataclass
class Locked:
    """One package of a lock."""

    version: Version
    hashes: list[str] = field(default_factory=list)
    required_by: list[str] = field(default_factory=list)
    """names of packages, and others that stand for pyproject.toml"""


def requirements(project: dict[str, Any], name: str) -> list[Requirement]:
    """The requirements of pyproject.toml that a lock resolves, for Linux."""
    if name == BUILD:
        return [Requirement(line) for line in project["build-system"]["requires"]]
    tables, ours = project["project"]["optional-dependencies"], project["project"]["name"]

    def walk(lines: list[str]) -> Iterator[Requirement]:
        for line in lines:
            requirement = Requirement(line)
            if requirement.name == ours:
                for extra in requirement.extras:
                    yield from walk(tables[extra])
            elif requirement.marker is None or requirement.marker.evaluate({"platform_system": "Linux"}):
                yield requirement

    return [*walk(project["project"]["dependencies"]), *walk([line for one in EXTRAS[name] for line in tables[one]])]


def parse(text: str) -> dict[str, Locked]:
    """The packages of a lock by name."""
    packages: dict[str, Locked] = {}
    last: Locked | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if match := re.fullmatch(r"([a-z0-9-]+)(?:\[[a-z0-9,-]+\])?==([\w.!+]+)(?: ; [^\\]+)? \\", line):
            last = packages[match[1]] = Locked(Version(match[2]))
        elif last and words and re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", words[0]) and words[1:] in ([], ["\\"]):
            last.hashes.append(words[0].removeprefix("--hash="))
        elif last and words and words[0] == "#":
            named = " ".join(words[1:]).removeprefix("via").strip()
            last.required_by += [named] if named else []
        else:
            raise LockError(f"line {number} is {line!r}, and packages with hashes are accepted")
    return packages


def disagreements(text: str, needed: Iterable[Requirement]) -> list[str]:
    """Why a lock does not agree with the requirements; empty if it does. Nothing is resolved."""
    packages = parse(text)
    direct = {canonicalize_name(requirement.name): requirement for requirement in needed}
    problems = [f"{name} {one.version} has no hash" for name, one in packages.items() if not one.hashes]
    for name, requirement in direct.items():
        if name not in packages:
            problems.append(f"{requirement} is missing")
        elif not requirement.specifier.contains(packages[name].version, prereleases=True):
            problems.append(f"{name} {packages[name].version} does not satisfy {requirement}")
    reached: set[str] = {*direct}
    while more := {name for name, one in packages.items() if name not in reached and reached & {*one.required_by}}:
        reached |= more
    return problems + [f"{name} is not required" for name in packages if name not in reached]


def check_names_no_place(text: str) -> None:
    """Raise LockError if a lock names an index, a folder, or a build that only a private index has."""
    for number, line in enumerate(text.splitlines(), start=1):
        if re.search(r"://|^-|^\s+--(?!hash=)|@ |file:|[=\s]/", line) or re.match(r"[^#]*==[^\s]*\+", line):
            raise LockError(f"line {number} names a place or a local build: {line.strip()!r}")


def resolve(name: str, previous: str) -> str:
    """The text of a lock; versions of `previous` are kept where they fit."""
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    options = ["--generate-hashes", "--no-header", "--no-config", "--only-binary", ":all:", *PLATFORM]
    if name == BUILD:
        lines = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
        source, given = ["-"], "\n".join(lines)
    else:
        source, given = [*(word for extra in EXTRAS[name] for word in ("--extra", extra)), "pyproject.toml"], ""
    # Wheels of a local folder may have the same version as those of the index, and other hashes.
    environment = {key: value for key, value in os.environ.items() if key != "UV_FIND_LINKS"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "lock.txt"
        output.write_text(previous, encoding="utf-8")
        command = [str(uv), "pip", "compile", "--quiet", *options, "--output-file", str(output), *source]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, input=given, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise LockError(f"uv cannot resolve it: {done.stderr.strip()}")
        return output.read_text(encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write or check the locks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docker.lock", description=(__doc__ or "").partition("\n")[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a lock would change")
    mode.add_argument("--upgrade", action="store_true", help="use the newest versions that pyproject.toml allows")
    options = parser.parse_args(arguments)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    code = 0
    for name in (*EXTRAS, BUILD):
        path = FOLDER / f"{name}.txt"
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        try:
            problems = disagreements(before, requirements(project, name)) if options.check else []
            after = before if problems else resolve(name, "" if options.upgrade else before)
            check_names_no_place(after)
            problems += [] if options.check else disagreements(after, requirements(project, name))
        except LockError as error:
            problems, after = [str(error)], before
        if options.check and after != before:
            problems.append("resolving it again gives another file")
        if problems:
            print(f"{path.relative_to(ROOT)}: {'; '.join(problems)}.", file=sys.stderr)
            code = 1
        elif not options.check:
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_suffix(".part")
            temporary.write_text(after, encoding="utf-8")
            temporary.replace(path)
            print(f"{path.relative_to(ROOT)}: {len(parse(after))} packages")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
