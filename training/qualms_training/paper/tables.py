"""Tables from results: every method has rows and every OOD set a column, also if there are no results."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qualms_training.data.noise import CORRUPTION
from qualms_training.data.prepare import CORRUPTED
from qualms_training.paper.detection import TABLE_METRICS, Detections, Measurements
from qualms_training.paper.document import BEST_MARK, Cell, Table, TableRow, mark_best
from qualms_training.paper.kept_rows import KeptRows
from qualms_training.paper.method import NoiseChains
from qualms_training.paper.noise_merit import merit
from qualms_training.paper.published import Figure, figure
from qualms_training.paper.registry import METHODS, PAPER_SCORE_NAMES, Entry, Group, methods_for
from qualms_training.paper.runner import JobResult

NOT_AVAILABLE = "not available"
NOT_RUN = "not run"
MEAN_OF_IMAGES = "mean of images"
"""column with the mean over all OOD sets except the Corrupted set, which is noise"""
NOISE_SUMMARIES = ("mean", "worst", "merit")
"""last columns of the noise table"""


@dataclass(frozen=True)
class ProtocolResults:
    """All results of one protocol, and the facts about the benchmark that the tables need."""

    by_method: Mapping[str, Mapping[int, JobResult]]
    """by method and seed"""
    columns: Sequence[str]
    available: Sequence[str]
    """the columns for which data are available"""
    itself: str
    """name of the column that compares the in-distribution set with itself"""
    paper_id: str | None
    not_run: Mapping[str, str]
    """methods that the benchmark omits, with the reason"""
    transfer: bool = False
    """whether the base's classes are not the data's"""
    other_ids: Sequence[str] = ()
    """in-distribution sets of the paper's table of transfer, by its names, for which no data are available"""
    seen_noise: Mapping[tuple[str, str], NoiseChains] = field(default_factory=dict)
    """by method and score: the noisy copies that the score was learned from, or that early stopping used"""
    kept: KeptRows = field(default_factory=KeptRows)
    """rows of earlier tables, used for methods without results"""

    @property
    def methods(self) -> dict[str, Entry]:
        """The methods that have rows in the tables."""
        return methods_for(transfer=self.transfer)

    def measured(self, key: str) -> dict[int, tuple[JobResult, Measurements]]:
        """A method's results that have measurements, by seed."""
        results = self.by_method.get(key, {})
        return {seed: (result, result.measured) for seed, result in results.items() if result.measured}

    @property
    def kept_methods(self) -> dict[str, Entry]:
        """The methods whose rows are those of the earlier tables."""
        titles = self.kept.scores
        return {key: entry for key, entry in self.methods.items() if entry.title in titles and not self.measured(key)}

    def with_kept_rows(self, table: Table) -> Table:
        """The table with the rows of earlier tables."""
        return self.kept.into(table, [entry.title for entry in self.kept_methods.values()])

    @property
    def noises(self) -> list[str]:
        """The columns of the noise table: noises, and errors; empty if this protocol has none."""
        measurements = [one for key in self.by_method for _, one in self.measured(key).values()]
        kept = [column for column in self.kept.columns("noise") if column not in NOISE_SUMMARIES]
        return list(dict.fromkeys(kind for one in measurements for kind in one.noise)) or kept

    def collect(self, key: str, get: Callable[[JobResult, Measurements], float | None]) -> dict[int, float]:
        """One figure of a method by seed."""
        figures = {seed: get(*pair) for seed, pair in self.measured(key).items()}
        return {seed: value for seed, value in figures.items() if value is not None}

    def cell(self, key: str, get: Callable[[JobResult, Measurements], float | None], decimals: int = 1) -> Cell:
        """A cell with one figure of a method."""
        return Cell(self.collect(key, get), decimals=decimals, missing="–" if self.measured(key) else NOT_RUN)

    def detection(self, key: str, score: str, metric: str, select: Callable[[Measurements], Detections]) -> Cell:
        """A cell with one metric of one score, from the detections that `select` returns."""

        def get(_: JobResult, measured: Measurements) -> float | None:
            value: float | None = getattr(select(measured).get(score), metric, None)
            return value

        return self.cell(key, get)

    def with_seen_noise(self, cell: Cell, key: str, score: str, noises: Sequence[str]) -> Cell:
        """The cell, marked if the score has seen one of the noises in its images."""
        seen = {noise for chain in self.seen_noise.get((key, score), []) for noise in chain}
        return replace(cell, seen_noise=bool(cell.values) and not seen.isdisjoint(noises))

    def published(
        self, key: str, task: str, score: str, column: str | None, metric: str, paper_id: str | None = None
    ) -> Figure | None:
        """The paper's figure. If the paper names no score, only the entry's `paper_score` has a figure."""
        entry, paper_id = METHODS[key], paper_id or self.paper_id
        name = entry.paper.get(task)
        if name is None or paper_id is None or (entry.paper_score and score != entry.paper_score):
            return None
        paper_score = None if entry.paper_score else PAPER_SCORE_NAMES.get(score)
        return figure(task, paper_id, name, paper_score, column, metric)

    def rows(self, groups: Iterable[Group]) -> list[tuple[str, str]]:
        """Methods and scores in the order of the registry; a method without results has one row."""
        selected, names, rows = list(groups), list(PAPER_SCORE_NAMES), list[tuple[str, str]]()
        for key, entry in self.methods.items():
            if entry.group in selected:
                measured = [measured for _, measured in self.measured(key).values()]
                scores = dict.fromkeys(score for one in measured for ood in one.ood.values() for score in ood)
                order = sorted(scores, key=lambda score: names.index(score) if score in names else -1)
                rows += [(key, score) for score in order or [entry.paper_score or ""]]
        return rows


