"""A model's weights: load, check, freeze and identify them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from qualms_training.errors import ModelError

WRAPPERS = ("state_dict", "model")  # keys under which common training scripts store the state dict
COUNTER = "num_batches_tracked"  # used by batch normalisation in training only; old checkpoints lack it
M = TypeVar("M", bound=nn.Module)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the state dict of a .pt or .pth file into `model`; ModelError if a tensor is missing or has another shape."""
    state = _read_state_dict(path)
    expected = model.state_dict()
    _check_keys(path, expected, state)
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise ModelError(
                f"Weights file {str(path)!r}: tensor {name!r} has shape {tuple(tensor.shape)}, "
                f"but the model takes {tuple(expected[name].shape)}."
            )
    model.load_state_dict(state, strict=False)


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


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ModelError(f"Weights file {str(path)!r} does not exist; a .pt or .pth state dict is accepted.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types of exception on damaged files
        raise ModelError(
            f"Weights file {str(path)!r} cannot be read as a state dict saved by torch.save "
            f"({type(error).__name__}); whole pickled models are not accepted."
        ) from error
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ModelError(
            f"Weights file {str(path)!r} does not hold a state dict; accepted is a mapping of names to "
            f"tensors, at the top level or under one of the keys {', '.join(map(repr, WRAPPERS))}."
        )
    state = dict(content)
    consume_prefix_in_state_dict_if_present(state, "module.")  # DataParallel adds it
    return state


def _check_keys(path: Path, expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    missing = [name for name in expected if name not in state and not name.endswith(COUNTER)]
    unexpected = [name for name in state if name not in expected]
    faults = []
    if missing:
        faults.append(f"it lacks {len(missing)} tensors (first: {missing[0]!r})")
    if unexpected:
        faults.append(f"it has {len(unexpected)} that the model does not have (first: {unexpected[0]!r})")
    if faults:
        raise ModelError(f"Weights file {str(path)!r} does not fit the model: {' and '.join(faults)}.")
