"""The result of one image: its fields, their order, and how they are filled."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import GraphRunner, Outputs
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint
from qualms.decisions.prediction_sets import EMPTY
from qualms.decisions.results import ALL_UP_TO_CLASSES, ResultBuilder, ResultRow
from qualms.decisions.verdicts import Decider, Rule, Verdicts, decide
from qualms.errors import BundleError, ExplanationError, ParameterError
from qualms.replies import AlphaDetail, Result

N = 4
Draw = Callable[[int, int], NDArray[np.uint8]]


@pytest.fixture
def outputs(runner: GraphRunner, draw_images: Draw) -> dict[str, NDArray[Any]]:
    return runner(draw_images(91, N))


@pytest.fixture
def refusing(manifest: Manifest) -> Manifest:
    """A manifest whose target risk the calibration does not support, so that trust is refused."""
    return manifest.model_copy(update={"operating": manifest.operating.model_copy(update={"target_risk": 1e-6})})


def build(
    manifest: Manifest,
    outputs: dict[str, NDArray[Any]],
    point: OperatingPoint = DEFAULT_OPERATING_POINT,
    *,
    explain: bool = False,
    alpha: AlphaDetail | None = None,
) -> tuple[list[ResultRow], list[dict[str, Any]]]:
    """The rows of some outputs, and the same as nested dicts."""
    builder, rule = ResultBuilder(manifest, outputs), Decider(manifest).rule(point)
    rows = builder.rows(outputs, rule, decide(rule, outputs), explain=explain, alpha=alpha)
    return rows, list(map(builder.nested(rule, explain=explain, alpha=alpha), rows))


def paths_of_schema(schema: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> list[str]:
    """The paths of all fields of a JSON schema, in their order."""
    paths = []
    for name, value in schema["properties"].items():
        reference = next((one["$ref"] for one in (value, *value.get("anyOf", ())) if "$ref" in one), None)
        if reference is not None:
            part = definitions[reference.rpartition("/")[2]]
            paths += paths_of_schema(part, definitions, f"{prefix}{name}.")
        else:
            paths.append(prefix + name)
    return paths


def paths_of(document: dict[str, Any], prefix: str = "") -> list[str]:
    """The paths of all values of a nested dict, in their order."""
    paths = []
    for name, value in document.items():
        is_part = isinstance(value, dict) and name not in ("flag_terms", "scores")
        paths += paths_of(value, f"{prefix}{name}.") if is_part else [prefix + name]
    return paths


SCHEMA = Result.model_json_schema()
ALL_PATHS = paths_of_schema(SCHEMA, SCHEMA["$defs"])


EVERYTHING = OperatingPoint(guarantee="by-class", coverage=0.9)
"""an operating point whose results have all optional fields but the explanation"""
WITHOUT: dict[AlphaDetail, tuple[str, ...]] = {
    "all": ("dirichlet.top", "explanation.meta.top", "explanation.meta.precision"),
    "top10": ("dirichlet.alpha", "explanation.meta.alpha"),
    "none": ("dirichlet.alpha", "dirichlet.top", "explanation.meta.alpha", "explanation.meta.top"),
}
"""paths that a result does not have, by how much of α it has"""


@pytest.mark.parametrize("alpha", ["all", "top10", "none"])
def test_if_everything_is_requested_every_field_of_the_schema_has_a_value_in_its_order(
    refusing: Manifest, outputs: dict[str, NDArray[Any]], alpha: AlphaDetail
) -> None:
    rows, documents = build(refusing, outputs, EVERYTHING, explain=True, alpha=alpha)
    expected = [path for path in ALL_PATHS if path not in WITHOUT[alpha]]
    assert [len(row) for row in rows] == N * [len(expected)]
    for document in documents:
        assert paths_of(document) == expected
        assert document["trust"]["accept"] is document["trust"]["threshold"] is None
        assert document["trust"]["refusal"].startswith("A target risk of 1e-06 needs")


@pytest.mark.parametrize(("which", "refused"), [("manifest", False), ("refusing", True)])
@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("with_set", [False, True])
@pytest.mark.parametrize("explain", [False, True])
def test_only_refusal_group_prediction_set_and_explanation_may_be_omitted(
    request: pytest.FixtureRequest,
    outputs: dict[str, NDArray[Any]],
    which: str,
    refused: bool,
    by_class: bool,
    with_set: bool,
    explain: bool,
) -> None:
    point = OperatingPoint(guarantee="by-class" if by_class else None, coverage=0.9 if with_set else None)
    rows, documents = build(request.getfixturevalue(which), outputs, point, explain=explain)
    optional = {"trust.refusal": refused, "ood.group": by_class, "prediction_set": with_set, "explanation": explain}
    left_out = (*WITHOUT["all"], *(path for path, present in optional.items() if not present))
    expected = [path for path in ALL_PATHS if not path.startswith(left_out)]
    assert [len(row) for row in rows] == N * [len(expected)]
    assert [paths_of(document) for document in documents] == N * [expected]
    assert all(("explanation" in document) == explain for document in documents)
    assert all(("prediction_set" in document) == with_set for document in documents)


def test_a_prediction_set_has_the_labels_of_its_classes_or_a_note(
    manifest: Manifest, outputs: dict[str, NDArray[Any]]
) -> None:
    outputs["probabilities"] = np.array(
        [[0.2, 0.7, 0.1], [0.34, 0.33, 0.33], [0.5, 0.0, 0.5], [0.1, 0.3, 0.6]], np.float32
    )
    calibration = manifest.calibration.model_copy(update={"label_scores": np.full(400, -0.35, np.float32)})
    changed = manifest.model_copy(update={"calibration": calibration})
    sets = [document["prediction_set"] for document in build(changed, outputs, OperatingPoint(coverage=0.9))[1]]
    assert [one["labels"] for one in sets] == [["crab"], [], ["bee", "dove"], ["dove"]]
    assert [(one["coverage"], one["method"]) for one in sets] == N * [(0.9, "lac")]
    assert [one["note"] for one in sets] == [None, EMPTY, None, None]


def test_with_thresholds_by_class_a_result_has_the_threshold_and_the_images_of_its_class(
    manifest: Manifest, outputs: dict[str, NDArray[Any]]
) -> None:
    predictions = np.repeat([0, 1, 2], [300, 60, 40]).astype(np.int32)
    scores = {**manifest.calibration.scores, "fused": np.arange(400, dtype=np.float32)}
    calibration = manifest.calibration.model_copy(update={"predictions": predictions, "scores": scores})
    changed = manifest.model_copy(update={"calibration": calibration})
    outputs["prediction"] = np.array([0, 1, 2, 0])
    outputs["fused"] = np.array([250, 350, 390, 299], np.float32)
    point = OperatingPoint(target_fpr=0.05, guarantee="by-class")
    ood = [document["ood"] for document in build(changed, outputs, point)[1]]
    first, pool = {"classes": ["bee"], "n": 300}, {"classes": ["crab", "dove"], "n": 100}
    assert [one["group"] for one in ood] == [first, pool, pool, first]
    # Of 300 images the confident rule uses the 9th largest score, of 100 images the 2nd.
    assert [one["threshold"] for one in ood] == [291, 398, 398, 291]
    assert [one["flag"] for one in ood] == [False, False, False, True]
    assert [one["p_value"] for one in ood] == [51 / 301, 51 / 101, 11 / 101, 2 / 301]
    assert {one["guarantee_text"] for one in ood} == {
        "at most 5 % of images predicted as one class (or sharing a threshold) are flagged, for 95 % of "
        "calibration sets, for images like the calibration images"
    }


def test_an_explanation_has_the_flag_terms_and_the_distribution_of_the_meta_model(
    manifest: Manifest, outputs: dict[str, NDArray[Any]]
) -> None:
    documents = build(manifest, outputs, explain=True)[1]
    for row, document in enumerate(documents):
        explanation = Result.model_validate(document).explanation
        assert explanation is not None
        assert explanation.flag_terms == {
            name: outputs["fused_terms"][row, column] for column, name in enumerate(manifest.flag_terms)
        }
        assert sum(explanation.flag_terms.values()) == pytest.approx(outputs["fused"][row], rel=1e-6)
        assert explanation.meta.alpha == outputs["meta_alpha"][row].tolist()
        assert explanation.meta.mutual_information == outputs["meta_mutual_information"][row]


def with_alpha(alpha: list[float], outputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The outputs with this α (K,) for every image, as the served and as the meta-model's."""
    rows = np.tile(np.array(alpha, np.float32), (N, 1))
    return {**outputs, "alpha": rows, "meta_alpha": 2 * rows}


