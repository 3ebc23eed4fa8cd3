"""What a method says it has seen is what it asks for."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from qualms_training.data.noise import NOISES
from qualms_training.paper.definition import load_benchmark
from qualms_training.paper.material import Frozen, Pictures, Shown, View
from qualms_training.paper.method import PostHoc
from qualms_training.paper.registry import METHODS

CHAINS = [["blur"], ["permutation", "contrast"]]
SETTINGS = {"fine-tune": {"epochs": 1}, "fine-tune-meta": {"epochs": 1}, **load_benchmark("tiny").methods}
EACH = {(kind,) for kind in NOISES}


class Watched(list[View]):
    """Noisy copies that tell who looks at them."""

    def __init__(self, views: list[View], looked: set[str]) -> None:
        super().__init__(views)
        self.looked = looked

    def __iter__(self) -> Iterator[View]:
        self.looked.add("recipe's")
        return super().__iter__()


def watched(frozen: Frozen, looked: set[str]) -> Frozen:
    def each() -> dict[str, View]:
        looked.add("each")
        return frozen.fit_noise()

    return replace(frozen, noisy=Watched(frozen.noisy, looked), fit_noise=each)


def watched_pictures(pictures: Pictures, looked: set[str]) -> Pictures:
    def outliers() -> list[Shown]:
        looked.add("recipe's")
        return pictures.outliers()

    return replace(pictures, outliers=outliers)


@pytest.mark.parametrize("key", METHODS)
def test_the_noise_that_a_method_names_is_the_noise_that_it_asks_for(
    key: str, freeze: Callable[..., Frozen], picture: Callable[..., Pictures]
) -> None:
    method, looked = METHODS[key].build(key, SETTINGS.get(key, {}), "mine"), set[str]()
    if isinstance(method, PostHoc):
        frozen = freeze(meta__stop_noise=CHAINS)
        method.fit(watched(frozen, looked))
        recipe, scores = frozen.recipe, list(method.score(frozen.validation.view).scores)
    else:
        pictures = picture(n=100, meta__stop_noise=CHAINS)
        method.fit(watched_pictures(pictures, looked))
        recipe, scores = pictures.recipe, list(method.score(pictures.validation.shown).scores)
    named = {tuple(chain) for score in scores for chain in method.seen_noise(recipe, score)}
    asked = {tuple(chain) for chain in CHAINS} if "recipe's" in looked else set()
    assert named == asked | (EACH if "each" in looked else set())


def test_what_errors_stop_has_seen_no_noise(freeze: Callable[..., Frozen]) -> None:
    by_errors = freeze(meta__stop_task="misclassification").recipe
    for key in ("ours-pooled", "linear-meta", "cross-ent", "last-layer"):
        assert METHODS[key].build(key, {}, "mine").seen_noise(by_errors, "entropy") == []


def test_evidence_by_density_is_set_without_noise_and_its_fused_score_is_not(freeze: Callable[..., Frozen]) -> None:
    frozen, other = freeze(), freeze()
    fits = [METHODS["density-evidence"].build("density-evidence", {}, "mine") for _ in range(2)]
    clean = dict.fromkeys(NOISES, frozen.validation.view)
    verdicts = []
    for method, given in zip(fits, (frozen, replace(other, fit_noise=lambda: clean)), strict=True):
        assert isinstance(method, PostHoc)
        method.fit(given)
        verdicts.append(method.score(frozen.validation.view).scores)
    unchanged = {score for score in verdicts[0] if (verdicts[0][score] == verdicts[1][score]).all()}
    assert {score for score in verdicts[0] if not fits[0].seen_noise(frozen.recipe, score)} == unchanged
    assert set(verdicts[0]) - unchanged == {"fused"}
