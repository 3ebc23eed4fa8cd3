"""Weights are loaded, checked, frozen and identified; a file that does not fit the model is an error."""

import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qualms_training.errors import ModelError
from qualms_training.models import check_finite, freeze, identity, load_weights
from qualms_training.models.architectures.small import SmallNet


def small(seed: int = 0) -> SmallNet:
    torch.manual_seed(seed)
    return SmallNet(3)


def save(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "weights.pt"
    torch.save(content, path)
    return path


@pytest.mark.parametrize("wrap", [None, "state_dict", "model", "model_state_dict", "ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod.", "model._orig_mod.", "module._orig_mod."])
def test_a_state_dict_is_loaded_bare_nested_or_from_data_parallel(
    tmp_path: Path, wrap: str | None, prefix: str
) -> None:
    source, target = small(1), small(2)
    state = {prefix + name: tensor for name, tensor in source.state_dict().items()}
    load_weights(target, save(tmp_path, state if wrap is None else {wrap: state, "epoch": 3}))
    assert identity(target) == identity(source)


def test_tensors_that_a_lightning_module_adds_beside_its_network_are_left_out(tmp_path: Path) -> None:
    source, target = small(1), small(2)
    state = {f"model.{name}": tensor for name, tensor in source.state_dict().items()}
    load_weights(target, save(tmp_path, {"state_dict": {**state, "loss.weight": torch.ones(3)}}))
    assert identity(target) == identity(source)


def test_safetensors_are_loaded_and_damaged_ones_are_an_error(tmp_path: Path) -> None:
    source, target, path = small(1), small(2), tmp_path / "weights.safetensors"
    save_file(source.state_dict(), path)
    load_weights(target, path)
    assert identity(target) == identity(source)
    path.write_bytes(b"no")
    with pytest.raises(ModelError, match=r"weights\.safetensors' cannot be read as safetensors"):
        load_weights(target, path)


def test_values_of_a_state_dict_that_are_no_tensors_are_ignored(tmp_path: Path) -> None:
    class Counted(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"steps": 3}

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    source, target = Counted(2, 2), Counted(2, 2)
    load_weights(target, save(tmp_path, source.state_dict()))
    assert identity(target) == identity(source)


def test_a_batch_normalisation_counter_may_be_missing(tmp_path: Path) -> None:
    source = nn.BatchNorm2d(2)
    nn.init.constant_(source.weight, 3.0)
    state = {name: value for name, value in source.state_dict().items() if "num_batches" not in name}
    target = nn.BatchNorm2d(2)
    load_weights(target, save(tmp_path, state))
    assert identity(target) == identity(source)


def edited(**changes: Tensor | None) -> dict[str, Tensor]:
    """A small net's state dict with tensors added, or removed if None; `__` in a name stands for a dot."""
    state: dict[str, Tensor | None] = dict(small().state_dict())
    state |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in state.items() if tensor is not None}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            edited(fc__weight=None, fc__bias=None),
            "it lacks 2 tensors (first: 'fc.weight'); is it of another architecture?",
        ),
        (
            edited(head=torch.zeros(1)),
            "it has 1 tensors that the model does not have (first: 'head'); is it of",
        ),
        (edited(fc__bias=torch.zeros(7)), "'fc.bias' has shape (7,), but the model takes (3,)."),
        (edited(fc__bias=None, head=torch.zeros(1)), "(first: 'fc.bias') and it has 1"),
        ([1, 2], "does not hold a state dict; accepted is a mapping of names to tensors"),
        ({"epoch": 3}, "does not hold a state dict"),
        (nn.Linear(1, 1), "cannot be read as a state dict"),
    ],
)
def test_the_error_names_the_tensor_that_does_not_fit(tmp_path: Path, content: object, sentence: str) -> None:
    path = save(tmp_path, content)
    target = small()
    before = identity(target)
    with pytest.raises(ModelError, match=re.escape(sentence)) as caught:
        load_weights(target, path)
    assert str(path) in str(caught.value)
    assert identity(target) == before


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04broken", b"\x80\x02broken"])
def test_a_file_that_is_not_a_state_dict_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"weights\.pt' cannot be read as a state dict"):
        load_weights(small(), path)


def test_the_name_of_a_file_must_be_utf_8(tmp_path: Path) -> None:
    path = save(tmp_path, small().state_dict()).rename(tmp_path / os.fsdecode(b"caf\xe9.pt"))
    with pytest.raises(ModelError, match=r"The name of weights file '.*caf\\udce9.pt' is not UTF-8; rename it"):
        load_weights(small(), path)


def test_a_missing_file_or_a_folder_is_an_error(tmp_path: Path) -> None:
    for path, what in ((tmp_path, "is a folder"), (tmp_path / "none.pt", "does not exist")):
        with pytest.raises(ModelError, match=rf"{what}; a \.pt, \.pth or \.safetensors state dict is accepted\."):
            load_weights(small(), path)