def all_tables(results: ProtocolResults) -> list[Table]:
    """All tables of one protocol, except the cost table, which does not depend on the protocol."""
    if results.transfer:
        return [results.with_kept_rows(transfer_table(results))]
    tables = [
        *(ood_table(results, metric) for metric in TABLE_METRICS),
        error_table(results, own=True),
        error_table(results, own=False),
        ablation_table(results),
        *([noise_table(results)] if any(results.noises) else []),
    ]
    return [results.with_kept_rows(table) for table in tables]


def ood_table(results: ProtocolResults, metric: str) -> Table:
    """Methods × OOD sets."""
    chosen = results.rows(("paper", "extension", "recent", "control"))
    rows = [_ood_row(results, key, score, metric, "ood") for key, score in chosen]
    return _over_sets(results, "ood", f"OOD detection, {TABLE_METRICS[metric]} in %", TABLE_METRICS[metric], rows)


def ablation_table(results: ProtocolResults) -> Table:
    """The paper's ablations, with the base and the full method for comparison."""
    chosen = [(key, score) for key, score in results.rows(("paper", "ablation")) if "ablation" in METHODS[key].paper]
    rows = [_ood_row(results, key, score, "auroc", "ablation") for key, score in chosen]
    return _over_sets(results, "ablation", "Ablations, AUROC in %", "AUROC", rows)


def error_table(results: ProtocolResults, *, own: bool) -> Table:
    """Detection of each method's own errors, as in the paper, or of the base's errors, which are the same for all methods."""
    rows = []
    for key, score in results.rows(("paper", "ablation", "extension", "recent")):
        cells = [results.cell(key, lambda _, m: m.error_rate if own else m.base_error_rate, decimals=2)]
        for metric, name in TABLE_METRICS.items():
            cell = results.detection(key, score, metric, lambda m: m.own_errors if own else m.base_errors)
            paper = results.published(key, "misclassification", score, None, name) if own else None
            cells.append(cell.with_paper(paper))
        rows.append(_row(key, score, cells))
    errors = "errors of the method itself, as published" if own else "errors of the base, the same for every method"
    columns = ["error rate", *TABLE_METRICS.values()]
    name = "own errors" if own else "errors of the base"
    title = f"Misclassification detection in %: {errors}"
    if not own:
        return mark_best(Table(name, title, None, columns, rows), unrated=("error rate",))
    note = f"AUPR has no {BEST_MARK} because it rises with the error rate, which differs between methods."
    return mark_best(Table(name, title, None, columns, rows, note), unrated=("error rate", TABLE_METRICS["aupr"]))


