import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from qualms.bundle.manifest import SCHEMA_VERSION, Manifest, OperatingDefaults, SetMethod, first_problem
from qualms.errors import BundleError
from qualms.images.input_spec import InputSpec

Document = dict[str, Any]


def array(*values: float, shape: list[int] | None = None) -> Document:
    """An array in the JSON format of the manifest."""
    raw = np.array(values, "<f4").tobytes()
    return {
        "shape": [len(values)] if shape is None else shape,
        "float32": base64.b64encode(raw).decode(),
    }


def put(document: Document, path: str, value: Any) -> None:
    """Set `a.b.c` of a document, or remove it with the value `...`."""
    *parents, last = path.split(".")
    for key in parents:
        document = document[key]
    if value is ...:
        del document[last]
    else:
        document[last] = value


def message(document: Document) -> str:
    with pytest.raises(BundleError) as caught:
        Manifest.from_json(json.dumps(document))
    return str(caught.value)


# Round trip


def test_json_round_trip_is_exact(manifest: Manifest) -> None:
    text = manifest.to_json()
    again = Manifest.from_json(text)
    assert again.to_json() == text
    assert again.model_dump(exclude={"calibration", "golden"}) == manifest.model_dump(exclude={"calibration", "golden"})


def test_fields_that_earlier_versions_do_not_have_are_left_out_of_an_earlier_manifest(
    manifest: Manifest, earlier_manifest: Manifest
) -> None:
    document, earlier = json.loads(manifest.to_json()), json.loads(earlier_manifest.to_json())
    assert Manifest.from_json(earlier_manifest.to_json()).to_json() == earlier_manifest.to_json()
    assert set(document) - set(earlier) == {"alpha", "flag_terms"}
    added = {"wrong", "predictions", "label_scores", "observed", "fingerprints"}
    assert set(document["calibration"]) - set(earlier["calibration"]) == added
    assert set(earlier["calibration"]["trust"]) - set(document["calibration"]["trust"]) == {"accepted", "errors"}
    assert set(document["evaluation"]) - set(earlier["evaluation"]) == {"probabilities"}
    again = Manifest.from_json(json.dumps(earlier))
    assert (again.schema_version, again.alpha, again.flag_terms) == (1, "meta", [])
    assert all(getattr(again.calibration, name) in (None, {}) for name in added)


def test_the_round_trip_of_arrays_is_exact(manifest: Manifest) -> None:
    again = Manifest.from_json(manifest.to_json())
    pairs = [
        *((again.calibration.scores[name], values) for name, values in manifest.calibration.scores.items()),
        *((again.golden.outputs[name], values) for name, values in manifest.golden.outputs.items()),
        (again.calibration.trust.levels, manifest.calibration.trust.levels),
        (again.calibration.trust.thresholds, manifest.calibration.trust.thresholds),
    ]
    assert len(pairs) == 11 + 17 + 2
    for actual, expected in pairs:
        assert actual.dtype == expected.dtype == np.float32
        assert actual.shape == expected.shape
        assert actual.tobytes() == expected.tobytes()


def test_the_round_trip_of_extreme_floats_is_exact(manifest: Manifest) -> None:
    odd = [5e-324, 0.1, 1 / 3, 1.7976931348623157e308]
    reference = manifest.reference.model_copy(update={"levels": odd, "quantiles": dict.fromkeys(manifest.scores, odd)})
    again = Manifest.from_json(manifest.model_copy(update={"reference": reference}).to_json())
    assert again.reference == reference


def test_the_evaluation_is_optional(document: Document) -> None:
    del document["evaluation"]
    assert Manifest.from_json(json.dumps(document)).evaluation is None


def test_a_manifest_is_immutable(manifest: Manifest) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        manifest.name = "other"  # type: ignore[misc]


