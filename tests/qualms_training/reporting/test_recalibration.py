"""Recalibration on the user's own images with and without labels, on recorded scores, and on the bundle's own images as sent."""

import hashlib
import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from qualms.bundle.calibration_data import AsSent, Calibration, CalibrationForm
from qualms.bundle.file import Bundle, open_bundle, write_bundle
from qualms.bundle.runtime import GraphRunner, Outputs
from qualms.decisions.calibration_set import CalibrationSet
from qualms.decisions.flag import rank
from qualms.decisions.verdicts import Decider
from qualms.errors import DataError, EncodingError, OperatingPointError
from qualms.images.encodings import all_settings, parse_encodings
from qualms.images.fingerprints import fingerprints
from qualms.telemetry.score_log import ScoreLog
from qualms_training.console import Display
from qualms_training.data import load
from qualms_training.data.dataset import ImageSet
from qualms_training.data.sources.npz import write_npz
from qualms_training.data.sources.synthetic import draw_shapes
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
    earlier_bundle: Path, shapes: str, tmp_path: Path
) -> None:
    before = open_bundle(earlier_bundle).manifest
    assert before.schema_version == 1
    assert not CalibrationSet(before).trust_point().joint
    after = recalibrate(earlier_bundle, shapes, tmp_path / "new.onnx").manifest
    assert after.calibration.wrong is not None
    assert after.calibration.trust.accepted is after.calibration.trust.errors is None
    assert CalibrationSet(after).trust_point().joint
    assert after.schema_version == 2


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


# Without labels


class Printed:
    """A display that keeps what is printed."""

    def __init__(self) -> None:
        self._file = io.StringIO()
        self.display = Display(Console(file=self._file, width=400))

    @property
    def text(self) -> str:
        return self._file.getvalue()


@pytest.fixture
def printed() -> Printed:
    return Printed()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flat_folder(folder: Path, count: int, seed: int = 77) -> str:
    """New in-distribution images as a folder of PNG files without labels."""
    folder.mkdir()
    for index, pixels in enumerate(np.asarray(draw_shapes(count, seed=seed).images)):
        Image.fromarray(pixels).save(folder / f"{index:04}.png")
    return str(folder)


@pytest.fixture
def photos(tmp_path: Path) -> str:
    return flat_folder(tmp_path / "photos", 200)


def as_json(calibration: Calibration | None) -> str:
    assert calibration is not None
    return calibration.model_dump_json()


def by_hand(values: np.typing.NDArray[Any], target: float = 0.05) -> float:
    """The confident flag threshold of scores: the k-th largest of them."""
    return float(np.sort(values)[len(values) - rank(len(values), target, "confident")])


def threshold(bundle: Bundle) -> float:
    return CalibrationSet(bundle.manifest).flag_point().threshold


def shape_outputs(bundle: Bundle, count: int, seed: int = 77) -> Outputs:
    """The graph's outputs for new in-distribution images as stored."""
    return GraphRunner(bundle.graph)(draw_shapes(count, seed=seed).conformed(bundle.manifest.input))


def test_a_flat_folder_renews_the_flag_and_withdraws_the_guarantee_on_errors(
    tiny_bundle: Path, photos: str, tmp_path: Path, printed: Printed
) -> None:
    before = open_bundle(tiny_bundle).manifest
    after = recalibrate(tiny_bundle, photos, tmp_path / "new.onnx", display=printed.display)
    manifest, outputs = after.manifest, shape_outputs(after, 200)
    assert (manifest.calibration.n, manifest.calibration.data, manifest.calibration.split) == (
        200,
        "photos",
        "calibration",
    )
    assert threshold(after) == by_hand(outputs["fused"])
    assert manifest.reference.quantiles["fused"][-1] == pytest.approx(float(outputs["fused"].max()))
    np.testing.assert_array_equal(manifest.calibration.predictions, outputs["prediction"])
    images = draw_shapes(200, seed=77).conformed(manifest.input)
    np.testing.assert_array_equal(manifest.calibration.fingerprints, fingerprints(images))
    assert manifest.calibration.observed == {"lossless, same size": 200}
    assert (manifest.labelled_calibration, manifest.evaluation) == (None, None)
    assert (manifest.name, manifest.operating, manifest.sets) == (before.name, before.operating, before.sets)
    rule = Decider(manifest).rule()
    assert rule.trust is None
    assert rule.refusal is not None
    assert "have no labels" in rule.refusal
    assert "200 images without labels. The guarantee holds only if these images are in distribution" in printed.text
    assert (
        "Trust: the guarantee on errors is withdrawn, because the images have no labels; --keep-trust keeps the guarantee of "
        "the 1,000 images of shapes, for images like those." in printed.text
    )