def noise_table(results: ProtocolResults) -> Table:
    """The basis of design choices: detection of noisy validation images and of errors among validation images."""
    rows = []
    for key, score in results.rows(("paper", "extension", "recent")):
        if not METHODS[key].whole_network:
            cells = [_noise_cell(results, key, score, kind) for kind in results.noises]
            by_seed = _by_seed(cells)
            cells.append(Cell({seed: float(np.mean(values)) for seed, values in by_seed.items()}))
            cells.append(Cell({seed: min(values) for seed, values in by_seed.items()}))
            cells.append(Cell({seed: merit(values) for seed, values in by_seed.items()}))
            rows.append(_row(key, score, cells))
    title = "Basis of design choices: detection of noisy validation images and of errors; AUROC in %"
    return mark_best(Table("noise", title, "AUROC", [*results.noises, *NOISE_SUMMARIES], rows), unrated=())


def transfer_table(results: ProtocolResults) -> Table:
    """Accuracy and all metrics for every OOD set, as in the paper, and the paper's columns for which data are missing."""
    columns = ["accuracy", *(f"{column} {name}" for column in results.columns for name in TABLE_METRICS.values())]
    columns.append(results.itself)
    for other in results.other_ids:
        columns += [f"{other} accuracy"]
        columns += [
            f"{other}, {column} {TABLE_METRICS[metric]}" for column, metric in _published_columns(results, other)
        ]
    rows = [_transfer_row(results, key, score) for key, score in results.rows(("transfer", "paper", "control"))]
    title = "Transfer: the methods predict classes that the frozen base does not have; accuracy and detection in %"
    return mark_best(Table("transfer", title, None, columns, rows), unrated=(results.itself,))


def cost_table(results: ProtocolResults) -> Table:
    """Time and storage of each method in addition to the base."""
    rows = []
    for key in dict.fromkeys(key for key, _ in results.rows(("transfer", "paper", "ablation", "extension", "recent"))):
        cells = [
            results.cell(key, lambda result, _: result.fit_seconds),
            results.cell(key, lambda result, _: 1e6 * result.score_seconds / result.images),
            results.cell(key, lambda result, _: float(result.stored_numbers), decimals=0),
        ]
        rows.append(_row(key, "", cells))
    columns = ["seconds to fit", "microseconds to score an image", "numbers kept beside the base"]
    return results.with_kept_rows(
        Table("cost", "Cost in addition to the forward pass of the base", None, columns, rows)
    )


def reasons(results: ProtocolResults) -> list[str]:
    """One sentence for each method without results and each column without data."""
    kept = results.kept_methods
    sentences = [
        f"{entry.title}: not run: {_reason(results, key)}."
        for key, entry in results.methods.items()
        if not results.measured(key) and key not in kept
    ]
    missing = [name for name in results.columns if name not in results.available]
    sentences += [f"Column {name}: not available: there are no data for it." for name in missing]
    return sentences + [f"Columns of {name}: not available: there are no data for it." for name in results.other_ids]


def _over_sets(results: ProtocolResults, name: str, title: str, metric: str, rows: list[TableRow]) -> Table:
    of_images = [MEAN_OF_IMAGES] if CORRUPTED in results.columns else []
    columns = [*results.columns, "mean", "worst", *of_images, results.itself]
    return mark_best(Table(name, title, metric, columns, rows), unrated=(results.itself,))