# Invalid manifests


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        # fields
        ("extra", 1, "extra: this field is unknown"),
        ("calibration.trust.extra", 1, "calibration.trust.extra: this field is unknown"),
        ("input.mean", [0.5], "input.mean: this field is unknown"),
        ("scores.entropy.weight", 1, "scores.entropy.weight: this field is unknown"),
        ("golden", ..., "golden: Field required"),
        ("schema_version", 0, "schema_version: Input should be 1 or 2"),
        ("schema_version", "2", "schema_version: Input should be 1 or 2"),
        ("name", "Tiny Model", "name: String should match pattern"),
        ("name", "tiny\n", "name: String should match pattern"),
        ("name", "-tiny", "name: String should match pattern"),
        ("name", "t" * 65, "name: String should match pattern"),
        ("version", "", "version: String should match pattern"),
        ("graph_sha256", "0" * 63, "graph_sha256: String should match pattern"),
        ("calibration.data_sha256", "A" * 64, "calibration.data_sha256: String should match pattern"),
        ("golden.input_sha256", "g" * 64, "golden.input_sha256: String should match pattern"),
        ("prediction", "both", "prediction: Input should be 'base' or 'meta'"),
        ("scores.entropy.direction", "up", "scores.entropy.direction: Input should be 'higher' or 'lower'"),
        ("scores.entropy.kind", "mixed", "scores.entropy.kind: Input should be 'total', 'epistemic' or"),
        ("operating.target_fpr", 0, "operating.target_fpr: Input should be greater than 0"),
        ("operating.target_risk", 1, "operating.target_risk: Input should be less than 1"),
        (
            "operating.guarantee",
            "perhaps",
            "operating.guarantee: Input should be 'confident', 'marginal' or 'by-class'",
        ),
        ("calibration.n", 0, "calibration.n: Input should be greater than 0"),
        ("calibration.n", "many", "calibration.n: Input should be a valid integer"),
        ("calibration", [], "calibration: Input should be a valid dictionary"),
        ("golden.count", 65, "golden.count: Input should be less than or equal to 64"),
        ("golden.outputs", {}, "golden.outputs: Dictionary should have at least 1 item"),
        ("evaluation.accuracy", float("nan"), "evaluation.accuracy: Input should be a finite number"),
        ("reference.class_shares", [float("inf"), 0, 0], "reference.class_shares.0: Input should be a finite"),
        ("input.height", 4097, "input.height: Input should be less than or equal to 4096"),
        ("input.width", 0, "input.width: Input should be greater than 0"),
        ("input.colour", "CMYK", "input.colour: Input should be 'RGB' or 'L'"),
        # arrays
        ("golden.outputs.alpha", [1.0], "golden.outputs.alpha: expected an object with the keys shape"),
        ("golden.outputs.alpha", array(np.inf), "golden.outputs.alpha: the array has non-finite values"),
        # consistency between fields
        ("calibration.trust.errors", [0], "calibration.trust: levels, thresholds, accepted and errors must"),
        ("calibration.trust.errors", [0] * 100, "calibration.trust: accepted and errors belong together"),
        ("calibration.trust.levels", array(1), "calibration.trust: levels, thresholds, accepted and errors"),
        ("calibration.trust.levels", array(1, shape=[]), "calibration.trust: levels, thresholds, accepted"),
        ("calibration.scores.entropy", array(1, 2), "calibration: the calibration scores of entropy must be 400"),
        ("calibration.n", 399, "calibration: the calibration scores of entropy must be 399 values"),
        ("calibration.wrong", [-1, 3], "calibration: wrong must be strictly ascending indices from 0 to 399"),
        ("calibration.wrong", [3, 3], "calibration: wrong must be strictly ascending indices from 0 to 399"),
        ("calibration.wrong", [4, 3], "calibration: wrong must be strictly ascending indices from 0 to 399"),
        ("calibration.wrong", [3, 400], "calibration: wrong must be strictly ascending indices from 0 to 399"),
        ("calibration.wrong", ["all"], "calibration.wrong.0: Input should be a valid integer"),
        ("alpha", "both", "alpha: Input should be 'meta' or 'joined'"),
        ("alpha", ..., "the document: flag_terms and alpha = 'joined' belong together"),
        ("flag_terms", ..., "the document: flag_terms and alpha = 'joined' belong together"),
        ("flag_terms", ["entropy", "entropy"], "the document: flag_terms must be unique"),
        ("flag_terms", ["entropy"], "the document: golden.outputs.fused_terms must have the shape [8, 1]"),
        ("golden.outputs.meta_alpha", array(1), "the document: golden.outputs.meta_alpha must have the shape [8, 3]"),
        ("evaluation.probabilities", [{}], "evaluation.probabilities.0.distribution: Field required"),
        ("reference.levels", [], "reference.levels: List should have at least 1 item"),
        ("reference.levels", [0.5], "reference: the quantiles of entropy must be 1 values, one per level"),
        ("reference.levels", [0.5, 0.1], "reference: levels must be ascending"),
        ("classes", ["bee"], "classes: List should have at least 2 items"),
        ("classes", ["bee", "crab", "bee"], "the document: class names must be unique"),
        ("classes", ["bee", "crab"], "the document: predictions must be from 0 to 1"),
        ("reference.class_shares", [0.5, 0.5], "the document: reference.class_shares must have one value per class"),
        ("calibration.scores.entropy", ..., "the document: the scores entropy are not calibrated"),
        ("calibration.scores.extra", array(*[0.5] * 400), "the document: the calibrated scores extra are not among"),
        ("scores.entropy", ..., "the document: the required scores entropy are missing"),
        ("reference.quantiles.entropy", ..., "the document: the scores entropy have no reference quantiles"),
        ("operating.score", "density", "the document: the operating score density is not among the scores"),
        ("operating.trust_score", "density", "the document: the operating score density is not among"),
        ("golden.outputs.alpha", array(*[1] * 24), "the document: golden.outputs.alpha must have the shape [8, 3]"),
        ("golden.outputs.entropy", array(1, shape=[]), "the document: golden.outputs.entropy must have the shape [8]"),
        ("golden.count", 7, "the document: golden.outputs.base_probabilities must have the shape [7, 3]"),
    ],
)
def test_the_error_names_the_invalid_field(document: Document, path: str, value: Any, problem: str) -> None:
    put(document, path, value)
    text = message(document)
    assert text.startswith(f"The file has a damaged manifest: {problem}")
    assert text.endswith(".")
    assert "\n" not in text