def test_keep_trust_keeps_the_guarantee_on_errors_of_the_earlier_images(
    tiny_bundle: Path, photos: str, tmp_path: Path, printed: Printed
) -> None:
    before = open_bundle(tiny_bundle).manifest
    kept = recalibrate(tiny_bundle, photos, tmp_path / "kept.onnx", keep_trust=True, display=printed.display).manifest
    assert as_json(kept.labelled_calibration) == as_json(before.calibration)
    assert not kept.calibration.has_labels
    trust = Decider(kept).rule().trust
    assert trust is not None
    assert trust.target_risk == before.operating.target_risk
    assert f"Trust if {trust.condition}: errors ≤ 5 % of the " in printed.text
    assert "accepted, kept from the 1,000 images of shapes, for images like those." in printed.text
    # A second recalibration without labels keeps the same images, and one with labels replaces them.
    more = flat_folder(tmp_path / "more", 100, seed=5)
    again = recalibrate(tmp_path / "kept.onnx", more, tmp_path / "again.onnx", keep_trust=True).manifest
    assert as_json(again.labelled_calibration) == as_json(before.calibration)
    assert again.calibration.n == 100


def test_labels_end_a_kept_guarantee(tiny_bundle: Path, photos: str, shapes: str, tmp_path: Path) -> None:
    recalibrate(tiny_bundle, photos, tmp_path / "kept.onnx", keep_trust=True)
    after = recalibrate(tmp_path / "kept.onnx", shapes, tmp_path / "new.onnx").manifest
    assert after.labelled_calibration is None
    assert after.calibration.has_labels


def test_keep_trust_is_refused_with_labels_and_where_there_is_nothing_to_keep(
    tiny_bundle: Path, photos: str, shapes: str, tmp_path: Path, printed: Printed
) -> None:
    out = tmp_path / "new.onnx"
    with pytest.raises(DataError, match="--keep-trust is for images without labels; these images have labels"):
        recalibrate(tiny_bundle, shapes, out, keep_trust=True)
    recalibrate(tiny_bundle, photos, tiny_bundle)
    with pytest.raises(
        DataError, match="tiny has no guarantee on errors that could be kept: it was calibrated without"
    ):
        recalibrate(tiny_bundle, photos, out, keep_trust=True)
    assert not out.exists()
    recalibrate(tiny_bundle, photos, out, display=printed.display)
    assert "is withdrawn, because the images have no labels." in printed.text


def test_keep_trust_keeps_the_counts_of_an_earlier_bundle(earlier_bundle: Path, photos: str, tmp_path: Path) -> None:
    kept = recalibrate(earlier_bundle, photos, tmp_path / "new.onnx", keep_trust=True).manifest
    assert kept.labelled_calibration is not None
    assert kept.labelled_calibration.trust.accepted is not None
    trust = Decider(kept).rule().trust
    assert trust is not None
    assert not trust.joint
    assert kept.schema_version == 2


def test_labels_of_an_npz_file_can_be_ignored(tiny_bundle: Path, shapes: str, tmp_path: Path) -> None:
    after = recalibrate(tiny_bundle, shapes, tmp_path / "new.onnx", unlabelled=True)
    assert not after.manifest.calibration.has_labels
    assert (after.manifest.calibration.n, after.manifest.calibration.data) == (600, "mine")
    assert threshold(after) == by_hand(shape_outputs(after, 600)["fused"])


