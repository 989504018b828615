"""HTML page of a report: sections of blocks, rendered to one file that needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

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


class Block:
    """A part of a section; the template chooses by its kind."""

    __slots__ = ()

    @property
    def kind(self) -> str:
        """Name of the class in lower case."""
        return type(self).__name__.lower()


@dataclass(frozen=True, slots=True)
class Cards(Block):
    """Numbers side by side."""

    cards: Sequence[Card]


@dataclass(frozen=True, slots=True)
class Text(Block):
    """A paragraph."""

    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Notes(Block):
    """A list."""

    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class Facts(Block):
    """Names and values that fold in and out."""

    title: str
    facts: Sequence[tuple[str, str]]
    open: bool = False


@dataclass(frozen=True, slots=True)
class Charts(Block):
    """SVG elements, from `charts`."""

    charts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Gallery(Block):
    """Pictures."""

    title: str
    pictures: Sequence[Picture]


@dataclass(frozen=True, slots=True)
class Confusion(Block):
    """A confusion matrix: one row per label."""

    title: str
    classes: Sequence[str]
    rows: Sequence[tuple[str, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Table(Block):
    """A table that can be sorted and filtered."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]

    @property
    def has_pictures(self) -> bool:
        """Whether a row opens pictures."""
        return any(row.pictures for row in self.rows)


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
        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        css, js = (Markup(_asset(name)) for name in ("page.css", "page.js"))  # noqa: S704 - our own
        made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        pieces = environment.from_string(_asset("page.html.j2")).generate(
            page=self, version=__version__, css=css, js=js, made=made
        )
        with appearing(path) as part, part.open("w", encoding="utf-8") as file:
            # In pieces: the pictures of a thousand slides need not be one text in memory.
            file.writelines(pieces)


def _asset(name: str) -> str:
    return (resources.files("histopipe.reports") / "templates" / name).read_text(encoding="utf-8")
