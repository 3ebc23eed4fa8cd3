"""Base classifiers: those of the paper, of torchvision, timm and transformers, the user's own functions, and files."""

from pathlib import Path

from torch import nn

from qualms_training.errors import ModelError, did_you_mean
from qualms_training.models.architectures.registry import NAMES, from_name
from qualms_training.models.channels import expected_channels
from qualms_training.models.checkpoint import check_finite, count_parameters, freeze, identity, load_weights
from qualms_training.models.libraries.external import from_function, from_timm, from_torchvision
from qualms_training.models.libraries.input_defaults import InputDefaults
from qualms_training.models.logits import find_logits, return_logits
from qualms_training.models.source import LoadedBase, load_base

__all__ = [
    "NAMES",
    "InputDefaults",
    "LoadedBase",
    "build",
    "check_finite",
    "count_parameters",
    "expected_channels",
    "find_logits",
    "freeze",
    "identity",
    "load_base",
    "load_weights",
    "return_logits",
]


def build(
    spec: str,
    classes: int,
    channels: int = 3,
    height: int = 32,
    width: int = 32,
    *,
    weights: Path | None = None,
) -> nn.Module:
    """The model that `spec` names: normalised images (N, channels, height, width) to logits (N, classes).

    `spec` is one of NAMES, `torchvision:NAME`, `timm:NAME` or `package.module:function`. The function is called with
    those of `classes`, `num_classes`, `channels`, `height` and `width` that are its parameters. `weights` is a
    state-dict file; without one the weights are random, drawn from torch's global generator. `load_base` loads other
    kinds of networks, which cannot be trained here.
    """
    model = _construct(spec, classes, channels, height, width)
    if weights is not None:
        load_weights(model, weights)
    return model


def _construct(spec: str, classes: int, channels: int, height: int, width: int) -> nn.Module:
    if spec in NAMES:
        return from_name(spec, classes, channels, height, width)
    source, _, name = spec.partition(":")
    if not source or not name:
        raise ModelError(
            f"Model {spec!r} is not known (accepted: {', '.join(NAMES)}, torchvision:NAME, timm:NAME, "
            f"package.module:function){did_you_mean(spec, NAMES)}"
        )
    if source == "torchvision":
        return from_torchvision(name, classes, channels)
    if source == "timm":
        return from_timm(name, classes, channels)
    sizes = {"classes": classes, "num_classes": classes, "channels": channels}
    return from_function(spec, {**sizes, "height": height, "width": width})
