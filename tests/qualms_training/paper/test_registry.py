"""The registry has every method of the paper's tables, and methods check their settings."""

import csv
import json
from dataclasses import asdict
from importlib import resources
from typing import Any

import pytest

from qualms_training.errors import RecipeError
from qualms_training.paper.method import ImageMethod, PostHocMethod
from qualms_training.paper.registry import METHODS, PAPER_SCORE_NAMES, methods_for


def test_every_row_of_the_papers_tables_has_a_method() -> None:
    text = (resources.files("qualms_training.paper") / "published.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    ours = {(task, name) for entry in METHODS.values() for task, name in entry.paper.items()}
    assert {(row["task"], row["method"]) for row in rows} == ours
    assert {row["score"] for row in rows} - {""} == set(PAPER_SCORE_NAMES.values())


def test_transfer_has_only_methods_that_learn_the_classes_of_the_data_and_the_control() -> None:
    assert list(methods_for(transfer=True)) == ["fine-tune", "fine-tune-meta", "ours-pooled", "pixels"]
    others = methods_for(transfer=False)
    assert set(METHODS) - set(others) == {"fine-tune", "fine-tune-meta"}


@pytest.mark.parametrize("key", METHODS)
def test_every_method_can_be_built_with_its_defaults(key: str) -> None:
    assert isinstance(METHODS[key].build(key, {}, "mine"), PostHocMethod | ImageMethod)


def test_an_unknown_setting_is_rejected_by_name() -> None:
    with pytest.raises(RecipeError, match="'mine': method 'knn' has no setting 'kk'; accepted are k"):
        METHODS["knn"].build("knn", {"kk": 3}, "mine")
    assert vars(METHODS["knn"].build("knn", {"k": 3}, "mine")) == {"k": 3}


@pytest.mark.parametrize(
    ("key", "name", "value", "accepted"),
    [
        ("mahalanobis", "where", "penultimat", "'penultimate' or 'taps'"),
        ("aloe", "start", "scrach", "'scratch' or 'base'"),
        ("aloe", "epsilon", 2.0, "less than or equal to 1"),
        ("mc-dropout", "epochs", 0, "greater than 0"),
        ("mc-dropout", "dropout", 1.0, "less than 1"),
        ("be-bayesian", "epochs", True, "a valid integer"),
        ("postnet", "lr", float("nan"), "a finite number"),
        ("postnet", "batch", 1, "greater than 1"),
        ("ours-pooled", "share", 0.0, "greater than 0"),
        ("knn", "k", "ten", "a valid integer"),
        ("knn", "k", "10", "a valid integer"),
        ("lula", "units", 1.5, "a valid integer"),
        ("ours-pooled", "stop", "errors", "'ood' or 'misclassification'"),
    ],
)
def test_an_invalid_value_is_rejected_with_the_accepted_ones(key: str, name: str, value: Any, accepted: str) -> None:
    with pytest.raises(RecipeError) as caught:
        METHODS[key].build(key, {name: value}, "mine")
    message = f"Benchmark 'mine': setting {name!r} of method {key!r} is {value!r}; it should be {accepted}."
    assert str(caught.value) == message


@pytest.mark.parametrize("key", METHODS)
def test_the_defaults_of_a_method_are_valid_settings(key: str) -> None:
    defaults = asdict(METHODS[key].build(key, {}, "mine"))
    given = {name: value for name, value in defaults.items() if value is not None}
    assert asdict(METHODS[key].build(key, given, "mine")) == defaults


def test_a_setting_is_not_converted_so_that_saved_results_stay_valid() -> None:
    built = asdict(METHODS["aloe"].build("aloe", {"lr": 1}, "mine"))
    assert json.dumps(built["lr"]) == "1"
