"""Test the files of cores: maps as tables, exports of QuPath and Aperio, and GeoJSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import shapely

from helpers.microarrays import Array
from histopipe.errors import MaskUnfit, UsageError
from histopipe.tiling.core_files import find_names, read_core_names, read_cores, write_cores
from histopipe.tiling.core_grid import Core, find_spots

ARRAY = Array(rows=5, columns=7)
SPOTS = find_spots(ARRAY.mask())


def write(folder: Path, text: str, name: str = "map.csv") -> Path:
    """Write a map."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "rows", "cases"),
    [
        ("p1,p2,p3\n,p4,p5\n", [["p1", "p2", "p3"], ["", "p4", "p5"]], {}),
        ("p1;p2\nNA;p4\n", [["p1", "p2"], ["", "p4"]], {}),
        (",1,2\nA,x,y\nB,,z\n", [["x", "y"], ["", "z"]], {}),
        (
            ",1,2\nA,c7,c7\nB,,c9\n",
            [["A-1", "A-2"], ["", "B-2"]],
            {"A-1": "c7", "A-2": "c7", "B-2": "c9"},
        ),
        (
            "c1,c1\nc2,\n",
            [["A-1", "A-2"], ["B-1", ""]],
            {"A-1": "c1", "A-2": "c1", "B-1": "c2"},
        ),
        # Outer rows and columns without a name do not count; the first row is no heading if it does not count from 1.
        (",,\n,1,3\n,2,4\n", [["1", "3"], ["2", "4"]], {}),
    ],
)
def test_tables(tmp_path: Path, text: str, rows: list[list[str]], cases: dict[str, str]) -> None:
    names = read_core_names(write(tmp_path, text))
    assert names.by_row.tolist() == rows
    assert (dict(names.cases), dict(names.places)) == (cases, {})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (",\n,\n", "map.csv"),
        ("a/b,c\nd,e\n", "map.csv"),
        ("a,b\nc\n", "map.csv"),
        ("Name,X,Y\nA-1,1,2\nA-1,3,4\n", "map.csv"),
        ("Name,X,Y\nA-1,1,two\n", "map.csv"),
        ("Name,X furlong,Y furlong\nA-1,1,2\n", "map.csv"),
        ("<Annotations>", "map.xml"),
    ],
)
def test_unusable_maps(tmp_path: Path, text: str, name: str) -> None:
    with pytest.raises(UsageError):
        read_core_names(write(tmp_path, text, name))


def qptma() -> str:
    """Return the export of a grid by QuPath, with the corner and the size of each core in pixels."""
    rows = [
        f"{name}\t{x - 40:.0f}\t{y - 40:.0f}\t80\t80\ttrue\t"
        for name, (x, y) in ARRAY.places().items()
    ]
    header = "Core name\tX\tY\tWidth\tHeight\tPresent\tCase ID"
    lost = "B-9\t1\t1\t80\t80\tfalse\t"
    return "\n".join(["/slides/a.svs", "a.svs", "", "TMA grid width: 7", header, *rows, lost, ""])


def measurements(unit: float) -> str:
    """Return a table of measurements of QuPath, with centres in µm."""
    return "Image,Name,Centroid X µm,Centroid Y µm,Missing\n" + "".join(
        f"a.svs,{name},{x * unit:.1f},{y * unit:.1f},False\n"
        for name, (x, y) in ARRAY.places().items()
    )


def imagescope() -> str:
    """Return annotations of ImageScope: an ellipse with a text for each core."""
    regions = "".join(
        f'<Region Type="2" Text="{name}"><Vertices><Vertex X="{x - 30}" Y="{y - 30}"/>'
        f'<Vertex X="{x + 30}" Y="{y + 30}"/></Vertices></Region>'
        for name, (x, y) in ARRAY.places().items()
    )
    return (
        f'<Annotations><Annotation Id="1"><Regions>{regions}</Regions></Annotation></Annotations>'
    )


@pytest.mark.parametrize(
    ("text", "name", "unit"),
    [
        (qptma(), "a.qptma", None),
        (measurements(0.5), "a.csv", 1.0),
        (imagescope(), "a.xml", None),
    ],
)
def test_exports_with_coordinates(tmp_path: Path, text: str, name: str, unit: float | None) -> None:
    names = read_core_names(write(tmp_path, text, name))
    assert (set(names.places), names.unit) == (set(ARRAY.places()), unit)
    cores, reason = find_names(SPOTS, names, 1.0 if unit is None else 2.0)
    assert reason == ""  # also without empty cells, since the places are those of the slide
    assert {core.name for core in cores if core.state == "core"} >= {*names.places} - {"A-1"}
    for core in cores:
        if core.state == "core":
            centre = core.area.centroid.coords[0]
            assert np.hypot(*np.subtract(centre, ARRAY.places()[core.name])) < ARRAY.radius


