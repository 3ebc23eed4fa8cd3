"""Tables have a cell for every method and set, with the paper's figure, also if there is no result."""

from dataclasses import replace

import numpy as np
import pytest

from qualms_training.data.noise import CORRUPTION, apply_noise, corrupt
from qualms_training.paper.detection import TABLE_METRICS, Detection, Measurements
from qualms_training.paper.document import Cell, Summary, Table, TableRow
from qualms_training.paper.kept_rows import KeptRows
from qualms_training.paper.registry import methods_for
from qualms_training.paper.runner import JobResult
from qualms_training.paper.tables import (
    ProtocolResults,
    ablation_table,
    all_tables,
    cost_table,
    error_table,
    noise_table,
    ood_table,
    reasons,
    transfer_table,
)


def detections(value: float, *scores: str) -> dict[str, Detection]:
    return {score: Detection(auroc=value, aupr=value - 1, fpr95=100 - value, detected=value - 3) for score in scores}


def result(value: float, *scores: str) -> JobResult:
    far = detections(value, *scores)
    return JobResult(
        fingerprint="m",
        measured=Measurements(
            error_rate=2.0,
            base_error_rate=1.0,
            ood={
                "svhn": far,
                "tiny_imagenet": detections(value - 4, *scores),
                "cifar10 (itself)": detections(50, *scores),
            },
            own_errors=far,
            base_errors=detections(value - 2, *scores),
        ),
        fit_seconds=2.0,
        score_seconds=1.0,
        images=1000,
        stored_numbers=7,
    )


@pytest.fixture
def results() -> ProtocolResults:
    return ProtocolResults(
        {
            "base": {seed: result(90 + seed, "entropy", "max_probability") for seed in range(2)},
            "lula": {0: result(95, "entropy", "max_probability")},
            "ten-percent": {0: result(80, "mutual_information")},
            "whitebox": {0: JobResult(fingerprint="m", reason="the base makes no errors")},
            "pixels": {0: result(99, "pixel_maximum")},
        },
        columns=["svhn", "lsun", "tiny_imagenet"],
        available=["svhn", "tiny_imagenet"],
        itself="cifar10 (itself)",
        paper_id="CIFAR10",
        not_run={"knn": "too long"},
    )


def row(table: Table, title: str) -> TableRow:
    (match,) = [row for row in table.rows if row.title == title]
    return match


def texts(table: Table, title: str) -> list[str]:
    return [str(cell) for cell in row(table, title).cells]


def test_ood_table_has_our_figures_the_papers_and_mean_and_worst(results: ProtocolResults) -> None:
    table = ood_table(results, "auroc")
    assert table.columns == ["svhn", "lsun", "tiny_imagenet", "mean", "worst", "cifar10 (itself)"]
    assert texts(table, "Base Model · Ent") == [
        "90.5 ± 0.5 (86.4)",
        "not available (89.0)",
        "86.5 ± 0.5 (87.5)",
        "88.5 ± 0.5",
        "86.5 ± 0.5",
        "50.0 ± 0.0",
    ]


def test_a_published_figure_without_a_score_is_printed_with_the_entrys_paper_score(results: ProtocolResults) -> None:
    table = ood_table(results, "auroc")
    assert texts(table, "LULA · MaxP")[0] == "95.0 ● (97.1)"
    assert texts(table, "LULA · Ent")[0] == "95.0 ●"


def test_every_method_of_the_registry_has_a_row_in_some_table(results: ProtocolResults) -> None:
    for tables in (all_tables(results), all_tables(ProtocolResults({}, ["svhn"], [], "x", None, {}))):
        titles = {row.method for table in tables for row in table.rows}
        assert titles == {entry.title for entry in methods_for(transfer=False).values()}


def test_a_method_without_results_is_not_run_and_has_the_papers_figure_and_a_reason(results: ProtocolResults) -> None:
    assert texts(ood_table(results, "auroc"), "PostNet · Prec")[0] == "not run (93.7)"
    sentences = reasons(results)
    assert "PostNet: not run: left out of this run by --only." in sentences
    assert "Whitebox: not run: the base makes no errors." in sentences
    assert "KNN: not run: too long." in sentences
    assert "Column lsun: not available: there are no data for it." in sentences
    assert not any(line.startswith(("Base Model", "LULA")) for line in sentences)


def test_the_worst_fpr95_is_the_largest(results: ProtocolResults) -> None:
    assert texts(ood_table(results, "fpr95"), "LULA · MaxP") == [
        "5.0 ●",
        "not available",
        "9.0 ●",
        "7.0 ●",
        "9.0 ●",
        "50.0",
    ]


