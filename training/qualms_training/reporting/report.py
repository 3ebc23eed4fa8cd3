"""Tables of evaluations over seeds, with the paper's figures beside ours, for the terminal and as Markdown."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.markup import escape
from rich.table import Table

from qualms.bundle.evaluation_results import Evaluation
from qualms.decisions.binomial import upper_bound
from qualms_training.paper.published import Figure, error_figure, ood_figure

METRICS = {"auroc": "AUROC", "aupr": "AUPR", "fpr95": "FPR95"}
MAX_CLASSES = 20
"""largest number of classes in a table"""
LONGEST_NAME = 28
"""longest name of a row that is not wrapped"""
UNSUPPORTED = "not supported: no threshold meets the target with confidence"


class SeedCell(NamedTuple):
    """Mean and standard deviation of our figure over seeds, and the paper's figure."""

    mean: float
    std: float
    seeds: int
    paper: Figure | None

    def __str__(self) -> str:
        ours = f"{self.mean:.1f}" + (f" ± {self.std:.1f}" if self.seeds > 1 else "")
        return f"{ours} ({self.paper.mean:.1f})" if self.paper else ours


class Grid(NamedTuple):
    """A titled table of cells."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]


def ood_grid(evaluations: Sequence[Evaluation], metric: str, paper_id: str | None) -> Grid:
    """Scores × OOD sets for one metric."""
    sets = list(dict.fromkeys(row.data for row in evaluations[0].ood))
    scores = list(dict.fromkeys(row.score for row in evaluations[0].ood))
    values = {
        (score, data): [
            getattr(row, metric) for e in evaluations for row in e.ood if (row.score, row.data) == (score, data)
        ]
        for score in scores
        for data in sets
    }
    rows = [
        (score, [str(_cell(values[score, data], ood_figure(paper_id, score, data, METRICS[metric]))) for data in sets])
        for score in scores
    ]
    published = paper_id if metric != "fpr95" else None  # the paper does not report FPR95
    return Grid(f"OOD detection, {METRICS[metric]} in %{_title_suffix(evaluations, published)}", sets, rows)


def error_grid(evaluations: Sequence[Evaluation], paper_id: str | None) -> Grid:
    """Scores × (AUROC, AUPR) for detecting the errors of the served predictions."""
    scores = list(dict.fromkeys(row.score for e in evaluations for row in e.misclassification))
    rows = []
    for score in scores:
        results = [row for e in evaluations for row in e.misclassification if row.score == score]
        cells = [
            _cell([getattr(row, metric) for row in results], error_figure(paper_id, score, METRICS[metric]))
            for metric in ("auroc", "aupr")
        ]
        rows.append((score, [str(cell) for cell in cells]))
    return Grid(f"Misclassification detection, %{_title_suffix(evaluations, paper_id)}", ["AUROC", "AUPR"], rows)


def guarantee_grid(evaluations: Sequence[Evaluation]) -> Grid:
    """Guaranteed rates as measured on the test set; the selective risk is that of images not flagged and accepted."""
    rows = []
    for promise, target in dict.fromkeys((row.promise, row.target) for row in evaluations[0].realised):
        results = [
            (row, e.n) for e in evaluations for row in e.realised if (row.promise, row.target) == (promise, target)
        ]
        rates = [100 * row.realised for row, _ in results if row.realised is not None]
        shares = [100 * row.n / n for row, n in results]
        text = f"{np.mean(rates):.2f}, worst {max(rates):.2f}" if rates else UNSUPPORTED
        name = f"{promise.replace('_', ' ')} ≤ {100 * target:g}"
        rows.append((name, [text, f"{np.mean(shares):.1f}", f"{len(rates)} of {len(results)}"]))
    return Grid("Guarantees as measured on the test set, %", ["measured", "of images", "supported"], rows)


def encoding_grid(evaluations: Sequence[Evaluation]) -> Grid:
    """Guarantees, accuracy and detection by the encoding in which all images are sent; means over the evaluations."""
    first = evaluations[0].encodings
    targets = list(dict.fromkeys(one.target for one in first[0].realised))
    listed = " / ".join(f"{100 * target:g}" for target in targets)
    rows = []
    for index, row in enumerate(first):
        results = [e.encodings[index] for e in evaluations]
        rates: dict[tuple[str, float], list[float | None]] = {}
        for result in results:
            for one in result.realised:
                rates.setdefault((one.promise, one.target), []).append(one.realised)
            for found in result.detected:
                rates.setdefault(("detected", found.target), []).append(found.realised)
        cells = [f"{np.mean([one.accuracy for one in results]):.1f}"]
        cells += [
            " / ".join(_rate(rates.get((kind, target), [None])) for target in targets)
            for kind in ("false_alarm_rate", "selective_risk", "detected")
        ]
        rows.append((row.encoding if row.calibrated else f"{row.encoding} *", cells))
    title = f"By encoding, {first[0].n:,} test images, % (* not calibrated for)"
    return Grid(title, ["accuracy", f"false alarms ≤ {listed}", f"risk ≤ {listed}", f"detected at {listed}"], rows)


def _rate(rates: Sequence[float | None]) -> str:
    """The mean of rates in percent, with three digits; a dash if none is known."""
    known = [100 * rate for rate in rates if rate is not None]
    return "–" if not known else f"{np.mean(known):.{2 if np.mean(known) < 10 else 1}f}"


def class_grid(evaluations: Sequence[Evaluation], by: str) -> Grid:
    """False alarms by class with 95 % confidence intervals, of all evaluations together; the worst ones of many classes."""
    totals: dict[str, list[int]] = {}
    supported = all(row.flagged_by_class is not None for e in evaluations for row in e.classes)
    for row in (row for e in evaluations for row in e.classes if row.by == by):
        counts = totals.setdefault(row.label, [0, 0, 0])
        for index, count in enumerate((row.n, row.flagged, row.flagged_by_class or 0)):
            counts[index] += count
    present = {label: counts for label, counts in totals.items() if counts[0]}
    ordered = sorted(present, key=lambda label: -present[label][1] / present[label][0])
    shown = list(present) if len(present) <= MAX_CLASSES else ordered[:MAX_CLASSES]
    target = evaluations[0].classes[0].target
    rows = []
    for label in shown:
        n, flagged, flagged_by_class = present[label]
        low, high = 1 - upper_bound(n - flagged, n, 0.975), upper_bound(flagged, n, 0.975)
        cells = [f"{n:,}", f"{100 * flagged / n:.2f}", f"{100 * low:.2f} to {100 * high:.2f}"]
        rows.append((label, [*cells, f"{100 * flagged_by_class / n:.2f}" if supported else "–"]))
    worst = "" if len(present) <= MAX_CLASSES else f", the {MAX_CLASSES} highest of {len(present)} classes"
    title = f"False alarms by {by} class, %, target {100 * target:g}{worst}"
    return Grid(title, ["images", "flagged", "95 % interval", "with by-class"], rows)


def set_grid(evaluations: Sequence[Evaluation]) -> Grid:
    """Coverage and size of prediction sets on the test set; means over the evaluations."""
    rows = []
    for index, row in enumerate(evaluations[0].sets):
        results = [one for e in evaluations if (one := e.sets[index]).realised is not None]
        cells = ["–"] * 4
        if results:
            values = {
                name: float(np.mean([getattr(one, name) for one in results]))
                for name in ("realised", "mean_size", "empty", "worst_class")
            }
            cells = [
                f"{100 * values['realised']:.2f}",
                f"{values['mean_size']:.2f}",
                f"{100 * values['empty']:.2f}",
                f"{100 * values['worst_class']:.1f}",
            ]
        rows.append((f"coverage {100 * row.coverage:g}", cells))
    return Grid("Prediction sets on the test set, %", ["covered", "mean size", "empty", "worst class covered"], rows)


def probability_grid(evaluations: Sequence[Evaluation]) -> Grid:
    """Distributions × (ECE, NLL) of the class probabilities on the test set."""
    names = {"alpha": "α/α₀", "base": "softmax of the base", "meta_alpha": "α/α₀ of the meta-model alone"}
    rows = []
    for distribution in dict.fromkeys(row.distribution for e in evaluations for row in e.probabilities):
        results = [row for e in evaluations for row in e.probabilities if row.distribution == distribution]
        cells = [_plain_cell([row.ece for row in results], 2), _plain_cell([row.nll for row in results], 4)]
        rows.append((names[distribution], cells))
    return Grid("Class probabilities on the test set", ["ECE in %", "NLL in nats"], rows)


def all_grids(evaluations: Sequence[Evaluation], paper_id: str | None) -> list[Grid]:
    """Every table of a run."""
    grids = [ood_grid(evaluations, metric, paper_id) for metric in METRICS] if evaluations[0].ood else []
    if all(e.misclassification for e in evaluations):
        grids.append(error_grid(evaluations, paper_id))
    if all(e.probabilities for e in evaluations):
        grids.append(probability_grid(evaluations))
    grids.append(guarantee_grid(evaluations))
    if all(e.encodings for e in evaluations):
        grids.append(encoding_grid(evaluations))
    if all(e.classes for e in evaluations):
        grids += [class_grid(evaluations, by) for by in ("predicted", "true")]
    if all(e.sets for e in evaluations):
        grids.append(set_grid(evaluations))
    return grids


def accuracy_line(evaluations: Sequence[Evaluation]) -> str:
    """The accuracy of base and bundle in one sentence."""
    accuracy = np.mean([e.accuracy for e in evaluations])
    note = f" {seen}" if (seen := seen_note(evaluations)) else ""
    base_accuracies = [e.base_accuracy for e in evaluations if e.base_accuracy is not None]
    if not base_accuracies:
        return f"Test accuracy: meta-model {accuracy:.2f} %; the base's classes are not the data's.{note}"
    same = same_predictions(evaluations)
    return f"Test accuracy: base alone {np.mean(base_accuracies):.2f} %, bundle {accuracy:.2f} % ({same}).{note}"


def same_predictions(evaluations: Sequence[Evaluation]) -> str:
    """Whether base and bundle predict the same classes, and on how many images they were compared if not on all."""
    same = "identical predictions" if all(e.identical_predictions for e in evaluations) else "predictions differ"
    compared = [e.compared for e in evaluations if e.compared is not None]
    return f"{same} on {min(compared):,} images" if compared else same


def seen_note(evaluations: Sequence[Evaluation]) -> str | None:
    """A sentence if test images are also calibration images."""
    seen = sum(e.calibrated_on for e in evaluations)
    return f"{seen:,} test images are also calibration images." if seen else None


def to_rich(grid: Grid) -> Table:
    """A table for the terminal; names and cells that do not fit are wrapped, never cut."""
    table = Table(title=escape(grid.title), title_justify="left", header_style="bold")
    names = max((len(name) for name, _ in grid.rows), default=0)
    table.add_column("", no_wrap=names <= LONGEST_NAME, overflow="fold")
    for column in grid.columns:
        table.add_column(escape(column), justify="right", overflow="fold")
    for name, cells in grid.rows:
        table.add_row(escape(name), *map(escape, cells))
    return table


def to_markdown(grid: Grid) -> str:
    """A table as Markdown."""
    lines = [f"### {grid.title}", "", "| |" + "|".join(grid.columns) + "|", "|---|" + "---:|" * len(grid.columns)]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in grid.rows]
    return "\n".join(lines) + "\n"


def _cell(values: Sequence[float], paper: Figure | None) -> SeedCell:
    return SeedCell(float(np.mean(values)), float(np.std(values)), len(values), paper)


def _plain_cell(values: Sequence[float], digits: int) -> str:
    spread = f" ± {np.std(values):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def _title_suffix(evaluations: Sequence[Evaluation], paper_id: str | None) -> str:
    seeds = f", mean ± std of {len(evaluations)} seeds" if len(evaluations) > 1 else ""
    return f", fair protocol{seeds}" + (" (the paper's figure)" if paper_id else "")