def test_images_of_class_folders_can_be_used_without_labels(tiny_bundle: Path, tmp_path: Path) -> None:
    flat_folder(tmp_path / "photos", 80)
    (tmp_path / "photos" / "zebra").mkdir()
    for path in sorted((tmp_path / "photos").glob("*.png"))[40:]:
        path.rename(tmp_path / "photos" / "zebra" / path.name)
    with pytest.raises(DataError, match="holds both images and the folder zebra"):
        recalibrate(tiny_bundle, str(tmp_path / "photos"), tmp_path / "new.onnx")
    after = recalibrate(tiny_bundle, str(tmp_path / "photos"), tmp_path / "new.onnx", unlabelled=True)
    assert after.manifest.calibration.n == 80


def test_the_training_set_is_refused_without_its_labels_too(tiny_bundle: Path, tmp_path: Path) -> None:
    data = write_npz(tmp_path, replace(load("shapes", "train"), name="mine"))
    with pytest.raises(DataError, match="is the training set of tiny"):
        recalibrate(tiny_bundle, str(data), tmp_path / "new.onnx", unlabelled=True)
    assert not (tmp_path / "new.onnx").exists()


def test_the_name_of_the_data_may_hold_brackets(tiny_bundle: Path, tmp_path: Path, printed: Printed) -> None:
    """Brackets are markup on the console."""
    drawn = draw_shapes(100, seed=3)
    named = write_npz(tmp_path, ImageSet("my [b]", "calibration", drawn.images, drawn.labels, drawn.classes))
    recalibrate(tiny_bundle, str(named), tiny_bundle)
    recalibrate(tiny_bundle, flat_folder(tmp_path / "photos", 60), tiny_bundle, display=printed.display)
    assert "the 100 images of my [b]" in printed.text


# As sent


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("form", ["worst", "by-size"])
def test_thresholds_of_several_settings_are_those_of_the_graph_on_the_encoded_images(
    form: CalibrationForm, labelled: bool, tiny_bundle: Path, tmp_path: Path, printed: Printed
) -> None:
    drawn = draw_shapes(150, seed=77)
    data = write_npz(tmp_path, ImageSet("mine", "calibration", drawn.images, drawn.labels, drawn.classes))
    encodings = ["png", "jpeg:30-40", "resize:2:bilinear"]
    after = recalibrate(
        tiny_bundle,
        str(data),
        tmp_path / "new.onnx",
        as_sent=encodings,
        form=form,
        seed=4,
        unlabelled=not labelled,
        display=printed.display,
    )
    calibration, runner = after.manifest.calibration, GraphRunner(after.graph)
    assert calibration.as_sent is not None
    assert (calibration.as_sent.encodings, calibration.as_sent.form, calibration.as_sent.seed) == (encodings, form, 4)
    settings = all_settings(parse_encodings(encodings))
    outputs = {one.text: runner(drawn.received(after.manifest.input, [one], 4).images) for one in settings}
    assert [one.encoding for one in calibration.settings] == list(outputs)
    for one in calibration.settings:
        wrong = np.flatnonzero(outputs[one.encoding]["prediction"] != drawn.labels).tolist()
        assert one.wrong == (wrong if labelled else None)
    thresholds = {text: by_hand(one["fused"]) for text, one in outputs.items()}
    assert threshold(after) == max(thresholds.values())
    decider = Decider(after.manifest)
    sizes = {text: "larger" if text.startswith("resize") else "same" for text in outputs}
    for size in ("same", "larger"):
        used = [value for text, value in thresholds.items() if form == "worst" or sizes[text] == size]
        assert decider.rule(size=size).flag.threshold == max(used)
    np.testing.assert_array_equal(calibration.fingerprints, fingerprints(drawn.conformed(after.manifest.input)))
    text = "images sent as png, jpeg:30-40 or resize:2:bilinear, in any shares"
    assert text in decider.rule().guarantee_text
    assert text in printed.text
    assert sum(calibration.observed.values()) == 150 * len(settings)


