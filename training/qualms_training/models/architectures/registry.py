"""Our own base classifiers by name."""

from collections.abc import Callable

from torch import nn

from qualms_training.models.architectures.lenet import LeNet
from qualms_training.models.architectures.resnet import ResNet20
from qualms_training.models.architectures.small import SmallNet
from qualms_training.models.architectures.vgg import VGG16
from qualms_training.models.architectures.wrn import WideResNet16x4

_FIXED_SIZE: dict[str, Callable[[int, int, int, int], nn.Module]] = {
    "lenet": LeNet,
    "vgg16": VGG16,
    "small": SmallNet,
}
_ANY_SIZE: dict[str, Callable[[int, int], nn.Module]] = {"wrn16-4": WideResNet16x4, "resnet20": ResNet20}
NAMES = (*_FIXED_SIZE, *_ANY_SIZE)
FIXED_SIZE = tuple(_FIXED_SIZE)
"""models whose weights depend on the height and width of the images"""


def from_name(name: str, classes: int, channels: int, height: int, width: int) -> nn.Module:
    """The model called `name`, one of NAMES, with random weights."""
    if name in _FIXED_SIZE:
        return _FIXED_SIZE[name](classes, channels, height, width)
    return _ANY_SIZE[name](classes, channels)
