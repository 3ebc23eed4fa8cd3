"""The table of CUDA kernels of onnxruntime-gpu, by release: operators, versions and tensor types.

The facts are in `cuda_kernels.json`, one kernel per line: operator, first and last version of the operator (null: open),
accepted types by type constraint, first and last release that has it. `qualms_training.gpu.wheels` reads them from wheels and
explains how to add a release.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

FILE = "cuda_kernels.json"
OLDEST_OPSET = 18
"""kernels for older opsets are not in the table"""


@dataclass(frozen=True)
class Kernel:
    """One registered kernel."""

    operator: str
    first: int
    last: int | None
    types: Mapping[str, frozenset[str]]
    """accepted element types by type constraint, for example {"T": {"float", "double"}}"""

    def accepts(self, version: int, types: Mapping[str, str]) -> bool:
        """Whether it runs a node of this operator version with these types by constraint.

        A range without an end includes only its first version: ONNX Runtime does not assume that a kernel can run
        versions of the operator that were defined later (VerifyKernelDef in core/framework/kernel_registry.cc).
        """
        in_range = version == self.first or (self.last is not None and self.first <= version <= self.last)
        return in_range and all(types[name] in accepted for name, accepted in self.types.items() if name in types)


@dataclass(frozen=True)
class Kernels:
    """The kernels of one release."""

    release: str
    by_operator: Mapping[str, tuple[Kernel, ...]]
    inputs_on_cpu: Mapping[str, frozenset[int]]
    """by operator: inputs that its kernel reads from the CPU's memory, for example the shape of Reshape"""
    outputs_on_cpu: Mapping[str, frozenset[int]]
    """by operator: outputs that its kernel writes to the CPU's memory, for example those of Shape"""

    def find(self, operator: str, version: int, types: Mapping[str, str]) -> Kernel | None:
        """A kernel for a node of the default domain, or None."""
        candidates = self.by_operator.get(operator, ())
        return next((kernel for kernel in candidates if kernel.accepts(version, types)), None)


def releases() -> list[str]:
    """The releases of the table, oldest first."""
    return list(_table()["releases"])


def of_release(release: str) -> Kernels:
    """The kernels of a release of the table."""
    table, number = _table(), releases().index(release)
    by_operator: dict[str, list[Kernel]] = {}
    for operator, first, last, types, since, until in table["kernels"]:
        if releases().index(since) <= number <= releases().index(until):
            accepted = {name: frozenset(names.split()) for name, names in types.items()}
            by_operator.setdefault(operator, []).append(Kernel(operator, first, last, accepted))
    return Kernels(
        release,
        {operator: tuple(kernels) for operator, kernels in by_operator.items()},
        *(
            {name: frozenset(indices) for name, indices in table[key].items()}
            for key in ("inputs_on_cpu", "outputs_on_cpu")
        ),
    )


def all_releases() -> Iterator[Kernels]:
    """The kernels of every release of the table, oldest first."""
    return (of_release(release) for release in releases())


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(resources.files(__package__).joinpath(FILE).read_text())
    return table
