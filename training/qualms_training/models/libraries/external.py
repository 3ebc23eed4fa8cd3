"""Models from elsewhere: torchvision, timm, and functions in the user's own modules."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

from torch import nn

from qualms_training.errors import ExtraMissingError, ModelError, QualmsError, did_you_mean
from qualms_training.models.libraries.hub import HUB, hub_failure, hub_or_cache
from qualms_training.models.libraries.torchvision_compat import import_torchvision
from qualms_training.models.wrappers import unwrap_parts, unwrapped


def torchvision_models(name: str) -> ModuleType:
    """torchvision.models; ModelError if it has no classifier `name`."""
    models: ModuleType = import_torchvision().models
    accepted = models.list_models(module=models)
    if name not in accepted:
        raise ModelError(f"torchvision has no classifier {name!r}{did_you_mean(name, accepted)}")
    return models


def torchvision_names() -> list[str]:
    """The names of torchvision's classifiers; none without torchvision."""
    with suppress(ExtraMissingError):
        models: ModuleType = import_torchvision().models
        return list(models.list_models(module=models))
    return []


def from_torchvision(name: str, classes: int | None, channels: int | None = None, **options: bool) -> nn.Module:
    """A torchvision classifier with random weights, with 1,000 classes if `classes` is None."""
    models = torchvision_models(name)
    if channels not in {None, 3}:
        raise ModelError(f"Model 'torchvision:{name}' takes images of 3 channels, not {channels}.")
    sizes = {} if classes is None else {"num_classes": classes}
    model: nn.Module = models.get_model(name, weights=None, **sizes, **options)
    return model


def import_timm(spec: str) -> ModuleType:
    """timm, which imports torchvision; ExtraMissingError names `spec` and the command that installs it."""
    make_torchvision_importable()
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise ExtraMissingError(
            f"Model {spec!r} needs timm, which is not installed; `pip install timm` adds it."
        ) from error


def check_timm_name(timm: ModuleType, name: str) -> None:
    """Raise ModelError if timm has no model `name`, which may end in a tag of its weights, as in `resnet50.a1_in1k`.

    A model on the Hub (`hf_hub:ORGANISATION/NAME`) is accepted: only the Hub knows it.
    """
    if name.startswith(HUB):
        return
    architecture, _, tag = name.partition(".")
    accepted = timm.list_models()
    if architecture not in accepted:
        raise ModelError(f"timm has no model {architecture!r}{did_you_mean(architecture, accepted)}")
    if tag:
        tagged = timm.list_pretrained(f"{architecture}.*")
        if name not in tagged:
            raise ModelError(f"timm has no weights {tag!r} of {architecture!r}{did_you_mean(name, tagged)}")


def from_timm(name: str, classes: int | None, channels: int | None) -> nn.Module:
    """A timm classifier with random weights; None leaves the number of classes or channels at the model's own."""
    timm = import_timm(f"timm:{name}")
    check_timm_name(timm, name)
    sizes = {"num_classes": classes, "in_chans": channels}
    given = {key: size for key, size in sizes.items() if size is not None}
    if not name.startswith(HUB):
        model: nn.Module = timm.create_model(name, pretrained=False, **given)
        return model
    with hub_or_cache() as unreachable:
        try:
            model = timm.create_model(name, pretrained=False, **given)
        except Exception as error:  # several download libraries, each with exceptions of its own
            raise ModelError(
                f"The configuration of 'timm:{name}' cannot be loaded ({hub_failure(error, unreachable)}); without a network, "
                "name the architecture, as timm:NAME."
            ) from error
    return model


def from_function(spec: str, sizes: Mapping[str, int]) -> nn.Module:
    """The model that `package.module:function` returns, called with those of `sizes` that are its parameters.

    The function may also be a network itself.
    """
    function = find_function(spec)
    try:
        parameters = {} if isinstance(function, nn.Module) else inspect.signature(function).parameters
        model = (
            function
            if isinstance(function, nn.Module)
            else function(**{name: size for name, size in sizes.items() if name in parameters})
        )
    except QualmsError:  # raised by a function of this package, with a sentence of its own
        raise
    except Exception as error:  # the user's code may raise anything
        raise ModelError(
            f"Model {spec!r}: the function raised {type(error).__name__}: {' '.join(str(error).split())}; it may take any of "
            "classes, num_classes, channels, height and width (--size), and must return a torch.nn.Module."
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Model {spec!r}: the function returned {type(model).__name__}; it must return a torch.nn.Module."
        )
    return unwrap_parts(unwrapped(model))


def find_function(spec: str) -> Callable[..., object]:
    """The function that `package.module:function` names."""
    make_torchvision_importable()
    module_name, _, function_name = spec.partition(":")
    try:
        module = _import_module(module_name)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ModelError(
            f"Model {spec!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error})."
        ) from error
    function: object = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value)]
        raise ModelError(
            f"Model {spec!r}: module {module_name!r} has no function {function_name!r}{did_you_mean(function_name, names)}"
        )
    return function


def make_torchvision_importable() -> None:
    """Import torchvision before other code does, since it may need help; without torchvision, do nothing."""
    with suppress(ExtraMissingError):
        import_torchvision()


def _import_module(name: str) -> ModuleType:
    """Import a module; a file in the working directory takes precedence over an installed package of the same name.

    It does not replace a module of the standard library or a package that is already imported, for example our own.
    """
    folder, package = Path.cwd(), name.partition(".")[0]
    if str(folder) not in sys.path:  # the script directory of a console script is not the working directory
        sys.path.append(str(folder))
    file = folder.joinpath(*name.split("."))
    is_here = file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()
    if is_here and package not in sys.modules and package not in sys.stdlib_module_names:
        _import_from(folder, package)
    return importlib.import_module(name)


def _import_from(folder: Path, package: str) -> None:
    """Import a top-level module or package, which need not have an `__init__.py`, from `folder` alone."""
    spec = PathFinder.find_spec(package, [str(folder)])
    if spec is None:
        return
    if spec.loader is None:  # no __init__.py: search this folder only, not folders of that name elsewhere on the path
        spec.submodule_search_locations = [str(folder / package)]
    module = module_from_spec(spec)
    sys.modules[package] = module
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[package]
        raise
