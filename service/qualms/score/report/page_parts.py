"""The parts of the page of `qualms score --html`, as HTML. Every text from outside passes through `text`."""

import html

from qualms.score.report.summary import HISTOGRAM_BINS, SummaryResult
from qualms.score.report.summary_table import class_rows, percent
from qualms.score.rows import FLAG, FLAG_FDR, LABEL, P_VALUE, Row

_TERM = "explanation_flag_terms_"
_LONGEST_TEXT = 240
_BAR_WIDTH = 100
_PLOT_WIDTH, _PLOT_HEIGHT = 400, 120


def text(value: str) -> str:
    """A text as HTML: escaped, without control and direction characters, and with the middle of very long texts left out."""
    if len(value) > _LONGEST_TEXT:
        half = _LONGEST_TEXT // 2
        value = f"{value[:half]} … {value[-half:]}"
    # Not printable are also lone surrogates, which come from file names that are not UTF-8.
    printable = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in value)
    return html.escape(printable, quote=True)


def count_tiles(summary: SummaryResult) -> str:
    """The numbers of images that were scored, flagged, accepted and not read."""
    share = f"{percent(summary.rate)}, bound {percent(summary.rate_bound)}"
    tiles = [("scored", summary.images, "images"), ("flagged", summary.flagged, share if summary.images else "")]
    if summary.rejections is not None:
        target = f"target {100 * summary.rejections.target:g} %"
        tiles.append(("flagged by FDR", summary.rejections.rejected, target))
    if summary.accepted is not None:
        tiles.append(("accepted", summary.accepted, percent(summary.accepted / max(summary.images, 1))))
    tiles.append(("not readable", summary.unreadable, f"of {summary.total:,} files"))
    return "\n".join(
        f"<div><dt>{text(name)}</dt><dd><strong>{count:,}</strong> <span>{text(note)}</span></dd></div>"
        for name, count, note in tiles
    )


def histogram(summary: SummaryResult) -> str:
    """The p-values as bars with the height that in-distribution images have on average; also as text for screen readers."""
    if not summary.images:
        return ""
    expected = summary.images / HISTOGRAM_BINS
    largest = max(*summary.histogram, expected)
    step = _PLOT_WIDTH / HISTOGRAM_BINS
    bars = []
    for position, count in enumerate(summary.histogram):
        height = _PLOT_HEIGHT * count / largest
        low, high = position / HISTOGRAM_BINS, (position + 1) / HISTOGRAM_BINS
        bars.append(
            f'<rect class="{"first" if position == 0 else "bar"}" x="{position * step + 1:.1f}" y="{_PLOT_HEIGHT - height:.2f}" '
            f'width="{step - 2:.1f}" height="{height:.2f}"><title>p from {low:.2f} to {high:.2f}: {count:,} images</title></rect>'
        )
    y = _PLOT_HEIGHT * (1 - expected / largest)
    share = percent(summary.histogram[0] / summary.images)
    usual = f"{100 / HISTOGRAM_BINS:g} %"
    label = f"Histogram of p-values: {share} are at most {1 / HISTOGRAM_BINS:g}; in-distribution images have {usual}."
    return (
        f'<svg viewBox="0 0 {_PLOT_WIDTH} {_PLOT_HEIGHT + 18}" role="img" aria-label="{text(label)}">{"".join(bars)}'
        f'<line class="expected" x1="0" x2="{_PLOT_WIDTH}" y1="{y:.2f}" y2="{y:.2f}"/>'
        f'<text x="0" y="{_PLOT_HEIGHT + 14}">0</text>'
        f'<text x="{_PLOT_WIDTH}" y="{_PLOT_HEIGHT + 14}" text-anchor="end">1</text>'
        f'<text x="{_PLOT_WIDTH / 2:g}" y="{_PLOT_HEIGHT + 14}" text-anchor="middle">p-value</text></svg>'
    )


def class_table(summary: SummaryResult) -> str:
    """The predicted classes beside their share in the calibration."""
    if not summary.classes:
        return "<p>No image was classified.</p>"
    titles, classes = class_rows(summary)
    head = "".join(f'<th scope="col">{title}</th>' for title in ("class", *titles))
    rows = [
        f'<tr><th scope="row">{text(label)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for label, cells in classes
    ]
    if summary.more_classes:
        share = percent(summary.more_images / summary.images)
        empty = "<td></td>" * (len(titles) - 2)
        rows.append(
            f'<tr><th scope="row">{summary.more_classes:,} more</th><td>{summary.more_images:,}</td><td>{share}</td>{empty}</tr>'
        )
    return (
        f'<div class="scroll" role="region" aria-label="Predicted classes" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def error_table(summary: SummaryResult) -> str:
    """Files that could not be read, by kind of error; nothing if there are none."""
    if not summary.errors:
        return ""
    rows = "".join(f"<li><strong>{count:,}</strong> {text(kind)}</li>" for kind, count in summary.errors)
    return f'<section><h2>Files that could not be read</h2><ul class="errors">{rows}</ul></section>'


def card(row: Row, thumbnail: str | None) -> str:
    """One image: thumbnail, class, p-value, flag and the terms of the flag score."""
    values, path = row.values, text(row.path)
    is_flagged = bool(values.get(FLAG_FDR, values[FLAG]))
    badge = '<span class="flag">flagged</span>' if is_flagged else '<span class="pass">not flagged</span>'
    picture = (
        '<div class="missing">no preview</div>'
        if thumbnail is None
        else f'<img src="{thumbnail}" alt="Thumbnail of {path}" loading="lazy">'
    )
    return (
        f'<li class="card"><div class="picture">{picture}</div><div class="facts"><p class="path">{path}</p>'
        f'<p>{badge} <span class="p">p = {values[P_VALUE]:.2g}</span></p>'
        f"<p>predicted: <strong>{text(str(values[LABEL]))}</strong> ({percent(float(values['prediction_probability']))})</p>"
        f"{_terms(row)}</div></li>"
    )


def _terms(row: Row) -> str:
    """The terms of the flag score as bars relative to their sum; nothing for models that do not have them."""
    terms = {name.removeprefix(_TERM): float(value) for name, value in row.values.items() if name.startswith(_TERM)}
    total = sum(max(0.0, value) for value in terms.values()) or 1.0
    if not terms:
        return ""
    items = []
    for name, value in terms.items():
        width = _BAR_WIDTH * max(0.0, value) / total
        items.append(
            f'<div><dt>{text(name)}</dt><dd><svg viewBox="0 0 {_BAR_WIDTH} 8" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect class="track" width="{_BAR_WIDTH}" height="8"/><rect class="term" width="{width:.1f}" height="8"/></svg>'
            f"<span>{value:.2f}</span></dd></div>"
        )
    return f'<dl class="terms">{"".join(items)}</dl>'
