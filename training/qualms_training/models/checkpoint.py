"""A model's weights: load, check, freeze and identify them."""

import hashlib
import importlib
import re
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path, PosixPath, PurePosixPath
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qualms_training.errors import ExtraMissingError, ModelError

WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "network", "ema", "model_ema", "state_dict_ema")
"""keys under which common training scripts store the state dict; of several, the first"""
PREFIXES = ("module.", "model.", "_orig_mod.", "net.")
"""prefixes that DataParallel, Lightning modules, torch.compile and wrapper classes add to the names of tensors"""
KNOWN_PREFIXES = tuple("".join(chain) for length in range(1, 4) for chain in product(PREFIXES, repeat=length))
_REFUSED_CLASS = re.compile(r"(?:GLOBAL|global|class):? (?:GLOBAL )?([\w.]+\.\w+)")
COUNTER = "num_batches_tracked"  # used by batch normalisation in training only; old checkpoints lack it
_DENSENET_NAME = re.compile(
    r"((?:norm|conv))\.([12])(?=\.)"
)  # the files that torchvision publishes have norm.1 instead of norm1
M = TypeVar("M", bound=nn.Module)


def load_weights(model: nn.Module, path: Path, *, ignored: tuple[str, ...] = ()) -> str:
    """Load a state dict from a .pt, .pth or .safetensors file; ModelError if a tensor is missing or has another shape.

    Tensors whose names begin with one of `ignored` are left out: heads that are used in training only. Returns the file and what
    was chosen or changed in it, for messages.
    """
    expected = tensors_of(model)
    state, about = read_state_dict(path, expected)
    state = {name: tensor for name, tensor in state.items() if name in expected or not name.startswith(ignored or "\0")}
    _check_keys(path, expected, state)
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise ModelError(
                f"Weights file {str(path)!r}: tensor {name!r} has shape {tuple(tensor.shape)}, "
                f"but the model takes {tuple(expected[name].shape)}."
            )
    model.load_state_dict(state, strict=False)
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in state.values() if tensor.is_floating_point()}
    others = sorted(types - {"float32"})
    return f"file {str(path)!r}{about}" + (f", in float32 instead of {' and '.join(others)}" if others else "")


