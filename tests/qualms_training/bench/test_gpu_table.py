"""The table of GPU placement."""

from pathlib import Path

import pytest
from tests.qualms_training.gpu.small_graphs import CASES, reduce_max

from qualms_training.bench import gpu_table as module
from qualms_training.bench.gpu_table import gpu_table
from qualms_training.errors import DataError

pytestmark = pytest.mark.slow


@pytest.fixture
def no_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only files are in the table."""
    monkeypatch.setattr(module, "networks", lambda: iter(()))


@pytest.mark.usefixtures("no_networks")
def test_releases_with_the_same_placement_share_a_row(tmp_path: Path) -> None:
    files = [tmp_path / "old.onnx", tmp_path / "new.onnx", tmp_path / "shapes.onnx"]
    for file, graph in zip(files, (reduce_max(18), reduce_max(20), CASES["an input of the graph"].graph), strict=True):
        file.write_bytes(graph)
    out = tmp_path / "gpu.md"
    text = gpu_table(out, files)
    assert out.read_text() == text
    assert [line for line in text.splitlines() if line.startswith("| ")][1:] == [
        "| old | 18 | 1 | 1.23.0 to 1.31.1 | 1 | 0 | 0 | accepted |",
        "| new | 20 | 1 | 1.23.0 to 1.26.0 | 0 | 1 (ReduceMax-20) | 0 | refused |",
        "| new | 20 | 1 | 1.27.0 to 1.31.1 | 1 | 0 | 0 | accepted |",
        "| shapes | 18 | 4 | 1.23.0 to 1.31.1 | 4 | 0 | 3 (Cast-13, Div-14, Gather-13) | refused |",
    ]
    assert "No GPU was available" in text
    assert text.endswith("Made by `qualms gpu-table --graph old.onnx --graph new.onnx --graph shapes.onnx`.\n")


@pytest.mark.usefixtures("no_networks")
@pytest.mark.parametrize("content", [b"", b"not a graph"])
def test_a_file_that_is_not_onnx_is_refused_and_nothing_is_written(tmp_path: Path, content: bytes) -> None:
    file, out = tmp_path / "graph.onnx", tmp_path / "gpu.md"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"graph\.onnx cannot be used\. ONNX Runtime cannot load the graph: .*\.$"):
        gpu_table(out, [file])
    assert not out.exists()
