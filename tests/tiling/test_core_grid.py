"""Test the grid of tissue microarrays: no name may be wrong, and what is open must be uncertain."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import shapely

from helpers.microarrays import Array, Places
from histopipe.errors import MaskUnfit
from histopipe.tiling.core_grid import Core, find_spots, name_cores, with_pale


def wrong_names(cores: list[Core], places: Places, radius: float) -> list[str]:
    """Return the names that are certain and on no core of this name."""
    return [
        core.name
        for core in cores
        if core.state == "core"
        and not (
            core.name in places
            and np.hypot(*np.subtract(core.area.centroid.coords[0], places[core.name])) < radius
        )
    ]


ARRAYS = [
    Array(
        rows=7 + seed % 4,
        columns=9 + seed % 7,
        radius=18.0,
        spacing=(54.0, 48.0),
        rotation=(seed % 21) - 10.0,
        bend=0.4 * np.sin(seed),
        gap=(0.0, 0.6, 1.0)[seed % 3],
        missing=0.1,
        merged=0.04,
        seed=seed,
    )
    for seed in range(1, 21)
]


@cache
def named(number: int) -> tuple[list[Core], str]:
    """Return the cores of one of the arrays."""
    return name_cores(find_spots(ARRAYS[number].mask()), ARRAYS[number].names())


@pytest.mark.parametrize("number", range(len(ARRAYS)))
def test_names_of_arrays(number: int) -> None:
    array = ARRAYS[number]
    places = array.places()
    cores, reason = named(number)
    assert not wrong_names(cores, places, array.radius)
    certain = {core.name for core in cores if core.state == "core"}
    if not reason:
        assert len(places.keys() - certain) <= 0.05 * len(places)
        missing = {core.name for core in cores if core.state == "missing"}
        lost = {str(name) for name in array.names().ravel() if name} - places.keys()
        assert len(lost - missing) <= 1
    else:  # the cores that make the corner identifiable are lost
        assert not certain
        assert "also fits" in reason or "outer row" in reason


def test_most_arrays_with_a_marker_are_certain() -> None:
    reasons = [named(number)[1] for number in range(len(ARRAYS))]
    assert sum(map(bool, reasons)) <= 2, reasons


@pytest.mark.parametrize("line", ["first row", "last row", "first column", "last column"])
@pytest.mark.parametrize("left", [0, 1], ids=["all lost", "one left"])
def test_a_lost_outer_line_makes_all_uncertain(line: str, left: int) -> None:
    array = Array(rows=6, columns=9)
    end = 0 if "first" in line else -1
    places = np.argwhere(np.ones((6, 9)))
    along, across = (0, 1) if "row" in line else (1, 0)
    edge = (0, 5)[end] if along == 0 else (0, 8)[end]
    line_places = [(p[0], p[1]) for p in places.tolist() if p[along] == edge]
    lost = [place for place in line_places if place[across] >= 2 + left]
    array = replace(array, lost=frozenset(lost), holes=((3, 3), (2, 5), *line_places[: 2 - left]))
    cores, reason = name_cores(find_spots(array.mask()), array.names())
    assert "outer row or column" in reason
    assert all(core.state != "core" for core in cores)


def test_a_map_without_empty_cells_fits_turned() -> None:
    array = Array(holes=())
    cores, reason = name_cores(find_spots(array.mask()), array.names())
    assert "also fits turned by 180°, mirrored" in reason
    assert {core.state for core in cores} == {"uncertain"}
    assert not wrong_names(
        [replace(core, state="core") for core in cores], array.places(), array.radius
    )
    cores, reason = name_cores(find_spots(array.mask()), array.names(), placed=True)
    assert (reason, {core.state for core in cores}) == ("", {"core"})


@pytest.mark.parametrize(
    ("turn", "title"),
    [
        (lambda names: np.rot90(names, 2), "turned by 180°"),
        (lambda names: np.rot90(names, 1), "turned by 90°"),
        (lambda names: names[:, ::-1], "mirrored"),
        (lambda names: names.T, "mirrored and turned by"),
    ],
)
def test_a_map_that_fits_only_turned_proposes_names(turn: object, title: str) -> None:
    array = Array()
    cores, reason = name_cores(find_spots(array.mask()), turn(array.names()))  # type: ignore[operator]
    assert reason.startswith(f"the map fits only {title}")
    assert {core.state for core in cores} == {"uncertain"}
    assert not wrong_names(
        [replace(core, state="core") for core in cores], array.places(), array.radius
    )


@pytest.mark.parametrize("shape", [(6, 11), (8, 13), (10, 11), (8, 9)])
def test_a_map_of_another_size_fails(shape: tuple[int, int]) -> None:
    other = Array(rows=shape[0], columns=shape[1])
    with pytest.raises(MaskUnfit, match="8 rows and 11 columns on the slide"):
        name_cores(find_spots(Array().mask()), other.names())


def test_a_core_where_the_map_has_none_has_no_name() -> None:
    array = Array(holes=())
    names = array.names()
    for hole in ((0, 0), (0, 1), (2, 0)):
        names[hole] = ""
    mask = Array().mask()
    x, y = array.places()["A-1"]
    rows, columns = np.ogrid[: mask.shape[0], : mask.shape[1]]
    mask |= np.hypot(columns - x, rows - y) < 25
    cores, reason = name_cores(find_spots(mask), names)
    assert reason == "cores are where the map has none"
    first = min(cores, key=lambda core: core.area.centroid.distance(shapely.Point(x, y)))
    assert (first.name, first.state) == ("", "uncertain")
    assert all(core.state != "core" for core in cores)


@pytest.mark.parametrize(
    "mask", [np.zeros((50, 50), bool), np.eye(60, dtype=bool), np.ones((50, 60), bool)]
)
def test_no_grid_is_an_error(mask: np.ndarray) -> None:
    with pytest.raises(MaskUnfit, match=r"no core|no grid"):
        name_cores(find_spots(mask), Array().names())


def test_cores_too_pale_for_a_mask_are_not_missing() -> None:
    array = Array(lost=frozenset({(4, 4), (5, 7)}))
    cores, reason = name_cores(find_spots(array.mask()), array.names())
    rng = np.random.default_rng(1)
    density = rng.normal(0.01, 0.002, (array.size.height, array.size.width)).astype(np.float32)
    x, y = Array().places()["E-5"]
    rows, columns = np.ogrid[: len(density), : density.shape[1]]
    density[np.hypot(columns - x, rows - y) < array.radius] += 0.012
    states = {core.name: (core.state, core.why) for core in with_pale(cores, density, reason)}
    assert states["E-5"] == ("core", "pale")
    assert states["F-8"] == ("missing", "")
    states = {core.name: (core.state, core.why) for core in with_pale(cores, density, "turned")}
    assert states["E-5"] == ("uncertain", "turned")


def with_disks(array: Array, places: list[tuple[float, float]]) -> np.ndarray:
    """Return the mask of an array with further pieces of the size of a core."""
    mask = array.mask()
    rows, columns = np.ogrid[: mask.shape[0], : mask.shape[1]]
    for x, y in places:
        mask |= np.hypot(columns - x, rows - y) < array.radius
    return mask


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_debris_on_the_other_side_of_a_lost_column_gives_no_wrong_name(
    share: float, seed: int
) -> None:
    array = Array(missing=0.1, seed=seed, lost=frozenset((row, 10) for row in range(8)))
    left = [p for name, p in Array(holes=(), seed=seed).places().items() if name.endswith("-1")]
    rng = np.random.default_rng(seed)
    debris = [(x - array.spacing[0], y) for x, y in left if rng.random() < share]
    cores, _ = name_cores(find_spots(with_disks(array, debris)), array.names())
    assert not wrong_names(cores, array.places(), array.radius)


def test_a_piece_in_line_with_the_cores_is_no_row() -> None:
    array = Array(seed=3)
    x, y = array.places()["E-11"]
    mask = with_disks(array, [(x + array.spacing[0], y)])
    cores, reason = name_cores(find_spots(mask), array.names())
    assert reason == ""
    assert not wrong_names(cores, array.places(), array.radius)
    assert [core.why for core in cores if not core.name] == ["it is on no place of the grid"]


@pytest.mark.parametrize("seed", range(6))
def test_strongly_bent_rows_give_no_wrong_name(seed: int) -> None:
    array = Array(seed=140 + seed, bend=0.7, missing=0.2, merged=0.05, radius=16, spacing=(48, 43))
    with suppress(MaskUnfit):  # too bent to be a grid
        cores, _ = name_cores(find_spots(array.mask()), array.names())
        assert not wrong_names(cores, array.places(), array.radius)
