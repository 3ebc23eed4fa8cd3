"""The baselines of transfer: a new end on a frozen source network, trained to the last epoch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qualms_training.fitting.meta_trainer import train_meta
from qualms_training.paper.material import Frozen, Head, Known
from qualms_training.paper.methods.trained_heads import heads
from qualms_training.paper.methods.trained_heads.dirichlet_meta import Ours
from qualms_training.paper.methods.trained_heads.fine_tune import FineTune
from qualms_training.paper.methods.trained_heads.last_layer import LastLayer
from qualms_training.paper.registry import METHODS

Draw = Callable[..., Known]
Freeze = Callable[..., Frozen]


@pytest.fixture
def source(freeze: Freeze, draw: Draw) -> Frozen:
    """A base of seven classes for data of four."""
    head = Head(np.zeros((7, 12)), np.zeros(7))
    return replace(freeze(), head=head, train=draw(4000, seed=10, wrong=0.0))


@pytest.mark.parametrize("structure", ["last-layer", "meta"])
def test_it_learns_the_datas_classes_and_not_the_bases(structure: Any, source: Frozen, draw: Draw) -> None:
    method = FineTune(structure, epochs=6)
    size = method.fit(source)
    assert size == (LastLayer() if structure == "last-layer" else Ours()).fit(source)
    unseen = draw(500, seed=30, wrong=0.0)
    found = method.score(unseen.view)
    assert (found.predictions == unseen.labels).mean() > 0.8
    assert set(found.scores) == {"entropy", "max_probability"}
    assert method.head.outputs(unseen.view).shape == (500, 4)


def test_it_is_trained_as_the_paper_says_and_not_stopped(source: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, Any]] = []

    def spy(model: Any, features: Any, labels: Any, stopping: Any, section: Any, **options: Any) -> Any:
        seen.append((stopping, section))
        short = section.model_copy(update={"epochs": 2})
        progress = train_meta(model, features, labels, stopping, short, **options)
        assert progress.best is None
        return progress

    monkeypatch.setattr(heads, "train_meta", spy)
    for key in ("fine-tune", "fine-tune-meta"):
        method = METHODS[key].build(key, {}, "mine")
        assert isinstance(method, FineTune)
        method.fit(source)
    for stopping, section in seen:
        assert stopping is None
        assert (section.optimizer, section.lr, section.momentum, section.weight_decay) == ("sgd", 0.01, 0.9, 1e-4)
        assert (section.batch, section.epochs, section.schedule) == (128, 50, "constant")
