"""Models that are not ours: torchvision's, timm's, and whatever function of the user's returns one."""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from qualms_training.errors import ExtraMissingError, ModelError, QualmsError
from qualms_training.models.suggest import nearest


def from_torchvision(name: str, classes: int, channels: int) -> nn.Module:
    """A classifier of torchvision's with random weights."""
    from qualms_training.models.torchvision_compat import import_torchvision  # noqa: PLC0415  # only this needs it

    zoo = import_torchvision().models
    known = zoo.list_models(module=zoo)
    if name not in known:
        raise ModelError(f"torchvision has no classifier {name!r}{nearest(name, known)}")
    if channels != 3:
        raise ModelError(f"Model 'torchvision:{name}' takes images of 3 channels, not {channels}.")
    model: nn.Module = zoo.get_model(name, weights=None, num_classes=classes)
    return model


def from_timm(name: str, classes: int, channels: int) -> nn.Module:
    """A classifier of timm's with random weights."""
    try:
        timm = importlib.import_module("timm")
    except ImportError as error:
        raise ExtraMissingError(
            f"Model 'timm:{name}' needs timm, which is not installed; `pip install timm` adds it."
        ) from error
    known = timm.list_models()
    if name not in known:
        raise ModelError(f"timm has no model {name!r}{nearest(name, known)}")
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, in_chans=channels)
    return model


def from_function(spec: str, sizes: dict[str, int]) -> nn.Module:
    """What the user's `package.module:function` returns, called with those of `sizes` that it names."""
    function = _find_function(spec)
    try:
        wanted = inspect.signature(function).parameters
        model = function(**{name: size for name, size in sizes.items() if name in wanted})
    except QualmsError:  # of a function of ours, which says what it means
        raise
    except Exception as error:  # the user's code may fail in any way
        raise ModelError(
            f"Model {spec!r}: the function raised {type(error).__name__}: {error}; it may take any of "
            f"{', '.join(sizes)} and must return a torch.nn.Module."
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Model {spec!r}: the function returned {type(model).__name__}; it must return a torch.nn.Module."
        )
    return model


def _find_function(spec: str) -> Callable[..., object]:
    module_name, _, function_name = spec.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # a console script does not look beside the recipe by itself
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may fail in any way while it is imported
        raise ModelError(
            f"Model {spec!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error})."
        ) from error
    function: object = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value)]
        raise ModelError(
            f"Model {spec!r}: module {module_name!r} has no function {function_name!r}{nearest(function_name, names)}"
        )
    return function
