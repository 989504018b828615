"""HTML page of a report: sections of blocks, rendered as one file without external resources."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from histopipe._version import __version__
from histopipe.reports.heatmap import ALPHA, coloured, pale_grey
from histopipe.reports.heatmap_values import NamedPatchValues
from histopipe.slides.thumbnail import resize_image
from histopipe.system.arrays import PixelArray
from histopipe.system.files import atomic_write


@dataclass(frozen=True, slots=True)
class Card:
    """A prominent number."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that the browser decodes when it becomes visible. Its id is unique in the page."""

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
    """A cell of a table: text, optional number for sorting, and CSS class."""

    text: str
    value: float | None = None
    tone: str = ""


def number(value: float | None, digits: int = 0, unit: str = "") -> Cell:
    """Return a cell with a number. None and NaN give an empty cell."""
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
    """A row of a table, with its pictures."""

    cells: Sequence[Cell]
    pictures: Sequence[Picture] = ()


class Block:
    """A part of a section. The template selects the markup by `kind`."""

    __slots__ = ()

    @property
    def kind(self) -> str:
        """Name of the class in lower case."""
        return type(self).__name__.lower()


@dataclass(frozen=True, slots=True)
class Cards(Block):
    """A row of cards."""

    cards: Sequence[Card]


@dataclass(frozen=True, slots=True)
class Text(Block):
    """A paragraph."""

    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Notes(Block):
    """A bulleted list."""

    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class NameValueTable(Block):
    """A collapsible table of names and values."""

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
        """Whether any row has pictures."""
        return any(row.pictures for row in self.rows)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page. Its id is the target of links."""

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
        """Add a section with the blocks that are not None. Do nothing if all are None."""
        contents = [block for block in blocks if block is not None]
        if contents:
            self.sections.append(Section(name.lower().replace(" ", "-"), name, contents))

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
        """Write the HTML file by one rename."""
        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        css, js = (Markup(_asset(name)) for name in ("page.css", "page.js"))  # noqa: S704 - from this package
        made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        pieces = environment.from_string(_asset("page.html.j2")).generate(
            page=self, version=__version__, css=css, js=js, made=made
        )
        with atomic_write(path) as part, part.open("w", encoding="utf-8") as file:
            # In pieces, so that the pictures of a thousand slides are not in memory as one string.
            file.writelines(pieces)


def _asset(name: str) -> str:
    return (resources.files("histopipe.reports") / "templates" / name).read_text(encoding="utf-8")


_GRID, _OUTSIDE = (20, 110, 60), 0.45
SIDE = 420
"""Longer side of a slide's image, in pixels."""


def data_uri(pixels: PixelArray) -> str:
    """Return an image as a data URI."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(
        buffer, "WEBP", quality=72, method=2
    )  # half the time of method 4, 2 % larger
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def plan_image(
    thumbnail: PixelArray,
    mask: PixelArray | None,
    corners: NDArray[np.floating],
    side: float,
    bounds: Sequence[float],
) -> PixelArray:
    """Draw the outlines of patches on a thumbnail of the bounds. Areas with 0 in the (H, W) mask are pale.

    `corners` (N, 2) are the top left corners of patches, `bounds` x, y, width and height; all in level-0 pixels.
    """
    image = resize_image(thumbnail, SIDE)
    height, width = image.shape[:2]
    if mask is not None:
        tissue = np.asarray(Image.fromarray(mask).resize((width, height), Image.Resampling.NEAREST))
        pale = (255 - _OUTSIDE * (255 - image.astype(np.float32))).astype(np.uint8)
        image = np.where((tissue > 0)[..., None], image, pale)
    result = Image.fromarray(image)
    canvas = ImageDraw.Draw(result)
    left, top, full_width, full_height = bounds
    scale, largest = (width / full_width, height / full_height), (width - 1, height - 1)
    first = (corners - (left, top)) * scale
    ends = [
        np.clip(np.rint(points), 0, largest) for points in (first, first + np.multiply(side, scale))
    ]
    for box in np.hstack(ends).tolist():
        canvas.rectangle(box, outline=_GRID)
    return np.asarray(result)


def heatmap_image(patches: NamedPatchValues, background: PixelArray | None) -> PixelArray:
    """Draw a heatmap over an image of the slide's bounds in grey, without axes."""
    _, _, width, height = patches.bounds
    if background is None:
        scale = SIDE / max(width, height)
        shape = max(1, round(height * scale)), max(1, round(width * scale)), 3
        background = np.full(shape, 235, np.uint8)
    image = pale_grey(resize_image(background, SIDE))
    raster = patches.raster(max(width / image.shape[1], height / image.shape[0]))
    size = image.shape[1], image.shape[0]
    values = np.asarray(Image.fromarray(raster).resize(size, Image.Resampling.NEAREST))
    mixed = (1 - ALPHA) * image + ALPHA * coloured(values)
    return np.where(np.isnan(values)[..., None], image, mixed).astype(np.uint8)


def strip(patches: Sequence[PixelArray], side: int = 84, gap: int = 4) -> PixelArray:
    """Return patches as one row."""
    row = np.full((side, max(1, len(patches) * (side + gap) - gap), 3), 255, np.uint8)
    for i, patch in enumerate(patches):
        small = np.asarray(
            Image.fromarray(patch).resize((side, side), Image.Resampling.BICUBIC, reducing_gap=2.0)
        )
        row[:, i * (side + gap) : i * (side + gap) + side] = small
    return row
