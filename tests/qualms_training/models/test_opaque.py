"""TorchScript and torch.export files are frozen bases whose penultimate feature can be tapped; others are refused."""

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qualms.bundle.runtime import GraphRunner
from qualms_training.errors import ModelError
from qualms_training.meta.export.onnx_export import to_onnx
from qualms_training.meta.taps.tapped import Tapped
from qualms_training.models import expected_channels, identity, load_base
from qualms_training.models.architectures.resnet import ResNet20

JIT: Any = torch.jit  # its functions have no types
X = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(0))
DYNAMIC = ({0: torch.export.Dim("batch")},)


class Graph(nn.Module):
    """Logits and the penultimate feature."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.tapped = Tapped(base, ["penultimate"])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, (feature,) = self.tapped(x)
        return logits, feature


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(1024, 5)
    ).eval()


def save(path: Path, kind: str, model: nn.Module) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        if kind == "traced":
            JIT.trace(model, X).save(str(path))
        elif kind == "scripted":
            JIT.script(model).save(str(path))
        else:
            dynamic = DYNAMIC if kind == "exported" else None
            torch.export.save(torch.export.export(model, (X,), dynamic_shapes=dynamic), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("traced", "a.pt"), ("scripted", "a.ts"), ("exported", "a.pt2")])
def test_a_file_gives_the_same_logits_and_exports_with_its_penultimate_feature(
    kind: str, name: str, tmp_path: Path
) -> None:
    original = net()
    base = load_base(str(save(tmp_path / name, kind, original)), height=16, width=16)
    assert base.opaque is not None
    assert "only its logits and the input of its last linear layer are used" in base.opaque
    assert base.image_size == ((16, 16) if kind == "exported" else None)
    assert expected_channels(base.module) == 1
    copied = copy.deepcopy(base.module)
    assert identity(copied) == identity(base.module)
    with torch.no_grad():
        expected, feature = original(X), original[:-1](X)  # type: ignore[index]
        assert torch.equal(copied(X), expected)
    actual = GraphRunner(to_onnx(Graph(copied), X[:2].numpy(), ["logits", "feature"]))(X.numpy())
    np.testing.assert_allclose(actual["logits"], expected.numpy(), atol=1e-5)
    np.testing.assert_allclose(actual["feature"], feature.numpy(), atol=1e-5)


def test_a_fixed_batch_size_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt2", "fixed", net())
    with pytest.raises(
        ModelError, match=r"exported for batches of exactly 3; .*dynamic_shapes=\(\{0: Dim\(\"batch\"\)\}"
    ):
        load_base(str(path))


def test_another_size_than_the_exported_one_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt2", "exported", net())
    with pytest.raises(ModelError, match="exported for images of height 16, not 32"):
        load_base(str(path), height=32, width=32)


def test_a_network_saved_in_training_mode_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt2", "exported", net().train())
    with pytest.raises(ModelError, match="was saved in training mode"):
        load_base(str(path))


def test_torchscript_needs_the_size_of_its_input(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", "traced", net())
    with pytest.raises(ModelError, match="does not hold the size of its input; give it with --size"):
        load_base(str(path))
    with pytest.raises(ModelError, match=r"cannot run on images \(N, 1, 8, 8\)"):
        load_base(str(path), height=8, width=8)


def test_weights_for_a_file_that_holds_its_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds its own weights, so weights 'b\.pt' cannot be loaded"):
        load_base(str(save(tmp_path / "a.pt", "traced", net())), weights="b.pt")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (ResNet20(3).state_dict(), "holds a state dict without a network: name the network with --model"),
        (nn.Linear(1, 1), "holds a whole pickled model, .* save model.state_dict"),
        (b"not a model", "is neither a TorchScript file nor a program saved by torch.export"),
    ],
)
def test_a_file_without_a_network_is_refused_with_the_way_to_give_it(
    content: object, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ModelError, match=sentence):
        load_base(str(path))


def test_a_trace_with_an_operator_that_has_no_onnx_form_is_refused(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(256, 2, 8, batch_first=True)
    model = nn.Sequential(nn.Flatten(2), layer, nn.Flatten(), nn.Linear(256, 5)).eval().requires_grad_(False)
    with pytest.raises(
        ModelError, match="contains the operator _transformer_encoder_layer_fwd, which has no ONNX form"
    ):
        load_base(str(save(tmp_path / "a.pt", "traced", model)), channels=1, height=16, width=16)
