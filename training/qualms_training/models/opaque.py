"""Networks without Python code: TorchScript files, and programs saved by torch.export.

Both become a graph of ATen operators, in which only the input of the last linear layer can be tapped.
"""

import importlib
import logging
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_unflatten

from qualms.errors import first_line
from qualms_training.errors import ModelError

_jit: Any = torch.jit  # its functions have no types
SUFFIXES = (".pt", ".pth", ".ts", ".torchscript", ".pt2")
PENULTIMATE, LOGITS = "penultimate", "logits"
"""modules that are added to the graph so that they can be tapped"""
LOST = "its inner layers cannot be tapped: only its logits{} used"
_LINEAR = (torch.ops.aten.linear.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
_TRAINING_FLAG = {
    torch.ops.aten.dropout.default: 2,
    torch.ops.aten.dropout_.default: 2,
    torch.ops.aten.feature_dropout.default: 2,
    torch.ops.aten.batch_norm.default: 5,
}
"""position of the argument that is true in training mode"""
_NO_ONNX_FORM = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
"""operators that PyTorch runs in evaluation mode without gradients; a trace made then contains them"""
_ASK_FOR_CODE = (
    "give the network itself as package.module:function, or save it in evaluation mode with torch.export.save"
)


class OpaqueGraph(fx.GraphModule):
    """A network as a graph of ATen operators, with its penultimate feature in the module `penultimate` if it has one."""

    image_size: tuple[int, int] | None
    """height and width that the program was exported for, None if it takes others"""

    @property
    def lost(self) -> str:
        """A sentence that names what cannot be tapped."""
        kept = " and the input of its last linear layer are" if hasattr(self, PENULTIMATE) else " are"
        return f"Without Python code, {LOST.format(kept)}."


def load_file(path: Path, channels: int | None, height: int | None, width: int | None) -> OpaqueGraph:
    """The network in a TorchScript or torch.export file; `channels`, `height` and `width` are needed for TorchScript."""
    if not path.is_file():
        raise ModelError(f"Model file {str(path)!r} does not exist.")
    if path.suffix == ".safetensors":
        raise _state_dict_only(path)
    if path.suffix == ".onnx":
        raise ModelError(f"Model file {str(path)!r} is an ONNX file; {_ASK_FOR_CODE}.")
    if path.suffix == ".pt2" or _is_exported(path):
        return _load_exported(path, height, width)
    if _is_torchscript(path):
        return _load_torchscript(path, channels, height, width)
    try:
        torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:  # torch.load raises many types of exception
        if not _is_pickled(path):
            raise ModelError(
                f"Model file {str(path)!r} is neither a TorchScript file nor a program saved by torch.export "
                f"({type(error).__name__})."
            ) from error
        raise ModelError(
            f"Model file {str(path)!r} holds a whole pickled model, which is not opened since it may run any code: save "
            "model.state_dict() to give it with --weights FILE, and name the network with --model package.module:function."
        ) from error
    raise _state_dict_only(path)


def _state_dict_only(path: Path) -> ModelError:
    return ModelError(
        f"Model file {str(path)!r} holds a state dict without a network: name the network with --model, such as "
        f"torchvision:resnet50 or package.module:function, and give this file with --weights {path}."
    )


def _members(path: Path) -> list[str]:
    return zipfile.ZipFile(path).namelist() if zipfile.is_zipfile(path) else []


def _is_torchscript(path: Path) -> bool:
    return any(name.endswith("/constants.pkl") for name in _members(path))


def _is_exported(path: Path) -> bool:
    return any("/models/" in f"/{name}" and name.endswith(".json") for name in _members(path))


def _is_pickled(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) == b"\x80" or any(name.endswith("/data.pkl") for name in _members(path))


def _load_exported(path: Path, height: int | None, width: int | None) -> OpaqueGraph:
    try:
        program = torch.export.load(path)
    except Exception as error:  # torch.export raises many types of exception
        raise ModelError(
            f"Model file {str(path)!r} cannot be read by torch.export.load ({first_line(error)}); files of another "
            "version of PyTorch may have to be saved again."
        ) from error
    inputs = program.graph_signature.user_inputs
    shapes = [
        node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs
    ]
    if len(shapes) != 1 or len(shapes[0]) != 4:
        raise ModelError(
            f"Model file {str(path)!r} takes inputs of shapes {[tuple(shape) for shape in shapes]}; one tensor of images "
            "(N, C, H, W) is accepted."
        )
    batch, _, *size = shapes[0]
    if isinstance(batch, int):
        raise ModelError(
            f"Model file {str(path)!r} was exported for batches of exactly {batch}; export it with a dynamic batch: "
            'torch.export.export(model, (images,), dynamic_shapes=({0: Dim("batch")},)).'
        )
    for name, wanted, exported in zip(("height", "width"), (height, width), size, strict=True):
        if wanted is not None and isinstance(exported, int) and wanted != exported:
            raise ModelError(f"Model file {str(path)!r} was exported for images of {name} {exported}, not {wanted}.")
    fixed = (size[0], size[1]) if all(isinstance(side, int) for side in size) else None
    return _opened(path, program, fixed)


def _load_torchscript(path: Path, channels: int | None, height: int | None, width: int | None) -> OpaqueGraph:
    if height is None or width is None:
        raise ModelError(
            f"TorchScript file {str(path)!r} does not hold the size of its input; give it with --size HEIGHTxWIDTH, or with "
            "height and width in [input] of a recipe."
        )
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # TorchScript is deprecated, and the converter's warnings are for its developers
        try:
            script = _jit.load(path, map_location="cpu").eval()
        except Exception as error:  # torch.jit raises many types of exception on damaged files
            raise ModelError(f"TorchScript file {str(path)!r} cannot be read ({first_line(error)}).") from error
        weights = [tensor for tensor in script.parameters() if tensor.ndim == 4]
        channels = channels or (weights[0].shape[1] if weights else 3)
        example = torch.zeros(2, channels, height, width)
        try:
            with torch.no_grad():
                script(example)
        except Exception as error:
            raise ModelError(
                f"TorchScript file {str(path)!r} cannot run on images (N, {channels}, {height}, {width}): {_last_line(error)}."
            ) from error
        program = _convert(path, script, example)
    return _opened(path, program, None)


def _convert(path: Path, script: torch.jit.ScriptModule, example: torch.Tensor) -> torch.export.ExportedProgram:
    """TorchScript as a program of torch.export, with a dynamic batch."""
    enabled = logging.root.manager.disable
    try:
        logging.disable(logging.CRITICAL)  # a failing conversion logs the whole graph
        converter: Any = importlib.import_module("torch._export.converter").TS2EPConverter  # private; torch is pinned
        program: torch.export.ExportedProgram = converter(script, (example,)).convert()
    except Exception as error:  # the converter raises many types of exception
        raise ModelError(
            f"TorchScript file {str(path)!r} cannot be converted ({type(error).__name__}: {first_line(error)}); "
            f"{_ASK_FOR_CODE}."
        ) from error
    finally:
        logging.disable(enabled)
    (name,) = program.graph_signature.user_inputs
    (node,) = (node for node in program.graph.nodes if node.name == name)
    if isinstance(node.meta["val"].shape[0], int):
        raise ModelError(
            f"TorchScript file {str(path)!r} runs only batches of {len(example)}, as its trace contains the batch size; "
            f"{_ASK_FOR_CODE}."
        )
    return program


def _opened(path: Path, program: torch.export.ExportedProgram, size: tuple[int, int] | None) -> OpaqueGraph:
    """The program as a module in which the input of its last linear layer is the output of the module `penultimate`."""
    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    graph = module.graph
    _check_operators(path, graph)
    linear = _last_linear(graph)
    output = graph.output_node()
    flat: Any = output.args[0]
    structured = tree_unflatten(list(flat), program.call_spec.out_spec)
    output.args = (dict(structured) if isinstance(structured, Mapping) else structured,)
    graph.set_codegen(CodeGen())  # that of torch.export checks arguments, and copying it warns
    opened = OpaqueGraph(module, graph)
    opened.image_size = size
    if linear is not None:
        source = linear.args[1 if linear.target is torch.ops.aten.addmm.default else 0]
        assert isinstance(source, fx.Node)
        _tap(opened, PENULTIMATE, source, linear)
    elif isinstance(output.args[0], fx.Node):
        _tap(opened, LOGITS, output.args[0], output)
    return opened


def _check_operators(path: Path, graph: fx.Graph) -> None:
    """Raise ModelError for operators that act as in training, or that cannot be exported to ONNX."""
    for node in graph.nodes:
        fused = next((name for name in _NO_ONNX_FORM if name in str(node.target)), None)
        if fused is not None:
            raise ModelError(
                f"Model file {str(path)!r} contains the operator {fused}, which has no ONNX form, as it was traced without "
                f"gradients; {_ASK_FOR_CODE}."
            )
        position = _TRAINING_FLAG.get(node.target) if node.op == "call_function" else None
        if position is not None and node.args[position : position + 1] == (True,):
            raise ModelError(
                f"Model file {str(path)!r} was saved in training mode; call model.eval() before saving it."
            )


def _last_linear(graph: fx.Graph) -> fx.Node | None:
    """The last linear layer if it computes as many values per image as the network returns, else None."""
    outputs = [node.meta["val"].shape for node in graph.output_node().all_input_nodes]
    linear = [node for node in graph.nodes if node.op == "call_function" and node.target in _LINEAR]
    if not linear:
        return None
    shape = linear[-1].meta["val"].shape
    returned = any(len(output) == 2 and output[1] == shape[1] for output in outputs)
    return linear[-1] if len(shape) == 2 and returned else None


def _tap(module: OpaqueGraph, name: str, source: fx.Node, user: fx.Node) -> None:
    """Pass what `user` takes from `source` through a new module `name`."""
    module.add_module(name, nn.Identity())
    with module.graph.inserting_before(user):
        tap = module.graph.call_module(name, (source,))
    user.replace_input_with(source, tap)
    module.recompile()


def _last_line(error: Exception) -> str:
    """The sentence of a TorchScript error, which comes after the script's stack trace."""
    return str(error).strip().rsplit("\n", 1)[-1]
