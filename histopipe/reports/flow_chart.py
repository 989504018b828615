"""Participant flow as a figure and a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from histopipe.reports.html_page import TEMPLATES, Block, Cell, Table, number
from histopipe.splits.slide_table import LABELLED, READ, SELECTED, Flow, subsets_text
from histopipe.system.files import write_atomically
from histopipe.system.output import counted

_CHARACTER, _LINE, _PAD = 6.6, 17, 10
"""Width of a character, height of a line, and padding of a box, in pixels."""
_GAP = 34
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
        yield Table(
            "Participant flow",
            ("level", "status", "reason or subset", "n"),
            [[*map(Cell, texts), number(count)] for *texts, count in lines],
        )


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
    width, width_of_excluded = _width([*stages, *ends]), _width(exclusions)
    middle = (max(len(ends), 1) * (width + _GAP) - _GAP) / 2 + 1
    boxes: list[tuple[float, float, float, list[str]]] = []
    lines, top = [], 1.0
    for stage, excluded in zip(stages, exclusions, strict=True):
        boxes.append((middle - width / 2, top, width, stage))
        bottom = top + _height(stage)
        top = bottom + _GAP
        if len(excluded) > 1:  # more than the title
            top = max(top, bottom + _height(excluded) + _PAD)
            branch, right = (bottom + top) / 2, middle + width / 2 + _GAP
            boxes.append((right, branch - _height(excluded) / 2, width_of_excluded, excluded))
            lines.append(f"M{middle:g} {branch:g}H{right:g}")
        lines.append(f"M{middle:g} {bottom:g}V{top:g}")
    for number_of_end, end in enumerate(ends):
        left = 1 + number_of_end * (width + _GAP)
        boxes.append((left, top + _GAP / 2, width, end))
        lines.append(f"M{middle:g} {top:g}H{left + width / 2:g}v{_GAP / 2:g}")
    return TEMPLATES.get_template("flow.svg.j2").render(
        boxes=[(x, y, wide, _height(texts), texts) for x, y, wide, texts in boxes],
        lines="".join(lines),
        width=max(x + wide for x, _, wide, _ in boxes) + 1,
        height=max(y + _height(texts) for _, y, _, texts in boxes) + 1,
        line=_LINE,
        pad=_PAD,
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


def _width(boxes: Iterable[Sequence[str]]) -> float:
    return max(len(text) for texts in boxes for text in texts) * _CHARACTER + 2 * _PAD


def _height(texts: Sequence[str]) -> float:
    return len(texts) * _LINE + 2 * _PAD - 4
