"""The meta-model is trained with the ELBO on cached features and stopped by the AUROC of its uncertainty."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from qualms_training.errors import DataError
from qualms_training.fitting.feature_cache import Features
from qualms_training.fitting.loop import Hooks
from qualms_training.fitting.meta_trainer import StoppingData, dirichlet_objective, head_outputs, train_meta
from qualms_training.meta.dirichlet import dirichlet_scores
from qualms_training.recipe import MetaSection

CPU = torch.device("cpu")
CLASSES = 3


def features(n: int, seed: int, spread: float = 0.5, errors: int = 0) -> tuple[Features, Any]:
    """Three clusters in the plane as one tap, and a base that is wrong on the first `errors` images."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=n)
    angle = 2 * np.pi * labels / CLASSES
    centres = 2 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    tap = (centres + spread * rng.standard_normal((n, 2))).astype(np.float16)
    predictions = labels.copy()
    predictions[:errors] = (predictions[:errors] + 1) % CLASSES
    return Features([tap], np.eye(CLASSES, dtype=np.float32)[predictions], Path("nowhere")), labels


def section(**changes: Any) -> MetaSection:
    settings = {"form": "pooled", "kl_weight": 0.1, "optimizer": "adam", "lr": 0.01, "epochs": 5, "batch": 32}
    return MetaSection.model_validate({**settings, **changes})


class Plain(nn.Module):
    """A minimal meta-model."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, taps: list[Tensor]) -> Tensor:
        z: Tensor = self.layers(taps[0])
        return z


def between_clusters(n: int) -> Features:
    """Points around the origin, far from the clusters."""
    tap = np.random.default_rng(9).normal(0, 0.3, (n, 2)).astype(np.float16)
    return Features([tap], np.zeros((n, CLASSES), np.float32), Path("nowhere"))


def train(tmp_path: Path, stopping: StoppingData, chosen: MetaSection, **options: Any) -> tuple[nn.Module, Any]:
    training, labels = features(300, seed=0)
    model = Plain()
    progress = train_meta(
        model,
        training,
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
    clean, labels = features(200, seed=5, errors=errors)
    return StoppingData(clean, labels, [between_clusters(150) for _ in range(noisy)])


def uncertainty(model: nn.Module, given: Features, chosen: MetaSection) -> NDArray[np.float64]:
    return dirichlet_objective(chosen).uncertainty(head_outputs(model, given, CPU))


@pytest.mark.slow
def test_it_learns_the_classes_and_is_uncertain_about_ood_points(tmp_path: Path) -> None:
    stopping = validation()
    model, progress = train(tmp_path, stopping, section(epochs=12))
    with torch.inference_mode():
        trained = dirichlet_scores(model(stopping.features.batch(np.arange(200), CPU)))
    assert (trained.probabilities.argmax(dim=1).numpy() == stopping.labels).mean() > 0.95
    assert progress.best_value > 0.9


def test_the_value_of_an_epoch_is_the_auroc_of_the_stopping_score(tmp_path: Path) -> None:
    stopping = validation(noisy=2)
    model, progress = train(tmp_path, stopping, section(stop_score="entropy"))
    values = []
    with torch.inference_mode():
        clean = dirichlet_scores(model(stopping.features.batch(np.arange(200), CPU))).entropy
        for noisy in stopping.noisy:
            both = torch.cat([clean, dirichlet_scores(model(noisy.batch(np.arange(150), CPU))).entropy])
            values.append(roc_auc_score(np.r_[np.zeros(200), np.ones(150)], both.numpy()))
    assert progress.best_value == pytest.approx(np.mean(values), abs=1e-9)
    assert progress.best_value == max(row["selected_on"] for row in progress.history)


def test_stopping_by_misclassification_is_the_auroc_for_the_bases_errors(tmp_path: Path) -> None:
    stopping = validation(errors=20)
    chosen = section(stop_task="misclassification", stop_score="precision")
    model, progress = train(tmp_path, stopping, chosen)
    wrong = np.arange(200) < 20
    expected = roc_auc_score(wrong, uncertainty(model, stopping.features, chosen))
    assert progress.best_value == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("errors", [0, 200])
def test_stopping_by_misclassification_needs_both_errors_and_correct_predictions(errors: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{errors} errors on 200 validation images"):
        train(tmp_path, validation(errors=errors), section(stop_task="misclassification"))
    assert not list(tmp_path.iterdir())


def test_uncertainty_falls_with_evidence_whatever_the_direction_of_the_score() -> None:
    class Fixed(nn.Module):
        def forward(self, taps: list[Tensor]) -> Tensor:
            return taps[0].float().repeat(1, 2)[:, :CLASSES]

    evidence = np.linspace(-2, 5, 5000).astype(np.float16)  # more rows than one forward pass takes
    increasing = Features([np.stack([evidence, evidence], axis=1)], np.zeros((5000, 3), np.float32), Path("nowhere"))
    for score in ("precision", "log_precision", "mutual_information"):
        values = uncertainty(Fixed(), increasing, section(stop_score=score))
        assert values.shape == (5000,)
        assert (np.diff(values) <= 0).all()
        assert values[0] > values[-1]


@pytest.mark.slow
def test_evidence_depends_on_the_kl_weight_and_the_prior(tmp_path: Path) -> None:
    """α_0 tends to K β + 1/λ on training data; with one epoch, no epoch is selected over another."""
    stopping = validation()
    totals = {}
    for weight, prior in ((0.1, 1.0), (1.0, 1.0), (1.0, 4.0)):
        chosen = section(kl_weight=weight, prior=prior, epochs=1, batch=2, lr=0.03, schedule="cosine")
        folder = tmp_path / f"{weight}-{prior}"
        model, _ = train(folder, stopping, chosen)
        with torch.inference_mode():
            precision = dirichlet_scores(model(stopping.features.batch(np.arange(200), CPU))).precision
        totals[weight, prior] = float(precision.median())
    assert totals[0.1, 1.0] == pytest.approx(CLASSES + 10, rel=0.25)
    assert totals[1.0, 1.0] == pytest.approx(CLASSES + 1, rel=0.25)
    assert totals[1.0, 4.0] == pytest.approx(4 * CLASSES + 1, rel=0.25)


def test_the_hooks_of_the_caller_are_called(tmp_path: Path) -> None:
    steps: list[int] = []
    epochs: list[float] = []
    hooks = Hooks(on_step=lambda step, _: steps.append(step), on_epoch=lambda row: epochs.append(row["selected_on"]))
    train(tmp_path, validation(), section(epochs=2), hooks=hooks)
    assert steps == list(range(1, 21))
    assert len(epochs) == 2
