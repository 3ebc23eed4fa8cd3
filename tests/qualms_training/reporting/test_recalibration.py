import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qualms.bundle.file import open_bundle, write_bundle
from qualms.bundle.runtime import GraphRunner
from qualms.decisions.calibration_set import CalibrationSet
from qualms.errors import DataError, OperatingPointError
from qualms_training.data import load
from qualms_training.data.dataset import ImageSet
from qualms_training.data.npz import write_npz
from qualms_training.data.synthetic import draw_shapes
from qualms_training.reporting.recalibration import recalibrate

pytestmark = pytest.mark.slow


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    """New in-distribution images as an npz file."""
    drawn = draw_shapes(600, seed=77)
    return str(write_npz(tmp_path, ImageSet("mine", "calibration", drawn.images, drawn.labels, drawn.classes)))


def test_thresholds_come_from_the_new_images_and_the_graph_is_unchanged(
    tiny_bundle: Path, shapes: str, tmp_path: Path
) -> None:
    before = open_bundle(tiny_bundle)
    after = recalibrate(tiny_bundle, shapes, tmp_path / "new.onnx", target_fpr=0.1)

    assert after.graph == before.graph
    assert after.digest != before.digest
    assert (after.manifest.calibration.n, after.manifest.calibration.data) == (600, "mine")
    assert after.manifest.evaluation is None
    point = CalibrationSet(after.manifest).flag_point()
    assert point.target_fpr == 0.1
    drawn = draw_shapes(600, seed=77)
    values = GraphRunner(after.graph)(drawn.conformed(after.manifest.input))[point.score]
    assert point.flags(values).sum() == point.k - 1  # the scores above the k-th largest of these images


def test_the_name_changes_only_if_a_new_one_is_given(tiny_bundle: Path, shapes: str, tmp_path: Path) -> None:
    old = open_bundle(tiny_bundle).manifest.name
    assert recalibrate(tiny_bundle, shapes, tmp_path / "a.onnx").manifest.name == old
    assert recalibrate(tiny_bundle, shapes, tmp_path / "b.onnx", name="mine").manifest.name == "mine"


def test_trust_keeps_its_candidate_thresholds_and_the_new_images_are_paired_with_their_errors(
    tiny_bundle: Path, shapes: str, tmp_path: Path
) -> None:
    before = open_bundle(tiny_bundle).manifest
    after = recalibrate(tiny_bundle, shapes, tmp_path / "new.onnx")
    trust = after.manifest.calibration.trust
    assert np.array_equal(before.calibration.trust.thresholds, trust.thresholds)
    drawn = draw_shapes(600, seed=77)
    outputs = GraphRunner(after.graph)(drawn.conformed(after.manifest.input))
    assert after.manifest.calibration.wrong == np.flatnonzero(outputs["prediction"] != drawn.labels).tolist()
    for name, values in after.manifest.calibration.scores.items():
        np.testing.assert_array_equal(values, outputs[name])


def test_an_earlier_bundle_gets_paired_scores_and_a_joint_guarantee(
    tiny_bundle: Path, shapes: str, tmp_path: Path
) -> None:
    bundle = open_bundle(tiny_bundle)
    calibration = bundle.manifest.calibration
    levels = len(calibration.trust.levels)
    counts = calibration.trust.model_copy(update={"accepted": [400] * levels, "errors": [0] * levels})
    scores = {name: np.sort(values) for name, values in calibration.scores.items()}
    earlier = calibration.model_copy(update={"wrong": None, "trust": counts, "scores": scores})
    write_bundle(tiny_bundle, bundle.graph, bundle.manifest.model_copy(update={"calibration": earlier}))
    assert not CalibrationSet(open_bundle(tiny_bundle).manifest).trust_point().joint
    after = recalibrate(tiny_bundle, shapes, tmp_path / "new.onnx").manifest
    assert after.calibration.wrong is not None
    assert after.calibration.trust.accepted is after.calibration.trust.errors is None
    assert CalibrationSet(after).trust_point().joint


def test_a_folder_and_an_npz_file_with_the_same_pixels_give_the_same_calibration(
    tiny_bundle: Path, shapes: str, tmp_path: Path
) -> None:
    drawn = draw_shapes(600, seed=77)
    root = tmp_path / "photos"
    for index, (pixels, label) in enumerate(zip(np.asarray(drawn.images), drawn.labels, strict=True)):
        folder = root / drawn.classes[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{index:04}.png")
    from_npz = recalibrate(tiny_bundle, shapes, tmp_path / "a.onnx").manifest.calibration
    from_folder = recalibrate(tiny_bundle, str(root), tmp_path / "b.onnx").manifest.calibration
    # The order of the images differs, and so do the batches and the last bits of the scores.
    for name, values in from_npz.scores.items():
        np.testing.assert_allclose(np.sort(from_folder.scores[name]), np.sort(values), rtol=1e-4, atol=1e-6)
    assert len(from_npz.wrong or []) == len(from_folder.wrong or []) > 0


def test_an_unknown_class_is_named_and_nothing_is_written(tiny_bundle: Path, tmp_path: Path) -> None:
    drawn = draw_shapes(400, seed=1)
    images = ImageSet("mine", "x", drawn.images, drawn.labels, ("disc", "square", "cross", "zebra"))
    data = write_npz(tmp_path, images)
    out = tmp_path / "out" / "new.onnx"
    with pytest.raises(DataError, match="zebra"):
        recalibrate(tiny_bundle, str(data), out)
    assert not out.parent.exists()


def test_a_target_that_needs_more_images_is_an_error_and_the_file_is_unchanged(tiny_bundle: Path, shapes: str) -> None:
    digest = hashlib.sha256(tiny_bundle.read_bytes()).hexdigest()
    with pytest.raises(OperatingPointError, match="2,995"):
        recalibrate(tiny_bundle, shapes, tiny_bundle, target_fpr=0.001)
    assert hashlib.sha256(tiny_bundle.read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("target", ["target_fpr", "target_risk"])
@pytest.mark.parametrize("value", [0.0, 2.0])
def test_a_target_outside_0_to_1_is_an_error_of_one_sentence(
    tiny_bundle: Path, shapes: str, target: str, value: float
) -> None:
    with pytest.raises(OperatingPointError, match=f"not valid: {target}: .*(greater|less) than") as caught:
        recalibrate(tiny_bundle, shapes, tiny_bundle, **{target: value})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_calibration_on_the_training_set_is_an_error(tiny_bundle: Path, tmp_path: Path) -> None:
    data = write_npz(tmp_path, replace(load("shapes", "train"), name="mine"))
    with pytest.raises(
        DataError, match=r"'mine' .*is the training set of tiny, so thresholds from it would be invalid"
    ):
        recalibrate(tiny_bundle, str(data), tmp_path / "new.onnx")
    assert not (tmp_path / "new.onnx").exists()


def test_recalibration_works_without_torch_scipy_and_sklearn(tiny_bundle: Path, shapes: str, tmp_path: Path) -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'sklearn', 'scipy', 'onnx', 'matplotlib']))"
    code = f"{blocked}; from qualms.cli import main; main()"
    arguments = ["calibrate", str(tiny_bundle), shapes, "--out", str(tmp_path / "new.onnx")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert open_bundle(tmp_path / "new.onnx").manifest.calibration.n == 600