def test_options_paths_and_numbers_beside_the_weights_do_not_prevent_loading(tmp_path: Path) -> None:
    source, target = small(1), small(2)
    training = {"args": Namespace(lr=0.1, out=Path("runs")), "best": np.float64(0.9), "history": np.zeros(3)}
    load_weights(target, save(tmp_path, {"model": source.state_dict(), **training}))
    assert identity(target) == identity(source)


@pytest.mark.parametrize("place", ["net", "params_ema", "checkpoint.weights", ":backbone.", "state_dict:encoder.q."])
def test_a_state_dict_under_another_key_or_prefix_is_found(place: str, tmp_path: Path) -> None:
    source, target = small(1), small(2)
    keys, _, prefix = place.partition(":")
    content: dict[str, Any] = {f"{prefix}{name}": tensor for name, tensor in source.state_dict().items()}
    for key in reversed(keys.split(".") if keys else []):
        content = {key: content, "epoch": 3, "optimizer": {"state": {0: {"step": torch.ones(1)}}}}
    load_weights(target, save(tmp_path, content))
    assert identity(target) == identity(source)


def test_of_several_state_dicts_the_one_that_is_used_is_named(tmp_path: Path) -> None:
    raw, averaged, target = small(1), small(2), small(3)
    path = save(tmp_path, {"model_ema": averaged.state_dict(), "model": raw.state_dict()})
    assert load_weights(target, path) == f"file '{path}' (of it 'model', not 'model_ema')"
    assert identity(target) == identity(raw)


def test_several_state_dicts_under_unknown_names_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, {"student": small(1).state_dict(), "teacher": small(2).state_dict()})
    with pytest.raises(ModelError, match="holds several state dicts that fit the model, 'student' and 'teacher'; save"):
        load_weights(small(), path)


def test_weights_in_half_precision_are_announced(tmp_path: Path) -> None:
    path = save(tmp_path, {name: tensor.half() for name, tensor in small().state_dict().items()})
    assert load_weights(small(), path).endswith(", in float32 instead of float16")


def test_the_format_of_a_file_does_not_depend_on_its_suffix(tmp_path: Path) -> None:
    source = small(1)
    save_file(source.state_dict(), tmp_path / "a.pt")
    torch.save(source.state_dict(), tmp_path / "a.safetensors")
    for path in (tmp_path / "a.pt", tmp_path / "a.safetensors"):
        target = small(2)
        load_weights(target, path)
        assert identity(target) == identity(source)


def test_pointers_damaged_files_and_pickled_models_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    for content, sentence in (
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "is a pointer of Git LFS .*`git lfs pull`"),
        (save(tmp_path, small().state_dict()).read_bytes()[:-200], "the file is empty, incomplete or of another kind"),
        (
            save(tmp_path, {"model": small()}).read_bytes(),
            r"object of the class qualms_training\..*SmallNet.*state_dict\(\)",
        ),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=sentence):
            load_weights(small(), path)


def test_tensors_without_values_are_an_error() -> None:
    with pytest.raises(ModelError, match="is on the meta device, so it has no values"):
        check_finite(small().to("meta"))
    with pytest.raises(ModelError, match="is not initialised, so it has no values"):
        check_finite(nn.LazyLinear(2))


def test_non_finite_weights_and_buffers_are_an_error_with_their_number() -> None:
    net = small()
    check_finite(net)
    with torch.no_grad():
        net.fc.bias[:2] = torch.tensor([float("nan"), float("inf")])
    with pytest.raises(ModelError, match=r"Tensor 'fc.bias' has 2 of 3 values that are not finite"):
        check_finite(net)
    norm = nn.BatchNorm2d(4)
    norm.running_var = torch.full((4,), float("nan"))
    with pytest.raises(ModelError, match=r"Tensor 'running_var' has 4 of 4 values"):
        freeze(norm)


def test_freeze_sets_evaluation_mode_and_disables_gradients() -> None:
    net = small()
    assert freeze(net) is net
    assert not net.training
    assert not any(weight.requires_grad for weight in net.parameters())


@pytest.mark.parametrize("inference", [False, True])
def test_freeze_disables_gradients_of_buffers(inference: bool) -> None:
    with torch.inference_mode(inference):
        net = nn.BatchNorm2d(3)
        net.register_buffer("weights", torch.ones(3, requires_grad=True))
        net.register_buffer("computed", 2 * net.weight)
        assert not any(buffer.requires_grad for buffer in freeze(net).buffers())


def test_identity_changes_with_values_types_shapes_and_names() -> None:
    identities = [
        identity(nn.Linear(2, 2, dtype=torch.bfloat16)),
        identity(small(0)),
        identity(small(1)),
        identity(small(0).double()),
        identity(nn.Sequential(small(0))),
        identity(nn.Conv2d(1, 1, kernel_size=(1, 4))),
        identity(nn.Conv2d(1, 1, kernel_size=(4, 1))),
    ]
    assert len(set(identities)) == len(identities)
    assert identity(small(0)) == identity(small(0))
    assert re.fullmatch("[0-9a-f]{64}", identities[0])


def test_identity_ignores_memory_layout() -> None:
    net = small()
    before = identity(net)
    net.conv2.weight.data = net.conv2.weight.data.contiguous(memory_format=torch.channels_last)
    assert identity(net) == before