@pytest.fixture
def earlier_document(earlier_manifest: Manifest) -> Document:
    """A manifest of an earlier version as parsed JSON."""
    parsed: Document = json.loads(earlier_manifest.to_json())
    return parsed


def test_without_wrong_calibration_scores_must_be_ascending(
    earlier_document: Document, earlier_manifest: Manifest
) -> None:
    values = earlier_manifest.calibration.scores["entropy"].tolist()
    values[7], values[8] = values[8], values[7]
    put(earlier_document, "calibration.scores.entropy", array(*values))
    assert "the calibration scores of entropy must be 400 ascending values" in message(earlier_document)


def test_with_wrong_calibration_scores_are_in_the_order_of_the_images(manifest: Manifest) -> None:
    values = Manifest.from_json(manifest.to_json()).calibration.scores["entropy"]
    assert (np.diff(values) < 0).any()


def test_with_wrong_trust_must_not_have_counts(document: Document, earlier_document: Document) -> None:
    for name, values in document["calibration"]["scores"].items():
        ascending = np.sort(np.frombuffer(base64.b64decode(values["float32"]), "<f4"))
        document["calibration"]["scores"][name] = array(*ascending)
    document["calibration"]["trust"] = earlier_document["calibration"]["trust"]
    problem = "calibration: with wrong or settings, trust must not have accepted and errors"
    assert message(document) == f"The file has a damaged manifest: {problem}."


def test_a_calibration_without_wrong_and_without_counts_has_no_labels(
    manifest: Manifest, document: Document, earlier_manifest: Manifest
) -> None:
    assert manifest.calibration.has_labels
    assert earlier_manifest.calibration.has_labels
    del document["calibration"]["wrong"], document["calibration"]["label_scores"]
    calibration = Manifest.from_json(json.dumps(document)).calibration
    assert not calibration.has_labels
    assert not calibration.is_sorted


@pytest.mark.parametrize("classes", [["bee", "crab"], ["ant", "bee", "crab", "dove"]])
def test_the_number_of_classes_must_match_the_graph_outputs(document: Document, classes: list[str]) -> None:
    document["classes"] = classes
    del document["calibration"]["predictions"]
    document["reference"]["class_shares"] = [1 / len(classes)] * len(classes)
    for vector in ("base_probabilities", "probabilities", "meta_alpha"):
        del document["golden"]["outputs"][vector]
    assert message(document) == (
        f"The file has a damaged manifest: the document: golden.outputs.alpha must have the shape [8, {len(classes)}] "
        f"for 8 images, {len(classes)} classes and 2 flag terms, not [8, 3]."
    )


