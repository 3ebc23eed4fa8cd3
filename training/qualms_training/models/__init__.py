"""Base models by name, the paper's, a model zoo's or the user's, so that a recipe says which in one word."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from qualms_training.errors import ModelError
from qualms_training.models.checkpoint import check_finite, freeze, identity, load_weights
from qualms_training.models.external import from_function, from_timm, from_torchvision
from qualms_training.models.lenet import LeNet
from qualms_training.models.resnet import ResNet20
from qualms_training.models.small import SmallNet
from qualms_training.models.suggest import nearest
from qualms_training.models.vgg import VGG16
from qualms_training.models.wrn import WideResNet16x4

__all__ = ["NAMES", "build", "check_finite", "freeze", "identity", "load_weights"]

_OF_ONE_SIZE: dict[str, Callable[[int, int, int, int], nn.Module]] = {
    "lenet": LeNet,
    "vgg16": VGG16,
    "small": SmallNet,
}
_OF_ANY_SIZE: dict[str, Callable[[int, int], nn.Module]] = {"wrn16-4": WideResNet16x4, "resnet20": ResNet20}
NAMES = (*_OF_ONE_SIZE, *_OF_ANY_SIZE)


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

    `spec` is one of NAMES, `torchvision:NAME`, `timm:NAME` or `package.module:function`; such a function is
    called with those of `classes`, `num_classes`, `channels`, `height` and `width` that it names. `weights`
    is a state-dict file; without one the weights are random, drawn from torch's global generator.
    """
    model = _construct(spec, classes, channels, height, width)
    if weights is not None:
        load_weights(model, weights)
    return model


def _construct(spec: str, classes: int, channels: int, height: int, width: int) -> nn.Module:
    if spec in _OF_ONE_SIZE:
        return _OF_ONE_SIZE[spec](classes, channels, height, width)
    if spec in _OF_ANY_SIZE:
        return _OF_ANY_SIZE[spec](classes, channels)
    source, _, name = spec.partition(":")
    if not source or not name:
        raise ModelError(
            f"Model {spec!r} is not known (accepted: {', '.join(NAMES)}, torchvision:NAME, timm:NAME, "
            f"package.module:function){nearest(spec, NAMES)}"
        )
    if source == "torchvision":
        return from_torchvision(name, classes, channels)
    if source == "timm":
        return from_timm(name, classes, channels)
    sizes = {"classes": classes, "num_classes": classes, "channels": channels}
    return from_function(spec, {**sizes, "height": height, "width": width})
