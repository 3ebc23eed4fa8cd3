"""Base classifiers by name: those of the paper, of torchvision and timm, and the user's own functions."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from qualms_training.errors import ModelError, did_you_mean
from qualms_training.models.checkpoint import check_finite, count_parameters, freeze, identity, load_weights
from qualms_training.models.external import from_function, from_timm, from_torchvision
from qualms_training.models.lenet import LeNet
from qualms_training.models.resnet import ResNet20
from qualms_training.models.small import SmallNet
from qualms_training.models.vgg import VGG16
from qualms_training.models.wrn import WideResNet16x4

__all__ = ["NAMES", "build", "check_finite", "count_parameters", "freeze", "identity", "load_weights"]

_FIXED_SIZE: dict[str, Callable[[int, int, int, int], nn.Module]] = {
    "lenet": LeNet,
    "vgg16": VGG16,
    "small": SmallNet,
}
_ANY_SIZE: dict[str, Callable[[int, int], nn.Module]] = {"wrn16-4": WideResNet16x4, "resnet20": ResNet20}
NAMES = (*_FIXED_SIZE, *_ANY_SIZE)


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
    state-dict file; without one the weights are random, drawn from torch's global generator.
    """
    model = _construct(spec, classes, channels, height, width)
    if weights is not None:
        load_weights(model, weights)
    return model


def _construct(spec: str, classes: int, channels: int, height: int, width: int) -> nn.Module:
    if spec in _FIXED_SIZE:
        return _FIXED_SIZE[spec](classes, channels, height, width)
    if spec in _ANY_SIZE:
        return _ANY_SIZE[spec](classes, channels)
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
