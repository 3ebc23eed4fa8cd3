"""Tables leave nothing out: what has no result says so, and the paper's figures stand where they belong."""

from dataclasses import replace

import numpy as np
import pytest

from qualms_training.data.noise import apply_noise, corrupt
from qualms_training.paper.cells import Row, Table
from qualms_training.paper.measure import Detection, Measured
from qualms_training.paper.registry import methods_for
from qualms_training.paper.runner import Result
from qualms_training.paper.tables import (
    CORRUPTION,
    Source,
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
    return {score: Detection(auroc=value, aupr=value - 1, fpr95=100 - value) for score in scores}


def result(value: float, *scores: str) -> Result:
    found = detections(value, *scores)
    return Result(
        mark="m",
        measured=Measured(
            error_rate=2.0,
            base_error_rate=1.0,
            ood={
                "svhn": found,
                "tiny_imagenet": detections(value - 4, *scores),
                "cifar10 (itself)": detections(50, *scores),
            },
            own_errors=found,
            base_errors=detections(value - 2, *scores),
        ),
        fit_seconds=2.0,
        score_seconds=1.0,
        images=1000,
        kept=7,
    )


@pytest.fixture
def source() -> Source:
    return Source(
        {
            "base": {seed: result(90 + seed, "entropy", "max_probability") for seed in range(2)},
            "lula": {0: result(95, "entropy", "max_probability")},
            "ten-percent": {0: result(80, "mutual_information")},
            "whitebox": {0: Result(mark="m", reason="the base makes no errors")},
            "pixels": {0: result(99, "pixel_maximum")},
        },
        columns=["svhn", "lsun", "tiny_imagenet"],
        available=["svhn", "tiny_imagenet"],
        itself="cifar10 (itself)",
        paper_id="CIFAR10",
        not_run={"knn": "too long"},
    )


def row(table: Table, title: str) -> Row:
    (found,) = [row for row in table.rows if row.title == title]
    return found


def texts(table: Table, title: str) -> list[str]:
    return [str(cell) for cell in row(table, title).cells]


def test_ours_stand_beside_the_papers_with_mean_and_worst(source: Source) -> None:
    table = ood_table(source, "auroc")
    assert table.columns == ["svhn", "lsun", "tiny_imagenet", "mean", "worst", "cifar10 (itself)"]
    assert texts(table, "Base Model · Ent") == [
        "90.5 ± 0.5 (86.4)",
        "not available (89.0)",
        "86.5 ± 0.5 (87.5)",
        "88.5 ± 0.5",
        "86.5 ± 0.5",
        "50.0 ± 0.0",
    ]


def test_a_figure_without_a_score_stands_beside_the_score_it_means(source: Source) -> None:
    table = ood_table(source, "auroc")
    assert texts(table, "LULA · MaxP")[0] == "95.0 ● (97.1)"
    assert texts(table, "LULA · Ent")[0] == "95.0 ●"


def test_every_method_of_the_registry_has_a_row_in_some_table(source: Source) -> None:
    for tables in (all_tables(source), all_tables(Source({}, ["svhn"], [], "x", None, {}))):
        titles = {row.method for table in tables for row in table.rows}
        assert titles == {entry.title for entry in methods_for(transfer=False).values()}


def test_a_method_that_was_not_run_says_so_beside_the_papers_figure(source: Source) -> None:
    assert texts(ood_table(source, "auroc"), "PostNet · Prec")[0] == "not run (93.7)"
    said = reasons(source)
    assert "PostNet: not run: left out of this run by --only." in said
    assert "Whitebox: not run: the base makes no errors." in said
    assert "KNN: not run: too long." in said
    assert "Column lsun: not available: there are no data for it." in said
    assert not any(line.startswith(("Base Model", "LULA")) for line in said)


def test_the_worst_false_alarm_rate_is_the_largest(source: Source) -> None:
    assert texts(ood_table(source, "fpr95"), "LULA · MaxP") == [
        "5.0 ●",
        "not available",
        "9.0 ●",
        "7.0 ●",
        "9.0 ●",
        "50.0",
    ]


def test_ablations_have_the_papers_figures_by_its_other_name_of_a_set(source: Source) -> None:
    assert texts(ablation_table(source), "10 % data · MI")[:3] == ["80.0 (99.9)", "not available (95.4)", "76.0 (97.2)"]


def test_errors_are_the_methods_own_or_the_bases(source: Source) -> None:
    own, bases = error_table(source, own=True), error_table(source, own=False)
    assert texts(own, "LULA · MaxP") == ["2.00", "95.0 ● (94.5)", "94.0 (47.3)", "5.0 ●"]
    assert texts(bases, "LULA · MaxP") == ["1.00", "93.0 ●", "92.0 ●", "7.0 ●"]


def test_nobody_is_best_by_a_figure_that_rises_with_its_own_error_rate(source: Source) -> None:
    own, bases = error_table(source, own=True), error_table(source, own=False)
    at = own.columns.index("AUPR")
    assert not any(row.cells[at].best for row in own.rows)
    assert own.note == "AUPR has no ●: it rises with the error rate, which is not the same for all methods."
    assert any(row.cells[at].best for row in bases.rows)
    assert bases.note == ""


def test_corrupted_is_made_by_the_noises_that_rows_are_asked_about() -> None:
    images = np.random.default_rng(0).integers(256, size=(4, 8, 8, 3), dtype=np.uint8)
    made = apply_noise(images, CORRUPTION, np.random.default_rng(1))
    assert np.array_equal(made, corrupt(images, np.random.default_rng(1)))


def with_corrupted(value: float, *scores: str) -> Result:
    found = result(value, *scores)
    assert found.measured
    ood = {**found.measured.ood, "corrupted": detections(value + 3, *scores)}
    noise = {kind: detections(value, *scores) for kind in ("blur", "blend", "errors")}
    return found.model_copy(update={"measured": found.measured.model_copy(update={"ood": ood, "noise": noise})})


@pytest.fixture
def noisy() -> Source:
    """LULA was shown blurred images, of density-evidence the fused score."""
    return Source(
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
        seen={
            ("lula", "entropy"): [["mosaic"], ["shuffle", "blur"]],
            ("density-evidence", "fused"): [["blur"], ["blend"]],
        },
    )


def test_a_row_that_has_seen_a_noise_of_corrupted_is_marked_there_and_not_rated(noisy: Source) -> None:
    table = ood_table(noisy, "auroc")
    at = table.columns.index("corrupted")
    run = [row for row in table.rows if row.cells[at].values]
    assert {row.title: str(row.cells[at]) for row in run} == {
        "Base Model · Ent": "93.0",
        "LULA · Ent": "98.0 †",
        "Evidence by density · fused": "96.0 †",
        "Evidence by density · Ent": "96.0 ●",
        "KNN · distance": "95.0",
    }
    assert not any(cell.seen for row in table.rows for cell in (*row.cells[:at], *row.cells[at + 1 :]))


def test_a_row_without_figures_has_no_mark_of_noise(noisy: Source) -> None:
    table = ood_table(replace(noisy, seen={("postnet", "precision"): [["blur"]]}), "auroc")
    assert not any(cell.seen for row in table.rows for cell in row.cells)


def test_a_mean_without_noise_stands_beside_the_mean_of_all(noisy: Source) -> None:
    table = ood_table(noisy, "auroc")
    assert table.columns[4:] == ["mean", "worst", "mean of images", "cifar10 (itself)"]
    assert texts(table, "LULA · Ent")[4:] == ["94.7 ●", "91.0 ●", "93.0 ●", "50.0"]
    assert texts(ood_table(noisy, "fpr95"), "LULA · Ent")[6] == "7.0 ●"


def test_a_kind_of_noise_is_marked_where_it_was_seen_alone_or_in_a_chain(noisy: Source) -> None:
    table = noise_table(noisy)
    assert table.columns == ["blur", "blend", "errors", "mean", "worst", "merit"]
    assert texts(table, "LULA · Ent")[:4] == ["95.0 †", "95.0 ●", "95.0 ●", "95.0 ●"]
    assert texts(table, "Evidence by density · fused")[:3] == ["93.0 †", "93.0 †", "93.0"]


def test_cost_is_time_and_numbers_kept(source: Source) -> None:
    assert texts(cost_table(source), "LULA") == ["2.0", "1,000.0", "7"]


@pytest.fixture
def transfer() -> Source:
    return Source(
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


def test_transfer_has_accuracy_and_every_set_and_the_papers_sets_that_we_lack(transfer: Source) -> None:
    (table,) = all_tables(transfer)
    assert table.columns == [
        "accuracy",
        *("fashion_mnist AUROC", "fashion_mnist AUPR", "fashion_mnist FPR95"),
        *("svhn AUROC", "svhn AUPR", "svhn FPR95"),
        "cifar10 (itself)",
        *("STL10 accuracy", "STL10, fashion_mnist AUROC", "STL10, fashion_mnist AUPR"),
    ]
    assert texts(table, "Ours, pooled form · MI") == [
        "98.0 ± 0.0 ● (86.6)",
        *("not available (90.8)", "not available (89.9)", "not available"),
        *("90.5 ± 0.5 ●", "89.5 ± 0.5 ●", "9.5 ± 0.5 ●"),
        "50.0 ± 0.0",
        *("not available (47.2)", "not available (90.2)", "not available (88.7)"),
    ]
    assert texts(table, "Ours, pooled form · Prec")[:2] == ["98.0 ± 0.0 ●", "not available"]


def test_a_control_has_no_accuracy(transfer: Source) -> None:
    assert texts(transfer_table(transfer), "Pixels alone · pixel maximum")[0] == "–"


def test_what_transfer_lacks_is_said_and_what_it_cannot_have_is_not(transfer: Source) -> None:
    assert reasons(transfer) == [
        "FineTune: not run: left out of this run by --only.",
        "CrossEnt: not run: left out of this run by --only.",
        "Column fashion_mnist: not available: there are no data for it.",
        "Columns of STL10: not available: there are no data for it.",
    ]
    assert [row.method for row in cost_table(transfer).rows] == ["FineTune", "CrossEnt", "Ours, pooled form"]
