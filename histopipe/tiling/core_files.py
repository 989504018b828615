"""Files about the cores of tissue microarrays: maps with their names, and GeoJSON that QuPath and the page can correct.

Outlines are in pixels of level 0, from the corner of the scanned area, as QuPath counts. Their class is the state of the
core: `Core`, `Uncertain core` or `Missing core`. Grids that QuPath has made ("tma_core") can be read, too.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import shapely
import shapely.geometry

from histopipe.annotations.annotation_files import (
    XML,
    feature_class,
    file_bytes,
    read_features,
    read_xml,
)
from histopipe.annotations.regions import plain, polygonal
from histopipe.errors import MaskUnfit, UsageError, reported_as
from histopipe.geometry import PointL0, RegionL0, Size
from histopipe.system.files import write_atomically
from histopipe.system.output import shown, some
from histopipe.system.table_cells import NA_VALUES, cell_number
from histopipe.system.table_files import UserTable, read_file, read_table
from histopipe.tiling.core_grid import Core, CoreMap, Spots, fit_grid, name_cores

STATES = {
    "core": ("Core", (0, 140, 70)),
    "uncertain": ("Uncertain core", (230, 130, 0)),
    "missing": ("Missing core", (140, 140, 140)),
}
"""Class of QuPath, and its colour, of each state of a core."""
_NAMES = ("core name", "core id", "core", "name", "tma core", "object id")
_X, _Y = (re.compile(rf"(?:centroid |center |centre )?{axis}\b\W*(.*?)\W*$") for axis in "xy")
_UNITS = {
    "": None,
    "px": None,
    "pixel": None,
    "pixels": None,
    "µm": 1.0,
    "um": 1.0,
    "microns": 1.0,
    "mm": 1000.0,
}
_CASES = "histopipe-cases"
"""Key in GeoJSON of the case of each core, by its name."""
_QUPATH = b"Core name\t"
"""Begin of the header of the table in QuPath's files .qptma."""
_FURTHER: Mapping[str, type] = {"why": str, "row": int, "column": int}
"""Properties of a core in GeoJSON that other tools do not have."""
_SAME_PLACES = 0.95
"""Share of the names that have a core at their place, and of the cores that have a name there, if places are of this slide."""
_CLEAR, _OVERLAP = 0.5, 0.5
"""Area of pieces that must have a name, relative to a core; and of two outlines that are of one core, in common."""


@dataclass(frozen=True, slots=True)
class CoreNames:
    """A map of cores: names by row and column, or by place.

    Attributes:
        by_row: names of a map of rows and columns; empty if there are places.
        cases: what the cells of a map contain, by name, if several cores have the same: the case or patient.
        places: centre of each core, by name.
        unit: unit of the places in µm; None for level-0 pixels from the corner of the scanned area.
    """

    by_row: CoreMap
    cases: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    unit: float | None = None


def read_core_names(path: Path) -> CoreNames:
    """Read a map: a table of rows and columns, a table with coordinates (QuPath's .qptma, or with names and x, y), or XML.

    A map may have numbers of columns and letters of rows. If cells are equal, they are cases, and names are A-1, A-2 and
    so on. XML files are those of Aperio ImageScope; the text of a region is its name.

    Raises:
        UsageError: the file cannot be read, or a name is used for two cores.
    """
    data = read_file(path)
    if path.suffix.lower() in XML:
        centres = [(o.name or "", o.area.centroid) for o in read_xml(data, "Text").entries]
        return _by_place(path, [(name, centre.x, centre.y) for name, centre in centres])
    table = read_table(path, data[max(0, data.find(_QUPATH)) :])
    name = next((name for name in _NAMES if name in table.columns), None)
    axes = [next(filter(None, map(axis.match, table.columns)), None) for axis in (_X, _Y)]
    if name is not None and all(axes):
        return _read_places(path, table, name, [axis for axis in axes if axis])
    if not table.header:
        raise UsageError(f"{path} has no name of a core", expected="a name in each cell")
    cells = np.array([table.header, *(row for _, row in table.rows)], object)
    cells[np.isin(cells, NA_VALUES)] = ""
    rows, columns = cells[1:, 0].tolist(), cells[0, 1:].tolist()
    if all(len(line) > 1 and line in _headings(len(line)) for line in (rows, columns)):
        cells = cells[1:, 1:]
    else:
        rows, columns = (_headings(count)[axis] for axis, count in enumerate(cells.shape))
    filled = cells != ""
    values = cells[filled].tolist()
    cases = {}
    if len({*values}) < len(values):
        places = np.array([[f"{row}-{column}" for column in columns] for row in rows], object)
        cells = np.where(filled, places, "")
        cases = dict(zip(cells[filled].tolist(), values, strict=True))
    _check_names(str(path), cells[filled].tolist())
    return CoreNames(cells[np.ix_(filled.any(axis=1), filled.any(axis=0))], cases)


