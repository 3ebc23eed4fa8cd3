import errno
import os
from pathlib import Path

import pytest

from qualms.bundle import embedded
from qualms.bundle.file import open_bundle
from qualms.bundle.runtime import GraphRunner, check_golden
from qualms.decisions.operating_point import flag_point, trust_point
from qualms.errors import BundleError

MODELS = {
    "mnist": (2_000_000, {"omniglot", "fashion_mnist", "kmnist", "cifar10", "corrupted"}, 0.9),
    "cifar10": (4_000_000, {"svhn", "fashion_mnist", "tiny_imagenet", "cifar100", "corrupted"}, 0.8),
}
"""the most bytes each may have, what it was evaluated on, and the share of images that it trusts at the least"""
each_model = pytest.mark.parametrize("name", MODELS)


def test_the_digits_are_the_default() -> None:
    assert embedded.resolve(None) == embedded.resolve("mnist")
    assert set(embedded.available()) == {*MODELS, "demo"}


@each_model
def test_a_model_is_there_verified_small_and_evaluated(name: str) -> None:
    path = embedded.resolve(name)
    bundle = open_bundle(path)
    most, strangers, _ = MODELS[name]
    assert path.stat().st_size <= most
    check_golden(GraphRunner(bundle.graph), bundle.manifest)
    evaluation = bundle.manifest.evaluation
    assert evaluation is not None
    assert evaluation.identical_predictions
    assert {row.data for row in evaluation.ood} >= strangers


@each_model
def test_a_model_keeps_both_promises_at_its_operating_point(name: str) -> None:
    manifest = open_bundle(embedded.resolve(name)).manifest
    assert (flag_point(manifest).guarantee, flag_point(manifest).score) == ("confident", "fused")
    assert trust_point(manifest).accepted > MODELS[name][2]
    assert manifest.evaluation is not None
    for row in manifest.evaluation.realised:
        assert row.realised is not None
        assert row.realised <= row.target, row


@each_model
def test_the_fused_score_is_above_all_others_in_its_worst_column(name: str) -> None:
    evaluation = open_bundle(embedded.resolve(name)).manifest.evaluation
    assert evaluation is not None
    worst = {
        score: min(row.auroc for row in evaluation.ood if row.score == score and not row.data.endswith("(itself)"))
        for score in {row.score for row in evaluation.ood}
    }
    # On digits the distance alone is as good, to a tenth of a point.
    assert worst["fused"] >= max(worst.values()) - 0.1


@each_model
def test_calibration_images_were_not_among_those_that_trained_it(name: str) -> None:
    manifest = open_bundle(embedded.resolve(name)).manifest
    assert manifest.calibration.split == "calibration"
    sizes = manifest.provenance.data["splits"][0]["sizes"]
    assert sizes["calibration"] == manifest.calibration.n
    assert sum(sizes.values()) <= manifest.provenance.data["splits"][0]["n"]


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.onnx"
    file.touch()
    assert embedded.resolve(str(file)) == file


@pytest.mark.parametrize("name", ["minst", f"{__file__}/minst", "min\0st"])
def test_what_is_neither_a_file_nor_a_model_is_named_with_what_there_is(name: str) -> None:
    with pytest.raises(BundleError, match=r"minst'|min\\x00st'") as caught:
        embedded.resolve(name)
    assert str(caught.value).endswith("and the embedded models are cifar10, demo, mnist.")


def test_a_name_that_the_system_refuses_is_a_sentence() -> None:
    name = "m" * 5000
    with pytest.raises(BundleError) as caught:
        embedded.resolve(name)
    assert str(caught.value) == f"{name} cannot be read: File name too long."


def test_a_folder_that_may_not_be_entered_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if path.name == "mine.onnx":  # root may enter any folder
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(BundleError, match=r"^secret/mine\.onnx cannot be read: Permission denied\.$"):
        embedded.resolve("secret/mine.onnx")
