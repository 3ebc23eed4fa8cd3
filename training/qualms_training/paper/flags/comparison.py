"""`qualms compare-flags`: the flag score against the scores it is made of, its predecessor and the scores of α.

Every score is computed from the same base, meta-model and images, under the fair protocol, so differences are paired.
"""

import csv
import io
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.markup import escape

from qualms_training.console import Display
from qualms_training.data import load
from qualms_training.data.noise import CORRUPTION
from qualms_training.data.prepare import CORRUPTED
from qualms_training.errors import DataError, QualmsError, RecipeError
from qualms_training.files import fingerprint, save_text
from qualms_training.paper.definition import Benchmark
from qualms_training.paper.detection import TABLE_METRICS, Detection, detect
from qualms_training.paper.document import SEEN_NOISE_MARK, Cell
from qualms_training.paper.evaluation_protocol import Protocol
from qualms_training.paper.flags.bootstrap import LEVEL, Array, Interval, interval, resampled_aurocs
from qualms_training.paper.flags.seed_scores import (
    DISTANCE,
    MUTUAL_INFORMATION,
    NEW_DEFAULT,
    OLD_DEFAULT,
    TEST,
    ComparedScore,
    SeedScores,
    compute_scores,
)
from qualms_training.paper.registry import METHODS
from qualms_training.paper.runner import MethodRun, Run
from qualms_training.reporting.report import Grid, to_markdown, to_rich

FORMAT = 1
"""format of the files of seeds; a new number makes all seeds run again"""
RESAMPLES = 1000
METRICS = ("auroc", "fpr95", "detected")
FIELDS = ("benchmark", "table", "row", "column", "mean", "std", "seeds", "lower", "upper")
"""header of the CSV file"""


@dataclass(frozen=True)
class Block:
    """One table of the comparison."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell | Interval]]]

    @property
    def grid(self) -> Grid:
        """The table as strings."""
        return Grid(
            self.title, list(self.columns), [(name, [str(cell) for cell in cells]) for name, cells in self.rows]
        )


@dataclass(frozen=True)
class Comparison:
    """All results of a benchmark: the scores of every seed, and the metrics of every row."""

    columns: Sequence[str]
    """OOD sets"""
    own_columns: Sequence[str]
    """the OOD sets of the benchmark, without those that --ood added"""
    seeds: Sequence[SeedScores]
    detections: Mapping[ComparedScore, Sequence[Mapping[str, Detection]]]
    """by row, seed and OOD set"""
    seen_noise: frozenset[ComparedScore]
    """rows that have seen the noise of the Corrupted set"""

    @property
    def groups(self) -> dict[str, Sequence[str]]:
        """The OOD sets over which mean and worst are taken, by the end of the column's name."""
        extra = {} if list(self.columns) == list(self.own_columns) else {" of all": self.columns}
        return {"": self.own_columns, **extra}

    def over_sets(self, values: Mapping[str, Array], *, lowest: bool = True) -> dict[str, Array]:
        """Mean and worst over sets, by the name of the column, from arrays by set."""
        results = {}
        for end, names in self.groups.items():
            stacked = np.stack([values[name] for name in names])
            results[f"mean{end}"] = stacked.mean(axis=0)
            results[f"worst{end}"] = stacked.min(axis=0) if lowest else stacked.max(axis=0)
        return results

    def figures(self, row: ComparedScore, metric: str) -> dict[str, Array]:
        """A metric of a row by OOD set, and its mean and worst over sets; one value per seed, (S,) each."""
        by_set = {
            name: np.array([getattr(by_column[name], metric) for by_column in self.detections[row]])
            for name in self.columns
        }
        return by_set | self.over_sets(by_set, lowest=metric != "fpr95")


def compare_flags(
    benchmark: Benchmark,
    *,
    out: Path,
    cache: Path,
    data_dir: Path | None,
    device: torch.device,
    seeds: int | None = None,
    ood: Sequence[str] = (),
    resamples: int = RESAMPLES,
    display: Display | None = None,
) -> list[Block]:
    """Compute the scores of the seeds that have no file yet, then print and write all tables.

    `ood` names further OOD sets, beside the benchmark's.
    """
    display = display or Display()
    extra = [name for name in dict.fromkeys(ood) if name not in benchmark.columns]
    for name in extra:
        load(name, "test", data_dir)  # report a set that does not exist before anything is computed
    extended = benchmark.under(Protocol.fair).model_copy(update={"columns": [*benchmark.columns, *extra]})
    display.note(f"[bold]{benchmark.name}[/bold]: {escape(benchmark.description)}")
    run = Run(extended, out, cache, data_dir, device, display)
    if not run.columns:
        raise DataError(f"Benchmark {benchmark.name!r} has no OOD set with data; give one with --ood, or its --data.")
    count = benchmark.seeds if seeds is None else seeds
    results = _seed_scores(run, count)
    own = [name for name in run.columns if name not in extra]
    comparison = _comparison(run, results, own or extra)
    blocks = [*_metric_blocks(comparison), _differences(comparison, resamples, display), *_alpha_blocks(comparison)]
    head = _head(run, comparison, count, extra, resamples)
    for block in blocks:
        display.console.print(to_rich(block.grid))
    text = "\n".join([f"# Flag scores, {benchmark.name}\n", *(f"{paragraph}\n" for paragraph in head)])
    text += "\n" + "\n".join(to_markdown(block.grid) for block in blocks)
    for suffix, content in (("md", text), ("csv", _csv(benchmark.name, blocks))):
        path = out / f"compare-{benchmark.name}.{suffix}"
        save_text(path, content)
        display.note(f"wrote {escape(str(path))}")
    return blocks


