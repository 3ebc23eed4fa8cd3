"""The page of qualms score: self-contained, escaped, bounded, and the most uncertain images first."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qualms.bundle.manifest import Manifest
from qualms.score.report.html_report import MAX_CAPACITY, MostUncertain, page, write_page
from qualms.score.report.summary import Summary, SummaryResult
from qualms.score.report.thumbnails import SIDE, thumbnail_uri
from qualms.score.rows import Part, Row

HOSTILE = '"><img src=x onerror=alert(1)><script>alert(2)</script>&amp;\u202e\udcff\n${style}.png'


def png(width: int = 40, height: int = 30, **options: Any) -> bytes:
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", **options)
    return file.getvalue()


def row(path: str, p_value: float, value: float = 0.0, label: str = "bee", **values: Any) -> Row:
    return Row(
        path,
        None,
        {
            "prediction_index": 0,
            "prediction_label": label,
            "prediction_probability": 0.75,
            "ood_flag": p_value < 0.1,
            "ood_p_value": p_value,
            "ood_value": value,
            "trust_accept": None,
            "explanation_flag_terms_entropy": 1.5,
            "explanation_flag_terms_distance": 0.5,
            **values,
        },
    )


@pytest.fixture
def summary(manifest: Manifest) -> SummaryResult:
    counted, rows = Summary(manifest), [row("a.png", 0.01), row("b.png", 0.5), row("c.png", 0.9)]
    columns: dict[str, list[Any]] = {name: [one.values[name] for one in rows] + [None] for name in rows[0].values}
    errors = [None, None, None, "<script>alert(3)</script>"]
    counted.add(Part(0, {"path": ["a.png", "b.png", "c.png", "d.png"], "error": errors, **columns}))
    return counted.finish()


class Tags(HTMLParser):
    """All tags with their attributes; ValueError if they are not nested."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(html)
        if self._open:
            raise ValueError(f"not closed: {self._open}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if self._open.pop() != tag:
            raise ValueError(f"</{tag}> closes another tag")


def test_the_most_uncertain_images_come_first_whatever_their_order() -> None:
    kept = MostUncertain(3)
    for p_value, value in [(0.5, 1.0), (0.01, 5.0), (0.2, 2.0), (0.01, 9.0), (0.9, 0.0), (0.01, 9.0)]:
        kept.offer(row(f"{p_value}/{value}", p_value, value), png)
    assert [one.path for one, _ in kept.ranked()] == ["0.01/9.0", "0.01/9.0", "0.01/5.0"]


def test_of_a_score_that_is_low_for_uncertain_images_the_lowest_values_come_first() -> None:
    kept = MostUncertain(1, "lower")
    for value in (3.0, 1.0, 2.0):
        kept.offer(row(str(value), 0.01, value), png)
    assert [one.path for one, _ in kept.ranked()] == ["1.0"]


def test_only_the_files_of_shown_images_are_read_and_unreadable_rows_are_not_shown(summary: SummaryResult) -> None:
    read: list[int] = []

    def load(index: int) -> bytes:
        read.append(index)
        return png()

    kept = MostUncertain(2)
    for index in range(100):
        kept.offer(row(str(index), 1 - index / 200), lambda index=index: load(index))  # type: ignore[misc]
    kept.offer(Row("broken.png", "The file is empty.", {}), png)
    page(summary, kept)
    assert read == [99, 98]


@pytest.mark.parametrize("capacity", [-1, MAX_CAPACITY + 1])
def test_the_number_of_images_is_bounded(capacity: int) -> None:
    with pytest.raises(ValueError, match="must be from 0 to 1,000, not"):
        MostUncertain(capacity)


def test_hostile_names_are_shown_as_text(summary: SummaryResult) -> None:
    kept = MostUncertain()
    kept.offer(row(HOSTILE, 0.01, label="<b>bee</b>"), png)
    html = page(summary, kept)
    tags = Tags(html).tags
    assert "script" not in {tag for tag, _ in tags}
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on") or name == "style"]
    assert [tag for tag, _ in tags].count("img") == 1
    assert "&lt;b&gt;bee&lt;/b&gt;" in html
    assert "\u202e" not in html
    assert "${style}.png" in html
    html.encode()


def test_the_page_refers_to_nothing_outside(summary: SummaryResult, tmp_path: Path) -> None:
    kept = MostUncertain()
    kept.offer(row("a.png", 0.01), png)
    write_page(tmp_path / "page.html", summary, kept)
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert not re.search(r"https?://|url\(|@import", html)
    sources = [attributes["src"] or "" for _, attributes in Tags(html).tags if "src" in attributes]
    assert len(sources) == 1
    assert sources[0].startswith("data:image/jpeg;base64,")
    policy = next(a["content"] or "" for tag, a in Tags(html).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy


def test_a_card_has_the_terms_behind_the_flag(summary: SummaryResult) -> None:
    kept = MostUncertain()
    kept.offer(row("a.png", 0.01), png)
    html = page(summary, kept)
    assert re.search(r"<dt>entropy</dt>.*?<span>1\.50</span>.*?<dt>distance</dt>.*?<span>0\.50</span>", html)
    assert 'width="75.0"' in html
    assert ">flagged</span>" in html


def test_with_a_false_discovery_rate_the_card_shows_its_flag(summary: SummaryResult) -> None:
    kept = MostUncertain()
    kept.offer(row("a.png", 0.01, flag_fdr=False), png)
    assert ">not flagged</span>" in page(summary, kept)


@pytest.mark.parametrize("data", [b"", b"no image", png()[:60]])
def test_an_image_that_cannot_be_decoded_any_more_has_no_preview(summary: SummaryResult, data: bytes) -> None:
    kept = MostUncertain()
    kept.offer(row("a.png", 0.01), lambda: data)
    assert "no preview" in page(summary, kept)


def test_a_file_that_is_gone_has_no_preview(summary: SummaryResult, tmp_path: Path) -> None:
    kept = MostUncertain()
    kept.offer(row("a.png", 0.01), (tmp_path / "gone.png").read_bytes)
    assert "no preview" in page(summary, kept)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (28, 28), (3000, 2000), (4000, 3), (3, 4000)])
def test_thumbnails_are_bounded(width: int, height: int) -> None:
    uri = thumbnail_uri(png(width, height))
    assert uri is not None
    image = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    assert max(image.size) <= SIDE
    assert len(uri) < 60_000


def test_thumbnails_have_no_metadata() -> None:
    exif = Image.Exif()
    exif[0x010E] = "a secret place"
    uri = thumbnail_uri(png(exif=exif))
    assert uri is not None
    assert b"secret" not in base64.b64decode(uri.partition(",")[2])
