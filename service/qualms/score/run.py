"""One run of `qualms score`, top to bottom: list, score, write, summarise."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from os import fspath
from pathlib import Path

from rich.console import Console

from qualms.bundle.file import Bundle
from qualms.errors import ImageError, first_line
from qualms.files import atomic_path
from qualms.model import Model
from qualms.score.archives import ArchiveError, TarStream, open_stream
from qualms.score.executor import Executor, LocalExecutor
from qualms.score.items import Item, ScoreError, read_item
from qualms.score.listing import Listing
from qualms.score.outputs import check_format, open_writer
from qualms.score.progress import progress
from qualms.score.report.false_discovery import Rejections, check_target, choose_from_counts
from qualms.score.report.summary import Summary, SummaryResult
from qualms.score.rows import ERROR, FLAG_FDR, P_VALUE, Column, result_columns
from qualms.score.scorer import Chunk, ScoreOptions, chunk_rows, split
from qualms.score.state import Identity, State, full_disk


@dataclass(frozen=True)
class Outcome:
    """What a run found."""

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
    with full_disk(output.parent), closing(state):
        state.open()
        listing = Listing(inputs, state.folder)
        digest, total = state.write_list(listing)
        if total == 0:
            state.close()
            state.remove()
            raise ScoreError(_nothing(inputs, listing.others))
        saved_options = {**asdict(options.point), "alpha": options.alpha, "target_fdr": target_fdr, "format": kind}
        parts = state.begin(Identity(bundle.digest, saved_options, digest), restart=overwrite)
        rows = chunk_rows(bundle.manifest.input)
        resumed = sum(len(items) for items in islice(split(state.items(), rows), parts))
        if resumed:
            console.print(f"continuing after {resumed:,} of {total:,} files", highlight=False)
        if resumed < total:
            chunks = _chunks(state.items(), rows, skip=parts)
            with executor(fspath(bundle.path), options, processes) as pool, progress(total, resumed, console) as report:
                _score(state, pool, chunks, resumed, report)
        return _write(state, bundle, options, output, kind, target_fdr, html, (resumed, listing.others))


def _score(state: State, pool: Executor, chunks: Iterator[Chunk], done: int, report: Callable[[int], None]) -> None:
    sizes: deque[int] = deque()

    def counted() -> Iterator[Chunk]:
        for chunk in chunks:
            sizes.append(len(chunk.items))
            yield chunk

    for _ in state.append(pool.map(counted())):
        done += sizes.popleft()
        report(done)


def _chunks(items: Iterable[Item], rows: int, skip: int) -> Iterator[Chunk]:
    """The chunks from number `skip` on, with the bytes of members of compressed tar files."""
    with closing(_StreamMembers()) as streams:
        for number, chunk in enumerate(split(items, rows)):
            if number >= skip:
                yield Chunk(number, chunk, [streams.read(item) if item.kind == "stream" else None for item in chunk])


class _StreamMembers:
    """Reads members of compressed tar files in their order, so that each archive is decompressed once."""

    def __init__(self) -> None:
        self._stream: TarStream | None = None
        self._source = ""

    def read(self, item: Item) -> bytes | ImageError:
        """The bytes of a member, or why they cannot be read."""
        try:
            if self._stream is None or self._source != item.source or self._stream.tell() > item.offset:
                self.close()
                self._stream, self._source = open_stream(item.source), item.source
            self._stream.seek(item.offset)
            data = self._stream.read(item.size)
        except (ArchiveError, OSError) as error:
            return ImageError(f"The archive cannot be read: {first_line(error)}.")
        except Exception as error:  # the decompressors raise many kinds of errors on hostile bytes
            return ImageError(f"The archive is damaged: {first_line(error)}.")
        return data if len(data) == item.size else ImageError("The archive is damaged: it ends early.")

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None


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
            write_page(html, result, most_uncertain)
    state.close()
    state.remove()
    return Outcome(result, files, unreadable, first_error, *counts)


def _flags(p_values: Sequence[float | None], threshold: float) -> list[bool | None]:
    return [None if value is None else value <= threshold for value in p_values]


def _load(item: Item) -> bytes:
    """The bytes of an image for its thumbnail; OSError if they cannot be read any more."""
    try:
        if item.kind != "stream":
            return read_item(item)
        with closing(_StreamMembers()) as stream:
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
