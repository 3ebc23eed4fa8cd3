"""The error of a network that cannot be run on images of a size and a number of channels."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from qualms_training.errors import ModelError, QualmsError
from qualms_training.models.channels import expected_channels

_TYPES = ("Half", "BFloat16", "half", "bfloat16", "double", "Double")
"""names of types of numbers other than float32 in PyTorch's messages"""


@contextmanager
def run_errors_explained(name: str, module: nn.Module, channels: int, height: int, width: int) -> Iterator[None]:
    """Turn errors of a network that is run inside on images of this form into ModelError."""
    try:
        yield
    except QualmsError:
        raise
    except Exception as error:  # the user's network may raise anything
        raise _unusable_input(name, module, channels, height, width, error) from error


def _unusable_input(
    name: str, module: nn.Module, channels: int, height: int, width: int, error: Exception
) -> ModelError:
    """The error for network `name` that raised `error` for images of this form; it names what to change."""
    expected = expected_channels(module)
    if expected not in {None, 1, 3}:
        return ModelError(
            f"{name} takes images of {expected} channels, and the service receives grey and RGB images: wrap the network in "
            "one that takes (N, 3, H, W) or (N, 1, H, W) and computes the other channels, and give it as "
            "package.module:function or as an object."
        )
    if expected not in {None, channels}:
        return ModelError(
            f"{name} takes images of {expected} channels, and images are read with {channels}: give --colour "
            f"{'L' if expected == 1 else 'RGB'}."
        )
    reason = " ".join(str(error).split()).rstrip(".")
    kind = type(error).__name__
    if not isinstance(error, RuntimeError | ValueError | AssertionError) or not reason:
        reason = f"{kind}: {reason}" if reason else kind
    remedy = "--size gives another input size"
    if isinstance(error, RuntimeError) and any(word in reason for word in _TYPES):
        remedy = "it is computed in float32, so remove conversions to other types from its forward"
    elif isinstance(error, KeyError | AttributeError | TypeError):
        remedy = "its forward must take one tensor (N, C, H, W) of normalised images"
    return ModelError(
        f"{name} cannot be run on images of {height} × {width} pixels with {channels} channels: {reason}; {remedy}."
    )
