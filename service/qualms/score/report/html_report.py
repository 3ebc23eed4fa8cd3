"""The page of `qualms score --html`: the summary, and the most uncertain images with the terms behind their flag.

It is one file that needs no other: styles and thumbnails are inside, there is no script, and its content security policy
forbids requests. Names of files and classes come from outside and are escaped wherever they occur.
"""

import base64
import hashlib
import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from string import Template

from qualms.bundle.scores import Direction, as_uncertainty
from qualms.files import write_bytes
from qualms.score.report.page_parts import card, class_table, count_tiles, error_table, histogram, text
from qualms.score.report.summary import SummaryResult
from qualms.score.report.thumbnails import thumbnail_uri
from qualms.score.rows import P_VALUE, Row

DEFAULT_CAPACITY = 48
MAX_CAPACITY = 1000
"""thumbnails have about 5 kB each"""


@dataclass(order=True)
class _Candidate:
    """A row in the order of its uncertainty; of equally uncertain ones, the first row counts as more uncertain."""

    certainty: tuple[float, float, int]
    """negative p-value, uncertainty, negative position"""
    row: Row = field(compare=False)
    load_bytes: Callable[[], bytes] = field(compare=False)


class MostUncertain:
    """Keeps the most uncertain of all images offered: those with the smallest p-values, then with the largest uncertainty."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY, direction: Direction = "higher") -> None:
        """`direction` is that of the flag score."""
        if not 0 <= capacity <= MAX_CAPACITY:
            raise ValueError(f"The number of images on a page must be from 0 to {MAX_CAPACITY:,}, not {capacity}.")
        self._capacity, self._direction = capacity, direction
        self._heap: list[_Candidate] = []
        self._offered = 0

    def offer(self, row: Row, load_bytes: Callable[[], bytes]) -> None:
        """Keep the row if it is among the most uncertain ones; its file is read by `load_bytes` when the page is written."""
        if row.error is not None:
            return
        self._offered += 1
        uncertainty = float(as_uncertainty(row.values["ood_value"], self._direction))
        candidate = _Candidate((-row.values[P_VALUE], uncertainty, -self._offered), row, load_bytes)
        if len(self._heap) < self._capacity:
            heapq.heappush(self._heap, candidate)
        elif self._heap and self._heap[0] < candidate:
            heapq.heapreplace(self._heap, candidate)

    def ranked(self) -> list[tuple[Row, Callable[[], bytes]]]:
        """The rows that were kept with the function that reads their file, the most uncertain first."""
        return [(one.row, one.load_bytes) for one in sorted(self._heap, reverse=True)]


def write_page(path: Path, summary: SummaryResult, most_uncertain: MostUncertain) -> None:
    """Write the page as one HTML file, atomically."""
    write_bytes(path, page(summary, most_uncertain).encode())


def page(summary: SummaryResult, most_uncertain: MostUncertain) -> str:
    """The page as HTML."""
    files = resources.files("qualms.score.report")
    style = files.joinpath("page.css").read_text(encoding="utf-8")
    ranked = most_uncertain.ranked()
    values: Mapping[str, str] = {
        "style": style,
        "style_digest": base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        "model": text(summary.model),
        "verdict": text(_verdict(summary)),
        "verdict_class": "alarm" if _is_alarming(summary) else "calm",
        "tiles": count_tiles(summary),
        "rate": text(_sentence(summary.rate_sentence)),
        "guarantee": text(summary.guarantee_text + "."),
        "discoveries": "" if summary.rejections is None else f"<p>{text(summary.rejections.sentence)}</p>",
        "histogram": histogram(summary),
        "uniformity": text("" if summary.uniformity is None else _sentence(summary.uniformity.sentence)),
        "classes": class_table(summary),
        "errors": error_table(summary),
        "shown": _shown(len(ranked), summary.images),
        "cards": "\n".join(card(row, _thumbnail(load)) for row, load in ranked),
    }
    return Template(files.joinpath("page.html").read_text(encoding="utf-8")).substitute(values)


def _is_alarming(summary: SummaryResult) -> bool:
    return summary.exceeds_bound or (summary.uniformity is not None and summary.uniformity.is_excessive)


def _verdict(summary: SummaryResult) -> str:
    """The most important finding."""
    if summary.images == 0:
        return "No image could be read."
    if summary.exceeds_bound:
        return "More images are flagged than in-distribution images explain."
    if _is_alarming(summary):
        return "There are more uncertain images than in-distribution images explain."
    return "These images are flagged no more often than in-distribution images."


def _sentence(phrase: str) -> str:
    return phrase[:1].upper() + phrase[1:] + "."


def _shown(count: int, images: int) -> str:
    if count == 0:
        return "There are no images to show."
    which = "All images" if count == images else f"The {count:,} most uncertain of {images:,} images"
    return f"{which}, by p-value. The bars are the terms whose sum is the flag score."


def _thumbnail(load_bytes: Callable[[], bytes]) -> str | None:
    """The thumbnail of a file; None if it cannot be read any more."""
    try:
        return thumbnail_uri(load_bytes())
    except OSError:
        return None
