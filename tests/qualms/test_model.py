"""The Python interface: `qualms.open_model` and `predict` give the results of the service without a server."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import qualms
from qualms.bundle.embedded import DEFAULT
from qualms.bundle.file import Bundle, write_bundle
from qualms.bundle.manifest import REQUIRED_SCORES, Manifest, OperatingDefaults
from qualms.bundle.parts import Guarantee
from qualms.errors import BundleError, ExplanationError, ImageError, OperatingPointError, ParameterError, QualmsError
from qualms.inference.engine import Engine
from qualms.model import Model, open_model

Encode = Callable[..., bytes]


@pytest.fixture(scope="module")
def opened(bundle: Bundle) -> Model:
    return open_model(bundle.path, threads=1)


@pytest.fixture
def pixels(draw_images: Callable[[int, int], NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """One image, (6, 5, 3)."""
    images = draw_images(81, 1)
    return np.ascontiguousarray(images[0])


def floats(document: Any) -> Any:
    """The document with every number rounded to float32."""
    if isinstance(document, dict):
        return {name: floats(value) for name, value in document.items()}
    if isinstance(document, list):
        return [floats(value) for value in document]
    return float(np.float32(document)) if isinstance(document, float) else document


# Opening


def test_a_model_is_opened_by_path(bundle: Bundle, manifest: Manifest) -> None:
    for path in (bundle.path, str(bundle.path)):
        model = open_model(path, threads=1)
        assert model.bundle.digest == bundle.digest
        assert model.classes == manifest.classes


def test_a_model_is_opened_by_the_name_of_an_embedded_model() -> None:
    assert open_model("demo", threads=1).bundle.path.stem == "demo"


def test_without_an_argument_the_default_model_is_opened() -> None:
    assert open_model().bundle.digest == open_model(DEFAULT).bundle.digest


@pytest.mark.parametrize("name", ["no-such-model", "folder/no-such-file.onnx"])
def test_an_unknown_model_is_an_error_that_lists_the_embedded_models(name: str) -> None:
    with pytest.raises(BundleError, match=f"There is no file '{name}'; the embedded models are cifar10, demo, mnist"):
        open_model(name)


def test_a_file_that_is_not_a_bundle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "other.onnx"
    path.write_bytes(b"something else")
    with pytest.raises(BundleError, match=str(path)):
        open_model(path)


def test_a_model_that_does_not_reproduce_its_golden_vectors_is_not_opened(
    tmp_path: Path, graph: bytes, manifest: Manifest
) -> None:
    outputs = {**manifest.golden.outputs, "alpha": manifest.golden.outputs["alpha"] + 1}
    golden = manifest.golden.model_copy(update={"outputs": outputs})
    wrong = write_bundle(tmp_path / "wrong.onnx", graph, manifest.model_copy(update={"golden": golden}))
    with pytest.raises(BundleError, match="golden vectors are not reproduced: alpha differs"):
        open_model(wrong.path)


# Images


def test_every_kind_of_image_gives_the_same_result(
    opened: Model, pixels: NDArray[np.uint8], encode: Encode, tmp_path: Path
) -> None:
    data = encode(pixels)
    path = tmp_path / "image.png"
    path.write_bytes(data)
    expected = opened.predict(pixels)
    assert isinstance(expected, qualms.Result)
    for image in (path, str(path), data, Image.fromarray(pixels), Image.open(io.BytesIO(data))):
        assert opened.predict(image) == expected, type(image)


def test_a_pil_image_is_rotated_according_to_exif_as_its_file_is(
    opened: Model, pixels: NDArray[np.uint8], encode: Encode
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # display it rotated by 90° clockwise
    data = encode(np.ascontiguousarray(np.rot90(pixels)), exif=exif)
    assert opened.predict(Image.open(io.BytesIO(data))) == opened.predict(data) == opened.predict(pixels)


def test_a_pil_image_of_a_truncated_file_is_an_error(opened: Model, pixels: NDArray[np.uint8], encode: Encode) -> None:
    truncated = encode(pixels, "BMP")[:-20]
    with pytest.raises(ImageError, match=r"^images\[0\]: The image is damaged"):
        opened.predict(Image.open(io.BytesIO(truncated)))


def test_several_images_give_a_list_of_results_in_their_order(
    opened: Model, draw_images: Callable[[int, int], NDArray[np.uint8]], encode: Encode
) -> None:
    images = list(draw_images(82, 5))
    alone = [opened.predict(image) for image in images]
    for together in (opened.predict(images), opened.predict(tuple(encode(image) for image in images))):
        assert isinstance(together, list)
        for result, expected in zip(together, alone, strict=True):
            assert result.prediction.label == expected.prediction.label
            assert result.dirichlet.alpha == pytest.approx(expected.dirichlet.alpha, rel=1e-5)


def test_no_images_give_no_results(opened: Model) -> None:
    assert opened.predict([]) == []
    assert opened.predict(()) == []


def test_images_are_resized_and_converted_to_the_models_input(opened: Model) -> None:
    grey = opened.predict(np.full((50, 40), 90, np.uint8))
    assert grey == opened.predict(np.full((6, 5, 3), 90, np.uint8))


# Results


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score": "precision", "target_fpr": 0.3},
        {"guarantee": "marginal", "target_fpr": 0.2, "target_risk": 0.1},
        {"coverage": 0.9},
        {"coverage": 0.01},
        {"alpha": "top10"},
        {"alpha": "all"},
        {"alpha": "none"},
        {"guarantee": "by-class", "target_fpr": 0.05, "coverage": 0.5},
    ],
)
def test_a_result_equals_that_of_the_service(
    opened: Model, client: httpx.Client, pixels: NDArray[np.uint8], encode: Encode, options: dict[str, Any]
) -> None:
    data = encode(pixels)
    reply = client.post("/predict", content=data, headers={"content-type": "image/png"}, params=options)
    (expected,) = reply.json()["results"]
    result = opened.predict(data, **options)
    assert floats(result.model_dump(exclude_unset=True)) == floats(expected)
    assert floats(json.loads(result.model_dump_json(exclude_unset=True))) == floats(expected)


def test_the_operating_point_of_a_result_is_the_requested_one(opened: Model, pixels: NDArray[np.uint8]) -> None:
    guarantee: Guarantee = "marginal"
    result = opened.predict(pixels, score="entropy", target_fpr=0.2, guarantee=guarantee, target_risk=0.1)
    assert (result.ood.score, result.ood.target_fpr, result.ood.guarantee) == ("entropy", 0.2, "marginal")
    assert result.trust.target_risk == 0.1
    default = opened.predict(pixels)
    assert (default.ood.score, default.ood.target_fpr, default.ood.guarantee) == (
        "fused",
        0.01,
        "confident",
    )
    assert default.dirichlet == result.dirichlet


def test_a_coverage_gives_a_prediction_set(opened: Model, pixels: NDArray[np.uint8]) -> None:
    result, plain = opened.predict(pixels, coverage=0.95), opened.predict(pixels)
    assert plain.prediction_set is None
    assert result.prediction_set is not None
    assert (result.prediction_set.coverage, result.prediction_set.method) == (0.95, "lac")
    assert result.prediction_set.labels[0] == result.prediction.label
    assert set(result.prediction_set.labels) <= set(opened.classes)
    assert result.model_copy(update={"prediction_set": None}) == plain


def test_an_empty_prediction_set_has_a_note(opened: Model) -> None:
    sets = opened.predict(np.zeros((6, 5, 3), np.uint8), coverage=0.01).prediction_set
    assert sets is not None
    assert sets.labels == []
    assert sets.note is not None
    assert sets.note.startswith("The set is empty: ")


def test_by_class_a_result_has_the_group_of_its_threshold(opened: Model, pixels: NDArray[np.uint8]) -> None:
    result, plain = opened.predict(pixels, guarantee="by-class", target_fpr=0.05), opened.predict(pixels)
    assert plain.ood.group is None
    assert result.ood.group is not None
    assert result.prediction.label in result.ood.group.classes
    assert 59 <= result.ood.group.n <= 400
    assert (result.ood.guarantee, result.ood.target_fpr) == ("by-class", 0.05)


def test_a_result_has_the_guarantee_in_words(opened: Model, pixels: NDArray[np.uint8]) -> None:
    assert opened.predict(pixels).ood.guarantee_text == (
        "at most 1 % of in-distribution images are flagged, for 95 % of calibration sets, for images like the "
        "calibration images"
    )


def test_a_result_is_explained_on_request(opened: Model, pixels: NDArray[np.uint8]) -> None:
    (explained,), plain = opened.predict([pixels], explain=True, target_fpr=0.2), opened.predict(pixels, target_fpr=0.2)
    assert plain.explanation is None
    assert explained.explanation is not None
    assert list(explained.explanation.flag_terms) == opened.bundle.manifest.flag_terms
    assert sum(explained.explanation.flag_terms.values()) == pytest.approx(explained.ood.value, rel=1e-6)
    assert len(explained.explanation.meta.alpha or ()) == len(opened.classes)
    assert explained.model_copy(update={"explanation": None}) == plain


def test_all_entries_of_alpha_are_returned_unless_fewer_are_requested(
    many_classes_bundle: Bundle, pixels: NDArray[np.uint8]
) -> None:
    model = open_model(many_classes_bundle.path, threads=1)
    complete = model.predict(pixels)
    alpha = complete.dirichlet.alpha
    assert alpha is not None
    assert len(alpha) == len(model.classes) == 150
    assert complete.dirichlet.precision == pytest.approx(sum(alpha), rel=1e-6)
    assert complete == model.predict([pixels], alpha="all")[0]
    top = model.predict(pixels, alpha="top10").dirichlet
    assert top.alpha is None
    assert top.top is not None
    assert [entry.alpha for entry in top.top] == sorted(alpha, reverse=True)[:10]
    assert all((entry.label, entry.alpha) == (model.classes[entry.index], alpha[entry.index]) for entry in top.top)
    none = model.predict(pixels, alpha="none").dirichlet
    assert (none.alpha, none.top) == (None, None)
    assert top.precision == none.precision == complete.dirichlet.precision


# Errors


@pytest.mark.parametrize("images", [np.zeros((6, 5, 3), np.uint8), []])
def test_an_unknown_detail_of_alpha_is_an_error(opened: Model, images: Any) -> None:
    with pytest.raises(ParameterError, match=r"^alpha is 'top5'; accepted: top10, all, none\.$"):
        opened.predict(images, alpha="top5")  # type: ignore[call-overload]


def test_a_model_of_an_earlier_version_predicts_but_cannot_explain(
    earlier_bundle: Bundle, pixels: NDArray[np.uint8]
) -> None:
    model = open_model(earlier_bundle.path, threads=1)
    assert model.predict(pixels).ood.score == "mutual_information"
    with pytest.raises(ExplanationError, match="The model tiny cannot explain its flags"):
        model.predict(pixels, explain=True)
    with pytest.raises(ExplanationError, match="The model tiny cannot explain its flags"):
        model.predict([], explain=True)


@pytest.mark.parametrize(("key", "use"), [("score", "flag"), ("trust_score", "trust")])
def test_a_bundle_whose_graph_lacks_an_operating_score_is_refused(
    earlier_bundle: Bundle, manifest: Manifest, tmp_path: Path, key: str, use: str
) -> None:
    """The manifest of a new bundle, with the graph of an earlier one."""
    name = getattr(manifest.operating, key)
    golden = manifest.golden.model_copy(update={"outputs": {"alpha": manifest.golden.outputs["alpha"]}})
    scores = {other: spec for other, spec in manifest.scores.items() if other in (name, *REQUIRED_SCORES)}
    calibration = manifest.calibration.model_copy(
        update={"scores": {other: manifest.calibration.scores[other] for other in scores}}
    )
    update = {
        "golden": golden,
        "scores": scores,
        "calibration": calibration,
        "operating": OperatingDefaults(**{"score": "entropy", "trust_score": "entropy", key: name}),
        "graph_sha256": earlier_bundle.manifest.graph_sha256,
    }
    bundle = write_bundle(tmp_path / "tiny.onnx", earlier_bundle.graph, manifest.model_copy(update=update))
    with pytest.raises(
        BundleError, match=rf"no output {name}, which its manifest names as the {use} score; it has pred"
    ):
        open_model(bundle.path)
    with pytest.raises(
        BundleError, match=rf"no output {name}, which its manifest names as the {use} score; it has pred"
    ):
        Engine(bundle)


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(opened: Model, tmp_path: Path) -> None:
    path = tmp_path / "missing.png"
    for image in (path, str(path)):
        with pytest.raises(ImageError, match=f"^{path}: The file cannot be read: No such file or directory"):
            opened.predict(image)


def test_a_file_that_is_not_an_image_is_an_error_that_names_it(opened: Model, tmp_path: Path) -> None:
    path = tmp_path / "text.png"
    path.write_text("text")
    with pytest.raises(ImageError, match=f"^{path}: The 4 bytes are not an image") as caught:
        opened.predict(path)
    assert caught.value.reason == "unsupported"


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"text", "images[1]: The 4 bytes are not an image in an accepted format; send a PNG"),
        (b"", "images[1]: The image has 0 bytes"),
        (np.zeros((6, 5, 3)), "images[1]: An image is float64 of shape (6, 5, 3); accepted is uint8"),
        (np.zeros((1, 6, 5, 3), np.uint8), "images[1]: An image is uint8 of shape (1, 6, 5, 3); accepted is uint8"),
        (np.zeros((6, 5, 2), np.uint8), "images[1]: An image is uint8 of shape (6, 5, 2); accepted is uint8"),
    ],
)
def test_an_unusable_image_is_an_error_that_names_its_index(
    opened: Model, pixels: NDArray[np.uint8], image: Any, message: str
) -> None:
    with pytest.raises(ImageError) as caught:
        opened.predict([pixels, image])
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, qualms.QualmsError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "novelty"}, "The score 'novelty' is not one of this model's; accepted are entropy"),
        ({"target_fpr": 1e-9}, "needs at least"),
        ({"target_risk": 1e-9}, "needs at least"),
        ({"coverage": 0.9999}, "A coverage of 0.9999 needs at least 9,999 labelled calibration images; there are 400"),
        ({"coverage": 1.0}, "The coverage must lie strictly between 0 and 1, not 1.0"),
        ({"coverage": float("nan")}, "The coverage must lie strictly between 0 and 1, not nan"),
        ({"guarantee": "by-class", "target_fpr": 1e-9}, "A by-class false-alarm rate of 1e-09 needs at least"),
    ],
)
def test_an_unsupported_operating_point_is_an_error(
    opened: Model, pixels: NDArray[np.uint8], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OperatingPointError, match=message):
        opened.predict(pixels, **options)
    with pytest.raises(OperatingPointError, match=message):
        opened.predict([], **options)


# The package


def test_the_public_names_are_listed_and_importable() -> None:
    assert {"Model", "QualmsError", "Result", "open_model"} <= set(dir(qualms))
    assert qualms.open_model is open_model
    assert qualms.Model is Model
    assert qualms.QualmsError is QualmsError
    assert all(hasattr(qualms, name) for name in qualms.__all__)


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'qualms' has no attribute 'open_modell'"):
        qualms.open_modell  # noqa: B018


def test_importing_qualms_loads_no_large_dependency() -> None:
    program = "import json, sys, qualms; dir(qualms); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "qualms" in loaded
    assert loaded.isdisjoint({"numpy", "torch", "onnxruntime", "PIL", "pydantic", "fastapi", "qualms_training"})