def _seed_scores(run: Run, count: int) -> list[SeedScores]:
    """The scores of every seed, from files where there are any."""
    if run.recipe_of(METHODS[NEW_DEFAULT.key]) is None:
        raise RecipeError(
            f"Benchmark {run.benchmark.name!r} has no recipe with a meta-model of pooled form, which the flag score needs."
        )
    folder = run.out / f"compare-{run.benchmark.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QualmsError(f"Folder {run.out} cannot be written to: {error.strerror}.") from None
    jobs = [MethodRun(NEW_DEFAULT.key, seed, Protocol.fair) for seed in range(count)]
    files = {job: folder / f"seed-{job.seed}.npz" for job in jobs}
    marks = {job: fingerprint("compare-flags", FORMAT, run.fingerprint(job)) for job in jobs}
    results = {job: SeedScores.load(files[job], marks[job]) for job in jobs}
    missing = [job for job, result in results.items() if result is None]
    run.display.note(f"  {len(jobs) - len(missing)} of {len(jobs)} seeds exist")
    for job, builder in run.with_inputs(missing):
        assert builder is not None  # there is a recipe
        made = compute_scores(builder, list(run.columns), run.scratch(job))
        made.save(files[job], marks[job])
        shutil.rmtree(run.scratch(job), ignore_errors=True)
        results[job] = made
    return [result for result in results.values() if result is not None]


def _comparison(run: Run, seeds: Sequence[SeedScores], own_columns: Sequence[str]) -> Comparison:
    rows, columns = list(seeds[0].scores[TEST]), list(run.columns)
    detections: dict[ComparedScore, list[dict[str, Detection]]] = {row: [] for row in rows}
    with run.display.bar("metrics", len(rows) * len(seeds)) as advance:
        for result in seeds:
            for row in rows:
                test = result.scores[TEST][row]
                detections[row].append({name: detect(test, result.scores[name][row]) for name in columns})
                advance(1)
    seen = {
        row
        for row in rows
        if row != DISTANCE and any(noise in CORRUPTION for chain in run.seen_noise(*row) for noise in chain)
    }
    return Comparison(columns, own_columns, seeds, detections, frozenset(seen))


def _metric_blocks(comparison: Comparison) -> list[Block]:
    """One table per metric: rows × OOD sets, mean and worst."""
    blocks = []
    for metric in METRICS:
        figures = {row: comparison.figures(row, metric) for row in comparison.detections}
        rows = [
            (
                row.title,
                [
                    Cell(dict(enumerate(values)), seen_noise=name == CORRUPTED and row in comparison.seen_noise)
                    for name, values in by_column.items()
                ],
            )
            for row, by_column in figures.items()
        ]
        blocks.append(Block(f"{TABLE_METRICS[metric]} in %", list(figures[NEW_DEFAULT]), rows))
    return blocks


def _differences(comparison: Comparison, resamples: int, display: Display) -> Block:
    """Flag score minus every other row, in mean and worst AUROC, with paired bootstrap intervals."""
    rows, seeds, columns = list(comparison.detections), comparison.seeds, comparison.columns
    pairs = [(row, result.scores) for row in rows for result in seeds]
    with display.bar("bootstrap", resamples) as advance:
        aurocs = resampled_aurocs(
            [scores[TEST][row] for row, scores in pairs],
            [[scores[name][row] for name in columns] for row, scores in pairs],
            resamples,
            np.random.default_rng(0),
            advance,
        )
    by_row = aurocs.reshape(len(rows), len(seeds), len(columns), resamples)
    resampled = [
        {
            name: values.mean(axis=0)
            for name, values in comparison.over_sets(
                {name: by_seed[:, position] for position, name in enumerate(columns)}
            ).items()
        }
        for by_seed in by_row
    ]
    measured = [comparison.figures(row, "auroc") for row in rows]
    new = rows.index(NEW_DEFAULT)
    lines = []
    for index, row in enumerate(rows):
        if row != NEW_DEFAULT:
            cells = [
                interval(
                    float((measured[new][name] - measured[index][name]).mean()),
                    resampled[new][name] - resampled[index][name],
                )
                for name in resampled[index]
            ]
            lines.append((row.title, cells))
    return Block(f"AUROC of {NEW_DEFAULT.title} minus that of the row, in points", list(resampled[new]), lines)


