"""Tables of evaluations over seeds, with the paper's figures; console output and plots."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from qualms.bundle.evaluation_results import (
    ClassResult,
    DetectionResult,
    EncodingResult,
    ErrorResult,
    Evaluation,
    GuaranteeResult,
    OodResult,
    ProbabilityResult,
    SetResult,
)
from qualms.bundle.file import open_bundle
from qualms_training.console import Display
from qualms_training.paper.published import Figure, error_figure, ood_figure
from qualms_training.recipe import REPORTED_ENCODINGS
from qualms_training.reporting.plots import save_plots
from qualms_training.reporting.report import (
    MAX_CLASSES,
    Grid,
    SeedCell,
    accuracy_line,
    all_grids,
    class_grid,
    encoding_grid,
    error_grid,
    guarantee_grid,
    ood_grid,
    probability_grid,
    set_grid,
    to_markdown,
    to_rich,
)

pytestmark = pytest.mark.slow


def evaluation(shift: float = 0.0, *, same: bool = True, supported: bool = True) -> Evaluation:
    ood = [
        OodResult(data=data, score=score, auroc=value + shift, aupr=value - 5, fpr95=100 - value, n_id=9, n_ood=9)
        for data, values in {"kmnist": (95.0, 94.0), "mnist (itself)": (50.0, 50.0)}.items()
        for score, value in zip(("base_entropy", "mutual_information"), values, strict=True)
    ]
    return Evaluation(
        test_data="mnist",
        n=200,
        base_accuracy=98.0 + shift,
        accuracy=98.5,
        identical_predictions=same,
        ood=ood,
        misclassification=[ErrorResult(score="entropy", auroc=90 + shift, aupr=40)],
        realised=[
            GuaranteeResult(promise="false_alarm_rate", target=0.05, realised=0.04 + shift / 100, n=200),
            GuaranteeResult(
                promise="selective_risk", target=0.01, realised=0.002 if supported else None, n=150 if supported else 0
            ),
        ],
        probabilities=[
            ProbabilityResult(distribution="alpha", ece=1.0 + shift, nll=0.25),
            ProbabilityResult(distribution="base", ece=2.5, nll=0.5 + shift),
        ],
    )


def test_a_cell_has_mean_standard_deviation_and_the_papers_figure() -> None:
    assert str(SeedCell(91.26, 0.44, 3, Figure(95.8, 0.8))) == "91.3 ± 0.4 (95.8)"
    assert str(SeedCell(91.26, 0.0, 1, None)) == "91.3"


def test_the_ood_table_has_scores_as_rows_and_sets_as_columns() -> None:
    grid = ood_grid([evaluation(0), evaluation(2)], "auroc", None)
    assert grid.title == "OOD detection, AUROC in %, fair protocol, mean ± std of 2 seeds"
    assert grid.columns == ["kmnist", "mnist (itself)"]
    assert grid.rows == [
        ("base_entropy", ["96.0 ± 1.0", "51.0 ± 1.0"]),
        ("mutual_information", ["95.0 ± 1.0", "51.0 ± 1.0"]),
    ]


def test_the_papers_figures_are_beside_ours() -> None:
    grid = ood_grid([evaluation()], "auroc", "MNIST")
    assert grid.title.endswith("(the paper's figure)")
    assert dict(grid.rows)["base_entropy"] == ["95.0 (95.8)", "50.0"]
    assert dict(ood_grid([evaluation()], "fpr95", "MNIST").rows)["base_entropy"] == ["5.0", "50.0"]


def test_the_table_of_class_probabilities() -> None:
    grid = probability_grid([evaluation(0), evaluation(1)])
    assert grid.columns == ["ECE in %", "NLL in nats"]
    assert grid.rows == [
        ("α/α₀", ["1.50 ± 0.50", "0.2500 ± 0.0000"]),
        ("softmax of the base", ["2.50 ± 0.00", "1.0000 ± 0.5000"]),
    ]
    assert probability_grid([evaluation()]).rows[0] == ("α/α₀", ["1.00", "0.2500"])


def test_evaluations_without_class_probabilities_have_no_table_of_them() -> None:
    earlier = evaluation().model_copy(update={"probabilities": []})
    titles = [[grid.title for grid in all_grids([one], None)] for one in (evaluation(), earlier)]
    assert [title for title in titles[0] if title not in titles[1]] == ["Class probabilities on the test set"]


def test_the_tables_of_misclassification_and_of_guarantees() -> None:
    runs = [evaluation(0), evaluation(1, supported=False)]
    assert dict(error_grid(runs, None).rows)["entropy"] == ["90.5 ± 0.5", "40.0 ± 0.0"]
    guarantees = dict(guarantee_grid(runs).rows)
    assert guarantees["false alarm rate ≤ 5"] == ["4.50, worst 5.00", "100.0", "2 of 2"]
    assert guarantees["selective risk ≤ 1"] == ["0.20, worst 0.20", "37.5", "1 of 2"]


def test_a_target_that_no_seed_supports_is_reported_as_not_supported() -> None:
    guarantees = dict(guarantee_grid([evaluation(supported=False)]).rows)
    cells = ["not supported: no threshold meets the target with confidence", "0.0", "0 of 1"]
    assert guarantees["selective risk ≤ 1"] == cells


def test_there_is_no_misclassification_table_if_a_seed_has_no_errors() -> None:
    perfect = evaluation().model_copy(update={"misclassification": []})
    assert len(all_grids([evaluation()], None)) == 6
    assert len(all_grids([evaluation(), perfect], None)) == 5


@pytest.mark.parametrize(("same", "words"), [(True, "identical predictions"), (False, "predictions differ")])
def test_the_accuracies_of_base_and_bundle_are_one_sentence(same: bool, words: str) -> None:
    line = accuracy_line([evaluation(0), evaluation(1, same=same)])
    assert line == f"Test accuracy: base alone 98.50 %, bundle 98.50 % ({words})."


GRID = Grid("A title", ["left", "right"], [("first", ["1.0", "2.0"]), ("second", ["3.0", "4.0"])])


def test_markdown_has_one_line_per_row() -> None:
    lines = to_markdown(GRID).splitlines()
    assert lines[0] == "### A title"
    assert lines[2:] == ["| |left|right|", "|---|---:|---:|", "| first | 1.0 | 2.0 |", "| second | 3.0 | 4.0 |"]


def test_the_terminal_table_has_the_same_cells() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(to_rich(GRID))
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    for text in ("A title", "left", "right", "first", "second", "1.0", "2.0", "3.0", "4.0"):
        assert text in output


@pytest.mark.parametrize(
    ("paper_id", "score", "data", "metric", "figure"),
    [
        ("MNIST", "base_entropy", "omniglot", "AUROC", Figure(98.9, 0.5)),
        ("MNIST", "base_entropy", "cifar10", "AUROC", Figure(99.4, 0.2)),
        ("CIFAR100", "mutual_information", "svhn", "AUROC", Figure(94.3, 1.0)),
        ("CIFAR100", "precision", "tiny_imagenet", "AUPR", Figure(83.3, 4.6)),
    ],
)
def test_published_figures_can_be_looked_up_by_our_names(
    paper_id: str, score: str, data: str, metric: str, figure: Figure
) -> None:
    assert ood_figure(paper_id, score, data, metric) == figure


def test_figures_that_the_paper_does_not_report_are_none() -> None:
    assert ood_figure(None, "entropy", "svhn", "AUROC") is None
    assert ood_figure("MNIST", "entropy", "svhn", "AUROC") is None
    assert ood_figure("MNIST", "log_precision", "kmnist", "AUROC") is None
    assert ood_figure("MNIST", "entropy", "kmnist", "FPR95") is None
    assert ood_figure("MNIST", "entropy", "mnist (itself)", "AUROC") is None
    assert error_figure(None, "entropy", "AUROC") is None


@pytest.mark.parametrize("paper_id", ["MNIST", "CIFAR10", "CIFAR100"])
def test_every_score_of_the_paper_has_figures_for_every_set(paper_id: str) -> None:
    scores = ("entropy", "max_probability", "mutual_information", "differential_entropy", "precision")
    sets = ("omniglot", "kmnist") if paper_id == "MNIST" else ("svhn", "tiny_imagenet")
    for score in scores:
        for data in (*sets, "fashion_mnist", "corrupted"):
            figure = ood_figure(paper_id, score, data, "AUROC")
            assert figure is not None, (score, data)
            assert 40 < figure.mean <= 100
        error = error_figure(paper_id, score, "AUROC")
        assert (error is not None) == (score in ("entropy", "max_probability"))  # the only ones of that table
        assert error is None or 50 < error.mean <= 100


def test_notes_are_not_wrapped_and_bars_print_nothing_without_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=40)
    display = Display(console)
    display.note("[bold]wrote[/bold] " + "x" * 100)
    with display.bar("reading folder:/a[/b]", 3) as advance:
        advance(3)
    with display.training_bar("training", 2) as step:
        step(2, 0.5)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == f"wrote {'x' * 100}\n"


def test_brackets_in_the_title_of_a_bar_are_not_markup() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Display(console).bar("reading folder:/a[/b]", 3) as advance:
        advance(2)
    assert isinstance(console.file, io.StringIO)
    assert "folder:/a[/b]" in console.file.getvalue()


def test_plots_are_written_for_every_score_including_a_constant_one(tiny_bundle: Path, tmp_path: Path) -> None:
    manifest = open_bundle(tiny_bundle).manifest
    rng = np.random.default_rng(0)
    outputs = {name: rng.random(50).astype(np.float32) for name in manifest.scores}
    ood = {name: rng.random(50).astype(np.float32) for name in manifest.scores}
    outputs["entropy"] = ood["entropy"] = np.ones(50, np.float32)
    save_plots(tmp_path / "plots", manifest, outputs, {"far": ood})
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == set(manifest.scores)
    with Image.open(tmp_path / "plots" / "entropy.png") as image:
        image.load()
        assert image.width > 500


def test_the_accuracy_of_a_base_that_does_not_predict_is_not_reported() -> None:
    result = evaluation().model_copy(update={"base_accuracy": None, "identical_predictions": None})
    assert accuracy_line([result]) == "Test accuracy: meta-model 98.50 %; the base's classes are not the data's."


# By encoding, by class, and prediction sets


def encoding_row(text: str, *, calibrated: bool, rate: float, known: bool = True) -> EncodingResult:
    """Rates that grow with `rate`; without `known`, the target of 1 % is not supported."""
    realised, detected = [], []
    for target in (0.05, 0.01):
        supported = known or target == 0.05
        alarms, risk = (factor * rate * target if supported else None for factor in (1.0, 0.5))
        realised += [
            GuaranteeResult(promise="false_alarm_rate", target=target, realised=alarms, n=200),
            GuaranteeResult(promise="selective_risk", target=target, realised=risk, n=150),
        ]
        detected.append(DetectionResult(target=target, realised=(0.5 + target) if supported else None, sets=2))
    return EncodingResult(
        encoding=text, calibrated=calibrated, n=2000, accuracy=90 + rate, realised=realised, detected=detected
    )


def detailed(shift: float = 0.0, *, known: bool = True, classes: int = 3) -> Evaluation:
    """An evaluation by encoding and by class, with prediction sets."""
    rows = [
        encoding_row(text, calibrated=index < 3, rate=1 + index + shift, known=known)
        for index, text in enumerate(REPORTED_ENCODINGS)
    ]
    by_class = [
        ClassResult.model_validate(
            {"by": by, "label": f"class {i}", "target": 0.05, "n": 100 * i, "flagged": 2 * i, "flagged_by_class": i}
        )
        for by in ("predicted", "true")
        for i in range(classes)
    ]
    sets = [
        SetResult(coverage=0.9, realised=0.92 + shift / 100, mean_size=1.25, empty=0.03, worst_class=0.81, n=200),
        SetResult(coverage=0.99, realised=None, mean_size=None, empty=None, worst_class=None, n=200),
    ]
    return evaluation().model_copy(update={"encodings": rows, "classes": by_class, "sets": sets})


def rendered(grid: Grid, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(to_rich(grid))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_by_encoding_has_the_rates_at_all_targets_and_marks_what_is_not_calibrated() -> None:
    grid = encoding_grid([detailed()])
    assert grid.title == "By encoding, 2,000 test images, % (* not calibrated for)"
    assert grid.columns == ["accuracy", "false alarms ≤ 5 / 1", "risk ≤ 5 / 1", "detected at 5 / 1"]
    assert [name for name, _ in grid.rows] == [
        text if index < 3 else f"{text} *" for index, text in enumerate(REPORTED_ENCODINGS)
    ]
    assert grid.rows[0] == ("png", ["91.0", "5.00 / 1.00", "2.50 / 0.50", "55.0 / 51.0"])
    assert grid.rows[4] == ("jpeg:50 *", ["95.0", "25.0 / 5.00", "12.5 / 2.50", "55.0 / 51.0"])


def test_the_table_by_encoding_has_means_over_the_seeds_that_support_a_target() -> None:
    grid = encoding_grid([detailed(0), detailed(2, known=False)])
    assert grid.rows[0] == ("png", ["92.0", "10.0 / 1.00", "5.00 / 0.50", "55.0 / 51.0"])
    assert encoding_grid([detailed(known=False)]).rows[0][1][1:] == ["5.00 / –", "2.50 / –", "55.0 / –"]


def test_without_ood_sets_the_table_by_encoding_has_a_dash() -> None:
    rows = [row.model_copy(update={"detected": []}) for row in detailed().encodings]
    assert encoding_grid([detailed().model_copy(update={"encodings": rows})]).rows[0][1][3] == "– / –"


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_by_encoding_fits_the_terminal_without_cutting_anything(width: int) -> None:
    grid = encoding_grid([detailed(19)])  # rates of 100 % and more are the widest
    output = rendered(grid, width)
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= width
    for name, cells in grid.rows:
        line = next(line for line in output.splitlines() if f" {name} " in line)
        assert all(cell in line for cell in cells)


def test_the_table_by_class_has_shares_and_intervals_of_all_seeds_together() -> None:
    grid = class_grid([detailed(), detailed()], "true")
    assert grid.title == "False alarms by true class, %, target 5"
    assert grid.columns == ["images", "flagged", "95 % interval", "with by-class"]
    # A class without images has no row; the Clopper-Pearson interval of 4 of 200 is 0.55 to 5.04 %.
    assert grid.rows == [
        ("class 1", ["200", "2.00", "0.55 to 5.04", "1.00"]),
        ("class 2", ["400", "2.00", "0.87 to 3.90", "1.00"]),
    ]


def test_the_table_by_class_has_a_dash_where_thresholds_by_class_are_not_supported() -> None:
    rows = [row.model_copy(update={"flagged_by_class": None}) for row in detailed().classes]
    grid = class_grid([detailed(), detailed().model_copy(update={"classes": rows})], "predicted")
    assert [cells[-1] for _, cells in grid.rows] == ["–", "–"]


def test_of_many_classes_those_with_the_most_false_alarms_are_shown() -> None:
    many = detailed(classes=MAX_CLASSES + 11)
    rows = [
        row.model_copy(update={"n": 100, "flagged": int(row.label.split()[1]) % 7}) if row.n else row
        for row in many.classes
    ]
    grid = class_grid([many.model_copy(update={"classes": rows})], "true")
    assert grid.title.endswith(f"target 5, the {MAX_CLASSES} highest of {MAX_CLASSES + 10} classes")
    shares = [float(cells[1]) for _, cells in grid.rows]
    assert shares == sorted(shares, reverse=True)
    assert (len(shares), shares[0]) == (MAX_CLASSES, 6.0)


def test_the_table_of_prediction_sets_has_a_dash_for_a_coverage_that_is_not_supported() -> None:
    grid = set_grid([detailed(), detailed(1)])
    assert grid.columns == ["covered", "mean size", "empty", "worst class covered"]
    assert grid.rows == [
        ("coverage 90", ["92.50", "1.25", "3.00", "81.0"]),
        ("coverage 99", ["–", "–", "–", "–"]),
    ]


def test_all_tables_of_a_detailed_evaluation_are_printed_in_80_columns() -> None:
    grids = all_grids([detailed()], None)
    assert len(grids) == len(all_grids([evaluation()], None)) + 4
    for grid in grids[-4:]:
        output = rendered(grid, 80)
        assert "…" not in output
        for name, cells in grid.rows:
            assert name in output
            assert cells[0] in output
            assert f"| {name} | " + " | ".join(cells) + " |" in to_markdown(grid)


def test_tables_of_which_an_evaluation_has_no_results_are_left_out() -> None:
    titles = [grid.title for grid in all_grids([detailed(), evaluation()], None)]
    assert titles == [grid.title for grid in all_grids([evaluation(), evaluation()], None)]


def test_names_of_classes_may_hold_brackets() -> None:
    """Brackets are markup on the console."""
    rows = [row.model_copy(update={"label": f"{row.label} [b]"}) for row in detailed().classes]
    output = rendered(class_grid([detailed().model_copy(update={"classes": rows})], "true"), 80)
    assert "class 1 [b]" in output


@pytest.mark.parametrize("base", [True, False])
def test_test_images_that_were_calibrated_on_are_reported(base: bool) -> None:
    update = {} if base else {"base_accuracy": None, "identical_predictions": None}
    seen = [evaluation().model_copy(update={**update, "calibrated_on": count}) for count in (2, 1)]
    assert accuracy_line(seen).endswith(" 3 test images are also calibration images.")
    assert "calibration images" not in accuracy_line([evaluation()])
