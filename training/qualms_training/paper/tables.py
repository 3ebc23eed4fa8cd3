"""From results to the paper's tables: every method has its rows, every set its column, or the reason why not."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qualms_training.data.prepare import CORRUPTED
from qualms_training.meta.fusion import merit
from qualms_training.paper.cells import MARK, Cell, Row, Table, mark_best
from qualms_training.paper.figures import Figure, figure
from qualms_training.paper.measure import Detections, Measured
from qualms_training.paper.method import Chains
from qualms_training.paper.registry import METHODS, SHORT, Entry, Group, methods_for
from qualms_training.paper.runner import Result

NOT_AVAILABLE = "not available"
NOT_RUN = "not run"
METRICS = {"auroc": "AUROC", "aupr": "AUPR", "fpr95": "FPR95"}
CORRUPTION = ("permutation", "blur", "contrast")
"""the noises that the Corrupted set is made by"""
IMAGES = "mean of images"
"""the mean over sets that are images, not noise"""


@dataclass(frozen=True)
class Source:
    """All results of one protocol, and what the tables need to know of the benchmark."""

    results: Mapping[str, Mapping[int, Result]]
    """by method and seed"""
    columns: Sequence[str]
    available: Sequence[str]
    """those columns that there are data for"""
    itself: str
    """the column of the in-distribution set against itself"""
    paper_id: str | None
    not_run: Mapping[str, str]
    """methods that the benchmark leaves out, with the reason"""
    transfer: bool = False
    """whether the base's classes are not the data's"""
    other_ids: Sequence[str] = ()
    """in-distribution sets of the paper's table of transfer, by its names, that there are no data for"""
    seen: Mapping[tuple[str, str], Chains] = field(default_factory=dict)
    """the noisy copies that a method's score was learned from or stopped by, where there were any"""

    @property
    def methods(self) -> dict[str, Entry]:
        """Those that the tables have rows for."""
        return methods_for(transfer=self.transfer)

    def measured(self, key: str) -> dict[int, tuple[Result, Measured]]:
        """A method's results by seed, those that have figures."""
        found = self.results.get(key, {})
        return {seed: (result, result.measured) for seed, result in found.items() if result.measured}

    @property
    def kinds(self) -> list[str]:
        """Kinds of noise that choices are made by, where this protocol has any."""
        return list(
            dict.fromkeys(kind for key in self.results for _, one in self.measured(key).values() for kind in one.noise)
        )

    def collect(self, key: str, get: Callable[[Result, Measured], float | None]) -> dict[int, float]:
        """One figure of a method by seed."""
        found = {seed: get(*pair) for seed, pair in self.measured(key).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def cell(self, key: str, get: Callable[[Result, Measured], float | None], decimals: int = 1) -> Cell:
        """The same as a cell."""
        return Cell(self.collect(key, get), decimals=decimals, missing="–" if self.measured(key) else NOT_RUN)

    def detection(self, key: str, score: str, metric: str, where: Callable[[Measured], Detections]) -> Cell:
        """A metric of one score among the detections that `where` picks."""

        def get(_: Result, measured: Measured) -> float | None:
            found = where(measured).get(score)
            return None if found is None else float(getattr(found, metric))

        return self.cell(key, get)

    def marked(self, cell: Cell, key: str, score: str, noises: Sequence[str]) -> Cell:
        """The cell, marked if the score has seen one of the noises that its images are made by."""
        known = {noise for chain in self.seen.get((key, score), []) for noise in chain}
        return replace(cell, seen=bool(cell.values) and not known.isdisjoint(noises))

    def figure(
        self, key: str, task: str, score: str, column: str | None, metric: str, paper_id: str | None = None
    ) -> Figure | None:
        """The paper's; one that it gives without naming a score stands beside the score that it means."""
        entry, known = METHODS[key], paper_id or self.paper_id
        name = entry.paper.get(task)
        if name is None or known is None or (entry.single and score != entry.single):
            return None
        return figure(task, known, name, None if entry.single else SHORT.get(score), column, metric)

    def rows(self, groups: Iterable[Group]) -> list[tuple[str, str]]:
        """Methods and scores in the order of the registry; a method without results has one row."""
        wanted, found = list(groups), []
        for key, entry in self.methods.items():
            if entry.group in wanted:
                measured = [measured for _, measured in self.measured(key).values()]
                scores = dict.fromkeys(score for one in measured for ood in one.ood.values() for score in ood)
                order = sorted(scores, key=lambda score: list(SHORT).index(score) if score in SHORT else -1)
                found += [(key, score) for score in order or [entry.single or ""]]
        return found


def all_tables(source: Source) -> list[Table]:
    """Every table of one protocol but that of cost, which no protocol changes."""
    if source.transfer:
        return [transfer_table(source)]
    return [
        *(ood_table(source, metric) for metric in METRICS),
        error_table(source, own=True),
        error_table(source, own=False),
        ablation_table(source),
        *([noise_table(source)] if any(source.kinds) else []),
    ]


def ood_table(source: Source, metric: str) -> Table:
    """Methods × OOD sets."""
    rows = [
        _ood_row(source, key, score, metric, "ood") for key, score in source.rows(("paper", "past", "today", "control"))
    ]
    return _over_sets(source, "ood", f"OOD detection, {METRICS[metric]} in %", METRICS[metric], rows)


def ablation_table(source: Source) -> Table:
    """The paper's ablations beside the base and the whole method."""
    chosen = [(key, score) for key, score in source.rows(("paper", "ablation")) if "ablation" in METHODS[key].paper]
    rows = [_ood_row(source, key, score, "auroc", "ablation") for key, score in chosen]
    return _over_sets(source, "ablation", "Ablations, AUROC in %", "AUROC", rows)


def error_table(source: Source, *, own: bool) -> Table:
    """Detection of errors: each method's own, as published, or the base's, which are the same for all."""
    rows = []
    for key, score in source.rows(("paper", "ablation", "past", "today")):
        cells = [source.cell(key, lambda _, m: m.error_rate if own else m.base_error_rate, decimals=2)]
        for metric, name in METRICS.items():
            cell = source.detection(key, score, metric, lambda m: m.own_errors if own else m.base_errors)
            paper = source.figure(key, "misclassification", score, None, name) if own else None
            cells.append(cell.beside(paper))
        rows.append(_row(key, score, cells))
    whose = "errors of the method itself, as published" if own else "errors of the base, the same for every method"
    columns = ["error rate", *METRICS.values()]
    name = "own errors" if own else "errors of the base"
    title = f"Misclassification detection in %: {whose}"
    if not own:
        return mark_best(Table(name, title, None, columns, rows), unrated=("error rate",))
    note = f"AUPR has no {MARK}: it rises with the error rate, which is not the same for all methods."
    return mark_best(Table(name, title, None, columns, rows, note), unrated=("error rate", METRICS["aupr"]))


def noise_table(source: Source) -> Table:
    """What choices are made by, all of it in-distribution: noisy copies of validation images, and errors among them."""
    rows = []
    for key, score in source.rows(("paper", "past", "today")):
        if not METHODS[key].whole_network:
            cells = [_noise_cell(source, key, score, kind) for kind in source.kinds]
            each = _by_seed(cells)
            cells.append(Cell({seed: float(np.mean(values)) for seed, values in each.items()}))
            cells.append(Cell({seed: min(values) for seed, values in each.items()}))
            cells.append(Cell({seed: merit(values) for seed, values in each.items()}))
            rows.append(_row(key, score, cells))
    title = "What choices are made by: validation images against noisy copies, and their errors; AUROC in %"
    return mark_best(Table("noise", title, "AUROC", [*source.kinds, "mean", "worst", "merit"], rows), unrated=())


def transfer_table(source: Source) -> Table:
    """Accuracy and every OOD set by every metric, as in the paper; then the sets of its table that we lack."""
    columns = ["accuracy", *(f"{column} {name}" for column in source.columns for name in METRICS.values())]
    columns.append(source.itself)
    for other in source.other_ids:
        columns += [f"{other} accuracy"]
        columns += [f"{other}, {column} {METRICS[metric]}" for column, metric in _published(source, other)]
    rows = [_transfer_row(source, key, score) for key, score in source.rows(("transfer", "paper", "control"))]
    title = "Transfer: the methods predict on a frozen base of other classes; accuracy and detection in %"
    return mark_best(Table("transfer", title, None, columns, rows), unrated=(source.itself,))


def cost_table(source: Source) -> Table:
    """What a method costs beside the base's one pass."""
    rows = []
    for key in dict.fromkeys(key for key, _ in source.rows(("transfer", "paper", "ablation", "past", "today"))):
        cells = [
            source.cell(key, lambda result, _: result.fit_seconds),
            source.cell(key, lambda result, _: 1e6 * result.score_seconds / result.images),
            source.cell(key, lambda result, _: float(result.kept), decimals=0),
        ]
        rows.append(_row(key, "", cells))
    columns = ["seconds to fit", "microseconds to score an image", "numbers kept beside the base"]
    return Table("cost", "Cost beside the base's one pass", None, columns, rows)


def reasons(source: Source) -> list[str]:
    """One sentence for each method without results and each column without data."""
    found = [
        f"{entry.title}: not run: {_reason(source, key)}."
        for key, entry in source.methods.items()
        if not source.measured(key)
    ]
    missing = [name for name in source.columns if name not in source.available]
    found += [f"Column {name}: not available: there are no data for it." for name in missing]
    return found + [f"Columns of {name}: not available: there are no data for it." for name in source.other_ids]


def _over_sets(source: Source, name: str, title: str, metric: str, rows: list[Row]) -> Table:
    columns = [*source.columns, "mean", "worst", *([IMAGES] if CORRUPTED in source.columns else []), source.itself]
    return mark_best(Table(name, title, metric, columns, rows), unrated=(source.itself,))


def _ood_row(source: Source, key: str, score: str, metric: str, task: str) -> Row:
    """A cell for each set, their mean, the worst of them, the mean of images, and the in-distribution set against itself."""
    cells = [_set_cell(source, key, score, metric, task, column) for column in source.columns]
    each = _by_seed(cells)
    images = _by_seed([cell for cell, column in zip(cells, source.columns, strict=True) if column != CORRUPTED])
    worst = max if metric == "fpr95" else min
    missing = cells[0].missing if not source.measured(key) else "–"
    cells.append(Cell({seed: float(np.mean(values)) for seed, values in each.items()}, missing=missing))
    cells.append(Cell({seed: worst(values) for seed, values in each.items()}, missing=missing))
    if CORRUPTED in source.columns:
        cells.append(Cell({seed: float(np.mean(values)) for seed, values in images.items()}, missing=missing))
    cells.append(source.detection(key, score, metric, lambda m: m.ood.get(source.itself, {})))
    return _row(key, score, cells)


def _by_seed(cells: Sequence[Cell]) -> dict[int, list[float]]:
    """The values of those cells that have any, for each seed that all of these have."""
    present = [cell.values for cell in cells if cell.values]
    seeds = set.intersection(*(set(values) for values in present)) if present else set()
    return {seed: [values[seed] for values in present] for seed in sorted(seeds)}


def _set_cell(source: Source, key: str, score: str, metric: str, task: str, column: str) -> Cell:
    """One OOD set."""
    cell = Cell(missing=NOT_AVAILABLE)
    if column in source.available:
        cell = source.detection(key, score, metric, lambda measured: measured.ood.get(column, {}))
    if column == CORRUPTED:
        cell = source.marked(cell, key, score, CORRUPTION)
    return cell.beside(source.figure(key, task, score, column, METRICS[metric]))


def _noise_cell(source: Source, key: str, score: str, kind: str) -> Cell:
    """One kind of noise, or the errors."""
    cell = source.detection(key, score, "auroc", lambda measured: measured.noise.get(kind, {}))
    return source.marked(cell, key, score, [kind])


def _transfer_row(source: Source, key: str, score: str) -> Row:
    """Accuracy, the cells of each OOD set, the set against itself, and the paper's figures of sets that we lack."""
    predicts = METHODS[key].group != "control"
    accuracy = source.cell(key, lambda _, measured: 100 - measured.error_rate if predicts else None)
    cells = [accuracy.beside(_published_accuracy(source, key, score, source.paper_id))]
    for column in source.columns:
        cells += [_set_cell(source, key, score, metric, "transfer", column) for metric in METRICS]
    cells.append(source.detection(key, score, "auroc", lambda measured: measured.ood.get(source.itself, {})))
    for other in source.other_ids:
        lacking = Cell(missing=NOT_AVAILABLE)
        cells.append(lacking.beside(_published_accuracy(source, key, score, other)))
        for column, metric in _published(source, other):
            cells.append(lacking.beside(source.figure(key, "transfer", score, column, METRICS[metric], other)))
    return _row(key, score, cells)


def _published(source: Source, paper_id: str) -> list[tuple[str, str]]:
    """OOD sets and metrics that the paper's table of transfer has for an in-distribution set."""
    return [
        (column, metric)
        for column in source.columns
        for metric in METRICS
        if any(source.figure(key, "transfer", "entropy", column, METRICS[metric], paper_id) for key in source.methods)
    ]


def _published_accuracy(source: Source, key: str, score: str, paper_id: str | None) -> Figure | None:
    """The paper gives it beside an OOD set, on which it does not depend."""
    found = (source.figure(key, "transfer", score, column, "accuracy", paper_id) for column in source.columns)
    return next((value for value in found if value), None)


def _row(key: str, score: str, cells: list[Cell]) -> Row:
    entry = METHODS[key]
    return Row(entry.title, SHORT.get(score, score.replace("_", " ")), cells, rated=entry.group != "control")


def _reason(source: Source, key: str) -> str:
    given = [result.reason for result in source.results.get(key, {}).values() if result.reason]
    return METHODS[key].reason or source.not_run.get(key) or (given[0] if given else "left out of this run by --only")
