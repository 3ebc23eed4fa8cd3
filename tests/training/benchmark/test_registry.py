"""The registry has every system of the paper's tables, and its names are the paper's."""

import csv
from importlib import resources

import pytest

from training.benchmark.method import OnImages, PostHoc
from training.benchmark.registry import METHODS, SHORT, methods_for
from training.errors import RecipeError


def test_every_row_of_the_papers_tables_has_a_method() -> None:
    text = (resources.files("training") / "paper_figures.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    ours = {(task, name) for entry in METHODS.values() for task, name in entry.paper.items()}
    assert {(row["task"], row["method"]) for row in rows} == ours
    assert {row["score"] for row in rows} - {""} == set(SHORT.values())


def test_transfer_has_the_methods_that_predict_on_a_base_of_other_classes() -> None:
    assert list(methods_for(transfer=True)) == ["fine-tune", "fine-tune-meta", "ours-pooled", "pixels"]
    others = methods_for(transfer=False)
    assert set(METHODS) - set(others) == {"fine-tune", "fine-tune-meta"}


@pytest.mark.parametrize("key", METHODS)
def test_a_method_can_be_built_or_says_why_not(key: str) -> None:
    entry = METHODS[key]
    if entry.make is None:
        assert entry.reason
    else:
        assert isinstance(entry.build(key, {}), PostHoc | OnImages)


def test_a_setting_that_a_method_does_not_have_is_named() -> None:
    with pytest.raises(RecipeError, match="'knn' has no setting 'kk'; accepted are k"):
        METHODS["knn"].build("knn", {"kk": 3})
    assert vars(METHODS["knn"].build("knn", {"k": 3})) == {"k": 3}
