"""The grid of a tissue microarray: its cores in a tissue mask, their rows and columns, and their names from a map.

The grid may be rotated by about 15°, bent, of blocks with wider gaps between them, and have missing and merged cores.
Names must never be wrong. They are certain only if the map fits the cores as written, and fits neither turned nor
mirrored: a map without empty cells fits in four ways, and an outer row without a core leaves open which rows are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
import shapely
from numpy.typing import NDArray

from histopipe.errors import MaskUnfit
from histopipe.tiling.mask import Components, Mask

CoreMap = NDArray[np.object_]
"""Name of each core, (R, C) str; "" where there is none by design. No row and no column is empty."""

_DEEP = 0.75
"""Depth of the middle of a core in its tissue, relative to the usual radius. Between touching cores, it is less."""
_PART, _LEAST, _HALF, _SEVERAL = 0.1, 0.35, 0.5, 1.5
"""Areas relative to a usual core: of what may be a torn core, of a core, of one that has a clear centre, of two."""
_LONG = 1.2
"""Largest standard deviation of the pixels of a core, relative to its radius. Pen marks and edges are longer."""
_REACH, _SLOPE = 2.6, 0.22
"""Largest distance of neighbours, in spacings, over lost cores and gaps; and sideways offset per spacing, if bent."""
_APART, _OFF, _FAR, _MOST_FAR = 0.36, 0.36, 0.25, 0.15
"""Distances, in spacings, from its line that a core has at most, and from its place, beyond which it is on none; and share
of the cores beyond the third distance, above which the grid is not known well enough."""
_BIN, _SPREAD, _PROMINENCE = 0.02, 0.12, 0.4
"""Of the density of cores across the lines: bin and standard deviation, in spacings, and least height above valleys."""
_PALE = 0.007
"""Optical density above that of the glass around it at which a place has a pale core."""
_LEAST_IN_LINE = 0.6
"""Share of the cores of an outer row or column that must be there, so that it is this one."""
_MARGIN = 1.25
"""Radius of an outline, relative to the usual radius of cores."""


@dataclass(frozen=True, slots=True)
class Spots:
    """Pieces of tissue that may be cores: centres (N, 2) x, y, areas (N,) relative to a usual core, and its radius."""

    centres: NDArray[np.float64]
    sizes: NDArray[np.float64]
    radius: float


@dataclass(frozen=True, slots=True)
class Core:
    """A place of a grid: its name, and an outline in level-0 pixels from the corner of the scanned area.

    Attributes:
        name: name of the core; "" if it has none.
        area: the outline, which includes no neighbour.
        state: "core", "uncertain" with the reason in `why`, or "missing".
        case: what the map has in the place of a name, if it has it for several cores: a case or patient.
        row, column: place on the grid, from 0; -1 if it is on none.
    """

    name: str
    area: Any
    state: str = "core"
    why: str = ""
    case: str = ""
    row: int = -1
    column: int = -1


def find_spots(mask: Mask) -> Spots:
    """Find the pieces of tissue in a mask, (H, W). Touching cores are separated at their narrowest place."""
    first = _radius(mask)
    side = 2 * max(1, round(first / 6)) + 1
    disk = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (side, side))
    padded = cv2.morphologyEx(np.pad(mask.view(np.uint8), side), cv2.MORPH_CLOSE, disk)
    holes = Components(padded == 0)
    tissue = padded | holes.pixels_of(holes.areas < np.pi * first**2).view(np.uint8)
    depth = np.asarray(cv2.distanceTransform(tissue, cv2.DIST_L2, 5))
    radius = _radius(tissue.view(np.bool_))
    # A piece of tissue has the deep parts of its cores, or is one part itself.
    deep = depth > _DEEP * radius
    pieces = Components(tissue.view(np.bool_))
    seeds = deep | pieces.pixels_of(pieces.means(deep) == 0)
    _, nearest = cv2.distanceTransformWithLabels(1 - seeds.view(np.uint8), cv2.DIST_L2, 5)
    labels, places = nearest[seeds], np.nonzero(seeds)
    sizes = np.bincount(nearest[tissue > 0]) / (np.pi * radius**2)
    count = np.maximum(np.bincount(labels), 1)
    means = [np.bincount(labels, at) / count for at in places]
    squares = [np.bincount(labels, at**2) / count for at in places]
    spread = [square - mean**2 for square, mean in zip(squares, means, strict=True)]
    kept = (sizes > _PART) & (np.max(spread, axis=0) < (_LONG * radius) ** 2)
    return Spots(np.stack(means[::-1], axis=1)[kept] + 0.5 - side, sizes[kept], radius)


def _radius(mask: Mask) -> float:
    """Return the usual radius of cores: of the circles that fit into the pieces of a mask.

    Raises:
        MaskUnfit: there is no tissue.
    """
    depth = np.asarray(cv2.distanceTransform(mask.view(np.uint8), cv2.DIST_L2, 5))
    count, labels = cv2.connectedComponents(mask.view(np.uint8), connectivity=8)
    radii = np.zeros(count)
    np.maximum.at(radii, labels.ravel().astype(np.int64), depth.ravel())
    radii = np.sort(radii[(radii > 1) & (radii < min(mask.shape) / 2)])
    if not len(radii):
        raise MaskUnfit("no core", found="all tissue" if mask.all() else "no tissue")
    # Weighted by area: dust may be more frequent than cores.
    weights = np.cumsum(radii**2)
    return float(radii[np.searchsorted(weights, weights[-1] / 2)])


def fit_grid(
    spots: Spots, least: int = 1
) -> tuple[NDArray[np.float64], dict[tuple[int, int], list[int]], float]:
    """Return the centres of all places by row and column, (R, C, 2) x, y, and the numbers of the spots at each place.

    Outer rows and columns have at least so many cores. The last value is the share of spots that are far from their place.

    Raises:
        MaskUnfit: they form no grid.
    """
    clear = spots.centres[(spots.sizes > _HALF) & (spots.sizes < _SEVERAL)]
    basis = np.stack([_spacing(clear, axis) for axis in (0, 1)])
    # From here on in spacings: neighbours are about 1 apart, along x or y.
    (columns, of_columns), (rows, of_rows) = (
        _lines(clear @ np.linalg.inv(basis), axis, least) for axis in (0, 1)
    )
    x, y = np.meshgrid(columns, rows)
    across, down = x, y
    for _ in range(8):  # the bend of each depends on the other
        across, down = x + np.polyval(of_columns, down), y + np.polyval(of_rows, across)
    places, at = np.stack([across, down], axis=2), dict[tuple[int, int], list[int]]()
    far = []
    for spot, centre in enumerate(spots.centres @ np.linalg.inv(basis)):
        away = np.hypot(*(places - centre).transpose(2, 0, 1))
        far += [bool(away.min() > _FAR)] * bool(spots.sizes[spot] > _HALF)
        if away.min() < _OFF:
            row, column = divmod(int(away.argmin()), len(columns))
            at.setdefault((row, column), []).append(spot)
    return places @ basis, at, float(np.mean(far))


def _spacing(points: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Return the vector from a core to its right neighbour (axis 0) or to its lower one."""
    steps = points[None] - points[:, None]
    lengths = np.hypot(*steps.transpose(2, 0, 1))
    lengths[steps[..., axis] <= 1.5 * abs(steps[..., 1 - axis])] = np.inf
    shortest = lengths.min(axis=1, initial=np.inf)
    # Of most cores, the neighbour is there; others have the next one but one.
    usual = np.quantile([*shortest[np.isfinite(shortest)], np.inf], 0.3, method="lower")
    chosen = np.isfinite(shortest) & (abs(shortest - usual) < 0.25 * usual)
    if chosen.sum() < 2:
        raise MaskUnfit("the cores form no grid", found=f"{len(points)} cores")
    return np.asarray(np.median(steps[chosen, lengths[chosen].argmin(axis=1)], axis=0))


