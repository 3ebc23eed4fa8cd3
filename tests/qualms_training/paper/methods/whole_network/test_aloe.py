"""ALOE: perturbations stay within ε and increase the loss, and each protocol has its own network."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qualms_training.meta.extractor import Normalise
from qualms_training.models import build, identity
from qualms_training.paper.evaluation_protocol import Protocol
from qualms_training.paper.inputs import ImageInputs
from qualms_training.paper.methods.whole_network.aloe import ALOE, joined, outlier_loss

MakeImageInputs = Callable[..., ImageInputs]
NORMALISE = Normalise([0.4, 0.5, 0.6], [0.2, 0.25, 0.3])
LABELS = torch.arange(40) % 4


@pytest.fixture
def images() -> Tensor:
    drawn = torch.randint(0, 256, (40, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    drawn[:, :8] = 0  # half of all changes would leave the range of pixels here
    return drawn


def attacker(steps: int = 2, epsilon: float = 1 / 255) -> ALOE:
    method = ALOE(steps=steps, epsilon=epsilon)
    torch.manual_seed(0)
    method.model, method.device = build("small", 4, 3, 16, 16), torch.device("cpu")
    return method


def class_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, LABELS)


@pytest.mark.parametrize("loss", [class_loss, outlier_loss])
@pytest.mark.parametrize("epsilon", [1 / 255, 4 / 255])
def test_perturbations_stay_within_epsilon_and_increase_the_loss(
    images: Tensor, loss: Callable[[Tensor], Tensor], epsilon: float
) -> None:
    def increase(steps: int) -> float:
        method = attacker(steps, epsilon)
        changed = method.perturb(images, NORMALISE, loss, torch.Generator().manual_seed(1))
        change = (changed - images.float()).abs()
        assert 0 < float(change.max()) <= 255 * epsilon + 1e-4
        assert 0 <= float(changed.min()) <= float(changed.max()) <= 255
        assert not changed.requires_grad
        with torch.no_grad():
            return float(loss(method.model(NORMALISE(changed))) - loss(method.model(NORMALISE(images))))

    assert increase(steps=2) > max(increase(steps=0), 0) + 1e-4
    assert increase(steps=0) == pytest.approx(0, abs=increase(steps=2) / 2)  # a random perturbation has little effect


def test_perturbing_does_not_change_the_network(images: Tensor) -> None:
    method = attacker()
    method.model = nn.Sequential(nn.BatchNorm2d(3), method.model).train()
    before = {name: value.clone() for name, value in method.model.state_dict().items()}
    method.perturb(images, NORMALISE, class_loss, torch.Generator().manual_seed(1))
    assert method.model.training
    assert all(parameter.grad is None for parameter in method.model.parameters())
    for name, value in method.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_outlier_loss_is_the_cross_entropy_with_the_uniform_distribution() -> None:
    logits = 3 * torch.randn(9, 5)
    uniform = torch.full((9, 5), 0.2)
    torch.testing.assert_close(outlier_loss(logits), F.cross_entropy(logits, uniform))


@pytest.mark.slow
def test_outliers_get_more_uncertain_than_with_cross_entropy_alone(make_image_inputs: MakeImageInputs) -> None:
    def mean_score(weight: float) -> float:
        inputs, method = make_image_inputs(n=256), ALOE(epochs=12, lr=0.1, outlier_batch=32, outlier_weight=weight)
        method.fit(inputs)
        return float(method.score(joined(inputs.outliers())).scores["max_probability"].mean())

    assert mean_score(weight=0.5) > mean_score(weight=0.0) + 0.1


def test_each_protocol_has_a_checkpoint_in_the_shared_folder(make_image_inputs: MakeImageInputs) -> None:
    fair, published = (make_image_inputs(n=100, protocol=protocol) for protocol in Protocol)
    assert fair.folder == published.folder
    scores = []
    for inputs in (fair, published, fair):
        method = ALOE(epochs=1, lr=0.05, outlier_batch=16)
        method.fit(inputs)
        scores.append(method.score(fair.validation.images).scores["max_probability"])
    files = {file: file.stat().st_mtime_ns for file in fair.folder.iterdir()}
    assert len(files) == 2
    assert not np.array_equal(scores[0], scores[1])
    np.testing.assert_array_equal(scores[0], scores[2])
    ALOE(epochs=1, lr=0.05, outlier_batch=16).fit(published)
    assert {file: file.stat().st_mtime_ns for file in fair.folder.iterdir()} == files  # trained once each


def test_start_selects_the_initial_weights(make_image_inputs: MakeImageInputs) -> None:
    inputs = make_image_inputs(n=64)
    for start, expected in (("scratch", inputs.new_network()), ("base", inputs.copy_of_base())):
        method = ALOE(epochs=1, lr=0.0, outlier_batch=16, start=start)  # type: ignore[arg-type]
        method.fit(inputs)
        assert identity(method.model) == identity(expected)
