"""Find the logits in what a network returns: a tensor, a dict, a tuple, or an output object of Hugging Face, nested or not."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn

from qualms_training.errors import ModelError, did_you_mean

KEY = "logits"  # the name that Hugging Face uses
SUM_TOLERANCE = 1e-3
"""of the sums of probabilities, which may be rounded to half precision"""


class _ReturnLogits:
    """A forward hook that replaces a network's output by its logits (N, K)."""

    def __init__(self, key: str | None, of_probabilities: bool) -> None:
        self.key = key
        self.of_probabilities = of_probabilities

    def __call__(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> Tensor:
        values = find_logits(output, self.key)
        return values.clamp(min=torch.finfo(values.dtype).tiny).log() if self.of_probabilities else values


def return_logits(module: nn.Module, example: Tensor, key: str | None = None) -> nn.Module:
    """`module`, changed in place to return logits (N, K) for normalised images like `example` (N, C, H, W).

    A forward hook replaces the output, so the names of its modules do not change and it exports as before. A network that
    already returns (N, K) is not changed. Of probabilities, the logarithm is returned, whose softmax they are. `key` names the
    logits among several outputs: a key or an index, or several of them joined by dots.
    """
    with torch.no_grad():
        output = module.eval()(example)
    logits = find_logits(output, key)
    if logits.shape[0] != example.shape[0]:
        raise ModelError(
            f"The base returned logits of shape {tuple(logits.shape)} for {example.shape[0]} images; "
            "it must return one row (N, K) per image."
        )
    _check_one_image(module, example[:1], logits.shape[1], key)
    of_probabilities = are_probabilities(logits)
    if logits is not output or of_probabilities:
        module.register_forward_hook(_ReturnLogits(key, of_probabilities))
    return module


def _check_one_image(module: nn.Module, image: Tensor, classes: int, key: str | None) -> None:
    """ModelError if the network returns another shape for one image (1, C, H, W) than for several."""
    with torch.no_grad():
        output = module(image)
    try:
        shape = tuple(find_logits(output, key).shape)
    except ModelError:
        shape = ()
    if shape != (1, classes):
        raise ModelError(
            f"For one image, the base returned {_describe(output)}, and logits of shape (1, {classes}) are needed; a squeeze() "
            "without an axis removes that of the batch: use flatten(1)."
        )


def are_probabilities(values: Tensor) -> bool:
    """Whether each row of (N, K) is a distribution over several classes, as after a softmax."""
    sums = values.double().sum(dim=1)
    return values.shape[1] > 1 and bool((values >= 0).all()) and bool(((sums - 1).abs() <= SUM_TOLERANCE).all())


def find_logits(output: object, key: str | None = None) -> Tensor:
    """The logits (N, K) in a network's output; ModelError lists what there is if they cannot be told apart.

    With `key`, the value of that key or index. Otherwise the value named `logits`, or the only two-dimensional tensor of
    floats; (N, K, 1, 1) counts as two-dimensional. Values inside other values have names such as `out.logits` and `0.1`.
    """
    if isinstance(output, Tensor):
        if key is not None:
            raise ModelError(
                f"The base returns one tensor of shape {tuple(output.shape)}, so logits {key!r} cannot be chosen."
            )
        logits = _as_logits(output)
        if logits is None:
            raise ModelError(
                f"The base returned {_describe(output)}; it must return logits (N, K) of a floating-point type."
            )
        return logits
    parts = _parts(output)
    if key is not None:
        return _chosen(parts, key)
    named = [
        logits
        for name, value in parts.items()
        if name.rpartition(".")[2] == KEY and (logits := _as_logits(value)) is not None
    ]
    if len(named) == 1:
        return named[0]
    candidates = [logits for value in parts.values() if (logits := _as_logits(value)) is not None]
    if len(candidates) == 1:
        return candidates[0]
    if not parts:
        raise ModelError(f"The base returned {_describe(output)}; it must return logits (N, K).")
    found = f"{len(candidates)} of them could be" if candidates else "none of them can be"
    raise ModelError(
        f"The base returns {_list(parts)}, and {found} the logits (N, K); name them with --logits KEY, or with `logits` in "
        "[base] of a recipe."
    )


def _chosen(parts: Mapping[str, object], key: str) -> Tensor:
    if key not in parts:
        raise ModelError(f"The base has no output {key!r}; it returns {_list(parts)}{did_you_mean(key, parts)}")
    logits = _as_logits(parts[key])
    if logits is None:
        raise ModelError(f"The base's output {key!r} is {_describe(parts[key])}; logits must be floats (N, K).")
    return logits


def _parts(output: object) -> dict[str, object]:
    """The values of an output by key, field or index; those of a value inside it have both names, joined by a dot."""
    parts = dict[str, object]()
    for name, value in _members(output).items():
        inner = {} if isinstance(value, Tensor) else _parts(value)
        parts |= {f"{name}.{key}": one for key, one in inner.items()} or {name: value}
    return parts


def _members(output: object) -> dict[str, object]:
    """The values of an output by key, field or index."""
    if isinstance(output, Mapping):  # Hugging Face's ModelOutput too
        return {str(name): value for name, value in output.items()}
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return dict(zip(output._fields, output, strict=True))
    if isinstance(output, Sequence) and not isinstance(output, str):
        return {str(index): value for index, value in enumerate(output)}
    if is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    return {}


def _as_logits(value: object) -> Tensor | None:
    """`value` as (N, K) if it has that form, or (N, K, 1, 1)."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    if value.ndim > 2 and all(size == 1 for size in value.shape[2:]):
        return value.flatten(1)
    return value if value.ndim == 2 else None


def _list(parts: Mapping[str, object]) -> str:
    return ", ".join(f"{name!r} ({_describe(value)})" for name, value in parts.items()) or "nothing"


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
