"""Who is best is decided by paired differences over seeds, not by the last decimal."""

import numpy as np
import pytest
from scipy.stats import ttest_rel

from qualms_training.paper.cells import Cell, Row, Table, clearly_better, mark_best
from qualms_training.paper.figures import Figure


def seeds(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


@pytest.mark.parametrize("seed", range(8))
def test_clearly_better_is_a_paired_t_test(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.normal(1.0, 1, 5), rng.normal(0, 1, 5)
    expected = first.mean() > second.mean() and ttest_rel(first, second, alternative="greater").pvalue < 0.05
    assert clearly_better(seeds(*first), seeds(*second)) == expected


def test_a_difference_that_rounding_hides_is_none() -> None:
    assert not clearly_better(seeds(99.04, 99.04, 99.04), seeds(99, 99, 99))
    assert clearly_better(seeds(99.1, 99.1, 99.1), seeds(99, 99, 99))


def test_one_seed_is_compared_by_rounding() -> None:
    assert clearly_better({0: 99.2}, {0: 99.0})
    assert not clearly_better({0: 99.02}, {0: 99.0})
    assert clearly_better({0: 1.0}, {0: 3.0}, sign=-1.0)


def table(metric: str) -> Table:
    rows = [
        Row("a", "", [Cell(seeds(99, 98, 99))]),
        Row("b", "", [Cell(seeds(98.9, 98.3, 98.8))]),
        Row("c", "", [Cell(seeds(90, 91, 90))]),
        Row("control", "", [Cell(seeds(100, 100, 100))], rated=False),
        Row("d", "", [Cell(missing="not run")]),
    ]
    return Table("t", "T", metric, ["x"], rows)


def best(found: Table) -> list[str]:
    return [row.method for row in found.rows if row.cells[0].best]


def test_the_best_and_all_within_noise_are_marked_but_no_control() -> None:
    assert best(mark_best(table("AUROC"), unrated=())) == ["a", "b"]


def test_a_row_of_few_seeds_that_leads_does_not_let_the_clearly_beaten_pass() -> None:
    rows = [
        Row("lucky", "", [Cell({0: 99.8, 1: 100.0})]),
        Row("good", "", [Cell(seeds(99.8, 99.9, 99.8, 99.9, 99.8))]),
        Row("beaten", "", [Cell(seeds(99.3, 99.1, 99.2, 99.3, 99.2))]),
    ]
    assert not clearly_better(rows[0].cells[0].values, rows[2].cells[0].values)
    assert best(mark_best(Table("t", "T", "AUROC", ["x"], rows), unrated=())) == ["lucky", "good"]


def test_less_is_better_for_false_alarms() -> None:
    assert best(mark_best(table("FPR95"), unrated=())) == ["c"]


def test_an_unrated_column_has_no_best() -> None:
    assert best(mark_best(table("AUROC"), unrated=("x",))) == []


def test_who_has_seen_a_columns_noise_is_neither_best_nor_in_the_way() -> None:
    rows = [
        Row("shown", "", [Cell(seeds(100, 100, 100), seen=True)]),
        Row("a", "", [Cell(seeds(99, 98, 99))]),
        Row("c", "", [Cell(seeds(90, 91, 90))]),
    ]
    assert best(mark_best(Table("t", "T", "AUROC", ["x"], rows), unrated=())) == ["a"]


def test_one_method_that_is_left_by_those_who_have_seen_the_noise_is_not_best() -> None:
    shown = Row("shown", "", [Cell(seeds(100, 100, 100), seen=True)])
    left = [Row("a", score, [Cell(seeds(99, 98, 99))]) for score in ("Ent", "MaxP")]
    assert best(mark_best(Table("t", "T", "AUROC", ["x"], [shown, *left]), unrated=())) == []
    assert best(mark_best(Table("t", "T", "AUROC", ["x"], left), unrated=())) == ["a", "a"]


def test_a_cell_reads_as_mean_spread_mark_and_the_papers() -> None:
    assert str(Cell(seeds(99.0, 98.0), Figure(97.25, 0.1), best=True)) == "98.5 ± 0.5 ● (97.2)"
    assert str(Cell(seeds(99.0, 98.0), Figure(97.25, 0.1), seen=True)) == "98.5 ± 0.5 † (97.2)"
    assert str(Cell({0: 12345.6}, decimals=0)) == "12,346"
    assert str(Cell(missing="not run", paper=Figure(99.0, None))) == "not run (99.0)"
