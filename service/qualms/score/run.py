"""One run of `qualms score`, top to bottom: list, score, write, summarise."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from os import fspath
from pathlib import Path

from rich.console import Console

from qualms.bundle.file import Bundle
from qualms.errors import ImageError, QualmsError
from qualms.files import atomic_path
from qualms.model import Model
from qualms.score.chunks import Chunks, StreamMembers, chunk_rows, split
from qualms.score.executor import Executor, LocalExecutor
from qualms.score.items import Item, ScoreError, read_item
from qualms.score.listing import Listing
from qualms.score.outputs import check_format, open_writer
from qualms.score.progress import progress
from qualms.score.report.false_discovery import Rejections, check_target, choose_from_counts
from qualms.score.report.summary import Summary, SummaryResult
from qualms.score.rows import ERROR, FLAG_FDR, P_VALUE, Column, result_columns
from qualms.score.scorer import ScoreOptions
from qualms.score.state import Identity, State, full_disk

PAGE_ENDINGS = (".html", ".htm")
"""of the page of --html, so that no image is overwritten by mistake"""


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    summary: SummaryResult
    files: int
    unreadable: int
    first_error: str | None
    """path and error of the first file that could not be read"""
    resumed: int
    """files that an earlier run had scored"""
    others: int
    """files in folders and archives that are not images by their endings"""


def score(
    bundle: Bundle,
    inputs: Sequence[str],
    output: Path,
    options: ScoreOptions | None = None,
    *,
    target_fdr: float | None = None,
    html: Path | None = None,
    overwrite: bool = False,
    processes: int = 1,
    executor: Callable[[str, ScoreOptions, int], Executor] = LocalExecutor,
    console: Console | None = None,
) -> Outcome:
    """Score all files of the inputs and write one row for each to the output; continue an interrupted run.

    `executor` is called with the path of the bundle, the options and the number of processes.
    """
    options, console = options or ScoreOptions(), console or Console(stderr=True)
    kind = check_format(output)
    if target_fdr is not None:
        check_target(target_fdr)
    Model(bundle, threads=1).rule(options.point)  # golden vectors and operating point, before files are listed
    if output.exists() and (not overwrite or output.is_dir()):
        raise ScoreError(f"The output {output} exists; use --overwrite to replace it, or name another file.")
    state = State(output)
    if html is not None:
        _check_page(html, replace=overwrite or state.holds_run)
    with full_disk(output.parent), closing(state):
        state.open()
        listing = Listing(inputs, state.folder)
        try:
            digest, total = state.write_list(listing)
            if total == 0:
                raise ScoreError(_nothing(inputs, listing.others))
        except QualmsError:
            state.abandon()
            raise
        saved_options = {**asdict(options.point), "alpha": options.alpha, "target_fdr": target_fdr, "format": kind}
        # Left out at their defaults, so that both engines continue each other's runs.
        saved_options |= {"threads": options.threads} if options.threads > 1 else {}
        saved_options |= {"cuda": True} if options.cuda else {}
        parts = state.begin(Identity(bundle.digest, saved_options, digest), restart=overwrite)
        rows = chunk_rows(bundle.manifest.input)
        resumed = sum(len(items) for items in islice(split(state.items(), rows), parts))
        if resumed:
            console.print(f"continuing after {resumed:,} of {total:,} files", highlight=False)
        if resumed < total:
            sizes = map(len, islice(split(state.items(), rows), parts, None))
            chunks = Chunks(state.list.absolute(), rows, skip=parts)
            useful = sum(1 for _ in islice(split(state.items(), rows), parts, parts + processes))
            with executor(fspath(bundle.path), options, useful) as pool, progress(total, resumed, console) as report:
                done = resumed
                for _, size in zip(state.append(pool.map(chunks)), sizes, strict=True):
                    done += size
                    report(done)
        return _write(state, bundle, options, output, kind, target_fdr, html, (resumed, listing.others))


def _write(
    state: State,
    bundle: Bundle,
    options: ScoreOptions,
    output: Path,
    kind: str,
    target_fdr: float | None,
    html: Path | None,
    counts: tuple[int, int],
) -> Outcome:
    """Write the output and the page from the parts, and remove the state folder."""
    columns = result_columns(bundle.manifest, options.point, alpha=options.alpha)
    summary = Summary(bundle.manifest, options.point)
    rejections: Rejections | None = None
    if target_fdr is not None:
        columns.append(Column(FLAG_FDR, "bool"))
        for part in state.parts():
            summary.add(part)
        rejections = choose_from_counts(summary.p_values, target_fdr, summary.n_calibration)
    from qualms.score.report.html_report import MostUncertain, write_page  # noqa: PLC0415

    score_name = options.point.score or bundle.manifest.operating.score
    most_uncertain = MostUncertain(direction=bundle.manifest.scores[score_name].direction)
    items = state.items() if html is not None else None
    files = unreadable = 0
    first_error = None
    with atomic_path(output) as temporary:
        with open_writer(temporary, kind, columns) as writer:
            for part in state.parts():
                if rejections is None:
                    summary.add(part)
                else:
                    part.columns[FLAG_FDR] = _flags(part.columns[P_VALUE], rejections.threshold)
                writer.write(part)
                files += len(part)
                errors = [index for index, error in enumerate(part.columns[ERROR]) if error is not None]
                unreadable += len(errors)
                if errors and first_error is None:
                    row = part[errors[0]]
                    first_error = f"{row.path}: {row.error}"
                if items is not None:
                    for row, item in zip(part, items, strict=False):
                        most_uncertain.offer(row, partial(_load, item))
        result = summary.finish(rejections)
        if html is not None:
            with full_disk(html.parent):
                write_page(html, result, most_uncertain)
    state.remove()
    return Outcome(result, files, unreadable, first_error, *counts)


def _check_page(page: Path, *, replace: bool) -> None:
    """ScoreError unless the page can be written: that would otherwise be known only when all files are scored."""
    if page.suffix.lower() not in PAGE_ENDINGS:
        raise ScoreError(f"The page {page} has the ending {page.suffix!r}; accepted are {', '.join(PAGE_ENDINGS)}.")
    if page.exists() and (not replace or page.is_dir()):
        raise ScoreError(f"The page {page} exists; use --overwrite to replace it, or name another file.")
    with full_disk(page.parent):
        page.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=page.parent).close()


def _flags(p_values: Sequence[float | None], threshold: float) -> list[bool | None]:
    return [None if value is None else value <= threshold for value in p_values]


def _load(item: Item) -> bytes:
    """The bytes of an image for its thumbnail; OSError if they cannot be read any more."""
    try:
        if item.kind != "stream":
            return read_item(item)
        with closing(StreamMembers()) as stream:
            data = stream.read(item)
    except ImageError as error:
        raise OSError(str(error)) from error
    if isinstance(data, ImageError):
        raise OSError(str(data))
    return data


def _nothing(inputs: Sequence[str], others: int) -> str:
    where = ", ".join(inputs[:3]) + (" …" if len(inputs) > 3 else "")
    seen = f" among {others:,} other files" if others else ""
    return f"There are no images in {where}{seen}; image files are known by endings such as .png and .jpg."