def test_ablations_use_the_papers_other_name_of_tiny_imagenet(results: ProtocolResults) -> None:
    assert texts(ablation_table(results), "10 % data · MI")[:3] == [
        "80.0 (99.9)",
        "not available (95.4)",
        "76.0 (97.2)",
    ]


def test_error_tables_are_about_the_methods_own_errors_or_the_bases(results: ProtocolResults) -> None:
    own, bases = error_table(results, own=True), error_table(results, own=False)
    assert texts(own, "LULA · MaxP") == ["2.00", "95.0 ● (94.5)", "94.0 (47.3)", "5.0 ●", "92.0 ●"]
    assert texts(bases, "LULA · MaxP") == ["1.00", "93.0 ●", "92.0 ●", "7.0 ●", "90.0 ●"]


def test_aupr_of_own_errors_is_not_rated(results: ProtocolResults) -> None:
    own, bases = error_table(results, own=True), error_table(results, own=False)
    position = own.columns.index("AUPR")
    assert not any(row.cells[position].best for row in own.rows)
    assert own.note == "AUPR has no ● because it rises with the error rate, which differs between methods."
    assert any(row.cells[position].best for row in bases.rows)
    assert bases.note == ""


def test_the_corrupted_set_is_made_with_the_noises_of_corruption() -> None:
    images = np.random.default_rng(0).integers(256, size=(4, 8, 8, 3), dtype=np.uint8)
    made = apply_noise(images, CORRUPTION, np.random.default_rng(1))
    assert np.array_equal(made, corrupt(images, np.random.default_rng(1)))


def with_corrupted(value: float, *scores: str) -> JobResult:
    made = result(value, *scores)
    assert made.measured
    ood = {**made.measured.ood, "corrupted": detections(value + 3, *scores)}
    noise = {kind: detections(value, *scores) for kind in ("blur", "blend", "errors")}
    return made.model_copy(update={"measured": made.measured.model_copy(update={"ood": ood, "noise": noise})})


@pytest.fixture
def noisy() -> ProtocolResults:
    """Results in which LULA and the fused score of density-evidence have seen blurred images."""
    return ProtocolResults(
        {
            "base": {0: with_corrupted(90, "entropy")},
            "lula": {0: with_corrupted(95, "entropy")},
            "density-evidence": {0: with_corrupted(93, "fused", "entropy")},
            "knn": {0: with_corrupted(92, "distance")},
        },
        columns=["svhn", "lsun", "corrupted", "tiny_imagenet"],
        available=["svhn", "corrupted", "tiny_imagenet"],
        itself="cifar10 (itself)",
        paper_id=None,
        not_run={},
        seen_noise={
            ("lula", "entropy"): [["mosaic"], ["shuffle", "blur"]],
            ("density-evidence", "fused"): [["blur"], ["blend"]],
        },
    )


def test_rows_that_have_seen_a_noise_of_corrupted_are_marked_and_not_rated(noisy: ProtocolResults) -> None:
    table = ood_table(noisy, "auroc")
    position = table.columns.index("corrupted")
    run = [row for row in table.rows if row.cells[position].values]
    assert {row.title: str(row.cells[position]) for row in run} == {
        "Base Model · Ent": "93.0",
        "LULA · Ent": "98.0 †",
        "Evidence by density · fused": "96.0 †",
        "Evidence by density · Ent": "96.0 ●",
        "KNN · distance": "95.0",
    }
    others = [cell for row in table.rows for index, cell in enumerate(row.cells) if index != position]
    assert not any(cell.seen_noise for cell in others)


def test_a_row_without_results_has_no_mark_of_seen_noise(noisy: ProtocolResults) -> None:
    table = ood_table(replace(noisy, seen_noise={("postnet", "precision"): [["blur"]]}), "auroc")
    assert not any(cell.seen_noise for row in table.rows for cell in row.cells)


def test_there_is_a_mean_without_the_corrupted_set(noisy: ProtocolResults) -> None:
    table = ood_table(noisy, "auroc")
    assert table.columns[4:] == ["mean", "worst", "mean of images", "cifar10 (itself)"]
    assert texts(table, "LULA · Ent")[4:] == ["94.7 ●", "91.0 ●", "93.0 ●", "50.0"]
    assert texts(ood_table(noisy, "fpr95"), "LULA · Ent")[6] == "7.0 ●"


def test_noise_columns_are_marked_if_the_noise_was_seen_alone_or_in_a_chain(noisy: ProtocolResults) -> None:
    table = noise_table(noisy)
    assert table.columns == ["blur", "blend", "errors", "mean", "worst", "merit"]
    assert texts(table, "LULA · Ent")[:4] == ["95.0 †", "95.0 ●", "95.0 ●", "95.0 ●"]
    assert texts(table, "Evidence by density · fused")[:3] == ["93.0 †", "93.0 †", "93.0"]