def test_the_top_entries_of_alpha_are_the_largest_ones_with_their_classes(
    manifest: Manifest, outputs: dict[str, NDArray[Any]]
) -> None:
    many = manifest.model_copy(update={"classes": [f"c{index}" for index in range(14)]})
    alpha = [3.0, 1.0, 9.0, 3.0, 8.5, 1.0, 2.0, 1.0, 7.0, 1.0, 1.0, 6.0, 5.0, 1.0]
    indices = [2, 4, 8, 11, 12, 0, 3, 6, 1, 5]  # equal entries in the order of their classes
    for document in build(many, with_alpha(alpha, outputs), explain=True, alpha="top10")[1]:
        result = Result.model_validate(document)
        assert result.explanation is not None
        meta = result.explanation.meta
        assert result.dirichlet.alpha is meta.alpha is None
        for top, factor in ((result.dirichlet.top, 1), (meta.top, 2)):
            assert top is not None
            assert [(entry.index, entry.label, entry.alpha) for entry in top] == [
                (index, f"c{index}", factor * alpha[index]) for index in indices
            ]
        assert meta.precision == 2 * sum(alpha)


def test_the_top_entries_of_a_few_classes_are_all_of_them(manifest: Manifest, outputs: dict[str, NDArray[Any]]) -> None:
    for document in build(manifest, with_alpha([1.0, 5.0, 2.0], outputs), alpha="top10")[1]:
        assert [(entry["label"], entry["alpha"]) for entry in document["dirichlet"]["top"]] == [
            ("crab", 5),
            ("dove", 2),
            ("bee", 1),
        ]


