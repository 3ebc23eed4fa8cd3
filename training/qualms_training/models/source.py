"""Any classification network with its trained weights, as a frozen base."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from qualms_training.errors import ModelError, did_you_mean
from qualms_training.models import opaque
from qualms_training.models.architectures.registry import FIXED_SIZE, NAMES, from_name
from qualms_training.models.channels import expected_channels
from qualms_training.models.checkpoint import freeze, load_weights, read_state_dict, tensors_of
from qualms_training.models.libraries import hugging_face
from qualms_training.models.libraries.external import (
    find_function,
    from_function,
    from_timm,
    from_torchvision,
    torchvision_names,
)
from qualms_training.models.libraries.hub import HUB
from qualms_training.models.libraries.input_defaults import InputDefaults, from_timm_config, from_torchvision_weights
from qualms_training.models.libraries.pretrained import (
    DEFAULT,
    timm_with_weights,
    torchvision_weights,
    torchvision_with_weights,
)
from qualms_training.models.wrappers import unwrapped

INCLUDED = "included"
ACCEPTED = (
    f"{', '.join(NAMES)}, torchvision:NAME, timm:NAME, hf_hub:ORGANISATION/NAME, transformers:FOLDER_OR_NAME, "
    "package.module:function, or a TorchScript or torch.export file"
)
_CLASSES, _SIDE = 1000, 224  # of a network that is built without weights and does not know them
_AUXILIARY_HEADS = ("aux1.", "aux2.", "AuxLogits.")  # of GoogLeNet and Inception v3, used in training only
_FILE_OR_DEFAULT = "--weights FILE, or weights of the model such as --weights DEFAULT"
_OWN, _FILE, _FUNCTION = "own", "file", "function"  # kinds of networks, beside the libraries
_OTHER_FILES = (".safetensors", ".ckpt", ".bin", ".pkl", ".onnx")


@dataclass(frozen=True)
class LoadedBase:
    """A classifier with its trained weights, frozen, and what its configuration says about it."""

    module: nn.Module
    """normalised images (N, C, H, W) to logits (N, K), or to an output in which `logits.find_logits` finds them"""
    input: InputDefaults | None
    """the input that it was made for; None if it does not say"""
    classes: tuple[str, ...] | None
    """names of its classes; None if it has none"""
    opaque: str | None
    """what cannot be tapped in a network without Python code; None otherwise"""
    weights_source: str
    image_size: tuple[int, int] | None = None
    """height and width, if it runs with no others"""


def load_base(
    spec: str,
    *,
    weights: str | None = None,
    classes: int | None = None,
    channels: int | None = None,
    height: int | None = None,
    width: int | None = None,
) -> LoadedBase:
    """The network `spec` with its trained weights, frozen; ModelError if it has none, as weights are never random.

    `weights` is a state-dict file (.pt, .pth, .safetensors), the name of weights that the library publishes (`DEFAULT` for
    its best), or `included` if the user's function loads them. `classes` is the number of classes of a weights file; by
    default it is read from the file. `channels`, `height` and `width` of the images are needed by networks that do not
    know them.
    """
    sizes = {"classes": classes, "channels": channels, "height": height, "width": width}
    return _frozen(_load(spec, weights, {name: size for name, size in sizes.items() if size is not None}))


def untrained_base(
    spec: str, channels: int | None = None, height: int | None = None, width: int | None = None
) -> LoadedBase:
    """The network `spec` with random weights, to list its modules, whose names and shapes do not depend on the weights."""
    kind, name = _parse(spec)
    if kind == _FILE:
        return load_base(spec, channels=channels, height=height, width=width)
    defaults = None
    if kind == "torchvision":
        module = from_torchvision(name, None, channels, **_torchvision_options(name))
        defaults = from_torchvision_weights(torchvision_weights(name, DEFAULT), of_file=True)
    elif kind == "timm":
        module = from_timm(name, None, channels)
    elif kind == "transformers":
        module = hugging_face.with_random_weights(name, None)
        defaults = hugging_face.input_defaults(name)
    else:
        sizes = {"classes": _CLASSES, "channels": channels or 3, "height": height or _SIDE, "width": width or _SIDE}
        module = from_name(name, **sizes) if kind == _OWN else from_function(spec, _with_aliases(sizes))
    return _frozen(LoadedBase(module, defaults or _configured_input(module), None, None, "random"))


def base_of_module(module: nn.Module) -> LoadedBase:
    """A network that is a Python object, frozen, with what its own configuration says about it."""
    module = unwrapped(module)
    names = hugging_face.class_names(module)
    return _frozen(LoadedBase(module, _configured_input(module), names, None, "with its own weights"))


def _frozen(base: LoadedBase) -> LoadedBase:
    """The base in evaluation mode without gradients, with weights in float32, which is what the exported graph computes in."""
    check_layers(base.module)
    types = {
        str(tensor.dtype).removeprefix("torch.") for tensor in base.module.parameters() if tensor.is_floating_point()
    }
    freeze(base.module.float())
    if others := sorted(types - {"float32"}):
        return replace(base, weights_source=f"{base.weights_source}, in float32 instead of {' and '.join(others)}")
    return base


def check_layers(module: nn.Module) -> None:
    """ModelError for a graph as an object, whose layers are not modules, and for quantised layers; `opaque` opens files."""
    for name, part in module.named_modules():
        save = None
        if isinstance(part, torch.jit.ScriptModule):
            save = "its method save" if not name else "torch.jit.trace(model, images).save"
        elif isinstance(part, GraphModule) and not isinstance(part, opaque.OpaqueGraph):
            save = None if _has_modules(part) else "torch.export.save"
        if save:
            title = f"The part {name!r} of the model" if name else "The model"
            raise ModelError(
                f"{title} is a {type(part).__name__} whose layers cannot be read: give the network that it was made from, or "
                f"save {'the model' if name else 'it'} with {save} and run qualms fit --model FILE."
            )
        if ".quantized." in f"{type(part).__module__}.":
            raise ModelError(
                f"Layer {name!r} is quantised ({type(part).__module__}.{type(part).__name__}), and the exported graph is "
                "computed in float32: give the network as it was before quantisation."
            )


def _has_modules(module: GraphModule) -> bool:
    """Whether a graph calls modules, as one of torch.fx does, and not only operators, as one of torch.export does."""
    return any(node.op == "call_module" and node.target != "_guards_fn" for node in module.graph.nodes)


def _load(spec: str, weights: str | None, sizes: Mapping[str, int]) -> LoadedBase:
    kind, name = _parse(spec)
    loaders = {
        _OWN: _named,
        _FILE: _opaque,
        "torchvision": _torchvision,
        "timm": _timm,
        "transformers": _transformers,
        _FUNCTION: _function,
    }
    return loaders[kind](name, weights, sizes)


def _parse(spec: str) -> tuple[str, str]:
    """The kind of network that `spec` names, and its name there; ModelError if it is of no kind."""
    source, _, name = spec.partition(":")
    if spec in NAMES:
        return _OWN, spec
    if Path(source).suffix == ".py":
        module = Path(source).with_suffix("").as_posix().removeprefix("./").replace("/", ".")
        raise ModelError(
            f"Model {spec!r} is a Python file; name the function in it that returns the network, seen from the working directory: "
            f"{module}:{name or 'function'}."
        )
    if Path(spec).is_file() or Path(spec).suffix in (*opaque.SUFFIXES, *_OTHER_FILES):
        return _FILE, spec
    if spec.startswith(HUB):
        return "timm", spec
    if not source or not name:
        of_torchvision = spec.lower() in torchvision_names()
        near = f"; did you mean 'torchvision:{spec.lower()}'?" if of_torchvision else did_you_mean(spec, NAMES)
        if Path(spec, "config.json").is_file():
            near = f"; did you mean 'transformers:{spec}'?"
        raise ModelError(f"Model {spec!r} is not known (accepted: {ACCEPTED}){near}")
    if source.split(".")[:2] == ["torchvision", "models"] and name in torchvision_names():
        return (
            "torchvision",
            name,
        )  # as a function, it would have random weights and only torchvision's number of classes
    return (source, name) if source in {"torchvision", "timm", "transformers"} else (_FUNCTION, spec)


def _named(name: str, weights: str | None, sizes: Mapping[str, int]) -> LoadedBase:
    file = _weights_file(name, weights, "--weights FILE")
    if name in FIXED_SIZE and not {"height", "width"} <= sizes.keys():
        raise ModelError(f"Model {name!r} is built for one size of images; give their height and width.")

    def make(found: Mapping[str, int]) -> nn.Module:
        return from_name(name, **{"classes": 2, "channels": 3, "height": 32, "width": 32, **found})

    module, said = _with_file(make, file, sizes)
    return LoadedBase(module, None, None, None, said)


def _torchvision(name: str, weights: str | None, sizes: Mapping[str, int]) -> LoadedBase:
    if weights is not None and not _is_file(weights):
        member = torchvision_weights(name, weights)
        module = torchvision_with_weights(name, member)
        defaults = from_torchvision_weights(member, of_file=False)
        return LoadedBase(module, defaults, _categories(member), None, f"torchvision's {member}")
    file = _weights_file(f"torchvision:{name}", weights, _FILE_OR_DEFAULT)
    member = torchvision_weights(name, DEFAULT)
    options = _torchvision_options(name)
    note = ", with transform_input=True as for torchvision's own weights" if options else ""
    module, said = _with_file(
        lambda found: from_torchvision(name, found.get("classes"), found.get("channels"), **options),
        file,
        sizes,
        ignored=_AUXILIARY_HEADS if options else (),
    )
    defaults = from_torchvision_weights(member, of_file=True)
    return LoadedBase(module, defaults, None, None, f"{said}{note}")


def _torchvision_options(name: str) -> dict[str, bool]:
    """Arguments that torchvision sets with its weights, whose input defaults are used."""
    inception = name in {"googlenet", "inception_v3"}
    return {"aux_logits": False, "init_weights": False, "transform_input": True} if inception else {}


def _timm(name: str, weights: str | None, sizes: Mapping[str, int]) -> LoadedBase:
    names_weights = name.startswith(HUB) or "." in name  # a tag names weights
    if weights == DEFAULT or (weights is None and names_weights):
        module = timm_with_weights(name)
        said = f"timm's weights of {name}"
    else:
        file = _weights_file(f"timm:{name}", weights, _FILE_OR_DEFAULT)
        module, said = _with_file(
            lambda found: from_timm(name, found.get("classes"), found.get("channels")), file, sizes
        )
    return LoadedBase(module, _configured_input(module), None, None, said)


def _transformers(name: str, weights: str | None, sizes: Mapping[str, int]) -> LoadedBase:
    if weights in {None, DEFAULT, INCLUDED}:
        module, said = hugging_face.from_hugging_face(name), f"those of {name!r}"
    else:
        file = _weights_file(f"transformers:{name}", weights, "--weights FILE")
        module, said = _with_file(
            lambda found: hugging_face.with_random_weights(name, found.get("classes")), file, sizes
        )
    defaults = hugging_face.input_defaults(name)
    channels = expected_channels(module)
    names = hugging_face.class_names(module)
    return LoadedBase(module, defaults and defaults.for_channels(channels), names, None, said)


def _function(spec: str, weights: str | None, sizes: Mapping[str, int]) -> LoadedBase:
    hint = "--weights FILE, or --weights included if the function loads them itself"
    if weights == INCLUDED:
        module, said = from_function(spec, _with_aliases(sizes)), "those that the function loads"
    else:
        file = _weights_file(spec, weights, hint)
        required = _required_parameters(spec)
        unknown = {name: 3 if name == "channels" else 2 for name in required & {"classes", "num_classes", "channels"}}
        module, said = _with_file(lambda found: from_function(spec, {**unknown, **_with_aliases(found)}), file, sizes)
    return LoadedBase(module, _configured_input(module), hugging_face.class_names(module), None, said)


def _opaque(spec: str, weights: str | None, sizes: Mapping[str, int]) -> LoadedBase:
    if weights not in {None, INCLUDED}:
        raise ModelError(f"Model file {spec!r} holds its own weights, so weights {weights!r} cannot be loaded into it.")
    module = opaque.load_file(Path(spec), sizes.get("channels"), sizes.get("height"), sizes.get("width"))
    return LoadedBase(module, None, None, module.lost, f"those in {spec!r}", module.image_size)


def _with_file(
    make: Callable[[Mapping[str, int]], nn.Module], file: Path, sizes: Mapping[str, int], ignored: tuple[str, ...] = ()
) -> tuple[nn.Module, str]:
    """The network that `make` builds for `sizes`, with the weights of `file`, and where they are from.

    The numbers of classes and channels that `sizes` lacks are read from the file: the network is built with its own
    numbers first and, if the first or last layers have other shapes in the file, again.
    """
    model = make(sizes)
    expected = tensors_of(model)
    state, _ = read_state_dict(file, expected)
    found = {**_sizes_in_file(model, expected, state), **sizes}
    if found != dict(sizes):
        model = make(found)
    return model, load_weights(model, file, ignored=ignored)


def _sizes_in_file(model: nn.Module, expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, int]:
    """Numbers of classes and channels in a state dict, where they differ from those of `model`."""
    sizes = {}
    first = next((name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)), None)
    differing = {
        name: state[name].shape
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    }
    if (shape := differing.pop(f"{first}.weight", None)) is not None and len(shape) == 4:
        sizes["channels"] = shape[1]
    heads = {shape[0] for name, shape in differing.items() if shape and shape[1:] == expected[name].shape[1:]}
    if len(heads) == 1:
        sizes["classes"] = heads.pop()
    return sizes


def _weights_file(spec: str, weights: str | None, hint: str) -> Path:
    if weights is None:
        raise ModelError(f"Model {spec!r} has no weights, and a base is never trained here; give them with {hint}.")
    if not _is_file(weights):
        raise ModelError(f"Weights {weights!r} of model {spec!r} are not a file; give them with {hint}.")
    return Path(weights)


def _is_file(weights: str) -> bool:
    """Whether `weights` is meant to be a file, which load_weights then reports if it does not exist."""
    path = Path(weights)
    return path.exists() or path.suffix in {*opaque.SUFFIXES, *_OTHER_FILES} or len(path.parts) > 1


def _with_aliases(sizes: Mapping[str, int]) -> dict[str, int]:
    """`sizes` with the number of classes also by torchvision's and timm's name."""
    return {**sizes, "num_classes": sizes["classes"]} if "classes" in sizes else dict(sizes)


def _required_parameters(spec: str) -> set[str]:
    """The parameters without a default of the user's function."""
    try:
        parameters = inspect.signature(find_function(spec)).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return set()
    return {parameter.name for parameter in parameters if parameter.default is parameter.empty}


def _configured_input(module: nn.Module) -> InputDefaults | None:
    """The input by the `pretrained_cfg` that timm, or a user's function, gives a model."""
    config: object = getattr(module, "pretrained_cfg", None)
    defaults = from_timm_config(config) if isinstance(config, Mapping) else None
    return defaults and defaults.for_channels(expected_channels(module))


def _categories(member: Any) -> tuple[str, ...] | None:
    names = member.meta.get("categories")
    return tuple(names) if names else None
