"""Benchmarks: which base, which columns, how many seeds, in one small TOML file each."""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from qualms.bundle.manifest import Name, first_problem
from qualms_training.errors import RecipeError
from qualms_training.paper.protocol import Protocol
from qualms_training.paper.registry import METHODS
from qualms_training.recipe import Count, Section


class Benchmark(Section):
    """A set of tables."""

    name: Name
    description: str
    paper_id: str | None = None
    """the in-distribution set's name in the paper's tables"""
    recipes: list[str] = Field(min_length=1)
    """whose base is judged; further recipes bring other forms of the meta-model for the same base"""
    protocols: list[Protocol] = Field(list(Protocol), min_length=1)
    columns: list[str]
    """OOD sets as the tables order them, also those that there may be no data for; `corrupted` is made"""
    other_ids: list[str] = Field(default_factory=list)
    """further in-distribution sets of the paper's table of transfer, by its names, that there are no data for"""
    seeds: Count = 5
    one_base: bool = False
    """every seed judges the base and the splits of the first one: a base that takes long is trained once"""
    whole_network_seeds: Count = 1
    """of the methods that train a network of their own"""
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """hyper-parameters that differ from a method's own, by method"""
    not_run: dict[str, str] = Field(default_factory=dict)
    """methods that this benchmark leaves out, with the reason that the tables give"""

    def under(self, protocol: str) -> "Benchmark":
        """The same under one protocol alone."""
        return self.model_copy(update={"protocols": [Protocol(protocol)]})


def available() -> list[str]:
    """Names of the benchmarks that come with the package."""
    folder = resources.files("qualms_training.paper") / "definitions"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_benchmark(name_or_path: str) -> Benchmark:
    """A benchmark of the package by name, or any TOML file by path."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"Benchmark {name_or_path} cannot be read: {error}.") from None
    elif name_or_path in available():
        folder = resources.files("qualms_training.paper") / "definitions"
        text = (folder / f"{name_or_path}.toml").read_text(encoding="utf-8")
    else:
        raise RecipeError(
            f"There is no benchmark {name_or_path!r}; give one of {', '.join(available())}, or a path to a .toml file."
        )
    return parse_benchmark(text, name_or_path)


def parse_benchmark(text: str, source: str) -> Benchmark:
    """Check a benchmark's text; RecipeError names what is wrong."""
    try:
        found = Benchmark.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"Benchmark {source} is not valid TOML: {error}.") from None
    except ValidationError as error:
        raise RecipeError(f"Benchmark {source} is not usable: {first_problem(error)}.") from None
    for key in (*found.methods, *found.not_run):
        if key not in METHODS:
            raise RecipeError(f"Benchmark {source} names the method {key!r}; accepted are {', '.join(METHODS)}.")
    return found
