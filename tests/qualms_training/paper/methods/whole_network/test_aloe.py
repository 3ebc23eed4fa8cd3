"""ALOE's perturbations stay within ε and raise the loss, and each protocol's outliers make a network of their own."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qualms_training.meta.normalise import Normalise
from qualms_training.models import build, identity
from qualms_training.paper.material import Pictures
from qualms_training.paper.methods.whole_network.aloe import ALOE, joined, outlier_loss
from qualms_training.paper.protocol import Protocol

Picture = Callable[..., Pictures]
NORMALISE = Normalise([0.4, 0.5, 0.6], [0.2, 0.25, 0.3])
LABELS = torch.arange(40) % 4


@pytest.fixture
def images() -> Tensor:
    drawn = torch.randint(0, 256, (40, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    drawn[:, :8] = 0  # where half of all changes would leave the range
    return drawn


def attacker(steps: int = 2, epsilon: float = 1 / 255) -> ALOE:
    method = ALOE(steps=steps, epsilon=epsilon)
    torch.manual_seed(0)
    method.model, method.device = build("small", 4, 3, 16, 16), torch.device("cpu")
    return method


def classes(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, LABELS)


@pytest.mark.parametrize("loss", [classes, outlier_loss])
@pytest.mark.parametrize("epsilon", [1 / 255, 4 / 255])
def test_a_perturbation_stays_within_epsilon_and_raises_the_loss(
    images: Tensor, loss: Callable[[Tensor], Tensor], epsilon: float
) -> None:
    def harm(steps: int) -> float:
        method = attacker(steps, epsilon)
        changed = method.perturb(images, NORMALISE, loss, torch.Generator().manual_seed(1))
        away = (changed - images.float()).abs()
        assert 0 < float(away.max()) <= 255 * epsilon + 1e-4
        assert 0 <= float(changed.min()) <= float(changed.max()) <= 255
        assert not changed.requires_grad
        with torch.no_grad():
            return float(loss(method.model(NORMALISE(changed))) - loss(method.model(NORMALISE(images))))

    assert harm(steps=2) > max(harm(steps=0), 0) + 1e-4
    assert harm(steps=0) == pytest.approx(0, abs=harm(steps=2) / 2)  # chance alone does little


def test_an_attack_leaves_the_network_as_it_was(images: Tensor) -> None:
    method = attacker()
    method.model = nn.Sequential(nn.BatchNorm2d(3), method.model).train()
    before = {name: value.clone() for name, value in method.model.state_dict().items()}
    method.perturb(images, NORMALISE, classes, torch.Generator().manual_seed(1))
    assert method.model.training
    assert all(parameter.grad is None for parameter in method.model.parameters())
    for name, value in method.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_loss_of_outliers_is_cross_entropy_from_the_uniform_distribution() -> None:
    logits = 3 * torch.randn(9, 5)
    uniform = torch.full((9, 5), 0.2)
    torch.testing.assert_close(outlier_loss(logits), F.cross_entropy(logits, uniform))


def test_outliers_are_learned_to_be_doubtful(picture: Picture) -> None:
    """On top of what cross-entropy alone would say about them."""

    def as_uncertainty(weight: float) -> float:
        pictures, method = picture(n=256), ALOE(epochs=12, lr=0.1, outlier_batch=32, outlier_weight=weight)
        method.fit(pictures)
        return float(method.score(joined(pictures.outliers())).scores["max_probability"].mean())

    assert as_uncertainty(weight=0.5) > as_uncertainty(weight=0.0) + 0.1


def test_both_protocols_keep_their_networks_in_one_folder(picture: Picture) -> None:
    fair, published = (picture(n=100, protocol=protocol) for protocol in Protocol)
    assert fair.folder == published.folder
    found = []
    for pictures in (fair, published, fair):
        method = ALOE(epochs=1, lr=0.05, outlier_batch=16)
        method.fit(pictures)
        found.append(method.score(fair.validation.shown).scores["max_probability"])
    files = {file: file.stat().st_mtime_ns for file in fair.folder.iterdir()}
    assert len(files) == 2
    assert not np.array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    ALOE(epochs=1, lr=0.05, outlier_batch=16).fit(published)
    assert {file: file.stat().st_mtime_ns for file in fair.folder.iterdir()} == files  # trained once each


def test_it_goes_on_from_the_base_where_that_is_said(picture: Picture) -> None:
    pictures = picture(n=64)
    for start, expected in (("scratch", pictures.new_network()), ("base", pictures.copy_of_base())):
        method = ALOE(epochs=1, lr=0.0, outlier_batch=16, start=start)  # type: ignore[arg-type]
        method.fit(pictures)
        assert identity(method.model) == identity(expected)
