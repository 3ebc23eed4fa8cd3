"""The error of a network that cannot be run on images of a size and a number of channels."""

from torch import nn

from qualms_training.errors import ModelError
from qualms_training.models.channels import expected_channels

RUN_ERRORS = (RuntimeError, TypeError, ValueError, AssertionError, IndexError)
"""what networks raise for images that they do not take"""


def unusable_input(
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
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return ModelError(
        f"{name} cannot be run on images of {height} × {width} pixels with {channels} channels: {reason}; --size gives another "
        "input size."
    )
