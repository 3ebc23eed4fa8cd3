from pathlib import Path

import pytest

from service.bundle import embedded
from service.bundle.errors import BundleError
from service.bundle.file import open_bundle
from service.bundle.operate import accept_point, flag_point
from service.bundle.runtime import GraphRunner, check_golden

MOST_BYTES = 2_000_000


def test_the_default_model_is_there_verified_small_and_evaluated() -> None:
    path = embedded.resolve(None)
    bundle = open_bundle(path)
    assert path.stat().st_size <= MOST_BYTES
    check_golden(GraphRunner(bundle.graph), bundle.manifest)
    evaluation = bundle.manifest.evaluation
    assert evaluation is not None
    assert evaluation.identical_predictions
    assert {row.data for row in evaluation.ood} >= {"omniglot", "fashion_mnist", "kmnist", "cifar10", "corrupted"}


def test_the_default_model_keeps_both_promises_at_its_operating_point() -> None:
    manifest = open_bundle(embedded.resolve(None)).manifest
    assert flag_point(manifest).guarantee == "confident"
    assert accept_point(manifest).accepted > 0.9


def test_its_calibration_images_were_not_among_those_that_trained_it() -> None:
    manifest = open_bundle(embedded.resolve(None)).manifest
    assert manifest.calibration.split == "calibration"
    sizes = manifest.provenance.data["splits"][0]["sizes"]
    assert sizes["calibration"] == manifest.calibration.n
    assert sum(sizes.values()) <= manifest.provenance.data["splits"][0]["n"]


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.onnx"
    file.touch()
    assert embedded.resolve(str(file)) == file


def test_what_is_neither_a_file_nor_a_model_is_named_with_what_there_is() -> None:
    with pytest.raises(BundleError, match=r"'minst'.*mnist"):
        embedded.resolve("minst")
