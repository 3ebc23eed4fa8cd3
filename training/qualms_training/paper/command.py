"""`qualms tables`: run what is missing of a benchmark, and write its tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from rich.markup import escape

from qualms_training.console import Display
from qualms_training.data.prepare import CORRUPTED, itself
from qualms_training.errors import QualmsError, RecipeError
from qualms_training.files import save_json, save_text
from qualms_training.paper.cells import MARK, SEEN, Table
from qualms_training.paper.definition import Benchmark
from qualms_training.paper.method import Chains
from qualms_training.paper.output import Document
from qualms_training.paper.protocol import Protocol
from qualms_training.paper.registry import METHODS, Group, methods_for
from qualms_training.paper.runner import Result, Run
from qualms_training.paper.tables import CORRUPTION, IMAGES, Source, all_tables, cost_table, reasons
from qualms_training.reporting.provenance import versions
from qualms_training.reporting.report import to_rich

_READING = (
    f"Means over seeds, ± their standard deviation; {MARK} marks the rows of a column that no other "
    "beats by more than the noise of seeds (paired t-test, one-sided, 5 %); in brackets the paper's figure. "
    "`fair` normalises everything alike."
)
_AS_PUBLISHED = (
    " `as-published` repeats the mismatch of the authors' evaluation, which "
    "normalises strangers otherwise than in-distribution images and noise not at all: what it adds is an artefact, "
    "as the rows of pixel statistics and the column of the set against itself show."
)
_SEEN = (
    f"{SEEN} marks figures on noise that the row has seen: it was learned from noisy copies of in-distribution images, or "
    f"stopped by them, and a noise of this column was among theirs. There {MARK} is given among the rows without {SEEN}, "
    "and to none if these are of one method."
)
_CORRUPTED = (
    f"`{CORRUPTED}` is {', '.join(CORRUPTION)} in turn. `mean` and `worst` count it whether a row has seen its noise or "
    f"not; `{IMAGES}` leaves it out."
)
_TRANSFER = (
    "The base's classes are not those of the data, so that no row is the base's own: every method here learns to predict "
    "from what the frozen base computes. The paper's base is a ResNet-50."
)
_ONE_BASE = (
    "All seeds decide one base on one division of the data: ± is the spread of a method's own draws, none for a method "
    "that draws nothing, and who is best is said of this base alone."
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
    """Run every method that has no result yet, then print and write all tables; `only` limits what is run."""
    display = display or Display()
    for key, settings in benchmark.methods.items():
        METHODS[key].build(key, settings, benchmark.name)  # a wrong setting is said before hours go into another method
    display.note(f"[bold]{benchmark.name}[/bold]: {escape(benchmark.description)}")
    run = Run(benchmark, out, cache, data_dir, device, display)
    known = [name for name, entry in methods_for(transfer=run.transfer).items() if entry.make]
    for key in only:
        if key not in known:
            raise RecipeError(f"There is no method {key!r} to run; accepted are {', '.join(known)}.")
    count = benchmark.seeds if seeds is None else seeds
    made_by = {"benchmark": benchmark.model_dump(), "versions": versions(), "device": str(device)}
    try:
        save_json(out / "run.json", made_by)
    except OSError as error:
        raise QualmsError(f"Folder {out} cannot be written to: {error.strerror}.") from None
    run.run(run.jobs(only, count))
    document = collect(run, count)
    for grid in document.grids():
        display.console.print(to_rich(grid))
    for note in document.notes:
        display.note(escape(note))
    for suffix, text in (("md", document.markdown()), ("csv", document.csv()), ("html", document.html())):
        save_text(out / f"{benchmark.name}.{suffix}", text)
        display.note(f"wrote {escape(str(out / f'{benchmark.name}.{suffix}'))}")
    return document


def collect(run: Run, seeds: int) -> Document:
    """The document of all results that are there."""
    benchmark, sources = run.benchmark, {}
    for protocol in benchmark.protocols:
        results: dict[str, dict[int, Result]] = {}
        for job in run.jobs((), seeds):
            found = run.found(job) if job.protocol is protocol else None
            if found:
                results.setdefault(job.key, {})[job.seed] = found
        sources[protocol] = Source(
            results,
            benchmark.columns,
            list(run.columns),
            itself(run.recipes[0].data.id),
            benchmark.paper_id,
            benchmark.not_run,
            run.transfer,
            benchmark.other_ids,
            _seen(run, results),
        )
    first = sources[benchmark.protocols[0]]
    tables = {protocol.value: all_tables(source) for protocol, source in sources.items()}
    reading = _READING + (_AS_PUBLISHED if Protocol.as_published in benchmark.protocols else "")
    command = f"qualms tables {benchmark.name} --seeds {seeds} --out DIR --cache DIR"
    if len(benchmark.protocols) == 1:
        command += f" --protocol {benchmark.protocols[0]}"
    return Document(
        benchmark.name,
        [
            benchmark.description,
            f"Made by `{command}`.",
            _TRANSFER if run.transfer else _base_line(first),
            reading,
            *([_ONE_BASE] if benchmark.one_base else []),
            *_seen_lines(first, [table for made in tables.values() for table in made]),
        ],
        {**tables, "": [cost_table(first)]},
        reasons(first),
    )


def _seen(run: Run, results: Mapping[str, Mapping[int, Result]]) -> dict[tuple[str, str], Chains]:
    """The noisy copies behind every method and score that has any."""
    scores = dict.fromkeys(
        (key, score)
        for key, by_seed in results.items()
        for result in by_seed.values()
        if result.measured
        for found in result.measured.ood.values()
        for score in found
    )
    return {pair: chains for pair in scores if (chains := run.seen_noise(*pair))}


def _seen_lines(source: Source, tables: Sequence[Table]) -> list[str]:
    """What the mark of seen noise means, and which noise each method has seen, if there is such a mark."""
    if not any(cell.seen for table in tables for row in table.rows for cell in row.cells):
        return []
    rows = source.rows(get_args(Group))
    methods: dict[str, dict[str, None]] = {}
    for (key, score), chains in source.seen.items():
        whole = all(row in source.seen for row in rows if row[0] == key)
        for chain in chains:
            methods.setdefault(" + ".join(chain), {})[f"`{key}`" if whole else f"`{key}` ({score})"] = None
    noises: dict[str, list[str]] = {}
    for noise, keys in methods.items():
        noises.setdefault(", ".join(keys), []).append(noise)
    said = "; ".join(f"{', '.join(found)} by {keys}" for keys, found in noises.items())
    return [
        _SEEN,
        *([_CORRUPTED] if CORRUPTED in source.columns else []),
        f"Noise seen, in turn where joined by +: {said}.",
    ]


def _base_line(source: Source) -> str:
    rates = list(source.collect("base", lambda _, measured: measured.base_error_rate).values())
    if not rates:
        return "The base's accuracy is not known: its row was not run."
    return f"Test accuracy of the base: {100 - np.mean(rates):.2f} % over {len(rates)} seed(s)."