def _ood_row(results: ProtocolResults, key: str, score: str, metric: str, task: str) -> TableRow:
    """One cell per OOD set, their mean, the worst of them, the mean of images, and the set against itself."""
    cells = [_set_cell(results, key, score, metric, task, column) for column in results.columns]
    by_seed = _by_seed(cells)
    images = _by_seed([cell for cell, column in zip(cells, results.columns, strict=True) if column != CORRUPTED])
    worst = max if metric == "fpr95" else min
    missing = cells[0].missing if not results.measured(key) else "–"
    cells.append(Cell({seed: float(np.mean(values)) for seed, values in by_seed.items()}, missing=missing))
    cells.append(Cell({seed: worst(values) for seed, values in by_seed.items()}, missing=missing))
    if CORRUPTED in results.columns:
        cells.append(Cell({seed: float(np.mean(values)) for seed, values in images.items()}, missing=missing))
    cells.append(results.detection(key, score, metric, lambda m: m.ood.get(results.itself, {})))
    return _row(key, score, cells)


def _by_seed(cells: Sequence[Cell]) -> dict[int, list[float]]:
    """Values of the non-empty cells, for each seed that all of these cells have."""
    present = [cell.values for cell in cells if cell.values]
    seeds = set.intersection(*(set(values) for values in present)) if present else set()
    return {seed: [values[seed] for values in present] for seed in sorted(seeds)}


def _set_cell(results: ProtocolResults, key: str, score: str, metric: str, task: str, column: str) -> Cell:
    """The cell of one OOD set."""
    cell = Cell(missing=NOT_AVAILABLE)
    if column in results.available:
        cell = results.detection(key, score, metric, lambda measured: measured.ood.get(column, {}))
    if column == CORRUPTED:
        cell = results.with_seen_noise(cell, key, score, CORRUPTION)
    return cell.with_paper(results.published(key, task, score, column, TABLE_METRICS[metric]))


def _noise_cell(results: ProtocolResults, key: str, score: str, kind: str) -> Cell:
    """The cell of one noise, or of the errors."""
    cell = results.detection(key, score, "auroc", lambda measured: measured.noise.get(kind, {}))
    return results.with_seen_noise(cell, key, score, [kind])


def _transfer_row(results: ProtocolResults, key: str, score: str) -> TableRow:
    """Accuracy, the cells of each OOD set, the set against itself, and the paper's figures for which data are missing."""
    predicts = METHODS[key].group != "control"
    accuracy = results.cell(key, lambda _, measured: 100 - measured.error_rate if predicts else None)
    cells = [accuracy.with_paper(_published_accuracy(results, key, score, results.paper_id))]
    for column in results.columns:
        cells += [_set_cell(results, key, score, metric, "transfer", column) for metric in TABLE_METRICS]
    cells.append(results.detection(key, score, "auroc", lambda measured: measured.ood.get(results.itself, {})))
    for other in results.other_ids:
        empty = Cell(missing=NOT_AVAILABLE)
        cells.append(empty.with_paper(_published_accuracy(results, key, score, other)))
        for column, metric in _published_columns(results, other):
            cells.append(
                empty.with_paper(results.published(key, "transfer", score, column, TABLE_METRICS[metric], other))
            )
    return _row(key, score, cells)


def _published_columns(results: ProtocolResults, paper_id: str) -> list[tuple[str, str]]:
    """OOD sets and metrics in the paper's table of transfer for an in-distribution set."""

    def has_figure(column: str, name: str) -> bool:
        return any(results.published(key, "transfer", "entropy", column, name, paper_id) for key in results.methods)

    return [
        (column, metric)
        for column in results.columns
        for metric, name in TABLE_METRICS.items()
        if has_figure(column, name)
    ]


def _published_accuracy(results: ProtocolResults, key: str, score: str, paper_id: str | None) -> Figure | None:
    """The paper's accuracy, which it repeats in the columns of every OOD set."""
    figures = (results.published(key, "transfer", score, column, "accuracy", paper_id) for column in results.columns)
    return next((value for value in figures if value), None)


def _row(key: str, score: str, cells: list[Cell]) -> TableRow:
    entry = METHODS[key]
    name = PAPER_SCORE_NAMES.get(score, score.replace("_", " "))
    return TableRow(entry.title, name, cells, rated=entry.group != "control")


def _reason(results: ProtocolResults, key: str) -> str:
    given = [result.reason for result in results.by_method.get(key, {}).values() if result.reason]
    return results.not_run.get(key) or (given[0] if given else "left out of this run by --only")