def test_the_threshold_of_a_mixture_is_that_of_the_graph_on_the_drawn_encodings(
    tiny_bundle: Path, shapes: str, tmp_path: Path
) -> None:
    encodings = ["png", "jpeg:30-95", "webp:40"]
    options: dict[str, Any] = {"as_sent": encodings, "form": "mixture"}
    after = recalibrate(tiny_bundle, shapes, tmp_path / "new.onnx", seed=4, **options)
    received = draw_shapes(600, seed=77).received(after.manifest.input, parse_encodings(encodings), 4)
    outputs = GraphRunner(after.graph)(received.images)
    assert after.manifest.calibration.settings == []
    assert threshold(after) == by_hand(outputs["fused"])
    assert (
        after.manifest.calibration.wrong
        == np.flatnonzero(outputs["prediction"] != draw_shapes(600, seed=77).labels).tolist()
    )
    text = Decider(after.manifest).rule().guarantee_text
    assert text.endswith("images sent as png, jpeg:30-95 or webp:40, in the listed shares")
    other = recalibrate(tiny_bundle, shapes, tmp_path / "other.onnx", seed=5, **options)
    assert threshold(other) != threshold(after)


def test_the_setting_that_determines_the_threshold_is_printed_only_if_there_are_several(
    tiny_bundle: Path, photos: str, tmp_path: Path
) -> None:
    for encodings, several in ((["png", "jpeg:30"], True), (["png"], False)):
        printed = Printed()
        recalibrate(tiny_bundle, photos, tmp_path / "new.onnx", as_sent=encodings, display=printed.display)
        assert ("alone would need" in printed.text) == several


@pytest.mark.parametrize("encoding", ["jpg", "jpeg:101", "jpeg:95-75", "png+jpeg:75"])
def test_an_encoding_that_is_not_accepted_is_named_and_nothing_is_written(
    encoding: str, tiny_bundle: Path, shapes: str, tmp_path: Path
) -> None:
    with pytest.raises(EncodingError, match=f"The encoding '{encoding}'".replace("+", r"\+")):
        recalibrate(tiny_bundle, shapes, tmp_path / "out" / "new.onnx", as_sent=["png", encoding])
    assert not (tmp_path / "out").exists()


# The bundle's own calibration images


def test_without_data_the_bundles_own_calibration_images_are_used_again(tiny_bundle: Path, tmp_path: Path) -> None:
    before = open_bundle(tiny_bundle).manifest
    after = recalibrate(tiny_bundle, None, tmp_path / "new.onnx", target_fpr=0.1, name="mine").manifest
    assert (after.calibration.n, after.calibration.data) == (1000, "shapes")
    assert after.calibration.data_sha256 == before.calibration.data_sha256
    np.testing.assert_array_equal(after.calibration.fingerprints, before.calibration.fingerprints)
    for name, values in before.calibration.scores.items():
        np.testing.assert_allclose(after.calibration.scores[name], values, rtol=1e-5, atol=1e-6)
    assert after.calibration.wrong == before.calibration.wrong
    assert (after.name, after.operating.target_fpr) == ("mine", 0.1)
    assert after.provenance == before.provenance


