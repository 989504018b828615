"""HTML page of a report: sections of blocks, rendered to one file that needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import jinja2
from markupsafe import Markup
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.reports.page_images import data_uri
from histopipe.system.files import appearing


@dataclass(frozen=True, slots=True)
class Card:
    """A number to show prominently."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that the browser decodes when it comes into view. Its id is unique in its page."""

    id: str
    caption: str
    uri: str
    width: int
    height: int

    @classmethod
    def of(cls, name: str, caption: str, pixels: NDArray[Any]) -> Picture:
        """Create a picture from (H, W, 3) uint8 pixels."""
        return cls(name, caption, data_uri(pixels), pixels.shape[1], pixels.shape[0])


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: its text, the number that it is sorted by, if any, and a CSS class."""

    text: str
    value: float | None = None
    tone: str = ""


def number(value: float | None, digits: int = 0, unit: str = "") -> Cell:
    """Return a cell with a number; empty for None and NaN."""
    if value is None or value != value:  # noqa: PLR0124 - NaN
        return Cell("", tone="n")
    return Cell(f"{value:,.{digits}f}{unit}", float(value), "n")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    number: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table, and the pictures that it opens."""

    cells: Sequence[Cell]
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True, slots=True)
class Cards:
    """Numbers side by side."""

    kind: ClassVar[str] = "cards"
    cards: Sequence[Card]


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Notes:
    """A list."""

    kind: ClassVar[str] = "notes"
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values that fold in and out."""

    kind: ClassVar[str] = "facts"
    title: str
    facts: Sequence[tuple[str, str]]
    open: bool = False


@dataclass(frozen=True, slots=True)
class Charts:
    """SVG elements, from `charts`."""

    kind: ClassVar[str] = "charts"
    charts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Gallery:
    """Pictures."""

    kind: ClassVar[str] = "gallery"
    title: str
    pictures: Sequence[Picture]


@dataclass(frozen=True, slots=True)
class Confusion:
    """A confusion matrix: one row per label."""

    kind: ClassVar[str] = "confusion"
    title: str
    classes: Sequence[str]
    rows: Sequence[tuple[str, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Table:
    """A table that can be sorted and filtered."""

    kind: ClassVar[str] = "table"
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]

    @property
    def has_pictures(self) -> bool:
        """Whether a row opens pictures."""
        return any(row.pictures for row in self.rows)


Block = Cards | Text | Notes | Facts | Charts | Gallery | Confusion | Table


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page; its id is the target of links."""

    id: str
    name: str
    blocks: Sequence[Block]


@dataclass(slots=True)
class Page:
    """A report."""

    title: str
    subtitle: str
    sections: list[Section] = field(default_factory=list)

    def add(self, name: str, *blocks: Block | None) -> None:
        """Add a section with the blocks that are not None; no section if there is none."""
        given = [block for block in blocks if block is not None]
        if given:
            self.sections.append(Section(name.lower().replace(" ", "-"), name, given))

    def pictures(self) -> Iterator[Picture]:
        """Yield all pictures."""
        for section in self.sections:
            for block in section.blocks:
                if isinstance(block, Gallery):
                    yield from block.pictures
                elif isinstance(block, Table):
                    for row in block.rows:
                        yield from row.pictures

    def write(self, path: Path) -> None:
        """Write the HTML file, by one rename."""
        with appearing(path) as part, part.open("w", encoding="utf-8") as file:
            context = {
                "page": self, "version": __version__, "css": _asset("page.css"), "js": _asset("page.js"),
                "made": datetime.now(UTC).isoformat(" ", timespec="minutes").replace("+00:00", " UTC"),
            }  # fmt: skip
            # In pieces: the pictures of a thousand slides need not be one text in memory.
            file.writelines(_template().generate(**context))


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_text), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.j2")


def _asset(name: str) -> Markup:
    return Markup(_text(name))  # noqa: S704 - our own file


def _text(name: str) -> str:
    return (resources.files("histopipe.reports") / "templates" / name).read_text(encoding="utf-8")
