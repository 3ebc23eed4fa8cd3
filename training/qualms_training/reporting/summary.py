"""The few rows that decide whether to serve a model: accuracy, false alarms, trust and detection, beside the user's own softmax."""

from collections.abc import Sequence

import numpy as np

from qualms.bundle.evaluation_results import Evaluation, OodResult, ServedOodResult, ServedResult
from qualms.bundle.manifest import Manifest
from qualms.bundle.scores import DEFAULT_FLAG_SCORE
from qualms.decisions.binomial import upper_bound
from qualms_training.console import Display
from qualms_training.data.prepare import itself
from qualms_training.errors import DataError
from qualms_training.reporting.graph_runs import BASE_ENTROPY, BASE_MAX_PROBABILITY
from qualms_training.reporting.report import Grid, accuracy_line, all_grids, same_predictions, seen_note, to_rich

_UNKNOWN = "–"
MIN_EXPECTED = 3
"""false alarms expected at the target rate; with fewer, the test images cannot show whether it is met"""
_VERDICTS = ("meets the target", "not significantly above the target (95 % bound)", "exceeds the target (95 % bound)")


def summary(source: Manifest | Evaluation) -> list[Grid]:
    """The deciding rows of one model, from its manifest or its evaluation; DataError if it was not evaluated."""
    if isinstance(source, Evaluation):
        return summary_grids([source])
    if source.evaluation is None:
        raise DataError(f"{source.name} has no evaluation: run `qualms evaluate MODEL --write`.")
    return summary_grids([source.evaluation], source.operating.score)


def summary_grids(evaluations: Sequence[Evaluation], score: str = DEFAULT_FLAG_SCORE) -> list[Grid]:
    """One table of the test set and one of the OOD sets, means over the evaluations.

    `score` is the flag score of evaluations by an earlier version, which do not name it.
    """
    grids = [_test_grid(evaluations)]
    sets = [one for one in dict.fromkeys(row.data for row in evaluations[0].ood) if one != itself(_name(evaluations))]
    return [*grids, _ood_grid(evaluations, sets, score)] if sets else grids


def print_report(
    evaluations: Sequence[Evaluation], paper_id: str | None, display: Display, *, show_all: bool = False
) -> None:
    """Print the summary or, with `show_all`, every table too."""
    for grid in [*summary_grids(evaluations), *(all_grids(evaluations, paper_id) if show_all else [])]:
        display.console.print(to_rich(grid))
    if show_all:
        display.note(accuracy_line(evaluations))
    elif note := seen_note(evaluations):
        display.note(note)


def _test_grid(evaluations: Sequence[Evaluation]) -> Grid:
    rows = [
        ("accuracy, %", [_base_accuracy(evaluations), _accuracy(evaluations)]),
        ("calibration error (ECE), %", [_ece(evaluations, "base"), _ece(evaluations, "alpha")]),
        *_false_alarms(evaluations),
        *_trust(evaluations),
    ]
    seeds = f", mean ± std of {len(evaluations)} seeds" if len(evaluations) > 1 else ""
    title = f"Test set {_name(evaluations)}, {evaluations[0].n:,} images{seeds}"
    return Grid(title, ["base alone", "served"], rows)


def _base_accuracy(evaluations: Sequence[Evaluation]) -> str:
    values = [e.base_accuracy for e in evaluations if e.base_accuracy is not None]
    return _mean(values, 2) if values else "other classes"


def _accuracy(evaluations: Sequence[Evaluation]) -> str:
    mean = _mean([e.accuracy for e in evaluations], 2)
    return mean if evaluations[0].identical_predictions is None else f"{mean}, {same_predictions(evaluations)}"


def _ece(evaluations: Sequence[Evaluation], distribution: str) -> str:
    values = [row.ece for e in evaluations for row in e.probabilities if row.distribution == distribution]
    return _mean(values, 2) if values else _UNKNOWN


def _false_alarms(evaluations: Sequence[Evaluation]) -> list[tuple[str, list[str]]]:
    """Flagged test images at the served target, with the verdict of the worst evaluation."""
    counts = [one for e in evaluations if (one := _flagged(e)) is not None]
    if not counts:
        return [("false alarms", [_UNKNOWN, "the calibration set does not support the target"])]
    rates = [100 * flagged / n for flagged, n, _ in counts]
    index = max(verdict_index(*one) for one in counts)
    few = index == 0 and any(n * target < MIN_EXPECTED for _, n, target in counts)
    verdict = "meets the target, but so few images cannot confirm it" if few else _VERDICTS[index]
    worst = "" if len(counts) == 1 else f", worst {max(rates):.2f}"
    return [
        (
            f"false alarms, %, target {100 * counts[0][2]:g}",
            [_UNKNOWN, f"{_mean(rates, 2)} of {counts[0][1]:,}{worst}: {verdict}"],
        )
    ]