@pytest.fixture
def kept(results: ProtocolResults) -> ProtocolResults:
    """Results beside earlier tables that have figures of PostNet, of the base and of a method that exists no more."""

    def row(score: str, **figures: float) -> dict[str, dict[str, Cell]]:
        return {score: {name: Cell(kept=Summary(mean, 0.5, 5)) for name, mean in figures.items()}}

    ood = {"Base Model": row("Ent", svhn=1.0), "PostNet": row("MI", svhn=77.7, lsun=66.6), "Gone": row("Ent", svhn=1.0)}
    noise = {"KNN": row("distance", blur=70.0, errors=60.0, mean=65.0, worst=60.0, merit=62.5)}
    return replace(results, kept=KeptRows({("ood", "AUROC"): ood, ("noise", "AUROC"): noise}))


def test_only_methods_without_results_have_the_rows_of_earlier_tables(kept: ProtocolResults) -> None:
    table = all_tables(kept)[0]
    assert texts(table, "Base Model · Ent")[0] == "90.5 ± 0.5 (86.4)"
    assert texts(table, "PostNet · MI") == ["77.7 ± 0.5", "66.6 ± 0.5", "–", "–", "–", "–"]
    assert "Gone" not in {row.method for row in table.rows}
    assert not any(line.startswith("PostNet") for line in reasons(kept))


def test_the_noise_table_of_earlier_tables_is_kept_without_new_results(kept: ProtocolResults) -> None:
    table = all_tables(kept)[-1]
    assert (table.name, table.columns) == ("noise", ["blur", "errors", "mean", "worst", "merit"])
    assert texts(table, "KNN · distance")[-1] == "62.5 ± 0.5"


def test_a_metric_that_a_saved_result_lacks_is_an_empty_cell(results: ProtocolResults) -> None:
    made = result(90, "entropy")
    assert made.measured
    old = {"svhn": {"entropy": Detection(auroc=90.0, aupr=89.0, fpr95=10.0)}}
    measured = made.measured.model_copy(update={"ood": old})
    saved = replace(results, by_method={"base": {0: made.model_copy(update={"measured": measured})}})
    assert texts(ood_table(saved, "detected"), "Base Model · Ent") == ["–", "not available", "–", "–", "–", "–"]


def test_cost_table_has_times_and_stored_numbers(results: ProtocolResults) -> None:
    assert texts(cost_table(results), "LULA") == ["2.0", "1,000.0", "7"]


@pytest.fixture
def transfer() -> ProtocolResults:
    return ProtocolResults(
        {
            "ours-pooled": {seed: result(90 + seed, "mutual_information", "precision") for seed in range(2)},
            "pixels": {0: result(99, "pixel_maximum")},
        },
        columns=["fashion_mnist", "svhn"],
        available=["svhn"],
        itself="cifar10 (itself)",
        paper_id="CIFAR10",
        not_run={},
        transfer=True,
        other_ids=["STL10"],
    )


def test_transfer_table_has_accuracy_every_set_and_the_papers_sets_without_data(transfer: ProtocolResults) -> None:
    (table,) = all_tables(transfer)
    assert table.columns == [
        "accuracy",
        *(f"{name} {metric}" for name in ("fashion_mnist", "svhn") for metric in TABLE_METRICS.values()),
        "cifar10 (itself)",
        *("STL10 accuracy", "STL10, fashion_mnist AUROC", "STL10, fashion_mnist AUPR"),
    ]
    assert texts(table, "Ours, pooled form · MI") == [
        "98.0 ± 0.0 ● (86.6)",
        *("not available (90.8)", "not available (89.9)", "not available", "not available"),
        *("90.5 ± 0.5 ●", "89.5 ± 0.5 ●", "9.5 ± 0.5 ●", "87.5 ± 0.5 ●"),
        "50.0 ± 0.0",
        *("not available (47.2)", "not available (90.2)", "not available (88.7)"),
    ]
    assert texts(table, "Ours, pooled form · Prec")[:2] == ["98.0 ± 0.0 ●", "not available"]


def test_the_control_has_no_accuracy(transfer: ProtocolResults) -> None:
    assert texts(transfer_table(transfer), "Pixels alone · pixel maximum")[0] == "–"


def test_reasons_of_transfer_name_only_methods_of_transfer_and_missing_columns(transfer: ProtocolResults) -> None:
    assert reasons(transfer) == [
        "FineTune: not run: left out of this run by --only.",
        "CrossEnt: not run: left out of this run by --only.",
        "Column fashion_mnist: not available: there are no data for it.",
        "Columns of STL10: not available: there are no data for it.",
    ]
    assert [row.method for row in cost_table(transfer).rows] == ["FineTune", "CrossEnt", "Ours, pooled form"]
