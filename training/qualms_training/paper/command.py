"""`qualms tables`: run the jobs of a benchmark that have no result yet, and write its tables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from rich.markup import escape

from qualms_training.console import Display
from qualms_training.data.noise import CORRUPTION
from qualms_training.data.prepare import CORRUPTED, itself
from qualms_training.errors import QualmsError, RecipeError
from qualms_training.files import save_json, save_text
from qualms_training.paper.definition import Benchmark
from qualms_training.paper.document import BEST_MARK, SEEN_NOISE_MARK, Cell, Document, Summary, Table
from qualms_training.paper.evaluation_protocol import Protocol
from qualms_training.paper.kept_rows import RENAMED, KeptRows, read_kept_rows
from qualms_training.paper.method import NoiseChains
from qualms_training.paper.registry import METHODS, PAPER_SCORE_NAMES, Group, methods_for
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
    keep: Path | None = None,
    display: Display | None = None,
) -> Document:
    """Run the jobs that have no result yet, then print and write all tables.

    `only` limits the methods that are run; `keep` is the CSV file of earlier tables, for the methods without results.
    """
    display = display or Display()
    kept = read_kept_rows(keep, benchmark.name) if keep else {}
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
    document = _document(run, count, kept, keep.name if keep else "")
    for grid in document.grids():
        display.console.print(to_rich(grid))
    for note in document.notes:
        display.note(escape(note))
    for suffix, text in (("md", document.markdown()), ("csv", document.csv()), ("html", document.html())):
        save_text(out / f"{benchmark.name}.{suffix}", text)
        display.note(f"wrote {escape(str(out / f'{benchmark.name}.{suffix}'))}")
    return document


def _document(run: Run, seeds: int, kept: Mapping[str, KeptRows], kept_file: str) -> Document:
    """The document with all results that exist, and the rows of earlier tables for the other methods."""
    benchmark = run.benchmark
    results = {
        protocol: _protocol_results(run, protocol, seeds, kept.get(protocol, KeptRows()))
        for protocol in benchmark.protocols
    }
    first = results[benchmark.protocols[0]]
    tables = {protocol.value: all_tables(one) for protocol, one in results.items()}
    cells = _CELLS + (_AS_PUBLISHED if Protocol.as_published in benchmark.protocols else "")
    command = f"qualms tables {benchmark.name} --seeds {seeds} --out DIR --cache DIR"
    if len(benchmark.protocols) == 1:
        command += f" --protocol {benchmark.protocols[0]}"
    if kept:
        command += f" --keep {kept_file}"
    return Document(
        benchmark.name,
        [
            benchmark.description,
            f"Made by `{command}`.",
            _TRANSFER if run.transfer else _base_accuracy(first),
            cells,
            *_kept_paragraphs(results, kept_file),
            *([_ONE_BASE] if benchmark.one_base else []),
            *_seen_noise_paragraphs(first, [table for made in tables.values() for table in made]),
        ],
        {**tables, "": [cost_table(first)]},
        [*reasons(first), *_dropped_rows(results, tables, kept_file)],
    )


def _protocol_results(run: Run, protocol: Protocol, seeds: int, kept: KeptRows) -> ProtocolResults:
    benchmark = run.benchmark
    by_method: dict[str, dict[int, JobResult]] = {}
    for job in run.jobs((), seeds):
        result = run.saved_result(job) if job.protocol is protocol else None
        if result:
            by_method.setdefault(job.key, {})[job.seed] = result
    results = ProtocolResults(
        by_method,
        benchmark.columns,
        list(run.columns),
        itself(run.recipes[0].data.id),
        benchmark.paper_id,
        benchmark.not_run,
        run.transfer,
        benchmark.other_ids,
        kept=kept,
    )
    return replace(results, seen_noise=_seen_noise(run, results))


def _kept_paragraphs(results: Mapping[Protocol, ProtocolResults], file: str) -> list[str]:
    """The sentence on the rows of earlier tables; none if there are no such rows."""
    protocols: dict[str, list[str]] = {}
    for protocol, one in results.items():
        for entry in one.kept_methods.values():
            protocols.setdefault(entry.title, []).append(protocol)
    if not protocols:
        return []
    earlier = {new: old for old, new in RENAMED.items()}
    names = []
    for title, kept_in in protocols.items():
        remarks = [f"there: {earlier[title]}"] if title in earlier else []
        remarks += [f"only {', '.join(kept_in)}"] if len(kept_in) < len(results) else []
        names.append(f"{title} ({'; '.join(remarks)})" if remarks else title)
    return [
        f"These rows are kept from `{file}`, an earlier table, because there are no results of single seeds for them: "
        f"{'; '.join(names)}; they are not compared with other rows and have no {BEST_MARK}."
    ]


def _dropped_rows(
    results: Mapping[Protocol, ProtocolResults], tables: Mapping[str, Sequence[Table]], file: str
) -> list[str]:
    """One sentence for each method and score of the earlier tables that exists no more."""
    dropped: dict[str, None] = {}
    for protocol, one in results.items():
        present = {(row.method, row.score) for table in tables[protocol] for row in table.rows}
        for title, scores in one.kept.scores.items():
            if title not in {entry.title for entry in METHODS.values()}:
                dropped[f"Rows of {title} in `{file}`: not kept: there is no such method any more."] = None
            else:
                lost = [score for score in scores if (title, score) not in present]
                reason = "not kept: the method has new results, without this score."
                dropped |= dict.fromkeys(f"Row {title} · {score} in `{file}`: {reason}" for score in lost)
    return list(dropped)


def _seen_noise(run: Run, results: ProtocolResults) -> dict[tuple[str, str], NoiseChains]:
    """The noisy copies that each score has seen, by method and score, without the scores that have seen none."""
    return {pair: chains for pair in _all_scores(results) if (chains := run.seen_noise(*pair))}


def _all_scores(results: ProtocolResults) -> list[tuple[str, str]]:
    """Methods and scores of all rows with figures, including the rows of earlier tables."""
    names = {name: score for score, name in PAPER_SCORE_NAMES.items()}
    kept = [
        (key, names.get(name, name.replace(" ", "_")))
        for key, entry in results.kept_methods.items()
        for name in results.kept.scores[entry.title]
    ]
    return [*(row for row in results.rows(get_args(Group)) if results.measured(row[0])), *kept]


def _seen_noise_paragraphs(results: ProtocolResults, tables: Sequence[Table]) -> list[str]:
    """The explanation of the mark of seen noise, and the noise that each method has seen; empty if there is no mark."""
    if not any(cell.seen_noise for table in tables for row in table.rows for cell in row.cells):
        return []
    rows = _all_scores(results)
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
    """A sentence with the base's accuracy in this run and, if it differs, in the earlier tables."""
    by_seed: dict[int, float] = {}
    for key in results.by_method:
        by_seed |= results.collect(key, lambda _, measured: measured.base_error_rate)
    kept = _kept_error_rate(results)
    rate = Cell(by_seed, kept=kept).summary
    if rate is None:
        return "The base's accuracy is not available because no method was run."
    sentence = f"Test accuracy of the base: {100 - rate.mean:.2f} % over {rate.seeds} seed(s)"
    if kept and f"{100 - kept.mean:.2f}" != f"{100 - rate.mean:.2f}":
        sentence += f"; {100 - kept.mean:.2f} % in the rows that are kept, which are about other weights"
    return sentence + "."


def _kept_error_rate(results: ProtocolResults) -> Summary | None:
    """The base's error rate in the earlier tables."""
    rows = results.kept.tables.get(("errors of the base", ""), {}).get(METHODS["base"].title, {})
    return next((cells["error rate"].kept for cells in rows.values() if "error rate" in cells), None)
