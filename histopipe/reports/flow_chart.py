"""Participant flow as a figure and a table."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from histopipe.dataset.flow import Flow
from histopipe.reports.html_page import Block, Cell, Charts, Column, Row, Table, number

_CHARACTER, _LINE, _PAD = 6.6, 17, 10
"""Width of a character, height of a line, and padding of a box, in pixels."""
_GAP = 34
_NOUNS = {"slides": "slide", "patients": "patient", "patches": "patch"}


def flow_blocks(flow: Flow) -> Iterator[Block]:
    """Yield the figure and the table; nothing for runs of earlier versions, which have no flow."""
    if flow:
        yield Charts([flow_chart(flow)])
        yield flow_table(flow)


def flow_table(flow: Flow) -> Table:
    """Return a row for each reason of exclusion and each side."""
    rows = []
    for level, own in flow.items():
        rows.append(Row([Cell(level), Cell("found"), Cell(""), number(own.found)]))
        for reason, count in own.excluded.items():
            rows.append(Row([Cell(level), Cell("excluded"), Cell(reason), number(count)]))
        for side, count in own.used.items():
            rows.append(Row([Cell(level), Cell("used"), Cell(side), number(count)]))
    columns = (Column("level"), Column("status"), Column("reason or side"), Column("n", True))
    return Table("Participant flow", columns, rows)


def flow_chart(flow: Flow) -> str:
    """Draw the flow as an SVG element, in the manner of the figures of STARD and CONSORT."""
    found = ["Found", *(_counted(level, own.found) for level, own in flow.items())]
    excluded = ["Excluded"]
    for level, own in flow.items():
        excluded += [f"{_counted(level, count)}: {why}" for why, count in own.excluded.items()]
    used = ["Used", *(_counted(level, sum(own.used.values())) for level, own in flow.items())]
    sides = list(dict.fromkeys(side for own in flow.values() for side in own.used))
    ends = [
        [side.capitalize(), *(_counted(level, own.used[side]) for level, own in flow.items() if side in own.used)]
        for side in sides
    ]  # fmt: skip
    left = max(_width(found), _width(used))
    last_row = sum(_width(end) for end in ends) + _GAP * max(len(ends) - 1, 0)
    boxes, lines = [], []
    middle, top = max(left, last_row) / 2 + 1, 1.0
    boxes.append(_box(middle - left / 2, top, left, found))
    branch = top + _height(found) + _GAP / 2
    right = middle + left / 2 + _GAP
    width = max(last_row + 2, middle + left / 2 + 1)
    if len(excluded) > 1:
        top_excluded = max(1.0, branch - _height(excluded) / 2)
        boxes.append(_box(right, top_excluded, _width(excluded), excluded))
        lines.append(f"M{middle:g} {branch:g}H{right:g}")
        width = max(width, right + _width(excluded) + 1)
        below = max(branch + _GAP / 2, top_excluded + _height(excluded) - _height(used))
    else:
        below = branch + _GAP / 2
    lines.append(f"M{middle:g} {top + _height(found):g}V{below:g}")
    boxes.append(_box(middle - left / 2, below, left, used))
    bottom = below + _height(used)
    x = middle - last_row / 2
    for end in ends:
        center = x + _width(end) / 2
        lines.append(f"M{middle:g} {bottom:g}V{bottom + _GAP / 2:g}H{center:g}V{bottom + _GAP:g}")
        boxes.append(_box(x, bottom + _GAP, _width(end), end))
        x += _width(end) + _GAP
    height = bottom + _GAP + max(map(_height, ends), default=0) + 1
    label = "; ".join(", ".join(box) for box in (found, excluded, used, *ends))
    return (
        f'<svg class="chart flow" role="img" aria-label="{html.escape(label)}" viewBox="0 0 {width:g} {height:g}" '
        f'style="max-width: {width:.0f}px" xmlns="http://www.w3.org/2000/svg">'
        f'<path d="{"".join(lines)}" fill="none" stroke="var(--soft)"/>{"".join(boxes)}</svg>'
    )


def _counted(level: str, count: int) -> str:
    return f"{count:,} {_NOUNS[level] if count == 1 else level}"


def _width(texts: Sequence[str]) -> float:
    return max(map(len, texts)) * _CHARACTER + 2 * _PAD


def _height(texts: Sequence[str]) -> float:
    return len(texts) * _LINE + 2 * _PAD - 4


def _box(x: float, y: float, width: float, texts: Sequence[str]) -> str:
    """Return a box with lines of text, the first one bold."""
    spans = []
    for i, text in enumerate(texts):
        bold = ' font-weight="600"' if i == 0 else ""
        place = f'x="{x + _PAD:g}" y="{y + _PAD + 9 + i * _LINE:g}"'
        spans.append(f"<tspan {place}{bold}>{html.escape(text)}</tspan>")
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{_height(texts):g}" rx="4" fill="var(--paper)" '
        f'stroke="var(--soft)"/><text font-size="12" fill="var(--ink)">{"".join(spans)}</text>'
    )
