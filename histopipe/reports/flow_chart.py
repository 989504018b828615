"""Participant flow as a figure and a table."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from histopipe.reports.html_page import Block, Cell, Row, Table, number
from histopipe.splits.slide_table import LABELLED, READ, SELECTED, Flow, subsets_text
from histopipe.system.files import write_atomically
from histopipe.system.output import counted

_CHARACTER, _LINE, _PAD = 6.6, 17, 10
"""Width of a character, height of a line, and padding of a box, in pixels."""
_GAP = 34
_BOLD = ' font-weight="600"'
_NOUNS = {"slides": "slide", "patients": "patient", "patches": "patch"}


def flow_blocks(flow: Flow, read: str = "Ingested") -> Iterator[Block | Table]:
    """Yield the figure, and a table with a row for each reason of exclusion and each subset.

    Yield nothing for runs of earlier versions, which have no flow. `read` is the title of what could be read.
    """
    if flow:
        yield Block("charts", [flow_chart(flow, read)])
        lines = [
            line
            for level, numbers in flow.items()
            for line in (
                (level, "found", "", numbers.total),
                *((level, "excluded", reason, count) for reason, count in numbers.excluded.items()),
                *(
                    (level, "used", subsets_text(name), count)
                    for name, count in numbers.used.items()
                ),
            )
        ]
        rows = [Row([*map(Cell, texts), number(count)]) for *texts, count in lines]
        yield Table("Participant flow", ("level", "status", "reason or subset", "n"), rows)


def flow_chart(flow: Flow, read: str) -> str:
    """Draw the flow as an SVG element, in the manner of the figures of STARD and CONSORT."""
    stages, exclusions = _stages(flow, read)
    ends = [
        [
            subsets_text(subsets).capitalize(),
            *(
                counted(numbers.used[subsets], _NOUNS[level])
                for level, numbers in flow.items()
                if subsets in numbers.used
            ),
        ]
        for subsets in dict.fromkeys(
            subsets for numbers in flow.values() for subsets in numbers.used
        )
    ]
    width = max(map(_width, stages))
    last_row = sum(map(_width, ends)) + _GAP * max(len(ends) - 1, 0)
    middle = max(width, last_row) / 2 + 1
    right, top = middle + width / 2 + _GAP, 1.0
    boxes, lines = [], []
    for stage, excluded in zip(stages, exclusions, strict=True):
        boxes.append(_box(middle - width / 2, top, width, stage))
        bottom = top + _height(stage)
        top = bottom + _GAP
        if len(excluded) > 1:  # more than the title
            top = bottom + max(_GAP, _height(excluded) + _PAD)
            branch = (bottom + top) / 2
            boxes.append(_box(right, branch - _height(excluded) / 2, _width(excluded), excluded))
            lines.append(f"M{middle:g} {branch:g}H{right:g}")
        lines.append(f"M{middle:g} {bottom:g}V{top:g}")
    x = middle - last_row / 2
    for end in ends:
        center = x + _width(end) / 2
        lines.append(f"M{middle:g} {top:g}H{center:g}V{top + _GAP / 2:g}")
        boxes.append(_box(x, top + _GAP / 2, _width(end), end))
        x += _width(end) + _GAP
    height = top + _GAP / 2 + max(map(_height, ends), default=0) + 1
    drawn = [right + _width(box) for box in exclusions if len(box) > 1]
    full = max([middle + max(width, last_row) / 2, *drawn]) + 1
    label = "; ".join(", ".join(box) for box in (*stages, *exclusions, *ends) if len(box) > 1)
    return (
        f'<svg class="chart flow" role="img" aria-label="{html.escape(label)}" viewBox="0 0 {full:g} {height:g}" '
        f'style="max-width: {full:.0f}px" xmlns="http://www.w3.org/2000/svg">'
        f'<path d="{"".join(lines)}" fill="none" stroke="var(--soft)"/>{"".join(boxes)}</svg>'
    )


_COLOURS = {"var(--ink)": "#1c2430", "var(--soft)": "#5a6675", "var(--paper)": "#ffffff"}


def write_flow(flow: Flow, path: Path, *, read: str) -> None:
    """Write the flow as an SVG file, in the colours of a light page, by one rename. `read` as for `flow_blocks`."""
    text = flow_chart(flow, read)
    for variable, colour in _COLOURS.items():
        text = text.replace(variable, colour)
    text = text.replace("<svg ", '<svg font-family="system-ui, sans-serif" ', 1)
    write_atomically(path, text)


def _stages(flow: Flow, read: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return the texts of the boxes before each step, and of what the step excludes."""
    left = {level: numbers.total for level, numbers in flow.items()}
    stages, exclusions = [], []
    for title, step in (("Found", READ), (read, LABELLED), ("Labelled", SELECTED)):
        stages.append([title, *(counted(count, _NOUNS[level]) for level, count in left.items())])
        excluded = ["Excluded"]
        for level, numbers in flow.items():
            for reason, count in numbers.excluded_at(step).items():
                excluded.append(f"{counted(count, _NOUNS[level])}: {reason}")
                left[level] -= count
        exclusions.append(excluded)
    return stages, exclusions


def _width(texts: Sequence[str]) -> float:
    return max(map(len, texts)) * _CHARACTER + 2 * _PAD


def _height(texts: Sequence[str]) -> float:
    return len(texts) * _LINE + 2 * _PAD - 4


def _box(x: float, y: float, width: float, texts: Sequence[str]) -> str:
    """Return a box with lines of text, the first one bold."""
    spans = "".join(
        f'<tspan x="{x + _PAD:g}" y="{y + _PAD + 9 + i * _LINE:g}"'
        f"{'' if i else _BOLD}>{html.escape(text)}</tspan>"
        for i, text in enumerate(texts)
    )
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{_height(texts):g}" rx="4" fill="var(--paper)" '
        f'stroke="var(--soft)"/><text font-size="12" fill="var(--ink)">{spans}</text>'
    )
