"""Benchmarks are loaded from TOML files, and errors name the invalid key."""

from pathlib import Path

import pytest

from qualms_training.cli import ProtocolName
from qualms_training.errors import RecipeError
from qualms_training.paper.definition import Benchmark, available, load_benchmark
from qualms_training.paper.evaluation_protocol import Protocol
from qualms_training.recipe import load_recipe

GOOD = 'name = "x"\ndescription = "."\nrecipes = ["tiny"]\ncolumns = ["textures"]\n'


@pytest.mark.parametrize("name", available())
def test_every_benchmark_of_the_package_loads(name: str) -> None:
    benchmark = load_benchmark(name)
    assert benchmark.name == name
    assert [load_recipe(recipe).name for recipe in benchmark.recipes] == benchmark.recipes


def load_text(text: str, folder: Path) -> Benchmark:
    (folder / "own.toml").write_text(text)
    return load_benchmark(str(folder / "own.toml"))


def test_a_benchmark_can_be_loaded_by_path(tmp_path: Path) -> None:
    assert load_text(GOOD, tmp_path).columns == ["textures"]


def test_a_benchmark_can_be_limited_to_one_protocol(tmp_path: Path) -> None:
    benchmark = load_text(GOOD, tmp_path)
    assert benchmark.protocols == ["fair", "as-published"]
    assert benchmark.under("fair").protocols == ["fair"]
    assert {name.value for name in ProtocolName} == {protocol.value for protocol in Protocol}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "colums = []\n", "colums"),
        ("name = ", "not valid TOML"),
        (GOOD + "[methods.knnn]\nk = 3\n", "'knnn'; accepted are base,"),
        (GOOD + '[not_run]\nmagic = "none"\n', "'magic'"),
        (GOOD.replace('["tiny"]', "[]"), "recipes"),
        (GOOD + 'protocols = ["wild"]\n', r"protocols\.0: Input should be 'fair' or 'as-published'"),
    ],
)
def test_an_invalid_benchmark_is_rejected_with_the_key(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        load_text(text, tmp_path)


@pytest.mark.parametrize("name", ["nothing", "nothing.toml"])
def test_a_missing_benchmark_is_reported_in_one_sentence(name: str) -> None:
    with pytest.raises(RecipeError, match=r"nothing.*\.$"):
        load_benchmark(name)
