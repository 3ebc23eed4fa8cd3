"""The baselines of transfer: new layers on a frozen base of other classes, trained without early stopping."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qualms_training.fitting.meta_trainer import train_meta
from qualms_training.paper.inputs import Head, LabelledOutputs, PostHocInputs
from qualms_training.paper.methods.trained_heads import heads
from qualms_training.paper.methods.trained_heads.ablations import LastLayer
from qualms_training.paper.methods.trained_heads.dirichlet_meta import DirichletMeta
from qualms_training.paper.methods.trained_heads.fine_tune import FineTune
from qualms_training.paper.registry import METHODS

DrawOutputs = Callable[..., LabelledOutputs]
MakePostHocInputs = Callable[..., PostHocInputs]


@pytest.fixture
def source(make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs) -> PostHocInputs:
    """A base of seven classes for data of four."""
    head = Head(np.zeros((7, 12)), np.zeros(7))
    return replace(make_post_hoc_inputs(), head=head, train=draw_outputs(4000, seed=10, wrong=0.0))


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["last-layer", "meta"])
def test_it_learns_the_classes_of_the_data(structure: Any, source: PostHocInputs, draw_outputs: DrawOutputs) -> None:
    method = FineTune(structure, epochs=6)
    size = method.fit(source)
    assert size == (LastLayer() if structure == "last-layer" else DirichletMeta()).fit(source)
    unseen = draw_outputs(500, seed=30, wrong=0.0)
    verdict = method.score(unseen.outputs)
    assert (verdict.predictions == unseen.labels).mean() > 0.8
    assert set(verdict.scores) == {"entropy", "max_probability"}
    assert method.head(unseen.outputs).shape == (500, 4)


def test_it_is_trained_with_the_papers_settings_and_without_early_stopping(
    source: PostHocInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, Any]] = []

    def spy(model: Any, features: Any, labels: Any, stopping: Any, section: Any, **options: Any) -> Any:
        calls.append((stopping, section))
        short = section.model_copy(update={"epochs": 2})
        progress = train_meta(model, features, labels, stopping, short, **options)
        assert progress.best is None
        return progress

    monkeypatch.setattr(heads, "train_meta", spy)
    for key in ("fine-tune", "fine-tune-meta"):
        method = METHODS[key].build(key, {}, "mine")
        assert isinstance(method, FineTune)
        method.fit(source)
    for stopping, section in calls:
        assert stopping is None
        assert (section.optimizer, section.lr, section.momentum, section.weight_decay) == ("sgd", 0.01, 0.9, 1e-4)
        assert (section.batch, section.epochs, section.schedule) == (128, 50, "constant")
