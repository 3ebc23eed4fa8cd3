"""The figures of a benchmark as a table and one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from qualms.bench.load import Load
from qualms.bench.machine_limit import Limit


@dataclass(frozen=True)
class Row:
    """What was measured at one concurrency; limit and plain server are None where there is no bundle to run."""

    concurrency: int
    ours: Load
    plain: Load | None
    limit: Limit | None

    @property
    def of_limit(self) -> float | None:
        """Requests/s as a share of what one core can do at most."""
        return None if self.limit is None else self.ours.requests_per_second / self.limit.images_per_second

    @property
    def of_plain(self) -> float | None:
        """Requests/s as a multiple of the plain server's."""
        return None if self.plain is None else self.ours.requests_per_second / self.plain.requests_per_second

    @property
    def p50_of_plain(self) -> float | None:
        """Median latency as a multiple of the plain server's."""
        return None if self.plain is None else self.ours.p50 / self.plain.p50


def show(rows: Sequence[Row], console: Console) -> None:
    """Print everything, and then what it comes to."""
    headers = ("concurrency", "", "requests/s", "p50 ms", "p99 ms", "errors", "of\nlimit", "of\nplain", "p50 of\nplain")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place, header in enumerate(headers):
        table.add_column(header, justify="left" if place == 1 else "right", no_wrap=True)
    for place, row in enumerate(rows):
        if place:
            table.add_row()
        if row.limit is not None:
            table.add_row(str(row.concurrency), "limit", f"{row.limit.images_per_second:,.0f}")
        ratios = [_ratio(value) for value in (row.of_limit, row.of_plain, row.p50_of_plain)]
        concurrency = "" if row.limit else str(row.concurrency)
        table.add_row(
            concurrency,
            "[bold]qualms",
            *_figures(row.ours),
            *ratios,
        )
        if row.plain is not None:
            of_limit = row.plain.requests_per_second / row.limit.images_per_second if row.limit else None
            table.add_row("", "plain", *_figures(row.plain), _ratio(of_limit))
    console.print(table)
    for sentence in _sentences(rows):
        console.print(sentence)


def _figures(load: Load) -> tuple[str, str, str, str]:
    return f"{load.requests_per_second:,.0f}", f"{1e3 * load.p50:.2f}", f"{1e3 * load.p99:.2f}", str(load.errors)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _sentences(rows: Sequence[Row]) -> list[str]:
    found = []
    most = rows[-1]
    if most.of_limit is not None and most.of_plain is not None:
        found.append(
            f"At concurrency {most.concurrency}: {most.of_limit:.2f} of the limit, "
            f"{most.of_plain:.2f} times the plain server's requests/s."
        )
    if rows[0].concurrency == 1 and rows[0].p50_of_plain is not None:
        found.append(f"At concurrency 1: p50 is {rows[0].p50_of_plain:.2f} of the plain server's.")
    return found
