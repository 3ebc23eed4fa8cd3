"""Reading onnxruntime-gpu's wheels: the table grows by releases, and predictions agree with ONNX Runtime itself."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.qualms_training.gpu.small_graphs import CASES

from qualms_training.errors import DataError
from qualms_training.gpu import kernels
from qualms_training.gpu.placement import optimise, place, read_graph
from qualms_training.gpu.wheels import Row, Wheel, extended, unpacked, version_key, wheel_files, write_table

WITHOUT_CPU_KERNEL = {"float64 without a kernel"}
NOT_FOR_THE_CPU = WITHOUT_CPU_KERNEL | {"half precision"}
"""a session on the CPU refuses or changes these graphs, so that `optimise` does not apply"""
EMPTY: dict[str, Any] = {"source": "a test", "releases": [], "kernels": []}


def row(operator: str, first: int, last: int | None, *types: str) -> Row:
    return operator, first, last, (("T", frozenset(types)),)


def test_a_kernel_of_several_releases_is_one_row() -> None:
    table = extended(EMPTY, "1.9.0", [row("Add", 13, None, "float"), row("Relu", 6, 12, "float")])
    table = extended(table, "1.10.0", [row("Add", 13, None, "float"), row("Abs", 6, None, "int8", "float")])
    assert table["releases"] == ["1.9.0", "1.10.0"]
    assert table["kernels"] == [
        ["Abs", 6, None, {"T": "float int8"}, "1.10.0", "1.10.0"],
        ["Add", 13, None, {"T": "float"}, "1.9.0", "1.10.0"],
        ["Relu", 6, 12, {"T": "float"}, "1.9.0", "1.9.0"],
    ]


def test_a_kernel_that_was_missing_for_a_release_gets_a_second_row() -> None:
    table = EMPTY
    for release, present in (("1.1.0", True), ("1.2.0", False), ("1.3.0", True)):
        table = extended(table, release, [row("Add", 13, None, "float")] if present else [])
    assert [(since, until) for *_, since, until in table["kernels"]] == [("1.1.0", "1.1.0"), ("1.3.0", "1.3.0")]


def test_releases_are_added_in_order() -> None:
    table = extended(EMPTY, "1.10.0", [])
    with pytest.raises(DataError, match=r"^Release 1\.9\.2 is older than 1\.10\.0, the newest of the table"):
        extended(table, "1.9.2", [])


def test_the_written_table_is_that_of_the_package(tmp_path: Path) -> None:
    committed = Path(kernels.__file__).with_name(kernels.FILE)
    write_table(json.loads(committed.read_text()), tmp_path / "table.json")
    assert (tmp_path / "table.json").read_text() == committed.read_text()


def test_wheels_are_found_by_release(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no wheel of onnxruntime-gpu"):
        wheel_files(tmp_path)
    for name in ("onnxruntime_gpu-1.10.0-cp311-x.whl", "onnxruntime_gpu-1.9.2-cp311-x.whl", "onnxruntime-1.9.2-x.whl"):
        (tmp_path / name).touch()
    assert list(wheel_files(tmp_path)) == ["1.9.2", "1.10.0"]


FOLDER = os.environ.get("QUALMS_WHEELS")
WHEELS = wheel_files(Path(FOLDER)) if FOLDER else {}


@pytest.fixture(scope="module", params=[release for release in kernels.releases() if release in WHEELS] or [""])
def wheel(request: pytest.FixtureRequest) -> Iterator[Wheel]:
    if not WHEELS:
        pytest.skip("QUALMS_WHEELS names no folder with wheels of onnxruntime-gpu")
    with unpacked(request.param, WHEELS[request.param]) as opened:
        yield opened


@pytest.mark.slow
def test_the_table_has_the_kernels_of_the_wheel(wheel: Wheel) -> None:
    expected: dict[str, set[Any]] = {}
    for operator, first, last, types in wheel.kernels():
        expected.setdefault(operator, set()).add((first, last, types))
    actual = {
        operator: {(each.first, each.last, tuple(sorted(each.types.items()))) for each in several}
        for operator, several in kernels.of_release(wheel.release).by_operator.items()
    }
    assert actual == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_onnx_runtime_places_nodes_as_predicted(wheel: Wheel, name: str) -> None:
    graph = CASES[name].graph
    before_placement = graph if name in NOT_FOR_THE_CPU else optimise(graph)
    placement = place(read_graph(before_placement), kernels.of_release(wheel.release))
    if name in WITHOUT_CPU_KERNEL:
        assert placement.without_kernel
        with pytest.raises(DataError, match="cannot open the graph: "):
            wheel.open(graph)
        return
    opened = wheel.open(graph)
    assert opened.on_cpu == len(placement.without_kernel) + len(placement.cpu_preferred)
    assert opened.accepted == placement.runs_on_cuda_alone


def test_versions_are_compared_as_numbers() -> None:
    assert sorted(["1.10.0", "1.9.2"], key=version_key) == ["1.9.2", "1.10.0"]
