import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from qualms.bundle.calibration_data import AsSent
from qualms.bundle.evaluation_results import EncodingResult, GuaranteeResult
from qualms.bundle.file import Bundle
from qualms.bundle.manifest import Manifest
from qualms.decisions.calibration_set import CalibrationSet
from qualms.inspection import print_bundle


@pytest.fixture
def bundle(graph: bytes, manifest: Manifest) -> Bundle:
    return Bundle(Path("tiny.onnx"), manifest, graph, "ab" * 32)


def printed(bundle: Bundle, width: int = 300, **changes: Any) -> str:
    """The printed text of a bundle with changed fields of its manifest."""
    manifest = bundle.manifest.model_copy(update=changes)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_bundle(Bundle(bundle.path, manifest, bundle.graph, bundle.digest), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(text: str, first: str) -> list[str]:
    """The cells of the rows that begin with `first`, joined."""
    rows = [line.strip("│ ").split("│") for line in text.splitlines() if line.strip("│ ").startswith(first)]
    return [cell.strip() for row in rows for cell in row]


def test_identity_provenance_and_input_are_printed(bundle: Bundle, graph: bytes) -> None:
    text = printed(bundle)
    for fact in (
        "tiny 1.2",
        "ab" * 32,
        f"SHA-256 {bundle.manifest.graph_sha256[:16]}…, intact",
        "6 × 5 RGB, bilinear, stretch",
        "3: bee, crab, dove",
        "by the base model",
        "mean-colour, 1,234,567 parameters, taps features, logits",
        "pooled, 9 parameters",
        "tiny, seed 7, 2026-01-02T03:04:05+00:00, qualms 0.1.0",
        "python 3.11.1, numpy 2.2.0",
        "400 images of drawn, split calibration",
    ):
        assert fact in text


def test_the_digest_fits_on_one_line_of_80_columns(bundle: Bundle) -> None:
    assert bundle.digest in printed(bundle, width=80)


def test_every_score_is_printed_with_its_quantiles(bundle: Bundle) -> None:
    reference = bundle.manifest.reference
    text = printed(bundle)
    for name, spec in bundle.manifest.scores.items():
        quantiles = [reference.quantiles[name][reference.levels.index(level)] for level in (0.05, 0.5, 0.95, 0.99)]
        assert cells(text, name)[:7] == [name, spec.kind, spec.direction, *(f"{q:.4g}" for q in quantiles)]


def test_quantiles_between_reference_levels_are_interpolated(bundle: Bundle) -> None:
    quantiles = {name: [0.0, 200.0] for name in bundle.manifest.scores}
    reference = bundle.manifest.reference.model_copy(update={"levels": [0.0, 1.0], "quantiles": quantiles})
    assert cells(printed(bundle, reference=reference), "entropy")[3:7] == ["10", "100", "190", "198"]


def test_the_default_decisions_are_printed(bundle: Bundle) -> None:
    text = printed(bundle)
    calibration = CalibrationSet(bundle.manifest)
    flag, trust = calibration.flag_point(), calibration.trust_point()
    assert cells(text, "flag as OOD") == [
        "flag as OOD",
        "fused",
        f"{flag.threshold:.6g}",
        "at most 1 % of in-distribution images are flagged, for 95 % of calibration sets, for images like the "
        "calibration images (confident; k = 1, n = 400)",
    ]
    assert cells(text, "trust") == [
        "trust",
        "predicted_error",
        f"{trust.threshold:.6g}",
        f"not flagged and predicted_error ≤ {trust.threshold:.6g}: errors ≤ 1 % of the accepted "
        f"({100 * trust.accepted:.1f} % of the images)",
    ]


def fact(text: str, name: str) -> str:
    """The text of a line of the first table."""
    return next(line.split(name, 1)[1].strip() for line in text.splitlines() if line.strip().startswith(name))


def test_the_encodings_of_the_calibration_images_are_printed(bundle: Bundle, worst_manifest: Manifest) -> None:
    assert fact(printed(bundle), "as sent") == "as they came: lossless, same size (400)"
    text = printed(bundle, calibration=worst_manifest.calibration)
    assert fact(text, "as sent") == "png, jpeg:75, brightness:0.9 (worst, 3 settings, seed 0)"
    assert "for images sent as png, jpeg:75 or brightness:0.9, in any shares" in cells(text, "flag as OOD")[3]
    as_sent = AsSent(encodings=["jpeg:75-95"], form="mixture", seed=7)
    mixture = bundle.manifest.calibration.model_copy(update={"as_sent": as_sent})
    text = printed(bundle, calibration=mixture)
    assert fact(text, "as sent") == "jpeg:75-95 (mixture, seed 7)"
    assert "for images sent as jpeg:75-95, in the listed shares" in cells(text, "flag as OOD")[3]


def test_encodings_of_an_earlier_bundle_are_printed_as_not_recorded(earlier_bundle: Bundle) -> None:
    assert fact(printed(earlier_bundle), "as sent") == "not recorded"


def test_missing_labels_and_trimmed_images_are_printed(bundle: Bundle, unlabelled_manifest: Manifest) -> None:
    trimmed = unlabelled_manifest.calibration.model_copy(update={"trimmed": 0.025})
    text = printed(bundle, calibration=trimmed)
    assert fact(text, "calibration") == "400 images of drawn, split calibration, without labels, 2.5 % trimmed"
    assert "if the 2.5 % that were trimmed were all OOD" in cells(text, "flag as OOD")[3]
    assert cells(text, "trust")[2] == "–"
    assert cells(text, "trust")[3].startswith(
        "The calibration images have no labels, so no error rate can be guaranteed;"
    )


def test_a_guarantee_by_class_is_printed(bundle: Bundle) -> None:
    operating = bundle.manifest.operating.model_copy(update={"guarantee": "by-class", "target_fpr": 0.05})
    row = cells(printed(bundle, operating=operating), "flag as OOD")
    assert row[3].startswith(
        "at most 5 % of images predicted as one class (or sharing a threshold) are flagged, for 95 % of calibration sets, "
    )
    assert "(by-class; k = " in row[3]


def test_results_by_encoding_are_a_table_with_gaps(bundle: Bundle) -> None:
    evaluation = bundle.manifest.evaluation
    assert evaluation is not None

    def rates(*values: float | None) -> list[GuaranteeResult]:
        promises: list[Any] = ["false_alarm_rate", "false_alarm_rate", "selective_risk", "selective_risk"]
        return [
            GuaranteeResult(promise=promise, target=target, realised=value, n=1000)
            for promise, target, value in zip(promises, (0.05, 0.01, 0.05, 0.01), values, strict=True)
        ]

    rows = [
        EncodingResult(
            encoding=name, calibrated=calibrated, n=1000, accuracy=accuracy, realised=rates(*values), detected=[]
        )
        for name, calibrated, accuracy, values in (
            ("png", True, 98.75, (0.0432, 0.0054, 0.05, None)),
            ("jpeg:50", False, 90.04, (0.2, 0.04, 0.1, None)),
        )
    ]
    text = printed(bundle, evaluation=evaluation.model_copy(update={"encodings": rows}))
    assert cells(text, "png ")[-7:] == ["png", "yes", "98.8", "4.32", "0.54", "5.00", "–"]
    assert cells(text, "jpeg:50") == ["jpeg:50", "no", "90.0", "20.00", "4.00", "10.00", "–"]
    assert "risk ≤ 1 %" in text


def test_the_trust_guarantee_of_an_earlier_bundle_is_printed_as_that_of_flagged_images_too(
    earlier_bundle: Bundle,
) -> None:
    assert "errors ≤ 1 % of those up to the threshold, flagged or not" in cells(printed(earlier_bundle), "trust")[3]


def test_the_kind_of_alpha_and_the_flag_terms_are_printed(bundle: Bundle, earlier_bundle: Bundle) -> None:
    lines = [line.split() for line in printed(bundle).splitlines()]
    terms = "evidence by the fused score = entropy + meta_mutual_information"
    assert ["α", *f"joined: tempered softmax, {terms}".split()] in lines
    assert ["α", "of", "the", "meta-model"] in [line.split() for line in printed(earlier_bundle).splitlines()]


def test_the_calibration_of_the_class_probabilities_is_printed(bundle: Bundle, earlier_bundle: Bundle) -> None:
    text = printed(bundle)
    assert cells(text, "alpha") == ["alpha", "1.25", "0.1250"]
    assert cells(text, "base ")[-3:] == ["base", "2.50", "0.2500"]
    assert "ECE" not in printed(earlier_bundle)


def test_an_unsupported_guarantee_is_printed_with_the_reason(bundle: Bundle) -> None:
    operating = bundle.manifest.operating.model_copy(update={"target_fpr": 0.001, "target_risk": 0.001})
    text = printed(bundle, operating=operating)
    assert cells(text, "flag as OOD") == [
        "flag as OOD",
        "fused",
        "–",
        "A confident false-alarm rate of 0.001 needs at least 2,995 calibration images; there are 400.",
    ]
    assert cells(text, "trust")[2] == "–"
    assert cells(text, "trust")[3].startswith("A confident false-alarm rate of 0.001 needs at least 2,995 ")
    operating = bundle.manifest.operating.model_copy(update={"target_risk": 0.001})
    assert cells(printed(bundle, operating=operating), "trust")[2:] == [
        "–",
        "A target risk of 0.001 needs at least 2,995 accepted calibration images without an error; the loosest "
        "threshold accepts about 396 of 400, which support 0.0075 at best.",
    ]


def test_the_evaluation_is_a_table_of_scores_and_ood_sets_with_gaps(bundle: Bundle) -> None:
    text = printed(bundle)
    assert "Evaluation on 1,000 images of drawn" in text
    assert "accuracy 98.75 %" in " ".join(text.split())
    assert cells(text, "mutual_information")[-3:] == ["mutual_information", "91.2", "87.5"]
    assert cells(text, "entropy")[-3:] == ["entropy", "83.2", "–"]


def test_a_bundle_without_evaluation_is_reported_as_not_evaluated(bundle: Bundle) -> None:
    text = printed(bundle, evaluation=None)
    assert text.endswith("Not evaluated.\n")
    assert "AUROC" not in text


def test_names_are_not_interpreted_as_markup(bundle: Bundle) -> None:
    classes = ["[bold]a[/bold]", "[/b]", ":cat:"]
    evaluation = bundle.manifest.evaluation
    assert evaluation is not None
    row = evaluation.ood[0].model_copy(update={"data": "[/d]", "score": "[/s]"})
    changed = evaluation.model_copy(update={"test_data": "[/t]", "ood": [row]})
    text = printed(bundle, classes=classes, evaluation=changed)
    assert "3: [bold]a[/bold], [/b], :cat:" in text
    assert "[/t]" in text
    assert "[/d]" in text
    assert cells(text, "[/s]") == ["[/s]", "91.2"]


@pytest.mark.parametrize(
    ("count", "end"), [(12, "class 10, class 11"), (13, "class 10, class 11, …"), (1000, "class 10, class 11, …")]
)
def test_a_long_list_of_classes_is_shortened(bundle: Bundle, count: int, end: str) -> None:
    text = printed(bundle, classes=[f"class {index}" for index in range(count)])
    line = next(line for line in text.splitlines() if line.lstrip().startswith("classes"))
    assert f" {count}: class 0, class 1," in line
    assert line.rstrip().endswith(end)


def test_missing_provenance_fields_are_accepted(bundle: Bundle) -> None:
    provenance = bundle.manifest.provenance.model_copy(update={"base": {}, "meta": {"form": "pooled"}})
    lines = [line.split(maxsplit=1) for line in printed(bundle, provenance=provenance).splitlines()]
    assert ["base", "unknown"] in [[part.strip() for part in line] for line in lines]
    assert ["meta-model", "pooled"] in [[part.strip() for part in line] for line in lines]


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({"model": "lenet", "parameters": "many"}, "lenet, many parameters"),
        ({"model": "lenet", "parameters": None}, "lenet, None parameters"),
        ({"model": "lenet", "parameters": [1234]}, "lenet, [1234] parameters"),
        ({"model": "lenet", "taps": [1, None]}, "lenet, taps 1, None"),
        ({"model": "lenet", "taps": "conv1"}, "lenet, taps conv1"),
        ({"model": "lenet", "taps": 3}, "lenet, taps 3"),
        ({"model": ["lenet"], "parameters": 1234}, "['lenet'], 1,234 parameters"),
    ],
)
def test_provenance_fields_of_any_type_are_printed(bundle: Bundle, base: dict[str, Any], expected: str) -> None:
    provenance = bundle.manifest.provenance.model_copy(update={"base": base})
    lines = [line.split(maxsplit=1) for line in printed(bundle, provenance=provenance).splitlines()]
    assert ["base", expected] in [[part.strip() for part in line] for line in lines]