def read_state_dict(path: Path, expected: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """The tensors of a .pt, .pth or .safetensors file by the names they have in the state dict `expected`.

    Also returns which of several state dicts in the file was chosen, for messages; nothing if there is one.
    """
    state, about = _chosen(path, read_file(path), [name for name in expected if not name.endswith(COUNTER)])
    renamed = {name: _DENSENET_NAME.sub(r"\1\2", name) for name in state if name not in expected}
    named = {new if (new := renamed.get(name, name)) in expected else name: value for name, value in state.items()}
    return named, about


def _chosen(path: Path, content: object, needed: Sequence[str]) -> tuple[dict[str, Tensor], str]:
    """The state dict with the tensors `needed` in the content of a file, without the prefix of wrappers.

    Of several, the first in the order of WRAPPERS and KNOWN_PREFIXES. If none fits the model, only prefixes that all names share
    are removed.
    """
    states = _state_dicts(content)
    fitting = [(key, prefix) for key, state in states.items() for prefix in _fitting_prefixes(state, needed)]
    fitting.sort(key=lambda place: (_rank(place[0], WRAPPERS), _rank(place[1], KNOWN_PREFIXES)))
    if not fitting:
        key = min(states, key=lambda key: _rank(key, WRAPPERS), default=None)
        if key is None or (key and key not in WRAPPERS):
            raise ModelError(
                f"Weights file {str(path)!r} does not hold a state dict; accepted is a mapping of names to tensors, "
                f"at the top level or under a key such as {', '.join(map(repr, WRAPPERS))}."
            )
        return _without_shared_prefix(states[key], needed), ""
    titles = [f"{key}: {prefix}*" if key and prefix else key or f"{prefix}*" for key, prefix in fitting]
    (key, prefix), others = fitting[0], " and ".join(map(repr, titles[1:]))
    if others and key not in WRAPPERS and prefix not in KNOWN_PREFIXES:
        raise ModelError(
            f"Weights file {str(path)!r} holds several state dicts that fit the model, {titles[0]!r} and {others}; save the one to "
            "use alone with torch.save."
        )
    state = {name.removeprefix(prefix): value for name, value in states[key].items() if name.startswith(prefix)}
    return state, f" (of it {titles[0]!r}, not {others})" if others else ""


def _state_dicts(content: object, depth: int = 3) -> dict[str, dict[str, Tensor]]:
    """The mappings of names to tensors in the content of a file by their key, which is empty at the top level."""
    if not isinstance(content, Mapping):
        return {}
    tensors = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
    found = {"": tensors} if tensors else {}
    for key, value in content.items() if depth else ():
        inner = _state_dicts(value, depth - 1) if isinstance(key, str) else {}
        found |= {f"{key}.{name}" if name else key: state for name, state in inner.items()}
    return found


def _fitting_prefixes(state: Mapping[str, Tensor], needed: Sequence[str]) -> list[str]:
    """Prefixes with which the state dict has all tensors `needed`; none but the empty one if that is among them."""
    if all(name in state for name in needed):
        return [""]
    prefixes = [name.removesuffix(needed[0]) for name in state if name.endswith(f".{needed[0]}")]
    return [prefix for prefix in prefixes if all(f"{prefix}{name}" in state for name in needed)]


def _rank(name: str, known: Sequence[str]) -> int:
    """The place of a name, or of the last part of a dotted one, among known ones; after them if it is none of them."""
    last = name.rpartition(".")[2] if name not in known else name
    return -1 if not name else known.index(last) if last in known else len(known)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers in the state dict of `model`, which may also hold other values (`get_extra_state`)."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def check_finite(model: nn.Module) -> None:
    """Raise ModelError if any weight or buffer is NaN or infinite, or has no values."""
    check_has_values(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        count = int((~torch.isfinite(tensor)).sum())
        if count:
            raise ModelError(
                f"Tensor {name!r} has {count} of {tensor.numel()} values that are not finite; "
                "every weight and buffer of a model must be a finite number."
            )


def check_has_values(model: nn.Module) -> None:
    """Raise ModelError if a weight or buffer is on the meta device or not initialised."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta or is_lazy(tensor):
            kind = "on the meta device" if tensor.is_meta else "not initialised"
            raise ModelError(f"Tensor {name!r} is {kind}, so it has no values; load the model's weights first.")


def freeze(model: M) -> M:
    """Put `model` in evaluation mode without gradients and return it; ModelError if a weight is not finite."""
    check_finite(model)
    for buffer in model.buffers():  # of a converted TorchScript file, weights are buffers
        (buffer if buffer.is_leaf else buffer.detach_()).requires_grad_(False)
    return model.eval().requires_grad_(False)


def count_parameters(model: nn.Module) -> int:
    """Number of weights."""
    return sum(tensor.numel() for tensor in model.parameters())


def identity(model: nn.Module) -> str:
    """SHA-256 of all weights and buffers (names, types, shapes, bytes)."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors_of(model).items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_file(path: Path) -> object:
    """The content of a .pt, .pth or .safetensors file, whatever its suffix is."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ModelError(f"Weights file {str(path)!r} {what}; a .pt, .pth or .safetensors state dict is accepted.")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ModelError(f"The name of weights file {str(path)!r} is not UTF-8; rename it.") from None
    with path.open("rb") as file:
        start = file.read(100)
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(
            f"Weights file {str(path)!r} is a pointer of Git LFS instead of the file itself; run `git lfs pull`."
        )
    is_torch = start.startswith((b"PK", b"\x80"))
    return (
        _read_torch(path)
        if is_torch or not (start[8:9] == b"{" or path.suffix == ".safetensors")
        else _read_safetensors(path)
    )


def _read_torch(path: Path) -> object:
    try:
        with (
            path.open("rb") as file,  # of a path, torch.load considers the suffix
            warnings.catch_warnings(),
            torch.serialization.safe_globals(_harmless_classes()),
        ):
            warnings.simplefilter("ignore")  # about the pickle protocol
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types of exception on damaged files
        refused = _REFUSED_CLASS.search(str(error))
        reason = (
            f"it holds an object of the class {refused[1]}, and whole pickled models and other objects are not loaded, since they "
            "may run any code: save model.state_dict() with torch.save"
            if refused
            else f"{type(error).__name__}: the file is empty, incomplete or of another kind"
        )
        raise ModelError(
            f"Weights file {str(path)!r} cannot be read as a state dict saved by torch.save ({reason})."
        ) from error


def _harmless_classes() -> list[Any]:
    """Classes of plain values that training scripts save beside the weights: options, paths and NumPy's numbers."""
    multiarray: Any = importlib.import_module("numpy._core.multiarray")
    functions = [
        (getattr(multiarray, name), f"{module}.{name}")
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name in ("scalar", "_reconstruct")
    ]
    numbers = [type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"]
    return [
        Namespace,
        SimpleNamespace,
        PosixPath,
        PurePosixPath,
        np.dtype,
        np.ndarray,
        *functions,
        *dict.fromkeys(numbers),
    ]


def _read_safetensors(path: Path) -> object:
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
            f"Weights file {str(path)!r} cannot be read as safetensors ({type(error).__name__}): it is incomplete or of another "
            "kind."
        ) from error


def _without_shared_prefix(state: dict[str, Tensor], needed: Sequence[str]) -> dict[str, Tensor]:
    """`state` without prefixes that all names share, unless a needed one has them."""
    shared = next((prefix for prefix in PREFIXES if state and all(name.startswith(prefix) for name in state)), None)
    if shared is None or any(name.startswith(shared) for name in needed):
        return state
    return _without_shared_prefix({name.removeprefix(shared): value for name, value in state.items()}, needed)


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
