"""The regions of a slide: the outlines of one file, in the slide's frame, ordered by precedence.

Where outlines overlap, a point belongs to the class of the smallest outline that contains it: a gland inside a tumour
inside tissue is labelled gland. If two have the same size, the later one in the file takes precedence. Excluded areas
belong to no class.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import shapely
from shapely.affinity import translate

from histopipe.annotations.annotation_files import file_bytes, read_annotations
from histopipe.annotations.outline import Outline, Outlines, plain
from histopipe.annotations.rules import AnnotationRules
from histopipe.geometry import RegionL0, Size

MOST_NOTES = 10
"""Maximum number of notes on a file in a slide's record, and of properties in a note."""
_PART = 10
"""Outlines that are all inside the first tenth of the slide's width and height were probably drawn at another level."""


@dataclass(frozen=True, slots=True)
class Regions:
    """Outlines on a slide, in its level-0 pixels, and notes on what was repaired or left out.

    Outlines are in order of precedence: excluded areas first, then the smaller before the larger.
    `roi` has the outlines of the region of interest; None if there is no such setting.
    """

    outlines: tuple[Outline, ...]
    roi: tuple[Outline, ...] | None
    notes: tuple[str, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, sorted."""
        return class_names(self.outlines)


def class_names(outlines: Iterable[Outline]) -> tuple[str, ...]:
    """Return the names of the classes of outlines, sorted."""
    return tuple(sorted({outline.name for outline in outlines if outline.name is not None}))


def source_text(path: Path, rules: AnnotationRules) -> str:
    """Return the source of labels: file, CRC-32 and rules. Equal sources give equal labels. Raises as `file_bytes`."""
    rules_text = ", ".join(f"{name} {value}" for name, value in rules.to_json().items() if value)
    return f"{path.name}, crc32 {zlib.crc32(file_bytes(path)):08x}, {rules_text}"


def read_regions(path: Path, rules: AnnotationRules, *, size: Size, bounds: RegionL0) -> Regions:
    """Read the regions of a slide from a file. `size` is that of level 0; `bounds` is its scanned part.

    Raises:
        UsageError: the file cannot be used. The message contains the path.
    """
    return regions_of(read_annotations(path, rules.class_property), rules, size=size, bounds=bounds)


def regions_of(
    outlines: Outlines, rules: AnnotationRules, *, size: Size, bounds: RegionL0
) -> Regions:
    """Return the regions of a slide from outlines; see `read_regions`."""
    notes = list(outlines.notes)
    origin = outlines.frame if rules.annotation_origin == "auto" else rules.annotation_origin
    shift = (bounds.origin.x, bounds.origin.y) if origin == "bounds" else (0, 0)
    named = _named(outlines, rules.unclassified, notes)
    placed = _placed(named, shift, size, notes)
    notes = [*_frame_notes(len(named), placed, size, bounds), *notes]
    placed.reverse()  # the sort is stable: of equal sizes, the later one comes first
    ordered = tuple(sorted(placed, key=lambda o: (not o.excluded, o.area.area)))
    if rules.roi is None:
        return Regions(ordered, None, tuple(notes))
    rest = tuple(outline for outline in ordered if outline.excluded or outline.name != rules.roi)
    of_roi = tuple(outline for outline in ordered if outline.excluded or outline.name == rules.roi)
    return Regions(rest, of_roi, tuple(notes))


def _frame_notes(count: int, placed: Sequence[Outline], size: Size, bounds: RegionL0) -> list[str]:
    """Return a note if `count` outlines, of which `placed` meet the slide, seem to be in other units than its pixels."""
    advice = f"level 0 has {size} pixels; check the unit of the outlines, and the level at which they were drawn"
    if 2 * len(placed) < count:
        return [f"{count - len(placed)} of {count} outlines are outside the slide: {advice}"]
    if not placed:
        return []
    _, _, right, bottom = shapely.total_bounds([outline.area for outline in placed])
    origin, scanned = bounds.origin, bounds.size
    small = right < origin.x + scanned.width / _PART and bottom < origin.y + scanned.height / _PART
    note = f"all outlines are in the first tenth of the slide's width and height: {advice}"
    return [note] if small else []


def _named(outlines: Outlines, unclassified: str | None, notes: list[str]) -> list[Outline]:
    """Return the outlines that have a class or are excluded; the others get the class `unclassified`, if given."""
    nameless = [o for o in outlines.entries if o.name is None and not o.excluded]
    properties = " or ".join(map(plain, sorted(outlines.properties)[:MOST_NOTES]))
    if nameless and unclassified is None:
        notes.append(
            f"{len(nameless)} outlines without a class left out, such as {nameless[0].feature}; "
            "use --unclassified NAME to give them one"
            + (f", or --class-property with {properties}" if properties else "")
        )
    return [
        outline if outline.excluded else replace(outline, name=outline.name or unclassified)
        for outline in outlines.entries
        if outline.name or outline.excluded or unclassified is not None
    ]


def _placed(
    outlines: Sequence[Outline], shift: tuple[int, int], size: Size, notes: list[str]
) -> list[Outline]:
    """Return outlines in the slide's frame; leave out those outside the slide."""
    slide = shapely.box(0, 0, size.width, size.height)
    placed = []
    for outline in outlines:
        area = translate(outline.area, *shift) if any(shift) else outline.area
        if not shapely.intersects(slide, area):
            left, top, right, bottom = area.bounds
            notes.append(
                f"{outline.feature} left out: it is outside the slide of {size} pixels, "
                f"at x {left:.0f} to {right:.0f}, y {top:.0f} to {bottom:.0f}"
            )
            continue
        if not shapely.covers(slide, area):
            notes.append(f"{outline.feature} is partly outside the slide of {size} pixels")
        placed.append(replace(outline, area=area))
    return placed
