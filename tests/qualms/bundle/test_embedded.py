import errno
import os
from pathlib import Path

import pytest

from qualms.bundle import embedded
from qualms.bundle.file import open_bundle
from qualms.bundle.runtime import GraphRunner, check_golden
from qualms.decisions.binomial import binomial_cdf
from qualms.decisions.calibration_set import CalibrationSet
from qualms.errors import BundleError

MODELS = {
    "mnist": (4_500_000, {"omniglot", "fashion_mnist", "kmnist", "cifar10", "corrupted"}, 0.9),
    "cifar10": (4_500_000, {"svhn", "fashion_mnist", "tiny_imagenet", "cifar100", "corrupted"}, 0.6),
}
"""by name: maximal file size in bytes, OOD sets of the evaluation, minimal fraction of trusted test images"""
UNSUPPORTED = {("cifar10", "selective_risk", 0.01)}
"""guarantees that the calibration images do not support in all of their encodings"""
each_model = pytest.mark.parametrize("name", MODELS)


def test_mnist_is_the_default_model() -> None:
    assert embedded.resolve_model(None) == embedded.resolve_model("mnist")
    assert set(embedded.available()) == {*MODELS, "demo"}


@each_model
def test_an_embedded_model_is_small_verified_and_evaluated(name: str) -> None:
    path = embedded.resolve_model(name)
    bundle = open_bundle(path)
    max_bytes, ood_sets, _ = MODELS[name]
    assert path.stat().st_size <= max_bytes
    check_golden(GraphRunner(bundle.graph), bundle.manifest)
    evaluation = bundle.manifest.evaluation
    assert evaluation is not None
    assert evaluation.identical_predictions
    assert {row.data for row in evaluation.ood} >= ood_sets


@each_model
def test_an_embedded_model_meets_both_guarantees_on_its_test_set(name: str) -> None:
    manifest = open_bundle(embedded.resolve_model(name)).manifest
    assert (CalibrationSet(manifest).flag_point().guarantee, CalibrationSet(manifest).flag_point().score) == (
        "confident",
        "fused",
    )
    evaluation = manifest.evaluation
    assert evaluation is not None
    for row in evaluation.realised:
        if (name, row.promise, row.target) in UNSUPPORTED:
            assert row.realised is None
            continue
        assert row.realised is not None
        assert row.realised <= row.target, row
        if row.promise == "selective_risk" and row.target == manifest.operating.target_risk:
            assert row.n > MODELS[name][2] * evaluation.n


@each_model
def test_an_embedded_model_is_calibrated_for_what_clients_send_and_meets_its_guarantees_in_each_encoding(
    name: str,
) -> None:
    manifest = open_bundle(embedded.resolve_model(name)).manifest
    as_sent, evaluation = manifest.calibration.as_sent, manifest.evaluation
    assert as_sent is not None
    assert {"png", "jpeg:75-95", "resize:1.5-3"} <= set(as_sent.encodings)
    assert evaluation is not None
    calibrated = [row for row in evaluation.encodings if row.calibrated]
    assert {"png", "jpeg:75", "jpeg:95", "webp:80", "resize:2:bilinear", "resize:2+jpeg:75"} <= {
        row.encoding for row in calibrated
    }
    for row in calibrated:
        for one in row.realised:
            if one.realised is not None and one.n:  # rates that are compatible with the target at 95 % confidence
                assert binomial_cdf(round(one.realised * one.n) - 1, one.n, one.target) <= 0.95, (row.encoding, one)


@each_model
def test_the_fused_score_has_the_best_worst_case_auroc(name: str) -> None:
    evaluation = open_bundle(embedded.resolve_model(name)).manifest.evaluation
    assert evaluation is not None
    worst = {
        score: min(row.auroc for row in evaluation.ood if row.score == score and not row.data.endswith("(itself)"))
        for score in {row.score for row in evaluation.ood}
    }
    # On MNIST the distance alone is better by up to 0.1 points.
    assert worst["fused"] >= max(worst.values()) - 0.1


@each_model
def test_the_calibration_images_are_a_split_of_their_own(name: str) -> None:
    manifest = open_bundle(embedded.resolve_model(name)).manifest
    assert manifest.calibration.split == "calibration"
    sizes = manifest.provenance.data["splits"][0]["sizes"]
    assert sizes["calibration"] == manifest.calibration.n
    assert sum(sizes.values()) <= manifest.provenance.data["splits"][0]["n"]


def test_a_path_resolves_to_itself(tmp_path: Path) -> None:
    file = tmp_path / "mine.onnx"
    file.touch()
    assert embedded.resolve_model(str(file)) == file


@pytest.mark.parametrize("name", ["minst", f"{__file__}/minst", "min\0st"])
def test_an_unknown_name_is_refused_with_the_embedded_models(name: str) -> None:
    with pytest.raises(BundleError, match=r"minst'|min\\x00st'") as caught:
        embedded.resolve_model(name)
    assert str(caught.value).endswith("; the embedded models are cifar10, demo, mnist.")


def test_a_file_name_that_is_too_long_is_a_bundle_error() -> None:
    name = "m" * 5000
    with pytest.raises(BundleError) as caught:
        embedded.resolve_model(name)
    assert str(caught.value) == f"{name} cannot be read: File name too long."


def test_a_folder_without_permission_is_a_bundle_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if path.name == "mine.onnx":  # root may enter every folder, so permissions cannot be tested with real files
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(BundleError, match=r"^secret/mine\.onnx cannot be read: Permission denied\.$"):
        embedded.resolve_model("secret/mine.onnx")
