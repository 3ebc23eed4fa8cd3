"""`qualms tables`: run the jobs of a benchmark that have no result yet, and write its tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from rich.markup import escape

from qualms_training.console import Display
from qualms_training.data.noise import CORRUPTION
from qualms_training.data.prepare import CORRUPTED, itself
from qualms_training.errors import QualmsError, RecipeError
from qualms_training.files import save_json, save_text
from qualms_training.paper.definition import Benchmark
from qualms_training.paper.document import BEST_MARK, SEEN_NOISE_MARK, Document, Table
from qualms_training.paper.evaluation_protocol import Protocol
from qualms_training.paper.method import NoiseChains
from qualms_training.paper.registry import METHODS, Group, methods_for
from qualms_training.paper.runner import JobResult, Run
from qualms_training.paper.tables import MEAN_OF_IMAGES, ProtocolResults, all_tables, cost_table, reasons
from qualms_training.reporting.report import to_rich
from qualms_training.stages.provenance import versions

_CELLS = (
    "A cell is the mean over seeds ± the standard deviation, with the paper's figure in brackets. "
    f"{BEST_MARK} marks the rows of a column that no other row beats significantly (one-sided paired t-test over seeds, "
    "5 %). The protocol `fair` normalises all images in the same way."
)
_AS_PUBLISHED = (
    " The protocol `as-published` repeats the mismatch of the authors' evaluation, which normalises OOD images differently "
    "from in-distribution images and does not normalise noise. Its higher figures are an artefact, as the rows of pixel "
    "statistics and the column that compares the set with itself show."
)
_SEEN_NOISE = (
    f"{SEEN_NOISE_MARK} marks figures on noise that the row has seen: the score was learned from, or its training was "
    "stopped by, noisy copies of in-distribution images that were made with a noise of this column. In such columns only "
    f"rows without {SEEN_NOISE_MARK} can have a {BEST_MARK}, and none has one if they all belong to one method."
)
_CORRUPTED = (
    f"The images of `{CORRUPTED}` are made by {', '.join(CORRUPTION)}, one after the other. `mean` and `worst` include "
    f"this column for all rows, also for those that have seen its noise; `{MEAN_OF_IMAGES}` excludes it."
)
_TRANSFER = (
    "The base's classes are not those of the data, so there is no row for the base: every method here learns to predict "
    "from the outputs of the frozen base. The paper's base is a ResNet-50."
)
_ONE_BASE = (
    "All seeds evaluate the same base with the same split of the data: ± is the spread over the random draws of a method, "
    "which is zero for a deterministic method, and the best rows are the best for this base only."
)


def make_tables(
    benchmark: Benchmark,
    *,
    out: Path,
    cache: Path,
    data_dir: Path | None,
    device: torch.device,
    seeds: int | None = None,
    only: Sequence[str] = (),
    display: Display | None = None,
) -> Document:
    """Run the jobs that have no result yet, then print and write all tables. `only` limits the methods that are run."""
    display = display or Display()
    for key, settings in benchmark.methods.items():
        METHODS[key].build(key, settings, benchmark.name)  # report an invalid setting before the first method is run
    display.note(f"[bold]{benchmark.name}[/bold]: {escape(benchmark.description)}")
    run = Run(benchmark, out, cache, data_dir, device, display)
    accepted = list(methods_for(transfer=run.transfer))
    for key in only:
        if key not in accepted:
            raise RecipeError(f"There is no method {key!r} to run; accepted are {', '.join(accepted)}.")
    count = benchmark.seeds if seeds is None else seeds
    made_by = {"benchmark": benchmark.model_dump(), "versions": versions(), "device": str(device)}
    try:
        save_json(out / "run.json", made_by)
    except OSError as error:
        raise QualmsError(f"Folder {out} cannot be written to: {error.strerror}.") from None
    run.run(run.jobs(only, count))
    document = _document(run, count)
    for grid in document.grids():
        display.console.print(to_rich(grid))
    for note in document.notes:
        display.note(escape(note))
    for suffix, text in (("md", document.markdown()), ("csv", document.csv()), ("html", document.html())):
        save_text(out / f"{benchmark.name}.{suffix}", text)
        display.note(f"wrote {escape(str(out / f'{benchmark.name}.{suffix}'))}")
    return document


def _document(run: Run, seeds: int) -> Document:
    """The document with all results that exist."""
    benchmark = run.benchmark
    results = {protocol: _protocol_results(run, protocol, seeds) for protocol in benchmark.protocols}
    first = results[benchmark.protocols[0]]
    tables = {protocol.value: all_tables(one) for protocol, one in results.items()}
    cells = _CELLS + (_AS_PUBLISHED if Protocol.as_published in benchmark.protocols else "")
    command = f"qualms tables {benchmark.name} --seeds {seeds} --out DIR --cache DIR"
    if len(benchmark.protocols) == 1:
        command += f" --protocol {benchmark.protocols[0]}"
    return Document(
        benchmark.name,
        [
            benchmark.description,
            f"Made by `{command}`.",
            _TRANSFER if run.transfer else _base_accuracy(first),
            cells,
            *([_ONE_BASE] if benchmark.one_base else []),
            *_seen_noise_paragraphs(first, [table for made in tables.values() for table in made]),
        ],
        {**tables, "": [cost_table(first)]},
        reasons(first),
    )


def _protocol_results(run: Run, protocol: Protocol, seeds: int) -> ProtocolResults:
    benchmark = run.benchmark
    by_method: dict[str, dict[int, JobResult]] = {}
    for job in run.jobs((), seeds):
        result = run.saved_result(job) if job.protocol is protocol else None
        if result:
            by_method.setdefault(job.key, {})[job.seed] = result
    return ProtocolResults(
        by_method,
        benchmark.columns,
        list(run.columns),
        itself(run.recipes[0].data.id),
        benchmark.paper_id,
        benchmark.not_run,
        run.transfer,
        benchmark.other_ids,
        _seen_noise(run, by_method),
    )


def _seen_noise(run: Run, by_method: Mapping[str, Mapping[int, JobResult]]) -> dict[tuple[str, str], NoiseChains]:
    """The noisy copies that each score has seen, by method and score, without the scores that have seen none."""
    pairs = dict.fromkeys(
        (key, score)
        for key, by_seed in by_method.items()
        for result in by_seed.values()
        if result.measured
        for detections in result.measured.ood.values()
        for score in detections
    )
    return {pair: chains for pair in pairs if (chains := run.seen_noise(*pair))}


def _seen_noise_paragraphs(results: ProtocolResults, tables: Sequence[Table]) -> list[str]:
    """The explanation of the mark of seen noise, and the noise that each method has seen; empty if there is no mark."""
    if not any(cell.seen_noise for table in tables for row in table.rows for cell in row.cells):
        return []
    rows = results.rows(get_args(Group))
    methods: dict[str, dict[str, None]] = {}
    for (key, score), chains in results.seen_noise.items():
        all_scores = all(row in results.seen_noise for row in rows if row[0] == key)
        for chain in chains:
            methods.setdefault(" + ".join(chain), {})[f"`{key}`" if all_scores else f"`{key}` ({score})"] = None
    chains_of: dict[str, list[str]] = {}
    for chain, keys in methods.items():
        chains_of.setdefault(", ".join(keys), []).append(chain)
    seen = "; ".join(f"{', '.join(names)} by {keys}" for keys, names in chains_of.items())
    return [
        _SEEN_NOISE,
        *([_CORRUPTED] if CORRUPTED in results.columns else []),
        f"Noise seen (+ joins noises that are applied one after the other): {seen}.",
    ]


def _base_accuracy(results: ProtocolResults) -> str:
    rates = list(results.collect("base", lambda _, measured: measured.base_error_rate).values())
    if not rates:
        return "The base's accuracy is not available because the method `base` was not run."
    return f"Test accuracy of the base: {100 - np.mean(rates):.2f} % over {len(rates)} seed(s)."