def _alpha_blocks(comparison: Comparison) -> list[Block]:
    """Calibration of α and of other distributions, agreement with the served class, and the scores of α."""
    qualities = [result.alpha for result in comparison.seeds]
    first = qualities[0]
    calibration = [
        (
            name,
            [
                Cell({seed: one.ece[name] for seed, one in enumerate(qualities)}, decimals=2),
                Cell({seed: one.nll[name] for seed, one in enumerate(qualities)}, decimals=4),
            ],
        )
        for name in first.ece
    ]
    agreement = [
        Cell({seed: one.served_class[name] for seed, one in enumerate(qualities)}, decimals=3)
        for name in first.served_class
    ]
    information, flag = (comparison.figures(row, "auroc") for row in (MUTUAL_INFORMATION, NEW_DEFAULT))
    gaps = {name: information[name] - flag[name] for name in flag}
    smallest = np.stack([gaps[name] for name in comparison.columns]).min(axis=0)
    facts: dict[str, Iterable[float]] = {
        "mutual information minus flag score, mean AUROC": gaps["mean"],
        "mutual information minus flag score, worst AUROC": gaps["worst"],
        "mutual information minus flag score, smallest of all OOD sets": smallest,
        "ties in precision": [one.ties for one in qualities],
        "temperature": [one.temperature for one in qualities],
        "test accuracy of the served classes in %": [one.accuracy for one in qualities],
    }
    return [
        Block("Class probabilities on the test set", ["ECE in %", "NLL in nats"], calibration),
        Block(
            "Images whose largest α, in float32, is that of the served class, in %",
            list(first.served_class),
            [("joined α", agreement)],
        ),
        Block(
            "The joined α",
            ["value"],
            [(name, [Cell(dict(enumerate(values)), decimals=2)]) for name, values in facts.items()],
        ),
    ]


def _head(run: Run, comparison: Comparison, seeds: int, extra: Sequence[str], resamples: int) -> list[str]:
    """The paragraphs before the tables."""
    benchmark = run.benchmark
    command = f"qualms compare-flags {benchmark.name} --seeds {seeds}{''.join(f' --ood {name}' for name in extra)}"
    command += " --out DIR --cache DIR" + (f" --resamples {resamples}" if resamples != RESAMPLES else "")
    unavailable = [name for name in benchmark.columns if name not in comparison.columns]
    paragraphs = [
        benchmark.description,
        f"Made by `{command}`.",
        f"`{NEW_DEFAULT.title}` is the flag score of new bundles, `{OLD_DEFAULT.title}` that of earlier ones. All rows of a "
        "seed share one base and one meta-model, under the fair protocol. A cell is the mean over seeds ± the standard "
        "deviation; `worst` is the mean over seeds of each seed's worst OOD set. "
        f"`{TABLE_METRICS['detected']}` is the share of OOD images beyond the score that 1 % of the test images exceed.",
    ]
    if run.transfer:
        paragraphs.append(
            "The base's classes are not those of the data, so the meta-model predicts, and rows of the base are left out."
        )
    if extra and list(comparison.own_columns) != list(comparison.columns):
        paragraphs.append(
            f"`mean` and `worst` are over the benchmark's OOD sets; `of all` includes {', '.join(extra)}, too."
        )
    if unavailable:
        paragraphs.append(f"There are no data for {', '.join(unavailable)}.")
    if CORRUPTED in comparison.columns and comparison.seen_noise:
        paragraphs.append(
            f"{SEEN_NOISE_MARK} marks figures on noise that the row has seen: noisy copies of other images, made in the same "
            "way, stopped the training of the meta-model or selected weights."
        )
    paragraphs.append(
        f"Differences have a {100 * LEVEL:g} % percentile interval from {resamples:,} paired bootstrap resamples: test images "
        "and the images of each OOD set are drawn with replacement, all rows and seeds see the same draws, and seeds are "
        "averaged. An interval is about the choice of images; the spread over seeds is the ± of the other tables."
    )
    return paragraphs


def _csv(benchmark: str, blocks: Sequence[Block]) -> str:
    """All cells as CSV, one line per cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    for block in blocks:
        for name, cells in block.rows:
            for column, cell in zip(block.columns, cells, strict=True):
                writer.writerow([benchmark, block.title, name, column, *_figures(cell)])
    return text.getvalue()


def _figures(cell: Cell | Interval) -> list[str | int]:
    """Mean, standard deviation, number of seeds, and the ends of the interval."""
    if isinstance(cell, Interval):
        return [f"{cell.difference:.4f}", "", "", f"{cell.lower:.4f}", f"{cell.upper:.4f}"]
    summary = cell.summary
    assert summary is not None  # every cell of a comparison has values
    return [f"{summary.mean:.4f}", f"{summary.std:.4f}", summary.seeds, "", ""]