def _headings(count: int) -> tuple[list[str], list[str]]:
    """Return names of rows, A, B, … Z, AA, and of columns, 1, 2, 3."""
    numbers = range(count)
    letters = [chr(64 + n // 26) * (n >= 26) + chr(65 + n % 26) for n in numbers]
    return letters, [str(n + 1) for n in numbers]


def _read_places(
    path: Path, table: UserTable, name: str, axes: Sequence[re.Match[str]]
) -> CoreNames:
    units = {axis[1] for axis in axes}
    if len(units) > 1 or not units <= _UNITS.keys():
        raise UsageError(
            f"{path}: units of x and y", found=" and ".join(units), expected="one of px, µm, mm"
        )
    places = []
    for line, cells in table.rows:
        row = dict(zip(table.columns, cells, strict=True))
        # QuPath's .qptma has the corner of each core, and its size.
        sides = (cell_number(row.get(side) or "0") for side in ("width", "height"))
        x, y = (
            cell_number(row[axis.string]) + side / 2 for axis, side in zip(axes, sides, strict=True)
        )
        if row.get("present", "").lower() == "false" or row.get("missing", "").lower() == "true":
            continue
        if not math.isfinite(x + y):
            raise UsageError(f"{path}, line {line}: place of {row[name]!r}", expected="numbers")
        places.append((row[name], x, y))
    return _by_place(path, places, _UNITS[axes[0][1]])


def _by_place(
    path: Path, places: Sequence[tuple[str, float, float]], unit: float | None = None
) -> CoreNames:
    _check_names(str(path), [name for name, _, _ in places])
    return CoreNames(np.empty((0, 0), object), {}, {n: (x, y) for n, x, y in places}, unit)


def _check_names(where: str, names: Sequence[str]) -> None:
    """Raise UsageError if names are no parts of slide ids, or are used twice."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    wrong = [
        name for name in names if name in ("", ".", "..") or "/" in name or shown(name) != name
    ]
    if twice or wrong:
        raise UsageError(
            f"{where}: names of cores",
            found=f"{some(twice, 3)} for several cores" if twice else some(map(repr, wrong), 3),
            expected="a different name for each core, without /",
        )


def find_names(spots: Spots, names: CoreNames, to_pixels: float) -> tuple[list[Core], str]:
    """Return the cores of spots with their names, and why all of them are uncertain, or "".

    `to_pixels` converts the unit of the places to pixels of the mask of the spots.

    Raises:
        MaskUnfit: the spots form no grid, the map is for another number of rows or columns, or gives a core two names.
    """
    if not names.places:
        return name_cores(spots, names.by_row)
    places = np.array([*names.places.values()]) * to_pixels
    block, at, _ = fit_grid(Spots(places, np.ones(len(places)), spots.radius))
    by_row = np.full(block.shape[:2], "", object)
    for place, here in at.items():
        if len(here) > 1:
            both = [[*names.places][n] for n in here]
            raise MaskUnfit("two names for one core of the map", found=" and ".join(both))
        by_row[place] = [*names.places][here[0]]
    # If not, they are those of the block, or of another section: only their rows and columns count.
    clear = spots.centres[spots.sizes > _CLEAR]
    away = np.hypot(*(places[:, None] - clear[None]).transpose(2, 0, 1)) < spots.radius
    placed = all(away.any(axis=axis).mean() >= _SAME_PLACES for axis in (0, 1))
    cores, reason = name_cores(spots, by_row, placed=placed)
    place_of = {
        name: shapely.Point(place) for name, place in zip(names.places, places, strict=True)
    }
    return [
        replace(core, state="uncertain", why="its place in the map is elsewhere")
        if placed
        and core.state == "core"
        and core.area.centroid.distance(place_of[core.name]) > spots.radius
        else core
        for core in cores
    ], reason


def core_region(core: Core) -> RegionL0:
    """Return the rectangle of the outline of a core."""
    left, top, right, bottom = (round(edge) for edge in core.area.bounds)
    return RegionL0(PointL0(left, top), Size(right - left, bottom - top))


def core_features(cores: Sequence[Core]) -> list[dict[str, Any]]:
    """Return cores as features of QuPath."""
    return [
        {
            "type": "Feature",
            "geometry": shapely.geometry.mapping(shapely.set_precision(core.area, 0.01)),
            "properties": {
                "objectType": "annotation",
                "name": core.name,
                "classification": dict(zip(("name", "color"), STATES[core.state], strict=True)),
                **{name: getattr(core, name) for name in _FURTHER},
            },
        }
        for core in cores
    ]


def write_cores(path: Path, cores: Sequence[Core]) -> None:
    """Write cores as GeoJSON by one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # By name, since names are corrected.
    cases = {core.name: core.case for core in cores if core.case}
    value = {"type": "FeatureCollection", "features": core_features(cores), _CASES: cases}
    write_atomically(path, json.dumps(value))


def read_cores(path: Path) -> list[Core]:
    """Read the cores of a slide.

    Raises:
        MaskUnfit: the file cannot be read, two places have one name, or a core has no name or two.
    """
    with reported_as(MaskUnfit, f"{path} cannot be used", (OSError, UsageError)):
        data = file_bytes(path)
        cores = [_read_core(feature) for feature in read_features(data)]
        used = [core for core in cores if core.state == "core"]
        _check_names(str(path), [c.name for c in cores if c.name or c.state == "core"])
    outlines = np.array([core.area for core in used], object)
    for first, second in shapely.STRtree(outlines).query(outlines).T.tolist():
        areas = used[first].area, used[second].area
        if first < second and shapely.intersection(*areas).area > _OVERLAP * min(
            a.area for a in areas
        ):
            both = f"{used[first].name} and {used[second].name}"
            raise MaskUnfit(f"{path}: two names for one core", found=both)
    collection = json.loads(data.decode("utf-8-sig"))
    cases = collection.get(_CASES) if isinstance(collection, dict) else None
    return [
        replace(core, case=plain(str(cases.get(core.name, ""))))
        if isinstance(cases, dict)
        else core
        for core in cores
    ]


def _read_core(feature: Mapping[str, Any]) -> Core:
    properties = props if isinstance(props := feature.get("properties"), Mapping) else {}
    name, title = plain(str(properties.get("name") or "").strip()), feature_class(feature) or "Core"
    states = {title: state for state, (title, _) in STATES.items()}
    if title not in states:
        raise UsageError(f"class of core {name!r}", found=title, expected=", ".join(states))
    state = "missing" if properties.get("isMissing") else states[title]
    wrong = (KeyError, TypeError, ValueError, AttributeError, shapely.errors.ShapelyError)
    with reported_as(UsageError, f"outline of core {name!r}", wrong):
        area = polygonal(shapely.geometry.shape(feature["geometry"]))
    if area.is_empty or not np.isfinite(area.bounds).all():
        raise UsageError(f"outline of core {name!r}", found="no area")
    further = {k: properties[k] for k, kind in _FURTHER.items() if type(properties.get(k)) is kind}
    return Core(name, area, state, **further)