def test_own_images_sent_in_other_ways_are_recorded_in_the_recipe_and_kept_later(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    before = open_bundle(tiny_bundle).manifest
    sent = recalibrate(tiny_bundle, None, tmp_path / "sent.onnx", as_sent=["png", "jpeg:60"], seed=3).manifest
    section = sent.provenance.recipe["calibration"]
    assert (section["as_sent"], section["form"]) == (["png", "jpeg:60"], "worst")
    assert {**sent.provenance.recipe, "calibration": None} == {**before.provenance.recipe, "calibration": None}
    assert sent.provenance.data == before.provenance.data
    again = recalibrate(tmp_path / "sent.onnx", None, tmp_path / "again.onnx").manifest
    assert (
        again.calibration.as_sent
        == sent.calibration.as_sent
        == AsSent(encodings=["png", "jpeg:60"], form="worst", seed=3)
    )
    assert again.provenance.recipe == sent.provenance.recipe
    assert CalibrationSet(again).flag_point() == CalibrationSet(sent).flag_point()
    stored = recalibrate(tmp_path / "sent.onnx", None, tmp_path / "stored.onnx", as_sent=["png"]).manifest
    assert stored.provenance.recipe["calibration"]["as_sent"] == ["png"]
    assert CalibrationSet(stored).flag_point().threshold == pytest.approx(
        CalibrationSet(before).flag_point().threshold, rel=1e-5
    )


def test_own_images_that_have_changed_are_an_error(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    origin = bundle.manifest.provenance
    data = {**origin.data, "sha256": {**origin.data["sha256"], "train": "0" * 64}}
    changed = bundle.manifest.model_copy(update={"provenance": origin.model_copy(update={"data": data})})
    write_bundle(tiny_bundle, bundle.graph, changed)
    with pytest.raises(DataError, match="is not the one that the bundle was made with"):
        recalibrate(tiny_bundle, None, tmp_path / "new.onnx")
    assert not (tmp_path / "new.onnx").exists()


# Run folders


def test_the_bundle_of_a_run_folder_is_not_replaced(tiny_bundle: Path, photos: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    model = Path(shutil.copy(tiny_bundle, run / "model.onnx"))
    (run / "stages.json").write_text("{}")
    before = digest(model)
    for data in (photos, None):
        with pytest.raises(DataError, match=r"run/model\.onnx is the product of a run, .*another file with --out"):
            recalibrate(model, data, model)
        (run / "link.onnx").unlink(missing_ok=True)
        (run / "link.onnx").symlink_to(model)
        with pytest.raises(DataError, match="is the product of a run"):
            recalibrate(model, data, run / "link.onnx")
    assert digest(model) == before
    for out in (run / "recalibrated.onnx", tmp_path / "elsewhere.onnx"):
        assert recalibrate(model, photos, out).manifest.calibration.n == 200
    assert digest(model) == before
    (run / "stages.json").unlink()
    recalibrate(model, photos, model)
    assert digest(model) != before


def test_another_bundle_does_not_replace_the_product_of_a_run(tiny_bundle: Path, photos: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    model = Path(shutil.copy(tiny_bundle, run / "model.onnx"))
    (run / "stages.json").write_text("{}")
    before = digest(model)
    with pytest.raises(DataError, match="is the product of a run"):
        recalibrate(tiny_bundle, photos, model)
    assert digest(model) == before


# Recorded scores


def write_log(bundle: Bundle, path: Path, count: int = 300, first: int | None = None) -> Path:
    """Record the scores of (the first of) `count` images as the service does, in batches of another size than calibration uses."""
    manifest = bundle.manifest
    images, runner = draw_shapes(count, seed=77).conformed(manifest.input)[:first], GraphRunner(bundle.graph)
    log = ScoreLog(path, 10**6, manifest.graph_sha256, list(manifest.scores))
    for start in range(0, len(images), 60):
        part = images[start : start + 60]
        log.write(part, runner(part))
    log.close()
    assert log.dropped == 0
    return path


def test_recorded_scores_give_the_same_threshold_as_the_images(
    tiny_bundle: Path, tmp_path: Path, printed: Printed
) -> None:
    before = open_bundle(tiny_bundle)
    log = write_log(before, tmp_path / "scores.jsonl")
    after = recalibrate(tiny_bundle, None, tmp_path / "new.onnx", from_log=log, display=printed.display)
    from_images = recalibrate(tiny_bundle, flat_folder(tmp_path / "photos", 300), tmp_path / "images.onnx")
    # The batches differ, and so do the last bits of the scores.
    assert threshold(after) == pytest.approx(threshold(from_images), rel=1e-4)
    recorded, expected = after.manifest.calibration, from_images.manifest.calibration
    assert (recorded.n, recorded.split, recorded.data) == (300, "served", "scores.jsonl")
    assert recorded.data_sha256 == digest(log)
    np.testing.assert_array_equal(recorded.predictions, expected.predictions)
    np.testing.assert_array_equal(recorded.fingerprints, expected.fingerprints)
    for name, values in expected.scores.items():
        np.testing.assert_allclose(recorded.scores[name], values, rtol=1e-4, atol=1e-5)
    assert not recorded.has_labels
    assert after.manifest.provenance == before.manifest.provenance
    assert "300 recorded images. The guarantee holds only if these images are in distribution" in printed.text
    assert "Trust: the guarantee on errors is withdrawn" in printed.text


def test_recorded_scores_are_exact_to_the_last_bit(tiny_bundle: Path, tmp_path: Path) -> None:
    before = open_bundle(tiny_bundle)
    log = write_log(before, tmp_path / "scores.jsonl", 60)
    after = recalibrate(tiny_bundle, None, tmp_path / "new.onnx", from_log=log).manifest.calibration
    outputs = shape_outputs(before, 60)
    for name, values in after.scores.items():
        np.testing.assert_array_equal(values, outputs[name])


def test_images_that_were_recorded_before_are_left_out(tiny_bundle: Path, tmp_path: Path, printed: Printed) -> None:
    bundle = open_bundle(tiny_bundle)
    log = write_log(bundle, tmp_path / "scores.jsonl")
    once = recalibrate(tiny_bundle, None, tmp_path / "once.onnx", from_log=log)
    write_log(bundle, log, first=120)
    twice = recalibrate(tiny_bundle, None, tmp_path / "twice.onnx", from_log=log, display=printed.display)
    assert threshold(twice) == threshold(once)
    assert twice.manifest.calibration.n == 300
    assert "300 recorded images (120 more were repetitions of the same image)." in printed.text


def test_recorded_scores_can_keep_the_guarantee_on_errors(tiny_bundle: Path, tmp_path: Path) -> None:
    before = open_bundle(tiny_bundle)
    log = write_log(before, tmp_path / "scores.jsonl", 60)
    after = recalibrate(tiny_bundle, None, tmp_path / "new.onnx", from_log=log, keep_trust=True).manifest
    assert as_json(after.labelled_calibration) == as_json(before.manifest.calibration)


def test_too_few_recorded_images_are_an_error_with_the_needed_number(tiny_bundle: Path, tmp_path: Path) -> None:
    log = write_log(open_bundle(tiny_bundle), tmp_path / "scores.jsonl", 60)
    for count, trim in ((58, None), (60, 0.05)):
        (tmp_path / "few.jsonl").write_text("".join(log.read_text().splitlines(keepends=True)[:count]))
        with pytest.raises(OperatingPointError, match=r"needs at least 59 calibration images; there are 5[78]\."):
            recalibrate(tiny_bundle, None, tmp_path / "new.onnx", from_log=tmp_path / "few.jsonl", trim=trim)
    assert not (tmp_path / "new.onnx").exists()


def test_a_log_of_another_model_is_refused_and_nothing_is_written(tiny_bundle: Path, tmp_path: Path) -> None:
    log = write_log(open_bundle(tiny_bundle), tmp_path / "scores.jsonl", 60)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[41]["graph"] = "f" * 64
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = digest(tiny_bundle)
    with pytest.raises(DataError, match=r"Line 42 of the score log .*was written by another model"):
        recalibrate(tiny_bundle, None, tiny_bundle, from_log=log)
    assert digest(tiny_bundle) == before


# Options


def test_trimming_leaves_out_the_share_with_the_highest_flag_scores(
    tiny_bundle: Path, photos: str, tmp_path: Path, printed: Printed
) -> None:
    after = recalibrate(tiny_bundle, photos, tmp_path / "new.onnx", trim=0.05, display=printed.display)
    outputs = shape_outputs(after, 200)
    kept = np.sort(np.argsort(outputs["fused"], kind="stable")[:190])
    calibration = after.manifest.calibration
    assert (calibration.n, calibration.trimmed) == (190, 0.05)
    np.testing.assert_array_equal(calibration.scores["fused"], outputs["fused"][kept])
    np.testing.assert_array_equal(calibration.scores["entropy"], outputs["entropy"][kept])
    assert threshold(after) == by_hand(outputs["fused"][kept])
    assert "if the 5 % that were trimmed were all OOD (else up to about 10 %)" in printed.text
    log = write_log(open_bundle(tiny_bundle), tmp_path / "scores.jsonl", 200)
    recorded = recalibrate(tiny_bundle, None, tmp_path / "log.onnx", from_log=log, trim=0.05).manifest.calibration
    assert (recorded.n, recorded.trimmed) == (190, 0.05)
    np.testing.assert_array_equal(recorded.fingerprints, calibration.fingerprints)


def test_trimming_nothing_is_not_recorded(tiny_bundle: Path, photos: str, tmp_path: Path) -> None:
    after = recalibrate(tiny_bundle, photos, tmp_path / "new.onnx", trim=0.0).manifest.calibration
    assert (after.n, after.trimmed) == (200, None)


@pytest.mark.parametrize("share", [-0.1, 0.51, 1.0, float("nan"), float("inf")])
def test_a_share_that_cannot_be_trimmed_is_an_error(share: float, tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"The share to trim must be from 0 to 0.5, not {share:g}"):
        recalibrate(tiny_bundle, "photos", tmp_path / "new.onnx", trim=share)


def test_images_with_labels_are_not_trimmed(tiny_bundle: Path, shapes: str, tmp_path: Path) -> None:
    for data in (shapes, None):
        with pytest.raises(DataError, match="Only images without labels can be trimmed"):
            recalibrate(tiny_bundle, data, tmp_path / "new.onnx", trim=0.1)
    assert not (tmp_path / "new.onnx").exists()


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("photos", {"from_log": Path("log")}, "Both the data 'photos' and the log 'log' are given"),
        (None, {"from_log": Path("log"), "as_sent": ["png"]}, "Recorded scores cannot be sent in another encoding"),
        (None, {"unlabelled": True}, "--unlabelled needs DATA"),
        (None, {"from_log": Path("log"), "unlabelled": True}, "--unlabelled needs DATA"),
        (None, {"form": "mixture"}, "--form and --seed need encodings: list them with --as-sent"),
        ("photos", {"form": "worst"}, "--form and --seed need encodings"),
        ("", {}, "DATA is empty"),
        ("photos", {"name": "Bad Name"}, "The name 'Bad Name' is not accepted"),
    ],
)
def test_options_that_exclude_each_other_are_an_error(
    data: str | None, options: dict[str, Any], message: str, tiny_bundle: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        recalibrate(tiny_bundle, data, tmp_path / "new.onnx", **options)
    assert not (tmp_path / "new.onnx").exists()


def test_own_images_are_sent_without_torch_scipy_and_sklearn(tiny_bundle: Path, tmp_path: Path) -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'sklearn', 'scipy', 'onnx', 'matplotlib']))"
    code = f"{blocked}; from qualms.cli import main; main()"
    arguments = ["calibrate", str(tiny_bundle), "--out", str(tmp_path / "new.onnx"), "--as-sent", "png, jpeg:75"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    as_sent = open_bundle(tmp_path / "new.onnx").manifest.calibration.as_sent
    assert as_sent is not None
    assert (as_sent.encodings, as_sent.form, as_sent.seed) == (["png", "jpeg:75"], "worst", 0)


# By size


def test_by_size_the_settings_have_the_sizes_of_their_images_and_each_size_its_own_threshold(
    tiny_bundle: Path, shapes: str, tmp_path: Path
) -> None:
    texts = ["png", "jpeg:75", "resize:2:bilinear", "resize:0.5:bicubic"]
    after = recalibrate(tiny_bundle, shapes, tmp_path / "new.onnx", as_sent=texts, form="by-size").manifest
    assert {one.encoding: one.size for one in after.calibration.settings} == dict(
        zip(texts, ["same", "same", "larger", "smaller"], strict=True)
    )
    decider = Decider(after)
    thresholds = {size: decider.rule(size=size).flag.threshold for size in ("same", "larger", "smaller")}
    assert len(set(thresholds.values())) == 3
    assert decider.rule().flag.threshold == max(thresholds.values())


def test_by_size_needs_images_of_one_size(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    rng = np.random.default_rng(0)
    for index in range(300):
        side = 16 if index % 3 else 20
        Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).save(tmp_path / "photos" / f"{index}.png")
    with pytest.raises(DataError, match="they are of several, relative to the model's input: 200 same, 100 larger"):
        recalibrate(
            tiny_bundle, str(tmp_path / "photos"), tmp_path / "new.onnx", as_sent=["png", "jpeg:75"], form="by-size"
        )
    assert not (tmp_path / "new.onnx").exists()
