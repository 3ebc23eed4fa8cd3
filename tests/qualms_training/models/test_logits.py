"""Logits are found in dicts, tuples and named outputs, and the error lists what there is."""

import copy
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qualms.bundle.runtime import GraphRunner
from qualms_training.errors import ModelError
from qualms_training.meta.export.onnx_export import to_onnx
from qualms_training.models import find_logits, return_logits
from qualms_training.models.logits import are_probabilities

LOGITS, FEATURE, MAP = torch.zeros(2, 5), torch.zeros(2, 7), torch.zeros(2, 3, 4, 4)
Output = namedtuple("Output", ["logits", "aux"])


@pytest.mark.parametrize(
    ("output", "key"),
    [
        (LOGITS, None),
        ({"logits": LOGITS, "feature": FEATURE}, None),
        ({"map": MAP, "scores": LOGITS}, None),
        ((MAP, LOGITS), None),
        (Output(LOGITS, FEATURE), None),
        ([FEATURE, LOGITS], "1"),
        ({"a": FEATURE, "b": LOGITS}, "b"),
        ((LOGITS[:, :, None, None],), None),
        (LOGITS[:, :, None, None], None),
        ({"out": {"logits": LOGITS, "embedding": FEATURE}}, None),
        ([[FEATURE, LOGITS], MAP], "0.1"),
    ],
)
def test_logits_are_found(output: object, key: str | None) -> None:
    assert find_logits(output, key).shape == (2, 5)


@pytest.mark.parametrize(
    ("output", "key", "sentence"),
    [
        ((FEATURE, LOGITS), None, r"'0' \(a tensor of shape \(2, 7\)\), '1' .*2 of them could be .*--logits KEY"),
        ({"map": MAP}, None, "'map' .*none of them can be the logits"),
        ({"a": LOGITS, "b": FEATURE}, "c", "has no output 'c'; it returns 'a'"),
        ({"a": MAP}, "a", "output 'a' is a tensor of shape"),
        (MAP, None, r"returned a tensor of shape \(2, 3, 4, 4\); it must return logits"),
        (LOGITS, "a", "so logits 'a' cannot be chosen"),
        ("text", None, "returned str"),
    ],
)
def test_the_error_lists_the_outputs(output: object, key: str | None, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        find_logits(output, key)


@pytest.mark.parametrize("form", ["tensor", "dict"])
def test_probabilities_become_logits_with_the_same_probabilities(form: str) -> None:
    class Network(nn.Module):
        def forward(self, x: Tensor) -> object:
            probabilities = x.flatten(1).softmax(1)
            return probabilities if form == "tensor" else {"probabilities": probabilities}

    x = 50 * torch.randn(8, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    logits = return_logits(Network(), x[:2])(x)
    torch.testing.assert_close(logits.softmax(1), x.flatten(1).softmax(1))
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("values", [[[0.2, 0.9]], [[1.5, -0.5]], [[0.5, 0.5], [0.5, 0.6]], [[1.0], [1.0]]])
def test_other_outputs_are_no_probabilities(values: list[list[float]]) -> None:
    assert not are_probabilities(torch.tensor(values))


def test_a_network_that_squeezes_the_batch_away_is_refused_with_the_remedy() -> None:
    with pytest.raises(ModelError, match=r"For one image, .* shape \(3,\), .* use flatten\(1\)"):
        return_logits(Squeezed(), torch.zeros(2, 3, 1, 1))


class Squeezed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze()


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"feature": x, "logits": self.fc(x)}


def test_a_network_that_returns_a_dict_is_copied_and_exported_with_its_logits() -> None:
    net, x = TwoOutputs().eval(), torch.randn(3, 4)
    expected = net(x)["logits"]
    names = [name for name, _ in net.named_modules()]
    copied = copy.deepcopy(return_logits(net, x))
    assert torch.equal(copied(x), expected)
    assert [name for name, _ in copied.named_modules()] == names
    actual = GraphRunner(to_onnx(copied, x.numpy(), ["logits"]))(x.numpy())["logits"]
    np.testing.assert_allclose(actual, expected.detach().numpy(), atol=1e-6)


def test_a_network_that_returns_logits_is_not_changed() -> None:
    net = nn.Linear(4, 3)
    assert return_logits(net, torch.zeros(2, 4)) is net
    assert not net._forward_hooks
