"""Methods that train a whole network: they learn, are reproducible, and resume after an interruption."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from qualms_training.data.sources.synthetic import draw_shapes
from qualms_training.paper.inputs import ImageInputs, Images
from qualms_training.paper.method import ImageMethod, MethodOutput, NotApplicableError
from qualms_training.paper.methods.score_functions import PAPER_SCORES
from qualms_training.paper.methods.whole_network.aloe import ALOE
from qualms_training.paper.methods.whole_network.be_bayesian import BeBayesian
from qualms_training.paper.methods.whole_network.mc_dropout import MCDropout
from qualms_training.paper.methods.whole_network.postnet import PostNet
from qualms_training.paper.registry import METHODS

MakeImageInputs = Callable[..., ImageInputs]
Make = Callable[[], Any]

METHODS_AND_SCORES: dict[str, tuple[Make, set[str]]] = {
    "mc-dropout": (lambda: MCDropout(epochs=2, samples=4, dropout=0.2), {"entropy", "mutual_information"}),
    "be-bayesian": (lambda: BeBayesian(epochs=2), {*PAPER_SCORES, "max_probability"}),
    "aloe": (lambda: ALOE(epochs=2, lr=0.05, outlier_batch=16), {"max_probability"}),
    "postnet": (lambda: PostNet(epochs=2, lr=2e-2), {"precision", "max_probability"}),
}
"""by key: the method with few epochs, and its scores"""
each_method = pytest.mark.parametrize("make", [make for make, _ in METHODS_AND_SCORES.values()], ids=METHODS_AND_SCORES)


def unseen(inputs: ImageInputs, n: int = 200) -> tuple[Images, Any]:
    drawn = draw_shapes(n, seed=9)
    return Images(np.asarray(drawn.images), inputs.train.images.normalise), drawn.labels


def fitted(method: ImageMethod, inputs: ImageInputs) -> MethodOutput:
    method.fit(inputs)
    return method.score(unseen(inputs)[0])


def test_all_methods_that_train_a_network_are_tested_here() -> None:
    assert set(METHODS_AND_SCORES) == {key for key, entry in METHODS.items() if entry.whole_network}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "scores"), METHODS_AND_SCORES.values(), ids=METHODS_AND_SCORES)
def test_it_learns_and_returns_its_scores(make_image_inputs: MakeImageInputs, make: Make, scores: set[str]) -> None:
    inputs, method = make_image_inputs(n=1000), make()
    method.epochs = 6
    weights = method.fit(inputs)
    images, labels = unseen(inputs)
    verdict = method.score(images)
    assert weights == sum(tensor.numel() for tensor in method.model.parameters()) > 500
    assert (verdict.predictions == labels).mean() > 0.6  # of four classes
    assert set(verdict.scores) == scores
    assert verdict.predictions.dtype == np.int64
    for values in verdict.scores.values():
        assert values.shape == (200,)
        assert np.isfinite(values).all()
        assert len(np.unique(values)) > 100


@each_method
def test_the_same_seed_gives_the_same_scores_and_another_does_not(
    make_image_inputs: MakeImageInputs, make: Make
) -> None:
    first, same, other = (
        fitted(make(), replace(inputs, folder=inputs.folder / name))
        for name, inputs in (
            ("a", make_image_inputs(n=200)),
            ("b", make_image_inputs(n=200)),
            ("c", make_image_inputs(n=200, seed=1)),
        )
    )
    for name, values in first.scores.items():
        np.testing.assert_array_equal(values, same.scores[name])
        assert not np.array_equal(values, other.scores[name])


@each_method
def test_it_resumes_after_an_interruption_and_is_trained_once(make_image_inputs: MakeImageInputs, make: Make) -> None:
    inputs = make_image_inputs(n=200)
    uninterrupted = fitted(make(), replace(inputs, folder=inputs.folder / "uninterrupted"))
    steps, limit = 0, 5  # interrupt in the second of two epochs with four steps each

    def count_step(*_: Any) -> None:
        nonlocal steps
        if steps == limit:
            raise KeyboardInterrupt
        steps += 1

    hook = register_optimizer_step_pre_hook(count_step)
    try:
        with pytest.raises(KeyboardInterrupt):
            make().fit(inputs)
        steps, limit = 0, 100
        resumed = fitted(make(), inputs)
        assert steps == 4  # only the second epoch
        again = fitted(make(), inputs)
        assert steps == 4
    finally:
        hook.remove()
    for name, values in uninterrupted.scores.items():
        np.testing.assert_array_equal(values, resumed.scores[name])
        np.testing.assert_array_equal(values, again.scores[name])


@each_method
def test_a_checkpoint_of_other_settings_is_not_used(make_image_inputs: MakeImageInputs, make: Make) -> None:
    fitted(make(), make_image_inputs(n=200))
    method = make()
    method.epochs = 1
    verdict = fitted(method, make_image_inputs(n=200))
    fresh = make()
    fresh.epochs = 1
    expected = fitted(fresh, replace(make_image_inputs(n=200), folder=make_image_inputs().folder / "fresh"))
    np.testing.assert_array_equal(verdict.predictions, expected.predictions)


@each_method
def test_scores_do_not_depend_on_the_global_random_generator(make_image_inputs: MakeImageInputs, make: Make) -> None:
    inputs, method = make_image_inputs(n=200), make()
    first = fitted(method, inputs)
    torch.rand(3)
    again = method.score(unseen(inputs)[0])
    for name, values in first.scores.items():
        np.testing.assert_array_equal(values, again.scores[name])


@each_method
def test_a_recipe_with_weights_is_not_applicable(make_image_inputs: MakeImageInputs, make: Make) -> None:
    inputs = make_image_inputs()
    base = inputs.recipe.base.model_copy(update={"weights": "theirs.pt", "weights_saw": "train-split"})
    with pytest.raises(NotApplicableError, match="trains from scratch"):
        make().fit(replace(inputs, recipe=inputs.recipe.model_copy(update={"base": base})))