def test_a_vector_output_cannot_be_a_score(document: Document, manifest: Manifest) -> None:
    document["scores"]["alpha"] = {"direction": "lower", "kind": "epistemic"}
    document["calibration"]["scores"]["alpha"] = document["calibration"]["scores"]["entropy"]
    document["reference"]["quantiles"]["alpha"] = manifest.reference.quantiles["entropy"]
    assert "golden.outputs.alpha must have the shape [8] " in message(document)


def test_the_base_may_have_other_classes_only_if_the_meta_model_predicts(document: Document) -> None:
    document["golden"]["outputs"]["base_probabilities"] = array(*[0.2] * 40, shape=[8, 5])
    assert "golden.outputs.base_probabilities must have the shape [8, 3]" in message(document)
    document["prediction"] = "meta"
    assert Manifest.from_json(json.dumps(document)).prediction == "meta"


# Calibrations without labels, and in several settings


@pytest.mark.parametrize("which", ["worst_manifest", "unlabelled_manifest", "kept_manifest"])
def test_the_json_round_trip_of_other_calibrations_is_exact(request: pytest.FixtureRequest, which: str) -> None:
    text = request.getfixturevalue(which).to_json()
    assert Manifest.from_json(text).to_json() == text


def test_fields_with_their_default_are_left_out(document: Document) -> None:
    assert not {"sets", "labelled_calibration"} & set(document)
    document["sets"] = {"method": "raps", "penalty": 0.1, "free_ranks": 2}
    manifest = Manifest.from_json(json.dumps(document))
    assert manifest.sets == SetMethod(method="raps", penalty=0.1, free_ranks=2)
    assert json.loads(manifest.to_json())["sets"] == document["sets"]


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        ({"method": "aps"}, "sets.method: Input should be 'lac' or 'raps'"),
        ({"penalty": -0.1}, "sets.penalty: Input should be greater than or equal to 0"),
        ({"free_ranks": 0}, "sets.free_ranks: Input should be greater than or equal to 1"),
    ],
)
def test_an_unknown_method_of_prediction_sets_is_refused(document: Document, sets: Document, problem: str) -> None:
    document["sets"] = sets
    assert message(document) == f"The file has a damaged manifest: {problem}."


def test_only_a_calibration_without_labels_may_keep_an_earlier_one(
    document: Document, unlabelled_manifest: Manifest
) -> None:
    problem = (
        "The file has a damaged manifest: the document: labelled_calibration must have labels and calibration none."
    )
    document["labelled_calibration"] = document["calibration"]
    assert message(document) == problem
    unlabelled = json.loads(unlabelled_manifest.to_json())
    unlabelled["labelled_calibration"] = unlabelled["calibration"]
    assert message(unlabelled) == problem


@pytest.mark.parametrize("index", [-1, 3])
@pytest.mark.parametrize("which", ["manifest", "kept_manifest", "worst_manifest"])
def test_predictions_must_be_classes_in_every_calibration(
    request: pytest.FixtureRequest, which: str, index: int
) -> None:
    document = json.loads(request.getfixturevalue(which).to_json())
    calibration = document.get("labelled_calibration", document["calibration"])
    part = calibration["settings"][-1] if "settings" in calibration else calibration
    raw = np.full(400, index, "<i4").tobytes()
    part["predictions"] = {"shape": [400], "int32": base64.b64encode(raw).decode()}
    assert message(document) == "The file has a damaged manifest: the document: predictions must be from 0 to 2."


@pytest.mark.parametrize("name", ["fused", "predicted_error"])
def test_every_setting_must_have_the_operating_scores(worst_manifest: Manifest, name: str) -> None:
    document = json.loads(worst_manifest.to_json())
    del document["calibration"]["settings"][1]["scores"][name]
    assert message(document) == (
        f"The file has a damaged manifest: the document: the operating score {name} is missing in a calibration."
    )


