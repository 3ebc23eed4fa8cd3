"""`seen_noise` of a method names exactly the noisy copies that `fit` uses."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from qualms_training.data.noise import NOISES
from qualms_training.paper.definition import load_benchmark
from qualms_training.paper.inputs import BaseOutputs, ImageInputs, Images, PostHocInputs
from qualms_training.paper.method import PostHocMethod
from qualms_training.paper.registry import METHODS

CHAINS = [["blur"], ["permutation", "contrast"]]
SETTINGS = {"fine-tune": {"epochs": 1}, "fine-tune-meta": {"epochs": 1}, **load_benchmark("tiny").methods}
EVERY_NOISE = {(kind,) for kind in NOISES}


class RecordingList(list[BaseOutputs]):
    """Noisy copies that record when they are used."""

    def __init__(self, copies: list[BaseOutputs], used: set[str]) -> None:
        super().__init__(copies)
        self.used = used

    def __iter__(self) -> Iterator[BaseOutputs]:
        self.used.add("chains of the recipe")
        return super().__iter__()


def recording(inputs: PostHocInputs, used: set[str]) -> PostHocInputs:
    def noisy_fit() -> dict[str, BaseOutputs]:
        used.add("every noise")
        return inputs.noisy_fit()

    return replace(inputs, noisy_validation=RecordingList(inputs.noisy_validation, used), noisy_fit=noisy_fit)


def recording_images(inputs: ImageInputs, used: set[str]) -> ImageInputs:
    def outliers() -> list[Images]:
        used.add("chains of the recipe")
        return inputs.outliers()

    return replace(inputs, outliers=outliers)


@pytest.mark.parametrize("key", METHODS)
def test_seen_noise_is_the_noise_that_fit_uses(
    key: str, make_post_hoc_inputs: Callable[..., PostHocInputs], make_image_inputs: Callable[..., ImageInputs]
) -> None:
    method, used = METHODS[key].build(key, SETTINGS.get(key, {}), "mine"), set[str]()
    if isinstance(method, PostHocMethod):
        inputs = make_post_hoc_inputs(meta__stop_noise=CHAINS)
        method.fit(recording(inputs, used))
        recipe, scores = inputs.recipe, list(method.score(inputs.validation.outputs).scores)
    else:
        images = make_image_inputs(n=100, meta__stop_noise=CHAINS)
        method.fit(recording_images(images, used))
        recipe, scores = images.recipe, list(method.score(images.validation.images).scores)
    seen = {tuple(chain) for score in scores for chain in method.seen_noise(recipe, score)}
    expected = {tuple(chain) for chain in CHAINS} if "chains of the recipe" in used else set()
    assert seen == expected | (EVERY_NOISE if "every noise" in used else set())


def test_methods_that_are_stopped_by_errors_have_seen_no_noise(
    make_post_hoc_inputs: Callable[..., PostHocInputs],
) -> None:
    by_errors = make_post_hoc_inputs(meta__stop_task="misclassification").recipe
    for key in ("ours-pooled", "linear-meta", "cross-ent", "last-layer"):
        assert METHODS[key].build(key, {}, "mine").seen_noise(by_errors, "entropy") == []


@pytest.mark.parametrize(("key", "changes"), [("fused-selected", True), ("fused", False), ("density-evidence", False)])
def test_noisy_copies_of_the_fit_images_change_only_the_selected_weights(
    key: str, changes: bool, make_post_hoc_inputs: Callable[..., PostHocInputs]
) -> None:
    inputs, other = make_post_hoc_inputs(), make_post_hoc_inputs()
    clean = dict.fromkeys(NOISES, inputs.validation.outputs)
    scores = []
    for used in (inputs, replace(other, noisy_fit=lambda: clean)):
        method = METHODS[key].build(key, {}, "mine")
        assert isinstance(method, PostHocMethod)
        method.fit(used)
        scores.append(method.score(inputs.validation.outputs).scores)
    assert any((scores[0][name] != scores[1][name]).any() for name in scores[0]) is changes