def _flagged(evaluation: Evaluation) -> tuple[int, int, float] | None:
    """Flagged test images, test images and target; of an evaluation by an earlier version, from its table by class."""
    if (served := evaluation.served) is not None:
        return served.flagged, served.n, served.target_fpr
    rows = [row for row in evaluation.classes if row.by == "predicted"]
    return (sum(row.flagged for row in rows), sum(row.n for row in rows), rows[0].target) if rows else None


def verdict_index(count: int, n: int, target: float) -> int:
    """0 if `count` of `n` is at most the target, 1 if its lower 95 % confidence bound is, else 2."""
    if count <= target * n:
        return 0
    return 1 if 1 - upper_bound(n - count, n) <= target else 2


def _trust(evaluations: Sequence[Evaluation]) -> list[tuple[str, list[str]]]:
    served = [e.served for e in evaluations if e.served is not None]
    if not served:
        return []
    known = [(one.trust, one.n) for one in served if one.trust is not None]
    if not known:
        return [
            ("accepted, %", [_UNKNOWN, "none: the calibration set supports no such risk (`qualms inspect` says why)"])
        ]
    target = f"{100 * known[0][0].target_risk:g}"
    accepted = _mean([100 * trust.accepted / n for trust, n in known], 1)
    wrong = _mean([_share(trust.wrong, trust.accepted) for trust, _ in known], 2)
    softmax = [(trust, n) for trust, n in known if trust.softmax_accepted is not None]
    by_softmax = _mean([100 * (trust.softmax_accepted or 0) / n for trust, n in softmax], 1) if softmax else _UNKNOWN
    wrong_by_softmax = (
        _mean([_share(trust.softmax_wrong or 0, trust.softmax_accepted or 0) for trust, _ in softmax], 2)
        if softmax
        else _UNKNOWN
    )
    worst = max(verdict_index(trust.wrong, trust.accepted, trust.target_risk) for trust, _ in known)
    return [
        (
            f"accepted, %, at a target risk of {target} (base: softmax with the same error rate here)",
            [by_softmax, accepted],
        ),
        (f"wrong among accepted, %, target {target}", [wrong_by_softmax, f"{wrong}: {_VERDICTS[worst]}"]),
    ]


def _ood_grid(evaluations: Sequence[Evaluation], sets: Sequence[str], score: str) -> Grid:
    """By OOD set: flagged at the served threshold, AUROC, and how many predictions would be accepted."""
    with_base = any(row.score in (BASE_ENTROPY, BASE_MAX_PROBABILITY) for row in evaluations[0].ood)
    with_served = any(e.served is not None and e.served.ood for e in evaluations)
    rows = []
    for data in sets:
        results = [[row for row in e.ood if row.data == data] for e in evaluations]
        served = [row for e in evaluations if e.served for row in e.served.ood if row.data == data]
        cells = [_mean([100 * row.flagged / row.n for row in served], 1)] if with_served else []
        scores = [e.served.score if e.served else score for e in evaluations]
        cells.append(_best_auroc(results, [{name} for name in scores]))
        if with_base:
            cells.append(_best_auroc(results, [{BASE_ENTROPY, BASE_MAX_PROBABILITY}] * len(results)))
        if with_served:
            cells.append(_accepted(served, "accepted"))
            cells += [_accepted(served, "softmax_accepted")] if with_base else []
        rows.append((data, cells))
    columns = ["flagged"] if with_served else []
    columns += ["AUROC", *(["AUROC softmax"] if with_base else [])]
    if with_served:
        columns += ["accepted", *(["accepted softmax"] if with_base else [])]
    return Grid(_ood_title(evaluations), columns, rows)


def _ood_title(evaluations: Sequence[Evaluation]) -> str:
    served = next((e.served for e in evaluations if isinstance(e.served, ServedResult)), None)
    at = (
        f" flagged and accepted at the served thresholds ({100 * served.target_fpr:g} % false alarms)" if served else ""
    )
    return f"OOD sets, %:{at or ' AUROC of the flag'}"


def _best_auroc(results: Sequence[Sequence[OodResult]], names: Sequence[set[str]]) -> str:
    """The mean over evaluations of the largest AUROC of the named scores."""
    values = [
        max(found)
        for rows, wanted in zip(results, names, strict=True)
        if (found := [row.auroc for row in rows if row.score in wanted])
    ]
    return _mean(values, 1) if values else _UNKNOWN


def _accepted(served: Sequence[ServedOodResult], field: str) -> str:
    values = [100 * getattr(row, field) / row.n for row in served if getattr(row, field) is not None]
    return _mean(values, 1) if values else _UNKNOWN


def _share(count: int, n: int) -> float:
    return 100 * count / n if n else 0.0


def _mean(values: Sequence[float], digits: int) -> str:
    """Mean and, of several values, standard deviation; a dash if there are none."""
    if not values:
        return _UNKNOWN
    spread = f" ± {np.std(values):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def _name(evaluations: Sequence[Evaluation]) -> str:
    return evaluations[0].test_data
