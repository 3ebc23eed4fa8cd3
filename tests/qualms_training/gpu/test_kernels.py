"""The table of CUDA kernels: its facts, its releases, and the rule by which a kernel accepts a node."""

import re
import tomllib
from pathlib import Path

import onnx
import pytest

from qualms_training.gpu import kernels
from qualms_training.gpu.kernels import Kernel

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.mark.parametrize(
    ("kernel", "accepted"),
    [
        (Kernel("Relu", 13, 13, {"T": frozenset({"float"})}), {13}),
        (Kernel("Relu", 13, 15, {"T": frozenset({"float"})}), {13, 14, 15}),
        (Kernel("Relu", 13, None, {"T": frozenset({"float"})}), {13}),
    ],
)
def test_a_kernel_without_a_last_version_accepts_only_its_first(kernel: Kernel, accepted: set[int]) -> None:
    assert {version for version in range(10, 20) if kernel.accepts(version, {"T": "float"})} == accepted


def test_a_kernel_accepts_only_its_types_and_ignores_constraints_of_omitted_outputs() -> None:
    kernel = Kernel("MaxPool", 12, None, {"T": frozenset({"float", "double"}), "I": frozenset({"int64"})})
    assert kernel.accepts(12, {"T": "double", "I": "int64"})
    assert kernel.accepts(12, {"T": "double"})
    assert not kernel.accepts(12, {"T": "int8", "I": "int64"})
    assert not kernel.accepts(12, {"T": "float", "I": "int32"})


@pytest.mark.parametrize(
    ("operator", "version", "element", "first"),
    [
        ("ReduceMax", 18, "double", "1.23.0"),
        ("ReduceMax", 20, "float", "1.27.0"),
        ("ReduceMin", 20, "float", "1.27.0"),
        ("Equal", 19, "int64", "1.27.0"),
        ("Pad", 18, "float", "1.23.0"),
        ("Pad", 19, "float", "1.25.0"),
        ("AveragePool", 11, "float", "1.23.0"),
        ("AveragePool", 19, "float", "1.24.1"),
        ("NonZero", 13, "double", None),
        ("Unknown", 1, "float", None),
    ],
)
def test_the_first_release_with_a_kernel(operator: str, version: int, element: str, first: str | None) -> None:
    having = [table.release for table in kernels.all_releases() if table.find(operator, version, {"T": element})]
    assert (having[0] if having else None) == first
    assert having == (kernels.releases()[kernels.releases().index(first) :] if first else [])


def test_every_type_constraint_is_one_of_the_operator() -> None:
    for release in kernels.all_releases():
        for operator, several in release.by_operator.items():
            newest = onnx.defs.get_schema(operator).since_version
            for kernel in several:
                if kernel.first > newest:  # defined after the installed onnx
                    continue
                schema = onnx.defs.get_schema(operator, max(kernel.last or kernel.first, kernels.OLDEST_OPSET))
                names = {parameter.type_str for parameter in (*schema.inputs, *schema.outputs)}
                names |= {parameter.name for parameter in (*schema.inputs, *schema.outputs)}
                assert set(kernel.types) <= names, kernel


def test_inputs_and_outputs_on_the_cpu_exist() -> None:
    release = kernels.of_release(kernels.releases()[-1])
    for operator, indices in release.inputs_on_cpu.items():
        assert max(indices) < len(onnx.defs.get_schema(operator).inputs) or operator in {"ArgMax", "ArgMin"}, operator
    assert release.outputs_on_cpu == {"Shape": {0}, "Size": {0}}


def test_releases_ascend_and_include_the_lower_bound_of_pyproject() -> None:
    versions = [tuple(map(int, release.split("."))) for release in kernels.releases()]
    assert versions == sorted(set(versions))
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    runtimes = [line for name in ("cpu", "gpu") for line in extras[name] if line.startswith("onnxruntime")]
    assert len(runtimes) == 2
    bounds = {re.sub(r".*>=", "", requirement) for requirement in runtimes}
    assert len(bounds) == 1
    (bound,) = bounds
    assert versions[0] <= tuple(map(int, bound.split("."))) <= versions[-1]
