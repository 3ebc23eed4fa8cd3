"""The summary of a run as a table for the terminal."""

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from qualms.score.report.summary import SummaryResult

_BARS = " ▁▂▃▄▅▆▇█"


def summary_table(result: "SummaryResult") -> Table:
    """The flags, the p-values and the errors, then the classes."""
    grid = Table.grid(padding=(0, 0, 1, 0))
    grid.add_row(_overview(result))
    if result.classes:
        grid.add_row(_classes(result))
    return grid


def _overview(result: "SummaryResult") -> Table:
    table = Table(title=Text(f"Summary of {result.model}"), title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def add(name: str, value: RenderableType) -> None:
        table.add_row(name, value)

    unreadable = f", {result.unreadable:,} could not be read" if result.unreadable else ""
    add("images", Text(f"{result.images:,} scored{unreadable}", style="yellow" if result.unreadable else ""))
    for kind, count in result.errors:
        add("", Text(f"{count:,} × {printable(kind)}", style="yellow"))
    rate = f"{result.flagged:,} ({percent(result.rate)}), " if result.images else ""
    add("flagged", Text(f"{rate}{result.rate_sentence}", style="red" if result.exceeds_bound else ""))
    add("guarantee", Text(result.guarantee_text))
    if result.rejections is not None:
        add("false discovery rate", Text(result.rejections.sentence))
    if result.accepted is not None and result.images:
        add("accepted", Text(f"{result.accepted:,} ({percent(result.accepted / result.images)})"))
    if result.uniformity is not None:
        add("p-values, 0 to 1", Text(spark(result.histogram)))
        add("", Text(result.uniformity.sentence, style="red" if result.uniformity.is_excessive else ""))
    return table


def _classes(result: "SummaryResult") -> Table:
    table = Table(title="Predicted classes", title_justify="left")
    titles, rows = class_rows(result)
    table.add_column("class", overflow="fold")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for label, cells in rows:
        table.add_row(Text(printable(label)), *cells)
    if result.more_classes:
        share = percent(result.more_images / result.images)
        table.add_row(f"{result.more_classes:,} more", f"{result.more_images:,}", share)
    return table


def class_rows(result: "SummaryResult") -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The titles of the columns of numbers, and for each predicted class its label and numbers."""
    titles = ["images", "share", "calibration", "flagged"]
    if result.accepted is not None:
        titles.append("accepted")
    rows = []
    for one in result.classes:
        shares = [one.share, one.calibration_share, one.flagged / one.images]
        if result.accepted is not None:
            shares.append(one.accepted / one.images)
        rows.append((one.label, [f"{one.images:,}", *map(percent, shares)]))
    return titles, rows


def percent(share: float) -> str:
    """A share in percent with about three digits."""
    return f"{100 * share:.2f} %" if share < 0.1 else f"{100 * share:.1f} %"


def spark(histogram: tuple[int, ...]) -> str:
    """Bars relative to the largest; a bin with an image has at least the lowest bar."""
    largest = max(histogram, default=0)
    steps = len(_BARS) - 1
    return "".join(_BARS[0 if not count else max(1, round(steps * count / largest))] for count in histogram)


def printable(text: str) -> str:
    """The text without control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else "�" for character in text)