@pytest.mark.parametrize("alpha", ["all", "top10", "none"])
def test_the_precision_does_not_depend_on_how_much_of_alpha_is_returned(
    manifest: Manifest, outputs: dict[str, NDArray[Any]], alpha: AlphaDetail
) -> None:
    for row, document in enumerate(build(manifest, outputs, explain=True, alpha=alpha)[1]):
        assert document["dirichlet"]["precision"] == outputs["precision"][row]
        if alpha != "all":
            expected = pytest.approx(outputs["meta_alpha"][row].sum(), rel=1e-6)
            assert document["explanation"]["meta"]["precision"] == expected


@pytest.mark.parametrize(("classes", "expected"), [(ALL_UP_TO_CLASSES, "all"), (ALL_UP_TO_CLASSES + 1, "top10")])
def test_the_default_depends_on_the_number_of_classes(
    manifest: Manifest, outputs: dict[str, NDArray[Any]], classes: int, expected: AlphaDetail
) -> None:
    many = manifest.model_copy(update={"classes": [str(index) for index in range(classes)]})
    outputs = with_alpha([float(index) for index in range(classes)], outputs)
    present = {
        alpha: [list(document["dirichlet"]) for document in build(many, outputs, alpha=alpha)[1]]
        for alpha in (None, "all", "top10", "none")
    }
    assert present["all"] == N * [["alpha", "precision"]]
    assert present["top10"] == N * [["top", "precision"]]
    assert present["none"] == N * [["precision"]]
    assert present[None] == present[expected]


def test_an_unknown_detail_of_alpha_is_an_error(manifest: Manifest, outputs: dict[str, NDArray[Any]]) -> None:
    with pytest.raises(ParameterError) as caught:
        build(manifest, outputs, alpha="some")  # type: ignore[arg-type]
    assert str(caught.value) == "alpha is 'some'; accepted: top10, all, none."


def test_results_of_an_earlier_model_cannot_be_explained(earlier_manifest: Manifest, earlier_graph: bytes) -> None:
    builder = ResultBuilder(earlier_manifest, GraphRunner(earlier_graph).outputs)
    with pytest.raises(ExplanationError) as caught:
        builder.check_explainable()
    assert str(caught.value) == (
        "The model tiny cannot explain its flags: it was made with an earlier version of qualms and has no flag terms; "
        "`qualms convert` makes one that has them."
    )