def test_a_setting_with_a_score_that_the_model_does_not_have_is_refused(worst_manifest: Manifest) -> None:
    document = json.loads(worst_manifest.to_json())
    document["calibration"]["settings"][1]["scores"]["density"] = array(*[0.5] * 400)
    assert "density" in message(document)


def test_a_kept_calibration_must_have_the_operating_scores_and_no_unknown_ones(kept_manifest: Manifest) -> None:
    document = json.loads(kept_manifest.to_json())
    del document["labelled_calibration"]["scores"]["predicted_error"]
    assert "predicted_error" in message(document)
    document = json.loads(kept_manifest.to_json())
    document["labelled_calibration"]["scores"]["density"] = array(*[0.5] * 400)
    assert "density" in message(document)


def test_equal_scores_are_ascending(earlier_document: Document) -> None:
    put(earlier_document, "calibration.scores.entropy", array(*[0.5] * 400))
    Manifest.from_json(json.dumps(earlier_document))


def trust(**parts: Any) -> Document:
    valid = {"levels": array(0.5, 1), "thresholds": array(0.1, 0.1), "accepted": [7, 9], "errors": [0, 9]}
    return {**valid, **parts}


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"levels": array(1, 0.5)}, "levels and thresholds must be ascending"),
        ({"thresholds": array(0.2, 0.1)}, "levels and thresholds must be ascending"),
        ({"errors": [0, 10]}, "errors must lie between 0 and accepted"),
        ({"errors": [-1, 0]}, "errors must lie between 0 and accepted"),
        ({"accepted": [7, 401]}, "trust.accepted must be at most n, 400"),
        ({"levels": array(0.5, 1, shape=[2, 1])}, "must have the same length"),
        (
            {"levels": array(), "thresholds": array(), "accepted": [], "errors": []},
            "must have the same length, at least 1",
        ),
    ],
)
def test_inconsistent_trust_counts_are_refused(earlier_document: Document, part: Document, problem: str) -> None:
    earlier_document["calibration"]["trust"] = trust()
    Manifest.from_json(json.dumps(earlier_document))
    earlier_document["calibration"]["trust"] = trust(**part)
    assert problem in message(earlier_document)


# Text that is not a manifest


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is not JSON (Expecting value: line 1 column 1 (char 0))"),
        ('{"name": "tiny"', "it is not JSON ("),
        ("[" * 100_000, "it is not JSON ("),
        ("9" * 5_000, "it is not JSON ("),
        ("[]", "it is not a JSON object"),
        ("null", "it is not a JSON object"),
        ("{}", "name: Field required"),
    ],
)
def test_text_that_is_not_a_manifest_is_refused(text: str, problem: str) -> None:
    with pytest.raises(BundleError) as caught:
        Manifest.from_json(text)
    assert str(caught.value).startswith(f"The file has a damaged manifest: {problem}")
    assert str(caught.value).endswith(".")


def test_a_newer_schema_version_is_reported_before_unknown_fields(document: Document) -> None:
    document |= {"schema_version": SCHEMA_VERSION + 1, "something": "new"}
    assert message(document) == (
        "The file has a manifest of schema version 3; this version of qualms reads up to 2: update qualms to open it."
    )


def test_the_error_names_the_source() -> None:
    with pytest.raises(BundleError, match=r"^/some/where\.onnx has a damaged manifest: name: Field required\.$"):
        Manifest.from_json("{}", "/some/where.onnx")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: OperatingDefaults.model_validate({"fpr": 0.1}), "fpr: this field is unknown"),
        (
            lambda: OperatingDefaults.model_validate(3),
            "the document: Input should be a valid dictionary or instance of",
        ),
        (lambda: InputSpec(height=-1, width=-1), "height: Input should be greater than 0"),
    ],
)
def test_the_first_problem_names_its_field(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        make()
    assert first_problem(caught.value).startswith(problem)


# Input


@pytest.mark.parametrize(("colour", "channels"), [("RGB", 3), ("L", 1)])
def test_the_input_shape_follows_from_the_colour_mode(colour: str, channels: int) -> None:
    spec = InputSpec.model_validate({"height": 4, "width": 6, "colour": colour})
    assert spec.channels == channels
    assert spec.shape == (4, 6, channels)
