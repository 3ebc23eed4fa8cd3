import shutil
from pathlib import Path

import pytest

from qualms.bundle.evaluation_results import Evaluation
from qualms.bundle.file import open_bundle, write_bundle
from qualms.bundle.manifest import Manifest
from qualms_training.errors import DataError
from qualms_training.reporting.compare import compare_runs

pytestmark = pytest.mark.slow


def shifted(manifest: Manifest, points: float, seed: int) -> Manifest:
    """The manifest with another seed and every AUROC `points` higher."""
    assert manifest.evaluation is not None
    rows = [row.model_copy(update={"auroc": row.auroc + points}) for row in manifest.evaluation.ood]
    evaluation: Evaluation = manifest.evaluation.model_copy(update={"ood": rows})
    provenance = manifest.provenance.model_copy(update={"seed": seed})
    return manifest.model_copy(update={"evaluation": evaluation, "provenance": provenance})


def test_runs_are_paired_by_seed(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = open_bundle(tiny_bundle)
    for run, points in (("a", {0: 0.0, 1: 0.0, 2: 0.0}), ("b", {0: 1.0, 1: 2.0})):
        for seed, shift in points.items():
            write_bundle(
                tmp_path / run / f"seed-{seed}" / "model.onnx", bundle.graph, shifted(bundle.manifest, shift, seed)
            )
    grid = compare_runs(tmp_path / "a", tmp_path / "b")
    assert "2 seed(s)" in grid.title
    assert {cell for _, cells in grid.rows for cell in cells} == {"+1.50 ± 0.50"}
    assert "parameters" in capsys.readouterr().out


def test_runs_without_a_common_seed_are_an_error(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    write_bundle(tmp_path / "other.onnx", bundle.graph, shifted(bundle.manifest, 0.0, 9))
    with pytest.raises(DataError, match="none is in both"):
        compare_runs(tiny_bundle, tmp_path / "other.onnx")


def test_a_folder_without_bundles_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        compare_runs(tmp_path, tmp_path)


def test_a_bundle_without_evaluation_is_named(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    bare = tmp_path / "bare.onnx"
    write_bundle(bare, bundle.graph, bundle.manifest.model_copy(update={"evaluation": None}))
    shutil.copy(tiny_bundle, tmp_path / "good.onnx")
    with pytest.raises(DataError, match=r"bare\.onnx"):
        compare_runs(tmp_path / "good.onnx", bare)