def test_every_document_validates_as_a_result(
    manifest: Manifest, refusing: Manifest, outputs: dict[str, NDArray[Any]]
) -> None:
    for document in (
        *build(manifest, outputs)[1],
        *build(refusing, outputs)[1],
        *build(refusing, outputs, EVERYTHING, explain=True)[1],
        *build(refusing, outputs, EVERYTHING, explain=True, alpha="top10")[1],
        *build(manifest, outputs, alpha="none")[1],
    ):
        result = Result.model_validate(document)
        assert result.model_dump(exclude_unset=True).keys() == document.keys()


def test_values_are_those_of_their_own_row(manifest: Manifest, outputs: dict[str, NDArray[Any]]) -> None:
    point = OperatingPoint("entropy", 0.3, "marginal", 0.1)
    rule = Decider(manifest).rule(point)
    verdicts = decide(rule, outputs)
    assert verdicts.accepts is not None
    assert rule.trust is not None
    for row, document in enumerate(build(manifest, outputs, point)[1]):
        index = int(outputs["prediction"][row])
        prediction = (index, manifest.classes[index], outputs["base_probabilities"][row, index])
        assert tuple(document["prediction"].values()) == prediction
        assert document["dirichlet"]["alpha"].tolist() == outputs["alpha"][row].tolist()
        assert document["dirichlet"]["precision"] == outputs["precision"][row]
        assert document["uncertainty"] == {
            "total": {"entropy": outputs["entropy"][row], "max_probability": outputs["max_probability"][row]},
            "epistemic": {
                "mutual_information": outputs["mutual_information"][row],
                "differential_entropy": outputs["differential_entropy"][row],
                "precision": outputs["precision"][row],
            },
            "aleatoric": outputs["expected_entropy"][row],
        }
        assert document["ood"] == {
            "flag": bool(verdicts.flags[row]),
            "score": "entropy",
            "value": outputs["entropy"][row],
            "threshold": rule.flag.threshold,
            "p_value": verdicts.p_values[row],
            "target_fpr": 0.3,
            "guarantee": "marginal",
            "guarantee_text": "at most 30 % of in-distribution images are flagged, on average over calibration sets, "
            "for images like the calibration images",
        }
        assert document["trust"] == {
            "accept": bool(verdicts.accepts[row]),
            "score": "predicted_error",
            "value": outputs["predicted_error"][row],
            "threshold": rule.trust.threshold,
            "target_risk": 0.1,
        }


def test_the_probability_is_that_of_the_network_that_predicts(
    manifest: Manifest, outputs: dict[str, NDArray[Any]]
) -> None:
    outputs["probabilities"] = np.full_like(outputs["probabilities"], 0.25)
    meta = manifest.model_copy(update={"prediction": "meta"})
    assert {document["prediction"]["probability"] for document in build(meta, outputs)[1]} == {0.25}
    assert 0.25 not in {document["prediction"]["probability"] for document in build(manifest, outputs)[1]}


def test_float32_values_are_written_with_float32_precision(
    manifest: Manifest, outputs: dict[str, NDArray[Any]]
) -> None:
    outputs["entropy"] = np.full(N, 0.1, np.float32)
    outputs["alpha"] = np.full((N, len(manifest.classes)), 0.1, np.float32)
    document = build(manifest, outputs)[1][0]
    written = json.loads(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY))
    assert written["uncertainty"]["total"]["entropy"] == 0.1
    assert written["dirichlet"]["alpha"] == len(manifest.classes) * [0.1]
    assert np.float32(written["ood"]["value"]) == outputs["fused"][0]


@pytest.mark.parametrize("path", ["prediction.label", "ood.flag", "trust.accept"])
def test_a_field_without_a_value_is_an_error(manifest: Manifest, outputs: dict[str, NDArray[Any]], path: str) -> None:
    class Incomplete(ResultBuilder):
        def columns(self, outputs: Outputs, rule: Rule, verdicts: Verdicts) -> dict[str, Iterable[Any]]:
            columns = super().columns(outputs, rule, verdicts)
            del columns[path]
            return columns

    rule = Decider(manifest).rule(DEFAULT_OPERATING_POINT)
    with pytest.raises(KeyError, match=path):
        Incomplete(manifest, outputs).rows(outputs, rule, decide(rule, outputs))


def test_a_graph_without_an_output_that_results_contain_is_refused(
    manifest: Manifest, outputs: dict[str, NDArray[Any]]
) -> None:
    with pytest.raises(BundleError, match="has no output expected_entropy"):
        ResultBuilder(manifest, set(outputs) - {"expected_entropy"})
