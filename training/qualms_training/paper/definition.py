"""Benchmark definitions: the base, the columns, the methods' settings and the seeds, in one TOML file per benchmark."""

from importlib import resources
from typing import Any

from pydantic import Field, ValidationError

from qualms.bundle.manifest import first_problem
from qualms.bundle.parts import Name
from qualms_training.errors import RecipeError
from qualms_training.files import load_toml, toml_names
from qualms_training.paper.evaluation_protocol import Protocol
from qualms_training.paper.registry import METHODS
from qualms_training.recipe import Count, Section

_FOLDER = resources.files("qualms_training.paper") / "definitions"


class Benchmark(Section):
    """The definition of one set of tables."""

    name: Name
    description: str
    paper_id: str | None = None
    """name of the in-distribution set in the paper's tables"""
    recipes: list[str] = Field(min_length=1)
    """recipes with the base to evaluate; further recipes add other forms of the meta-model for the same base"""
    protocols: list[Protocol] = Field(list(Protocol), min_length=1)
    columns: list[str]
    """OOD sets in the order of the tables, including sets without data; `corrupted` is made from the test set"""
    other_ids: list[str] = Field(default_factory=list)
    """further in-distribution sets of the paper's table of transfer, by its names, for which there are no data"""
    seeds: Count = 5
    one_base: bool = False
    """whether all seeds use the base and the splits of seed 0, so that an expensive base is trained only once"""
    whole_network_seeds: Count = 1
    """number of seeds for the methods that train a network of their own"""
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """hyper-parameters that differ from a method's defaults, by method"""
    not_run: dict[str, str] = Field(default_factory=dict)
    """methods that this benchmark omits, with the reason to print in the tables"""

    def under(self, protocol: str) -> "Benchmark":
        """A copy of the benchmark with one protocol only."""
        return self.model_copy(update={"protocols": [Protocol(protocol)]})


def available() -> list[str]:
    """Names of the benchmarks that come with the package."""
    return toml_names(_FOLDER)


def load_benchmark(name_or_path: str) -> Benchmark:
    """A benchmark of the package by name, or any TOML file by path."""
    try:
        benchmark = Benchmark.model_validate(load_toml(name_or_path, _FOLDER, "benchmark"))
    except ValidationError as error:
        raise RecipeError(f"Benchmark {name_or_path} is not valid: {first_problem(error)}.") from None
    for key in (*benchmark.methods, *benchmark.not_run):
        if key not in METHODS:
            raise RecipeError(f"Benchmark {name_or_path} names the method {key!r}; accepted are {', '.join(METHODS)}.")
    return benchmark
