"""Whole networks learn, repeat themselves, resume where they were cut off, and are trained once for both protocols."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from qualms_training.data.synthetic import draw_shapes
from qualms_training.fitting import loop
from qualms_training.paper.material import Pictures, Shown
from qualms_training.paper.method import NotApplicableError, OnImages, Verdict
from qualms_training.paper.methods.trained_heads.heads import DIRICHLET
from qualms_training.paper.methods.whole_network.aloe import ALOE
from qualms_training.paper.methods.whole_network.be_bayesian import BeBayesian
from qualms_training.paper.methods.whole_network.mc_dropout import MCDropout
from qualms_training.paper.methods.whole_network.postnet import PostNet
from qualms_training.paper.registry import METHODS

Picture = Callable[..., Pictures]
Make = Callable[[], Any]

WHOLE: dict[str, tuple[Make, set[str]]] = {
    "mc-dropout": (lambda: MCDropout(epochs=2, samples=4, dropout=0.2), {"entropy", "mutual_information"}),
    "be-bayesian": (lambda: BeBayesian(epochs=2), {*DIRICHLET, "max_probability"}),
    "aloe": (lambda: ALOE(epochs=2, lr=0.05, outlier_batch=16), {"max_probability"}),
    "postnet": (lambda: PostNet(epochs=2, lr=2e-2), {"precision", "max_probability"}),
}
"""by key: the method at a small budget, and the scores that it gives"""
EVERY = pytest.mark.parametrize("make", [make for make, _ in WHOLE.values()], ids=WHOLE)


def unseen(pictures: Pictures, n: int = 200) -> tuple[Shown, Any]:
    drawn = draw_shapes(n, seed=9)
    return Shown(np.asarray(drawn.images), pictures.train.shown.normalise), drawn.labels


def fitted(method: OnImages, pictures: Pictures) -> Verdict:
    method.fit(pictures)
    return method.score(unseen(pictures)[0])


def test_every_whole_network_is_tested_here() -> None:
    assert set(WHOLE) == {key for key, entry in METHODS.items() if entry.whole_network and entry.make}


@pytest.mark.parametrize(("make", "scores"), WHOLE.values(), ids=WHOLE)
def test_it_learns_and_gives_the_scores_of_its_row(picture: Picture, make: Make, scores: set[str]) -> None:
    pictures, method = picture(n=1000), make()
    method.epochs = 6
    weights = method.fit(pictures)
    shown, labels = unseen(pictures)
    found = method.score(shown)
    assert weights == sum(tensor.numel() for tensor in method.model.parameters()) > 500
    assert (found.predictions == labels).mean() > 0.6  # of four classes
    assert set(found.scores) == scores
    assert found.predictions.dtype == np.int64
    for values in found.scores.values():
        assert values.shape == (200,)
        assert np.isfinite(values).all()
        assert len(np.unique(values)) > 100


@EVERY
def test_a_seed_repeats_itself_and_another_differs(picture: Picture, make: Make) -> None:
    first, same, other = (
        fitted(make(), replace(pictures, folder=pictures.folder / name))
        for name, pictures in (("a", picture(n=200)), ("b", picture(n=200)), ("c", picture(n=200, seed=1)))
    )
    for name, values in first.scores.items():
        np.testing.assert_array_equal(values, same.scores[name])
        assert not np.array_equal(values, other.scores[name])


@EVERY
def test_it_resumes_where_it_was_cut_off_and_is_trained_once(
    picture: Picture, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = picture(n=200)
    whole = fitted(make(), replace(pictures, folder=pictures.folder / "whole"))
    real = loop._step
    steps: list[int] = []
    end = 5  # in the second epoch of four steps each

    def counted(*arguments: Any) -> float:
        if len(steps) == end:
            raise KeyboardInterrupt
        steps.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(loop, "_step", counted)
    with pytest.raises(KeyboardInterrupt):
        make().fit(pictures)
    end = 100
    resumed = fitted(make(), pictures)
    assert steps == [0, 1, 2, 3, 4, 4, 5, 6, 7]
    assert fitted(make(), pictures).scores.keys() == resumed.scores.keys()
    assert len(steps) == 9  # and not once more
    for name, values in whole.scores.items():
        np.testing.assert_array_equal(values, resumed.scores[name])


@EVERY
def test_other_settings_or_data_are_another_training(picture: Picture, make: Make) -> None:
    fitted(make(), picture(n=200))
    method = make()
    method.epochs = 1
    found = fitted(method, picture(n=200))
    fresh = make()
    fresh.epochs = 1
    expected = fitted(fresh, replace(picture(n=200), folder=picture().folder / "fresh"))
    np.testing.assert_array_equal(found.predictions, expected.predictions)


@EVERY
def test_the_order_of_what_is_scored_changes_nothing(picture: Picture, make: Make) -> None:
    pictures, method = picture(n=200), make()
    first = fitted(method, pictures)
    torch.rand(3)
    again = method.score(unseen(pictures)[0])
    for name, values in first.scores.items():
        np.testing.assert_array_equal(values, again.scores[name])


@EVERY
def test_given_weights_are_not_trained_from(picture: Picture, make: Make) -> None:
    pictures = picture()
    base = pictures.recipe.base.model_copy(update={"weights": "theirs.pt", "weights_saw": "train-split"})
    with pytest.raises(NotApplicableError, match="trains from scratch"):
        make().fit(replace(pictures, recipe=pictures.recipe.model_copy(update={"base": base})))