def test_coordinates_of_another_section_count_as_rows_and_columns(tmp_path: Path) -> None:
    # Moved by one spacing, most places have a core, which is the neighbour.
    text = "Name,X,Y\n" + "".join(
        f"{name},{x + 90},{y}\n" for name, (x, y) in ARRAY.places().items()
    )
    cores, reason = find_names(SPOTS, read_core_names(write(tmp_path, text)), 1.0)
    assert reason == ""  # three cells are empty, so that the map fits in one way
    for core in cores:
        if core.state == "core":
            centre = core.area.centroid.coords[0]
            assert np.hypot(*np.subtract(centre, ARRAY.places()[core.name])) < ARRAY.radius


def test_a_map_with_two_names_for_one_core_fails(tmp_path: Path) -> None:
    (x, y), *_ = ARRAY.places().values()
    names = read_core_names(
        write(tmp_path, qptma() + f"Z-9\t{x - 35:.0f}\t{y - 35:.0f}\t80\t80\ttrue\t\n", "a.qptma")
    )
    with pytest.raises(MaskUnfit, match="two names for one core"):
        find_names(SPOTS, names, 1.0)


def core(name: str, x: float = 100.0, state: str = "core", **further: object) -> Core:
    """Return a round core."""
    return Core(name, shapely.Point(x, 100).buffer(40), state, **further)  # type: ignore[arg-type]


def test_geojson_is_read_as_written(tmp_path: Path) -> None:
    cores = [
        core("A-1", case="c1", row=0, column=0),
        core("A-2", 200, "uncertain", why="torn", row=0, column=1),
        core("", 300, "uncertain", why="the map has no core here"),
        core("A-4", 400, "missing"),
    ]
    path = tmp_path / "folder" / "tma.geojson"
    write_cores(path, cores)
    again = read_cores(path)
    assert [(c.name, c.state, c.why, c.case, c.row, c.column) for c in again] == [
        (c.name, c.state, c.why, c.case, c.row, c.column) for c in cores
    ]
    for before, after in zip(cores, again, strict=True):
        assert shapely.hausdorff_distance(before.area, after.area) < 0.02


def test_grids_of_qupath_are_read(tmp_path: Path) -> None:
    features = [
        {
            "type": "Feature",
            "geometry": {
                "type": "Polygon",
                "coordinates": [[[0, 0], [9, 0], [9, 9], [0, 9], [0, 0]]],
            },
            "properties": {"objectType": "tma_core", "name": name, "isMissing": missing},
        }
        for name, missing in (("A-1", False), ("A-2", True))
    ]
    path = write(tmp_path, json.dumps(features), "tma.geojson")
    assert [(c.name, c.state) for c in read_cores(path)] == [("A-1", "core"), ("A-2", "missing")]


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        ([core("A-1"), core("A-1", 300)], "A-1 for several cores"),
        ([core("A-1"), core("B-1", 110)], "two names for one core.*A-1 and B-1"),
        ([core("")], "different name for each core"),
        ([core("A-1"), core("A-1", 300, "uncertain")], "A-1 for several cores"),
        ([core("A-1"), core("A-1", 300, "missing")], "A-1 for several cores"),
        ([core("../x")], "without /"),
    ],
)
def test_grids_with_wrong_names_fail(tmp_path: Path, cores: list[Core], message: str) -> None:
    path = tmp_path / "tma.geojson"
    write_cores(path, cores)
    with pytest.raises(MaskUnfit, match=message):
        read_cores(path)


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        '[{"type": "Feature", "geometry": null, "properties": {"name": "A"}}]',
        '[{"type": "Feature", "geometry": {"type": "Point", "coordinates": [1, 2]}, "properties": {"name": "A"}}]',
        '[{"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [[["a", 1]]]}, "properties": {}}]',
        '[{"type": "Feature", "geometry": null, "properties": {"classification": {"name": "Tumor"}}}]',
    ],
)
def test_damaged_grids_fail(tmp_path: Path, text: str) -> None:
    with pytest.raises(MaskUnfit, match=r"tma\.geojson"):
        read_cores(write(tmp_path, text, "tma.geojson"))


@pytest.mark.parametrize("cases", [None, [1], "x", {"A-1": 7}, {"A-1": "a\nb\ud800"}])
def test_strange_cases_and_properties_are_no_crash(tmp_path: Path, cases: object) -> None:
    path = tmp_path / "tma.geojson"
    write_cores(path, [core("A-1")])
    content = json.loads(path.read_text()) | {"histopipe-cases": cases}
    path.write_text(json.dumps(content))
    (again,) = read_cores(path)
    assert again.case in ("", "7", "a\nb\ufffd", "a\\x0ab\ufffd")
    content["features"][0]["properties"] = ["no", "mapping"]
    path.write_text(json.dumps(content))
    with pytest.raises(MaskUnfit, match="different name for each core"):
        read_cores(path)
