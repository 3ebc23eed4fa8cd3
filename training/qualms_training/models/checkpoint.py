"""A model's weights: load, check, freeze and identify them."""

import hashlib
import importlib
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from qualms_training.errors import ExtraMissingError, ModelError

WRAPPERS = ("state_dict", "model_state_dict", "model", "ema", "model_ema", "state_dict_ema")
"""keys under which common training scripts store the state dict; of several, the first"""
PREFIXES = ("module.", "model.", "_orig_mod.", "net.")
"""prefixes that DataParallel, Lightning modules, torch.compile and wrapper classes add to the names of tensors"""
COUNTER = "num_batches_tracked"  # used by batch normalisation in training only; old checkpoints lack it
_DENSENET_NAME = re.compile(
    r"((?:norm|conv))\.([12])(?=\.)"
)  # the files that torchvision publishes have norm.1 instead of norm1
M = TypeVar("M", bound=nn.Module)


def load_weights(model: nn.Module, path: Path, *, ignored: tuple[str, ...] = ()) -> None:
    """Load a state dict from a .pt, .pth or .safetensors file; ModelError if a tensor is missing or has another shape.

    Tensors whose names begin with one of `ignored` are left out: heads that are used in training only.
    """
    expected = model.state_dict()
    state = read_state_dict(path, expected)
    state = {name: tensor for name, tensor in state.items() if name in expected or not name.startswith(ignored or "\0")}
    _check_keys(path, expected, state)
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise ModelError(
                f"Weights file {str(path)!r}: tensor {name!r} has shape {tuple(tensor.shape)}, "
                f"but the model takes {tuple(expected[name].shape)}."
            )
    model.load_state_dict(state, strict=False)


def read_state_dict(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a .pt, .pth or .safetensors file by the names they have in the state dict `expected`."""
    if not path.is_file():
        raise ModelError(
            f"Weights file {str(path)!r} does not exist; a .pt, .pth or .safetensors state dict is accepted."
        )
    state = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    state = _without_prefix(state, [name for name in expected if not name.endswith(COUNTER)])
    renamed = {name: _DENSENET_NAME.sub(r"\1\2", name) for name in state if name not in expected}
    return {new if (new := renamed.get(name, name)) in expected else name: value for name, value in state.items()}


def check_finite(model: nn.Module) -> None:
    """Raise ModelError if any weight or buffer is NaN or infinite."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        count = int((~torch.isfinite(tensor)).sum())
        if count:
            raise ModelError(
                f"Tensor {name!r} has {count} of {tensor.numel()} values that are not finite; "
                "every weight and buffer of a model must be a finite number."
            )


def freeze(model: M) -> M:
    """Put `model` in evaluation mode without gradients and return it; ModelError if a weight is not finite."""
    check_finite(model)
    return model.eval().requires_grad_(False)


def count_parameters(model: nn.Module) -> int:
    """Number of weights."""
    return sum(tensor.numel() for tensor in model.parameters())


def identity(model: nn.Module) -> str:
    """SHA-256 of all weights and buffers (names, types, shapes, bytes)."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types of exception on damaged files
        raise ModelError(
            f"Weights file {str(path)!r} cannot be read as a state dict saved by torch.save "
            f"({type(error).__name__}); whole pickled models are not accepted: save model.state_dict() with torch.save."
        ) from error
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ModelError(
            f"Weights file {str(path)!r} does not hold a state dict; accepted is a mapping of names to "
            f"tensors, at the top level or under one of the keys {', '.join(map(repr, WRAPPERS))}."
        )
    return dict(content)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        load_file = importlib.import_module("safetensors.torch").load_file
    except ImportError as error:
        raise ExtraMissingError(
            f"Weights file {str(path)!r} needs safetensors, which is not installed: run pip install 'qualms[train]'."
        ) from error
    try:
        return dict(load_file(path, device="cpu"))
    except Exception as error:  # the package has an exception class of its own, and raises others on short files
        raise ModelError(
            f"Weights file {str(path)!r} cannot be read as safetensors ({type(error).__name__})."
        ) from error


def _without_prefix(state: dict[str, Tensor], needed: Sequence[str]) -> dict[str, Tensor]:
    """`state` without the prefix of wrappers such as DataParallel, and without the tensors that wrappers add themselves.

    If no prefix makes it fit the model, only prefixes that all names share are removed.
    """
    for length in range(4):
        for chain in product(PREFIXES, repeat=length):
            prefix = "".join(chain)
            if all(f"{prefix}{name}" in state for name in needed):
                return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    shared = next((prefix for prefix in PREFIXES if state and all(name.startswith(prefix) for name in state)), None)
    if shared is None or any(name.startswith(shared) for name in needed):
        return state
    return _without_prefix({name.removeprefix(shared): value for name, value in state.items()}, needed)


def _check_keys(path: Path, expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    missing = [name for name in expected if name not in state and not name.endswith(COUNTER)]
    unexpected = [name for name in state if name not in expected]
    faults = []
    if missing:
        faults.append(f"it lacks {len(missing)} tensors (first: {missing[0]!r})")
    if unexpected:
        faults.append(f"it has {len(unexpected)} tensors that the model does not have (first: {unexpected[0]!r})")
    if faults:
        raise ModelError(
            f"Weights file {str(path)!r} does not fit the model: {' and '.join(faults)}; is it of another architecture?"
        )
