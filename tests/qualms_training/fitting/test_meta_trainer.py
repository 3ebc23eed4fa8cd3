"""The meta-model is trained by the ELBO on cached features and stopped where doubt tells best."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from qualms_training.errors import DataError
from qualms_training.fitting.feature_cache import Features
from qualms_training.fitting.loop import Hooks
from qualms_training.fitting.meta_trainer import StoppingData, meta_score, train_meta
from qualms_training.meta.dirichlet import scores
from qualms_training.recipe import MetaSection

CPU = torch.device("cpu")
CLASSES = 3


def features(n: int, seed: int, spread: float = 0.5, errors: int = 0) -> tuple[Features, Any]:
    """Three clusters in the plane as one tap, and a base that is right but for `errors` images."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=n)
    angle = 2 * np.pi * labels / CLASSES
    centres = 2 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    tap = (centres + spread * rng.standard_normal((n, 2))).astype(np.float16)
    said = labels.copy()
    said[:errors] = (said[:errors] + 1) % CLASSES
    return Features([tap], np.eye(CLASSES, dtype=np.float32)[said], Path("nowhere")), labels


def section(**changes: Any) -> MetaSection:
    settings = {"form": "pooled", "kl_weight": 0.1, "optimizer": "adam", "lr": 0.01, "epochs": 5, "batch": 32}
    return MetaSection.model_validate({**settings, **changes})


class Plain(nn.Module):
    """The least that can stand in for a meta-model."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, taps: list[Tensor]) -> Tensor:
        z: Tensor = self.layers(taps[0])
        return z


def strange(n: int) -> Features:
    """Points around the middle, where no cluster is."""
    tap = np.random.default_rng(9).normal(0, 0.3, (n, 2)).astype(np.float16)
    return Features([tap], np.zeros((n, CLASSES), np.float32), Path("nowhere"))


def train(tmp_path: Path, stopping: StoppingData, chosen: MetaSection, **options: Any) -> tuple[nn.Module, Any]:
    known, labels = features(300, seed=0)
    model = Plain()
    progress = train_meta(
        model,
        known,
        labels,
        stopping,
        chosen,
        seed=2,
        checkpoint=tmp_path / "checkpoint.pt",
        fingerprint="mine",
        device=CPU,
        **options,
    )
    return model, progress


def validation(noisy: int = 1, errors: int = 0) -> StoppingData:
    known, labels = features(200, seed=5, errors=errors)
    return StoppingData(known, labels, [strange(150) for _ in range(noisy)])


def test_it_learns_the_classes_and_doubts_what_it_has_not_seen(tmp_path: Path) -> None:
    stopping = validation()
    model, progress = train(tmp_path, stopping, section(epochs=12))
    with torch.inference_mode():
        found = scores(model(stopping.features.batch(np.arange(200), CPU)))
    assert (found.probabilities.argmax(dim=1).numpy() == stopping.labels).mean() > 0.95
    assert progress.best_value > 0.9


def test_the_value_of_an_epoch_is_the_auroc_of_the_stopping_score(tmp_path: Path) -> None:
    stopping = validation(noisy=2)
    model, progress = train(tmp_path, stopping, section(stop_score="entropy"))
    values = []
    with torch.inference_mode():
        clean = scores(model(stopping.features.batch(np.arange(200), CPU))).entropy
        for noisy in stopping.noisy:
            doubts = torch.cat([clean, scores(model(noisy.batch(np.arange(150), CPU))).entropy])
            values.append(roc_auc_score(np.r_[np.zeros(200), np.ones(150)], doubts.numpy()))
    assert progress.best_value == pytest.approx(np.mean(values), abs=1e-9)
    assert progress.best_value == max(row["selected_on"] for row in progress.history)


def test_stopping_by_misclassification_tells_the_bases_errors(tmp_path: Path) -> None:
    stopping = validation(errors=20)
    model, progress = train(tmp_path, stopping, section(stop_task="misclassification", stop_score="precision"))
    wrong = np.arange(200) < 20
    expected = roc_auc_score(wrong, meta_score(model, stopping.features, "precision", CPU))
    assert progress.best_value == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("errors", [0, 200])
def test_a_base_without_errors_or_without_successes_cannot_stop_by_misclassification(
    errors: int, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"{errors} errors on 200 validation images"):
        train(tmp_path, validation(errors=errors), section(stop_task="misclassification"))
    assert not list(tmp_path.iterdir())


def test_doubt_is_larger_for_the_more_doubtful_whatever_the_score_says() -> None:
    class Fixed(nn.Module):
        def forward(self, taps: list[Tensor]) -> Tensor:
            return taps[0].float().repeat(1, 2)[:, :CLASSES]

    evidence = np.linspace(-2, 5, 5000).astype(np.float16)  # more than one batch of the scorer
    found = Features([np.stack([evidence, evidence], axis=1)], np.zeros((5000, 3), np.float32), Path("nowhere"))
    for score in ("precision", "log_precision", "mutual_information"):
        doubts = meta_score(Fixed(), found, score, CPU)
        assert doubts.shape == (5000,)
        assert (np.diff(doubts) <= 0).all()
        assert doubts[0] > doubts[-1]


def test_a_larger_kl_weight_and_a_larger_prior_show_in_the_evidence(tmp_path: Path) -> None:
    """α_0 tends to K β + 1/λ wherever the model was trained; one epoch, so that none can be preferred."""
    stopping = validation()
    totals = {}
    for weight, prior in ((0.1, 1.0), (1.0, 1.0), (1.0, 4.0)):
        chosen = section(kl_weight=weight, prior=prior, epochs=1, batch=2, lr=0.03, schedule="cosine")
        folder = tmp_path / f"{weight}-{prior}"
        model, _ = train(folder, stopping, chosen)
        with torch.inference_mode():
            precision = scores(model(stopping.features.batch(np.arange(200), CPU))).precision
        totals[weight, prior] = float(precision.median())
    assert totals[0.1, 1.0] == pytest.approx(CLASSES + 10, rel=0.25)
    assert totals[1.0, 1.0] == pytest.approx(CLASSES + 1, rel=0.25)
    assert totals[1.0, 4.0] == pytest.approx(4 * CLASSES + 1, rel=0.25)


def test_the_callers_hooks_are_called(tmp_path: Path) -> None:
    steps: list[int] = []
    epochs: list[float] = []
    hooks = Hooks(on_step=lambda step, _: steps.append(step), on_epoch=lambda row: epochs.append(row["selected_on"]))
    train(tmp_path, validation(), section(epochs=2), hooks=hooks)
    assert steps == list(range(1, 21))
    assert len(epochs) == 2