def _lines(
    local: NDArray[np.float64], axis: int, least: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the columns (axis 0) or rows (axis 1) of cores at places (N, 2) in spacings, and their bend, a polynomial.

    Neighbours along a line are linked. All lines share one bend. Without it, lines are peaks of the density of cores.
    """
    from scipy.signal import find_peaks  # late: the workers of an ingest need no scipy
    from scipy.sparse.csgraph import connected_components

    along, across = local[:, 1 - axis], local[:, axis]
    steps, aside = along[None] - along[:, None], abs(across[None] - across[:, None])
    allowed = (steps > 0.5) & (steps < _REACH) & (aside < np.minimum(0.15 + _SLOPE * steps, 0.55))
    cost = np.where(allowed, steps + 2 * aside, np.inf)
    following, first = cost.argmin(axis=1), np.arange(len(local))
    mutual = np.isfinite(cost[first, following]) & (cost.argmin(axis=0)[following] == first)
    links = np.zeros(cost.shape, np.bool_)
    links[first[mutual], following[mutual]] = True
    count, group = connected_components(links, directed=False)
    degree = 3 if len(local) > 4 * count else 1
    powers = np.stack([along**power for power in range(degree, 0, -1)], axis=1)
    table = np.concatenate([powers, np.eye(count)[group]], axis=1)
    bend = np.append(np.linalg.lstsq(table, across, rcond=None)[0][:degree], 0.0)
    straight = across - np.polyval(bend, along)
    bins = np.arange(straight.min() - 0.5, straight.max() + 0.5, _BIN)
    density = np.exp(-(((bins[:, None] - straight) / _SPREAD) ** 2) / 2).sum(axis=1)
    peaks, measures = find_peaks(density, prominence=_PROMINENCE)
    lines = bins[peaks[measures["prominences"] > _PROMINENCE * density[peaks]]]
    # One core close to a line is none: it was moved, or is debris.
    sizes = (abs(straight[:, None] - lines) < _APART).sum(axis=0)
    apart = abs(lines[:, None] - lines[sizes > 1]).min(axis=1, initial=np.inf)
    return lines[(sizes > 1) | ((least == 1) & (apart > 2 * _APART))], bend


_WRITTEN = "as written"
_TURNS = {
    _WRITTEN: (0, False),
    "turned by 90°": (1, False),
    "turned by 180°": (2, False),
    "turned by 270°": (3, False),
    "mirrored": (0, True),
    "mirrored and turned by 90°": (1, True),
    "mirrored and turned by 180°": (2, True),
    "mirrored and turned by 270°": (3, True),
}


def name_cores(spots: Spots, names: CoreMap, *, placed: bool = False) -> tuple[list[Core], str]:
    """Return the cores with the names of a map, row by row, and why all of them are uncertain, or "".

    `placed` is whether the map is known not to be turned or mirrored. Outlines are in the pixels of the spots.

    Raises:
        MaskUnfit: they form no grid, or the map is for another number of rows or columns.
    """
    for least in (1, 2):  # a single piece in line with the others may be debris
        places, at, far = fit_grid(spots, least)
        clear = [place for place, here in at.items() if not _is_doubtful(spots.sizes[here])]
        present = np.zeros(places.shape[:2], np.bool_)
        present[tuple(np.array(clear, np.int64).reshape(-1, 2).T)] = True
        # Each with the number of cores where it has none.
        fits = [
            (int((present & (part == "")).sum()), title, part)
            for title, (quarters, mirrored) in _TURNS.items()
            for part in _parts(np.rot90(names[:, ::-1] if mirrored else names, -quarters), present)
            if not placed or title == _WRITTEN
        ]
        if fits:
            break
    else:
        shape = places.shape
        raise MaskUnfit(
            "the map does not fit the cores",
            found=f"{shape[0]} rows and {shape[1]} columns on the slide, {names.shape[0]} and {names.shape[1]} in the map",
            todo="check that it is the map of this block, with an empty cell for each place without a core",
        )
    extra, best, chosen = min(fits, key=lambda fit: (fit[0], fit[1] != _WRITTEN))
    like = dict.fromkeys(title for count, title, _ in fits if title != best and not count)
    shares = [
        (present & (chosen != "")).sum(axis) / np.maximum(1, (chosen != "").sum(axis))
        for axis in (0, 1)
    ]
    reason = ""
    if chosen.size < names.size:
        reason = "an outer row or column has no core, so which rows and columns are there is open"
    elif min(share[end] for share in shares for end in (0, -1)) < _LEAST_IN_LINE:
        reason = "most cores of an outer row or column of the map are not there"
    elif best != _WRITTEN:
        reason = f"the map fits only {best}"
    elif extra or far > _MOST_FAR:
        reason = "cores are where the map has none" if extra else "the cores are in no clear rows"
    elif like:
        reason = f"the map also fits {', '.join(like)}"
    return _named(spots, places, at, chosen, reason), reason


def _is_doubtful(sizes: NDArray[np.float64]) -> bool:
    """Return whether the spots of a place are not clearly one core: a torn one, several pieces, or two cores."""
    return bool(sizes.sum() < _LEAST or (sizes > _LEAST).sum() > 1 or sizes.max() > _SEVERAL)


def _parts(names: CoreMap, present: Mask) -> Iterator[CoreMap]:
    """Yield the parts of a map that have the shape of a grid, if it lacks at most one outer row and one outer column."""
    down, across = np.subtract(names.shape, present.shape)
    if 0 <= down <= 1 and 0 <= across <= 1:
        for top, left in np.ndindex(down + 1, across + 1):
            yield names[top:, left:][: present.shape[0], : present.shape[1]]


def _named(
    spots: Spots,
    places: NDArray[np.float64],
    at: dict[tuple[int, int], list[int]],
    names: CoreMap,
    reason: str,
) -> list[Core]:
    """Return the cores of a grid, and then pieces of the size of a core that are on no place of it."""
    cores, centres = list[Core](), list[NDArray[np.float64]]()
    for row, column in np.ndindex(names.shape):
        here, name = at.get((row, column), []), str(names[row, column])
        if here or name:
            why, state = "" if name else "the map has no core here", "core" if here else "missing"
            if here and _is_doubtful(spots.sizes[here]):
                why = why or "a torn core, or several pieces"
            why = (reason or why) if here else ""
            cores.append(
                Core(name, None, "uncertain" if why else state, why, row=row, column=column)
            )
            centres.append(
                np.average(spots.centres[here], axis=0, weights=spots.sizes[here])
                if here
                else places[row, column]
            )
    on_grid = [spot for here in at.values() for spot in here]
    for spot in np.setdiff1d(np.flatnonzero(spots.sizes > _LEAST), on_grid):
        cores.append(Core("", None, "uncertain", "it is on no place of the grid"))
        centres.append(spots.centres[spot])
    away = np.hypot(*(np.array(centres)[None] - np.array(centres)[:, None]).transpose(2, 0, 1))
    np.fill_diagonal(away, np.inf)
    radii = np.minimum(_MARGIN * spots.radius, away.min(axis=1) / 2)
    areas = shapely.buffer(shapely.points(centres), radii, quad_segs=12)
    return [replace(core, area=area) for core, area in zip(cores, areas, strict=True)]


def with_pale(cores: list[Core], density: NDArray[np.float32], reason: str) -> list[Core]:
    """Return cores without the state "missing" where the picture is a little darker than around the place.

    Cores that are only counterstained can be too pale for a tissue mask. `density` is the mean optical density, (H, W).
    `reason` is why all of them are uncertain, or "".
    """
    angles = np.linspace(0, 2 * np.pi, 48)
    circle = np.stack([np.cos(angles), np.sin(angles)])
    is_pale = []
    for core in cores:
        (x, y), (left, _, right, _) = core.area.centroid.coords[0], core.area.bounds
        inside, around = (
            np.median(
                density[
                    (circle[1] * share * (right - left) / 2 + y)
                    .astype(int)
                    .clip(0, len(density) - 1),
                    (circle[0] * share * (right - left) / 2 + x)
                    .astype(int)
                    .clip(0, density.shape[1] - 1),
                ]
            )
            for share in (np.array([[0.2], [0.4], [0.6]]), np.array([[0.95], [1.0], [1.05]]))
        )
        is_pale.append(core.state == "missing" and inside - around > _PALE)
    return [
        replace(core, state="uncertain" if reason else "core", why=reason or "pale")
        if pale
        else core
        for core, pale in zip(cores, is_pale, strict=True)
    ]
