"""The deciding rows: their figures, their verdicts, and that nothing is cut in a narrow terminal."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from qualms.bundle.embedded import resolve_model
from qualms.bundle.evaluation_results import (
    Evaluation,
    OodResult,
    ProbabilityResult,
    ServedOodResult,
    ServedResult,
    ServedTrust,
)
from qualms.bundle.file import open_bundle
from qualms_training.console import Display
from qualms_training.errors import DataError
from qualms_training.reporting.report import to_rich
from qualms_training.reporting.saved import check_out, default_out, evaluation_files, ood_name, save_evaluation
from qualms_training.reporting.summary import print_report, summary, summary_grids, verdict_index

FOLDER = "folder:/home/someone/photographs/of-things-that-are-not-in-any-class"


def evaluation(flagged: int = 38, *, trust: bool = True) -> Evaluation:
    aurocs = {"base_entropy": 88.0, "base_max_probability": 89.1, "fused": 99.5}
    return Evaluation(
        test_data="cifar10",
        n=10_000,
        base_accuracy=94.2,
        accuracy=94.2,
        identical_predictions=True,
        compared=1000,
        ood=[
            OodResult(data=data, score=score, auroc=auroc, aupr=1, fpr95=1, n_id=10, n_ood=10)
            for data in ("svhn", FOLDER, "cifar10 (itself)")
            for score, auroc in aurocs.items()
        ],
        misclassification=[],
        realised=[],
        probabilities=[
            ProbabilityResult(distribution="alpha", ece=0.9, nll=1),
            ProbabilityResult(distribution="base", ece=3.1, nll=1),
        ],
        served=ServedResult(
            score="fused",
            target_fpr=0.01,
            n=10_000,
            flagged=flagged,
            trust=ServedTrust(target_risk=0.01, accepted=8000, wrong=60, softmax_accepted=8100, softmax_wrong=60)
            if trust
            else None,
            ood=[
                ServedOodResult(data=data, n=1000, flagged=975, accepted=2, softmax_accepted=250)
                for data in ("svhn", FOLDER, "cifar10 (itself)")
            ],
        ),
    )


def test_the_summary_has_what_is_before_and_after() -> None:
    test, ood = summary(evaluation())
    assert test.title == "Test set cifar10, 10,000 images"
    assert test.columns == ["base alone", "served"]
    assert [cells for _, cells in test.rows] == [
        ["94.20", "94.20, identical predictions on 1,000 images"],
        ["3.10", "0.90"],
        ["–", "0.38 of 10,000: meets the target"],
        ["81.0", "80.0"],
        ["0.74", "0.75: meets the target"],
    ]
    assert "same error rate" in test.rows[3][0]
    assert ood.columns == ["flagged", "AUROC", "AUROC softmax", "accepted", "accepted softmax"]
    assert ood.rows == [(name, ["97.5", "99.5", "89.1", "0.2", "25.0"]) for name in ("svhn", FOLDER)]


def test_few_test_images_cannot_confirm_the_target() -> None:
    few = evaluation()
    assert few.served is not None
    served = few.served.model_copy(update={"n": 50, "flagged": 0})
    rows = dict(summary(few.model_copy(update={"served": served}))[0].rows)
    assert rows["false alarms, %, target 1"][1] == "0.00 of 50: meets the target, but so few images cannot confirm it"


def test_several_seeds_have_means_and_the_verdict_of_the_worst() -> None:
    test, _ = summary_grids([evaluation(38), evaluation(142)])
    assert test.rows[2][1][1] == "0.90 ± 0.52 of 10,000, worst 1.42: exceeds the target (95 % bound)"


@pytest.mark.parametrize(("count", "index"), [(0, 0), (100, 0), (101, 1), (115, 1), (120, 2)])
def test_the_verdict_is_that_of_the_lower_95_percent_bound(count: int, index: int) -> None:
    assert verdict_index(count, 10_000, 0.01) == index


def test_a_target_risk_that_is_not_supported_has_a_sentence() -> None:
    rows = dict(summary(evaluation(trust=False))[0].rows)
    assert rows["accepted, %"] == ["–", "none: the calibration set supports no such risk (`qualms inspect` says why)"]


def test_an_evaluation_of_an_earlier_version_has_a_summary() -> None:
    manifest = open_bundle(resolve_model("mnist")).manifest
    assert manifest.evaluation is not None
    earlier = manifest.model_copy(update={"evaluation": manifest.evaluation.model_copy(update={"served": None})})
    test, ood = summary(earlier)
    assert test.rows[0][0] == "accuracy, %"
    assert ood.columns == ["AUROC", "AUROC softmax"]
    with pytest.raises(DataError, match="has no evaluation"):
        summary(manifest.model_copy(update={"evaluation": None}))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_names_are_wrapped_and_never_cut(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width)
    for grid in summary(evaluation()):
        console.print(to_rich(grid))
    output = file.getvalue()
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= width
    first = "".join(line.split("│")[1].strip() for line in output.splitlines() if line.startswith("│"))
    assert FOLDER in first


def test_all_tables_are_printed_only_on_request() -> None:
    printed = {}
    for show_all in (False, True):
        file = io.StringIO()
        print_report([evaluation()], None, Display(Console(file=file, width=200)), show_all=show_all)
        printed[show_all] = file.getvalue()
    assert "FPR95" not in printed[False]
    assert printed[True].startswith(printed[False])
    assert "FPR95" in printed[True]


def test_an_evaluation_is_saved_as_text_and_as_json(tmp_path: Path) -> None:
    text, results = save_evaluation(tmp_path / "new" / "mine.json", "tiny 1", evaluation())
    assert (text, results) == (tmp_path / "new" / "mine.md", tmp_path / "new" / "mine.json")
    assert Evaluation.model_validate(json.loads(results.read_text())) == evaluation()
    assert text.read_text().startswith("# tiny 1\n\nTest accuracy")
    assert FOLDER in text.read_text()
    assert evaluation_files(Path("a/model.v2")) == [Path("a/model.v2.md"), Path("a/model.v2.json")]


def test_files_are_written_beside_the_bundle_or_here_for_an_embedded_model(tmp_path: Path) -> None:
    assert default_out(tmp_path / "model.onnx") == tmp_path / "model.evaluation"
    assert default_out(resolve_model("demo")) == Path("demo.evaluation")
    with pytest.raises(DataError, match="is a folder; --out names the files"):
        check_out(tmp_path)
    check_out(tmp_path / "new" / "x.md")


def test_the_path_of_a_folder_is_an_ood_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("photos", "strokes", "svhn"):
        (tmp_path / name).mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "svhn-test.npz").touch()
    monkeypatch.chdir(tmp_path)
    names = ["photos", str(tmp_path / "photos"), "strokes", "svhn", "folder:photos", "nowhere"]
    assert [ood_name(name, tmp_path / "data") for name in names] == [
        "folder:photos",
        f"folder:{tmp_path / 'photos'}",
        "strokes",
        "svhn",
        "folder:photos",
        "nowhere",
    ]
