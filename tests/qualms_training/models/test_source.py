"""Networks of every kind are loaded with trained weights and frozen; without weights they are refused."""

import json
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from torch import nn

from qualms_training.errors import ExtraMissingError, ModelError
from qualms_training.models import build, expected_channels, identity, load_base, return_logits
from qualms_training.models.libraries.torchvision_compat import import_torchvision
from qualms_training.models.source import base_of_module, untrained_base

SOURCE = """
from torch import nn

def net(classes, channels):
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_sources.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_sources", raising=False)
    return "users_sources"


def saved(path: Path, model: nn.Module) -> str:
    torch.save(model.state_dict(), path)
    return str(path)


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("resnet20", "--weights FILE"),
        ("torchvision:resnet18", "--weights DEFAULT"),
        ("users:net", "--weights included if the function loads them itself"),
    ],
)
def test_a_model_without_weights_is_refused(spec: str, hint: str) -> None:
    with pytest.raises(ModelError, match=f"Model '{spec}' has no weights, and a base is never trained here; .*{hint}"):
        load_base(spec)


@pytest.mark.parametrize(("classes", "channels"), [(7, 3), (1000, 1)])
def test_classes_and_channels_are_read_from_the_weights_file(classes: int, channels: int, tmp_path: Path) -> None:
    source = build("resnet20", classes, channels)
    base = load_base("resnet20", weights=saved(tmp_path / "a.pt", source))
    assert identity(base.module) == identity(source)
    assert not base.module.training
    assert expected_channels(base.module) == channels
    assert base.weights_source == f"file '{tmp_path / 'a.pt'}'"


def test_a_users_function_is_called_with_the_sizes_of_the_weights_file(user_module: str, tmp_path: Path) -> None:
    source = build(f"{user_module}:net", 6, channels=1)
    base = load_base(f"{user_module}:net", weights=saved(tmp_path / "a.pt", source))
    assert identity(base.module) == identity(source)
    included = load_base(f"{user_module}:net", weights="included", classes=4, channels=3)
    assert included.module(torch.zeros(1, 3, 8, 8)).shape == (1, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_of_weights_are_computed_in_float32(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).to(dtype)
    base = base_of_module(model)
    assert base.module(torch.zeros(1, 3, 8, 8)).dtype == torch.float32
    assert base.weights_source == f"with its own weights, in float32 instead of {str(dtype).removeprefix('torch.')}"


@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x0_5", "squeezenet1_1"])
def test_torchvision_models_take_the_input_of_their_default_weights(name: str, tmp_path: Path) -> None:
    source = build(f"torchvision:{name}", 7).eval()
    base = load_base(f"torchvision:{name}", weights=saved(tmp_path / "a.pt", source))
    assert identity(base.module) == identity(source)
    assert base.input is not None
    assert (base.input.height, base.input.fit, base.input.shorter_side, base.input.colour) == (224, "crop", 256, "RGB")
    assert "Weights.IMAGENET1K_V1, assumed, because the weights file does not say" in base.input.source


def test_functions_of_torchvision_are_its_models_by_name(tmp_path: Path) -> None:
    source = build("torchvision:resnet18", 7).eval()
    base = load_base("torchvision.models:resnet18", weights=saved(tmp_path / "a.pt", source))
    assert identity(base.module) == identity(source)
    assert base.input is not None
    with pytest.raises(ModelError, match="Weights 'included' are neither a file nor weights of 'torchvision:resnet18'"):
        load_base("torchvision.models.resnet:resnet18", weights="included")  # they would be random


@pytest.mark.slow
def test_auxiliary_heads_are_left_out(tmp_path: Path) -> None:
    models = import_torchvision().models
    source = models.get_model("googlenet", weights=None, num_classes=7, init_weights=False, transform_input=True).eval()
    base = load_base("torchvision:googlenet", weights=saved(tmp_path / "a.pt", source))
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(base.module(x), source(x))
    assert "transform_input=True" in base.weights_source


def test_weights_that_cannot_be_downloaded_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise URLError("no network")

    import_torchvision()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fail)
    with pytest.raises(
        ModelError, match=r"cannot be downloaded .*put resnet18-f37072fd\.pth from .* into .*checkpoints"
    ):
        load_base("torchvision:resnet18", weights="DEFAULT")
    with pytest.raises(
        ModelError, match="neither a file nor weights of 'torchvision:resnet18', which has IMAGENET1K_V1"
    ):
        load_base("torchvision:resnet18", weights="IMAGENET1K_V9")


@pytest.fixture
def timm() -> Any:
    import_torchvision()
    return pytest.importorskip("timm")


def test_timm_models_take_their_own_input(timm: Any, tmp_path: Path) -> None:
    source = timm.create_model("resnet10t", num_classes=5, in_chans=1).eval()
    base = load_base("timm:resnet10t.c3_in1k", weights=saved(tmp_path / "a.pt", source))
    assert identity(base.module) == identity(source)
    assert base.input is not None
    assert (base.input.height, base.input.shorter_side, base.input.colour) == (176, 201, "L")
    assert base.input.mean == pytest.approx((0.449,))
    assert "timm's pretrained_cfg" in base.input.source


def test_unknown_timm_weights_are_named(timm: Any) -> None:
    with pytest.raises(ModelError, match="timm has no weights 'c4_in1k' of 'resnet10t'; did you mean"):
        load_base("timm:resnet10t.c4_in1k")
    with pytest.raises(ModelError, match="Model 'timm:resnet10t' has no weights"):
        load_base("timm:resnet10t")


def test_timm_weights_that_cannot_be_downloaded_are_named(timm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(timm, "create_model", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelError, match=r"no network.*bring model\.safetensors of https://huggingface\.co/timm/resnet10t"
    ):
        load_base("timm:resnet10t", weights="DEFAULT")
    with pytest.raises(
        ModelError, match=r"model\.safetensors and config\.json of https://huggingface\.co/org/name must"
    ):
        load_base("hf_hub:org/name")


def test_networks_without_weights_have_the_size_of_their_configuration(timm: Any) -> None:
    timm_vit = untrained_base("timm:vit_tiny_patch16_384")
    inception = untrained_base("torchvision:inception_v3")
    assert [base.input and (base.input.height, base.input.width) for base in (timm_vit, inception)] == [
        (384, 384),
        (299, 299),
    ]
    assert untrained_base("lenet", 1, 28, 28).module(torch.zeros(1, 1, 28, 28)).shape == (1, 1000)


def test_unknown_networks_are_named_without_weights_as_with_them() -> None:
    for load in (load_base, untrained_base):
        with pytest.raises(ModelError, match=r"Model 'resnet18' is not known.*did you mean 'torchvision:resnet18'\?"):
            load("resnet18")


def test_python_files_and_folders_are_refused_with_the_name_to_give(tmp_path: Path) -> None:
    for spec in ("nets/mine.py:make", "./nets/mine.py:make"):
        with pytest.raises(ModelError, match=r"is a Python file; name the function .*: nets\.mine:make\."):
            load_base(spec)
    with pytest.raises(ModelError, match=r"mine:function\."):
        load_base("mine.py", weights="mine.pt")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"; did you mean 'transformers:{tmp_path}'"):
        load_base(str(tmp_path))


@pytest.fixture
def transformers() -> Any:
    import_torchvision()
    return pytest.importorskip("transformers")


def tiny_vit(transformers: Any, folder: Path, **settings: object) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
        **settings,
    )
    model: nn.Module = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(folder)  # type: ignore[operator]
    preprocessor = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return model


def test_a_hugging_face_folder_is_loaded_with_its_input_and_classes(transformers: Any, tmp_path: Path) -> None:
    source = tiny_vit(
        transformers, tmp_path, id2label={0: "cat", 1: "dog", 2: "owl"}, label2id={"cat": 0, "dog": 1, "owl": 2}
    )
    base = load_base(f"transformers:{tmp_path}")
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(return_logits(base.module, x)(x), source(x).logits)
    assert base.classes == ("cat", "dog", "owl")
    assert base.input is not None
    assert (base.input.fit, base.input.resize, base.input.mean) == ("stretch", "bicubic", (0.5, 0.5, 0.5))
    untrained = untrained_base(f"transformers:{tmp_path}")
    assert untrained.input == base.input
    assert [name for name, _ in untrained.module.named_modules()] == [name for name, _ in source.named_modules()]


def test_values_of_a_preprocessor_that_are_not_usable_are_an_error_with_its_file(
    transformers: Any, tmp_path: Path
) -> None:
    tiny_vit(transformers, tmp_path)
    file = tmp_path / "preprocessor_config.json"
    for wrong in (
        {"size": {"height": 16, "width": "x"}},
        {"size": 16, "image_mean": [0.5, 0.5], "image_std": [0.5] * 3},
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(ModelError, match=rf"File '{file}' has a size, image_mean, image_std or other value"):
            load_base(f"transformers:{tmp_path}")


def test_generic_hugging_face_labels_are_not_class_names(transformers: Any, tmp_path: Path) -> None:
    tiny_vit(transformers, tmp_path, num_labels=4)
    assert load_base(f"transformers:{tmp_path}").classes is None


def test_hugging_face_models_without_a_trained_head_are_refused(transformers: Any, tmp_path: Path) -> None:
    source = tiny_vit(transformers, tmp_path, num_labels=4)
    source.vit.save_pretrained(tmp_path)  # type: ignore[union-attr,operator]
    with pytest.raises(ModelError, match="has no trained weights for 2 tensors .first: 'classifier.bias'"):
        load_base(f"transformers:{tmp_path}")


def test_the_error_without_transformers_names_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ExtraMissingError, match="needs transformers, which is not installed; `pip install transformers`"
    ):
        load_base("transformers:org/name")


def test_an_unknown_model_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(ModelError, match="'resnet-20' is not known .*torch.export file.; did you mean 'resnet20'"):
        load_base("resnet-20")
