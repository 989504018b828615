"""Annotations of other tools and the labels from them: comparison with slow reference code, and untrusted files."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import unicodedata
from functools import partial
from pathlib import Path
from typing import Any

import defusedxml.ElementTree
import numpy as np
import pytest
import shapely
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from helpers.commands import RunCommand, run_python, succeed
from helpers.examples import examples
from helpers.slide_variants import write_slide
from helpers.slides import make_slides
from histopipe.annotations.annotation_files import (
    find_annotations,
    read_annotations,
    read_regions,
)
from histopipe.annotations.regions import Outline, Outlines, Regions, class_names, regions_of
from histopipe.annotations.rules import AnnotationRules
from histopipe.errors import UsageError
from histopipe.geometry import PointL0, RegionL0, Size
from histopipe.measure.patch_labels import PatchLabels, annotation_notes, label_patches
from histopipe.slides.slide_files import SlideNames
from histopipe.store.store import Store

SIZE = Size(2220, 2967)
WHOLE = RegionL0(PointL0(0, 0), SIZE)
Point = tuple[float, float]


pytestmark = pytest.mark.usefixtures("inline_workers")


def shoelace(ring: list[list[float]]) -> float:
    """Return the area within a ring that does not cross itself."""
    following = ring[1:] + ring[:1]
    return abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in zip(ring, following, strict=True))) / 2


def write_geojson(path: Path, *features: tuple[str | None, list[list[Point]]]) -> Path:
    value = {
        "type": "FeatureCollection",
        "features": [
            {
                "type": "Feature",
                "id": f"f{i}",
                "geometry": {"type": "Polygon", "coordinates": rings},
                "properties": {"classification": {"name": name}} if name else {},
            }
            for i, (name, rings) in enumerate(features)
        ],
    }
    path.write_text(json.dumps(value))
    return path


def square(left: float, top: float, side: float) -> list[Point]:
    return [(left, top), (left + side, top), (left + side, top + side), (left, top + side)]


def regions_in(path: Path, **rules: Any) -> Regions:
    return read_regions(path, AnnotationRules(**rules), size=SIZE, bounds=WHOLE)


# Real files


@pytest.mark.parametrize(
    "name", ["multipolygon-with-holes", "qupath-unclassified", "CMU-1-Small-Region"]
)
def test_areas_of_geojson_equal_areas_of_rings(data: Path, name: str) -> None:
    path = data / "annotations" / f"{name}.geojson"
    value = json.loads(path.read_text())
    features = value.get("features", [value])
    for outline, feature in zip(read_annotations(path).entries, features, strict=True):
        shell, *holes = feature["geometry"]["coordinates"]
        assert outline.area.area == pytest.approx(
            shoelace(shell) - sum(map(shoelace, holes)), rel=1e-9
        )


def test_areas_of_imagescope_equal_areas_in_its_file(data: Path) -> None:
    path = data / "annotations" / "imagescope-TCGA-EJ-5518.xml"
    outlines = read_annotations(path)
    written = [float(r.attrib["Area"]) for r in defusedxml.ElementTree.parse(path).iter("Region")]
    assert [outline.name for outline in outlines.entries] == ["CaP", "CaP", None, None]
    for outline, area in zip(outlines.entries, written, strict=True):
        repaired = any(note.startswith(f"{outline.feature} repaired") for note in outlines.notes)
        # For a line that crosses itself, ImageScope adds and subtracts the areas of its loops.
        assert outline.area.area == pytest.approx(area, rel=2e-3 if repaired else 1e-6)
        assert outline.area.is_valid


def test_unclassified_outlines_get_class_of_option(tmp_path: Path) -> None:
    path = write_geojson(tmp_path / "a.geojson", *[(None, [square(900, 900, 9)])] * 3)
    without = regions_in(path)
    assert class_names(without.outlines) == ()
    assert "3 outlines without a class left out" in without.notes[0]
    named = regions_in(path, unclassified="gland")
    assert (class_names(named.outlines), named.notes) == (("gland",), ())


def test_geojson_and_asap_give_equal_labels_except_at_hole(data: Path) -> None:
    x, y = (grid.ravel() for grid in np.meshgrid(np.arange(0, 2150, 32), np.arange(0, 2900, 32)))
    files = [
        data / "annotations" / f"CMU-1-Small-Region.{kind}" for kind in ("geojson", "asap.xml")
    ]
    ours, theirs = (
        label_patches(regions_in(path).outlines, x, y, 64, threshold=0.5) for path in files
    )
    rings = json.loads(files[0].read_text())["features"][0]["geometry"]["coordinates"]
    near = shapely.intersects(shapely.box(x, y, x + 64, y + 64), shapely.Polygon(rings[1]))
    assert ours.classes == theirs.classes == ("Dermis", "Epidermis")
    assert np.array_equal(ours.label[~near], theirs.label[~near])
    assert np.allclose(ours.covered[~near], theirs.covered[~near], atol=1e-6)
    assert (theirs.covered[near] >= ours.covered[near] - 1e-6).all()
    assert not np.array_equal(ours.label[near], theirs.label[near])
    assert min(np.bincount(ours.label + 1)) > 100


# Comparison with slow reference code

FINE = 16
"""Number of sample points along a side of a square."""


@st.composite
def stars(draw: st.DrawFn) -> list[Point]:
    """Rings that do not cross themselves, with random corners."""
    count = draw(st.integers(3, 12))
    x, y = draw(st.floats(0, 64)), draw(st.floats(0, 64))
    radii = draw(st.lists(st.floats(2, 40), min_size=count, max_size=count))
    turns = [2 * math.pi * i / count for i in range(count)]
    return [(x + r * math.cos(t), y + r * math.sin(t)) for r, t in zip(radii, turns, strict=True)]


DRAWN = st.tuples(st.sampled_from(["a", "b", "c", "excluded"]), stars())


def rasterised(
    drawn: list[tuple[str, list[Point]]], x: NDArray[np.int64], y: NDArray[np.int64], side: int
) -> dict[str, NDArray[np.float64]]:
    """Return the share of each square by class: outlines are rasterized, the smallest one last."""
    offsets = (np.arange(FINE) + 0.5) * side / FINE
    px = x[:, None, None] + offsets[None, None, :] + np.zeros((1, FINE, 1))
    py = y[:, None, None] + offsets[None, :, None] + np.zeros((1, 1, FINE))
    owner = np.full(px.shape, "", object)
    order = sorted(range(len(drawn)), key=lambda i: (-shoelace(list(map(list, drawn[i][1]))), i))
    for i in order:
        owner[shapely.contains_xy(shapely.Polygon(drawn[i][1]), px, py)] = drawn[i][0]
    for name, ring in drawn:
        if name == "excluded":
            owner[shapely.contains_xy(shapely.Polygon(ring), px, py)] = "excluded"
    return {name: (owner == name).mean(axis=(1, 2)) for name in "abc"}


def labels_of(
    *drawn: tuple[str | None, list[Point]],
    x: Any = (0, 100, 200),
    y: Any = (0, 0, 0),
    side: int = 100,
    threshold: float = 0.5,
    **rules: Any,
) -> tuple[Regions, PatchLabels]:
    outlines = Outlines("slide")
    for i, (name, ring) in enumerate(drawn):
        excluded = name == "excluded"
        outlines.add(f"f{i}", None if excluded else name, [[ring]], excluded=excluded)
    regions = regions_of(outlines, AnnotationRules(**rules), size=SIZE, bounds=WHOLE)
    corners = np.array(x, np.int32), np.array(y, np.int32)
    return regions, label_patches(regions.outlines, *corners, side, threshold=threshold)


@given(st.lists(DRAWN, min_size=1, max_size=7), st.sampled_from([7, 16]), st.floats(0.1, 1))
@examples(60)
def test_labels_agree_with_rasterization(
    drawn: list[tuple[str, list[Point]]], side: int, threshold: float
) -> None:
    areas = sorted(shoelace(list(map(list, ring))) for _, ring in drawn)
    assume(all(b - a > 1e-6 for a, b in itertools.pairwise(areas)))
    x, y = (
        g.ravel().astype(np.int64) for g in np.meshgrid(range(-9, 70, side), range(0, 70, side))
    )
    _, labels = labels_of(*drawn, x=x, y=y, side=side, threshold=threshold)
    shares = rasterised(drawn, x, y, side)
    best = np.max(list(shares.values()), axis=0)
    # Rasterization has an error of up to about one point along each line that crosses a square.
    slack = 3.0 * len(drawn) / FINE
    assert np.abs(labels.covered - best).max() < slack
    assert np.abs(labels.covered - best).mean() < slack / 4
    for i in range(len(x)):
        ranked = sorted(((shares[n][i], n) for n in "abc"), reverse=True)
        # Only of clear shares.
        if ranked[0][0] - ranked[1][0] > slack and abs(ranked[0][0] - threshold) > slack:
            given_class = labels.classes[labels.label[i]] if labels.label[i] >= 0 else None
            assert given_class == (ranked[0][1] if ranked[0][0] >= threshold else None)


@pytest.mark.parametrize(
    ("drawn", "expected", "covered"),
    [
        (
            [
                ("tissue", square(0, 0, 300)),
                ("gland", square(100, 0, 100)),
                ("excluded", square(200, 0, 100)),
            ],
            ["tissue", "gland", None],
            [1, 1, 0],
        ),
        # Of outlines of equal size, the later one in the file takes precedence.
        ([("a", square(0, 0, 100)), ("b", square(0, 0, 100))], ["b", None, None], [1, 0, 0]),
        # No area is counted twice.
        ([("a", square(0, 0, 60)), ("a", square(0, 0, 69))], [None] * 3, [0.4761, 0, 0]),
        # If two classes cover the same share, the first by name is used.
        (
            [
                ("b", [(0, 0), (100, 0), (100, 50), (0, 50)]),
                ("a", [(0, 50), (100, 50), (100, 100), (0, 100)]),
            ],
            ["a", None, None],
            [0.5, 0, 0],
        ),
    ],
)
def test_precedence_of_overlapping_outlines(
    drawn: list[tuple[str, list[Point]]], expected: list[str | None], covered: list[float]
) -> None:
    _, labels = labels_of(*drawn)
    assert [[*labels.classes, None][label] for label in labels.label] == expected
    assert labels.covered.tolist() == pytest.approx(covered)


def test_region_of_interest_is_not_a_class() -> None:
    regions, labels = labels_of(
        ("roi", square(0, 0, 150)),
        ("gland", square(0, 0, 60)),
        ("excluded", square(0, 0, 50)),
        roi="roi",
    )
    assert labels.classes == ("gland",)
    x, y = np.array([0, 100, 200]), np.array([0, 0, 0])
    shares = label_patches(regions.roi or (), x, y, 100, threshold=0.5).covered
    assert shares.tolist() == pytest.approx([0.75, 0.5, 0])
    assert "roi" in {outline.name for outline in regions.roi or ()}
    assert labels_of(("gland", square(0, 0, 60)), roi="roi")[0].roi == ()


def test_labels_of_many_patches_are_exact() -> None:
    """Labels are the same in several batches, with threads, and with outlines that are split into pieces."""
    turns = np.linspace(0, 2 * np.pi, 5000, endpoint=False)
    ring = list(zip(1100 + 900 * np.cos(turns), 1400 + 1000 * np.sin(turns), strict=True))
    x, y = (g.ravel() for g in np.meshgrid(np.arange(0, 2200, 8), np.arange(0, 2900, 8)))
    assert len(x) > 60_000
    regions, labels = labels_of(("a", ring), x=x, y=y, side=8)
    area = regions.outlines[0].area
    assert labels.covered.sum() * 64 == pytest.approx(area.area, rel=1e-5)
    some = np.arange(0, len(x), 997)
    cells = shapely.box(x[some], y[some], x[some] + 8, y[some] + 8)
    expected = shapely.area(shapely.intersection(cells, area)) / 64
    assert np.allclose(labels.covered[some], expected, atol=1e-6)


# Content of files


def test_notes_name_repaired_and_left_out_features(tmp_path: Path) -> None:
    bow = [(0.0, 0.0), (100.0, 100.0), (100.0, 0.0), (0.0, 100.0)]
    path = write_geojson(
        tmp_path / "a.geojson",
        ("a", [bow]),
        ("a", [[(1, 1), (2, 2)]]),
        ("a", [square(5000, 5000, 10)]),
        ("a", [square(2200, 2900, 100)]),
        ("Ignore*", [square(0, 0, 10)]),
    )
    regions = regions_in(path)
    notes = "; ".join(regions.notes)
    assert "feature f0 repaired (self-intersection): 5,000 square pixels" in notes
    assert "feature f1 left out: it has no area" in notes
    assert "feature f2 left out: it is outside the slide of 2220×2967 pixels, at x 5000" in notes
    assert "feature f3 is partly outside the slide of 2220×2967 pixels" in notes
    assert [outline.excluded for outline in regions.outlines] == [True, False, False]
    no_patches = PatchLabels((), np.zeros(0, np.int32), np.zeros(0, np.float32))
    assert annotation_notes(path, regions, no_patches) == [f"a.geojson: {notes}"]


def test_geometry_types_of_geojson(tmp_path: Path) -> None:
    feature: dict[str, Any] = {
        "type": "Feature",
        "properties": {
            "classification": {"names": ["Tumor", "Positive"]},
            "measurements": {"Positive %": math.nan},
        },
        "geometry": {
            "type": "GeometryCollection",
            "geometries": [
                {
                    "type": "MultiPolygon",
                    "coordinates": [[square(0, 0, 10)], [square(20, 0, 10), square(22, 2, 5)]],
                },
                {"type": "LineString", "coordinates": [[0, 0], [1, 1]]},
            ],
        },
    }
    # The last three are of old versions of QuPath.
    features_of_others = [{**feature, "properties": {"objectType": "cell"}}] + [
        {**feature, "id": f"Path{kind}Object"} for kind in ("Cell", "Detection", "Tile")
    ]
    path = tmp_path / "a.json"
    for value in (
        feature,
        [{**feature, "id": "PathAnnotationObject"}, *features_of_others],
        {"type": "FeatureCollection", "features": [feature]},
    ):
        path.write_text("\ufeff" + json.dumps(value))
        outlines = read_annotations(path)
        assert [(outline.name, outline.area.area) for outline in outlines.entries] == [
            ("Tumor: Positive", 175)
        ]
        assert "feature 1 left out: LineString has no area" in outlines.notes
    path.write_text(json.dumps(features_of_others))
    assert read_annotations(path).notes == [
        "4 detections, cells or tiles left out: only annotations are read"
    ]


def asap(*annotations: tuple[str, str, list[Point]]) -> str:
    written = "".join(
        f'<Annotation Name="n{i}" Type="{kind}" PartOfGroup="{group}"><Coordinates>'
        # In reverse order: the attribute Order must be used, not the position.
        + "".join(
            f'<Coordinate Order="{n}" X="{x}" Y="{y}"/>'
            for n, (x, y) in reversed(list(enumerate(p)))
        )
        + "</Coordinates></Annotation>"
        for i, (kind, group, p) in enumerate(annotations)
    )
    return f"<ASAP_Annotations><Annotations>{written}</Annotations></ASAP_Annotations>"


def test_groups_of_asap(tmp_path: Path) -> None:
    path = tmp_path / "a.xml"
    path.write_text(
        asap(
            ("Polygon", "_0", square(0, 0, 10)),
            ("Rectangle", "_1", square(20, 0, 10)),
            ("Spline", "_2", square(0, 0, 5)),
            ("Polygon", "None", square(40, 0, 10)),
            ("Dot", "metastases", [(1, 1)]),
            ("Polygon", "metastases", square(60, 0, 10)),
        )
    )
    outlines = read_annotations(path)
    assert [(outline.name, outline.excluded) for outline in outlines.entries] == [
        ("tumor", False),
        ("tumor", False),
        (None, True),
        (None, False),
        ("metastases", False),
    ]
    assert outlines.notes == ["n4 left out: dot has no area"]
    regions = regions_of(outlines, AnnotationRules(), size=SIZE, bounds=WHOLE)
    labels = label_patches(regions.outlines, np.array([0, 20]), np.array([0, 0]), 10, threshold=0.5)
    assert labels.covered.tolist() == [0.75, 1]


def xml_region(kind: str, points: list[Point], *, tag: str = "Vertex", negative: int = 0) -> str:
    vertices = "".join(f'<{tag} X="{x:.0f}" Y="{y:.0f}" />' for x, y in points)
    return (
        f'<Region Type="{kind}" NegativeROA="{negative}"><Vertices>{vertices}</Vertices></Region>'
    )


def test_layers_and_negative_regions_of_imagescope(tmp_path: Path) -> None:
    regions = [
        xml_region("0", square(0, 0, 100)),
        xml_region("0", square(10, 10, 10), negative=1),
        xml_region("2", [(200, 0), (300, 50)]),
        xml_region("4", [(0, 0), (5, 5)]).replace("Region", 'Region Id="4"', 1),
    ]
    path = tmp_path / "a.xml"
    path.write_text(
        f'<Annotations><Annotation Id="1" Name="tumour"><Regions>{"".join(regions)}'
        '</Regions></Annotation><Annotation Id="2" Name=""><Attributes><Attribute Name="Description" Value="stroma"/>'
        f"</Attributes><Regions>{xml_region('0', square(10, 10, 10))}</Regions></Annotation></Annotations>"
    )
    outlines = read_annotations(path)
    assert [outline.name for outline in outlines.entries] == ["tumour", "tumour", "stroma"]
    areas = [outline.area.area for outline in outlines.entries]
    assert areas == pytest.approx([9900, math.pi * 50 * 25, 100], rel=1e-3)
    assert outlines.notes == ["layer 1, region 4 left out: an arrow, a ruler or a pin has no area"]


def test_regions_of_halo(tmp_path: Path) -> None:
    """HALO has `V` elements, and stores rectangles and ellipses by two opposite corners in any order."""
    region = partial(xml_region, tag="V")
    regions = [
        region("Polygon", [*square(0, 0, 100), (0, 0)]),
        region("Rectangle", [(300, 250), (200, 200)]),
        region("Ellipse", [(400, 300), (500, 350)]),
        region("Rectangle", [(10, 10), (20, 30)], negative=1),
        region("Ellipse", [(210, 210), (230, 230)], negative=1),
        region("Ruler", [(0, 0), (50, 60)]),
        region("Pin", [(700, 700)]),
    ]
    path = tmp_path / "s.annotations"
    path.write_text(
        '<Annotations><Annotation LineColor="65280" Name="Tumor" Visible="True"><Regions>'
        + "".join(regions)
        + "</Regions></Annotation></Annotations>"
    )
    assert find_annotations(tmp_path, SlideNames(["s"])) == ({"s": path}, [])
    outlines = read_annotations(path)
    assert (outlines.frame, {outline.name for outline in outlines.entries}) == ("slide", {"Tumor"})
    areas = [outline.area.area for outline in outlines.entries]
    expected = [100 * 100 - 10 * 20, 100 * 50 - math.pi * 100, math.pi * 50 * 25]
    assert areas == pytest.approx(expected, rel=1e-3)
    assert outlines.entries[1].area.bounds == (200, 200, 300, 250)
    assert len(outlines.notes) == 2


TEXT = (
    '<Annotations><Annotation Id="1"><Regions><Region Id="1" Text="gland" Type="0"><Vertices>'
    + "".join(f'<Vertex X="{x:.0f}" Y="{y:.0f}" Z="0" />' for x, y in square(0, 0, 100))
    + "</Vertices></Region></Regions></Annotation></Annotations>"
)
FEATURE = {
    "type": "Feature",
    "geometry": {"type": "Polygon", "coordinates": [square(0, 0, 100)]},
    "properties": {"objectType": "annotation", "type": "gland", "label": 3, "color": [1, 2, 3]},
}


@pytest.mark.parametrize(
    ("name", "text", "key", "expected", "hint"),
    [
        ("a.xml", TEXT, "Text", "gland", "or --class-property with Text"),
        ("b.geojson", json.dumps(FEATURE), "type", "gland", "--class-property with label or type"),
        ("c.geojson", json.dumps(FEATURE), "label", "3", "--class-property with label or type"),
        ("d.xml", "", "Name", "n0", "or --class-property with Name"),
    ],
)
def test_class_property(
    name: str, text: str, key: str, expected: str, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text or asap(("Polygon", "None", square(0, 0, 100))))
    usual = regions_in(path)
    assert class_names(usual.outlines) == ()
    assert hint in " ".join(usual.notes)
    assert class_names(regions_in(path, class_property=key).outlines) == (expected,)
    assert class_names(regions_in(path, class_property="absent").outlines) == ()


def test_excluded_areas_stay_excluded_with_another_property(tmp_path: Path) -> None:
    ignored = FEATURE | {"properties": {"classification": {"name": "Ignore*"}, "label": "T"}}
    path = tmp_path / "a.geojson"
    path.write_text(json.dumps(ignored))
    assert class_names(regions_in(path, class_property="label").outlines) == ()


def test_classes_are_compared_in_one_unicode_form(tmp_path: Path) -> None:
    composed, decomposed = (unicodedata.normalize(form, "Drüse") for form in ("NFC", "NFD"))
    path = tmp_path / "a.xml"
    for drawn, option in ((composed, decomposed), (decomposed, composed)):
        path.write_text(asap(("Polygon", drawn, square(0, 0, 100))), encoding="utf-8")
        assert class_names(regions_in(path).outlines) == (composed,)
        assert class_names(regions_in(path, roi=option).roi or ()) == (composed,)


def test_scale_of_outlines_is_checked() -> None:
    """Outlines at another scale have a note; a small one elsewhere, and a small and a large one, have none."""
    at_level_4, _ = labels_of(("a", square(20, 30, 100)), ("b", square(100, 50, 100)))
    assert "first tenth of the slide's width" in at_level_4.notes[0]
    outside, _ = labels_of(*(("a", square(300 * i, 2500, 200)) for i in range(30)))
    assert "22 of 30 outlines are outside the slide: level 0 has 2220×2967" in outside.notes[0]
    for drawn in (
        [square(1000, 40, 50)],
        [square(40, 1000, 50)],
        [square(0, 0, 100), square(900, 900, 9)],
    ):
        assert labels_of(*(("a", ring) for ring in drawn))[0].notes == ()


@pytest.mark.parametrize(
    ("name", "origin", "corner"),
    [
        ("a.geojson", "auto", (100, 50)),  # of QuPath
        ("a.geojson", "slide", (0, 0)),
        ("a.xml", "auto", (0, 0)),  # of ASAP
        ("a.xml", "bounds", (100, 50)),
    ],
)
def test_origin_of_coordinates_depends_on_tool(
    tmp_path: Path, name: str, origin: Any, corner: tuple[int, int]
) -> None:
    write_geojson(tmp_path / "a.geojson", ("a", [square(0, 0, 9)]))
    (tmp_path / "a.xml").write_text(asap(("Polygon", "a", square(0, 0, 9))))
    rules, bounds = AnnotationRules(annotation_origin=origin), RegionL0(PointL0(100, 50), SIZE)
    regions = read_regions(tmp_path / name, rules, size=SIZE, bounds=bounds)
    assert regions.outlines[0].area.bounds[:2] == corner


def test_annotation_files_match_slide_names(tmp_path: Path) -> None:
    names = SlideNames(["x/one", "two", "three.more"])
    for name in ("one.geojson", "two.asap.xml", "three.more.json", ".hidden.xml", "four.xml"):
        (tmp_path / name).write_text("")
    files, notes = find_annotations(tmp_path, names)
    assert {slide: path.name for slide, path in files.items()} == {
        "x/one": "one.geojson",
        "two": "two.asap.xml",
        "three.more": "three.more.json",
    }
    assert notes == ["1 annotation files match no slide: four.xml"]
    scene = tmp_path / "two.tif - two.tif #1.geojson"
    scene.write_text("")
    _, notes = find_annotations(tmp_path, names)
    assert f"{scene.name} (of a scene of two?)" in notes[0]
    scene.unlink()
    (tmp_path / "two.xml").write_text("")
    files, notes = find_annotations(tmp_path, names)
    assert files["two"].name == "two.xml"
    assert "two.asap.xml is not used: two.xml has the exact name" in notes[1]
    (tmp_path / "two.json").write_text("")
    with pytest.raises(UsageError, match="two annotation files for slide two"):
        find_annotations(tmp_path, names)
    with pytest.raises(UsageError, match=r"has the name of a slide: found four.xml.*\.geojson"):
        find_annotations(tmp_path / "four.xml", names)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="contains no annotations"):
        find_annotations(tmp_path / "empty", names)


# Untrusted files

BOMB = (
    '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">'
    + "".join(
        f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    + "]><ASAP_Annotations>&i;</ASAP_Annotations>"
)
FILE_ENTITY = (
    '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><ASAP_Annotations>&a;</ASAP_Annotations>'
)
POLYGON = (
    '{"type":"Feature","id":"x","geometry":{"type":"Polygon","coordinates":[[[0,0],[9,0],[%s,9]]]}}'
)
BAD: dict[str, tuple[str | bytes, str | None]] = {
    "cut.xml": ("<ASAP_Annotations><Annotations><Annota", "not XML, or truncated"),
    "bomb.xml": (BOMB, "document type or entities"),
    "file.xml": (FILE_ENTITY, "document type or entities"),
    "empty.xml": ("", "not XML"),
    "other.xml": ("<html/>", "XML of an unknown tool: found <html>"),
    "letters.xml": (asap(("Polygon", "a", [("x", 1)])), "n0: invalid coordinate: found"),  # type: ignore[list-item]
    "infinite.xml": (
        asap(("Polygon", "a", [(1, 2), (math.inf, 1), (3, 4)])),
        "n0: invalid coordinate: found",
    ),
    "nan.geojson": (POLYGON % "NaN", "invalid coordinate: found"),
    "infinite.geojson": (POLYGON % "Infinity", "invalid coordinate: found"),
    "large.geojson": (POLYGON % "1e999", "invalid coordinate: found"),
    "digits.geojson": (POLYGON % ("1" * 400), "invalid coordinates of its Polygon"),
    "names.geojson": (
        '[{"type":"Feature","properties":{"classification":{"names":5}},"geometry":5}]',
        None,
    ),
    "halves.geojson": (POLYGON.replace('"x"', '"\\udc00"') % 9, None),
    "chinese.xml": (
        '<?xml version="1.0" encoding="GBK"?><ASAP_Annotations/>',
        "cannot be read: found ValueError",
    ),
    "unknown.xml": ('<?xml version="1.0" encoding="nonsense"?><ASAP_Annotations/>', ""),
    "text.geojson": (POLYGON % '"a"', "invalid coordinates of its Polygon"),
    "cut.geojson": (POLYGON[:60], "not JSON"),
    "number.geojson": ("17", "not GeoJSON: found int"),
    "entry.geojson": ("[1]", "not GeoJSON: entry 1"),
    "latin.geojson": (b'{"name": "\xe4"}', "not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_files_are_refused_with_path_and_reason(name: str, tmp_path: Path) -> None:
    path, (content, message) = tmp_path / name, BAD[name]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if message is None:  # unusual, but valid
        assert all(outline.feature.encode() for outline in read_annotations(path).entries)
        return
    with pytest.raises(UsageError) as raised:
        read_annotations(path)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


READ_ALL = """
import resource, signal, sys
from pathlib import Path
from histopipe.annotations.annotation_files import read_annotations
from histopipe.errors import UsageError
resource.setrlimit(resource.RLIMIT_AS, (1_500_000_000,) * 2)
signal.alarm(100)
for path in sys.argv[1:]:
    try: read_annotations(Path(path))
    except UsageError as error: print(error)
"""


@pytest.mark.long(reason="reads 400 MB in a new process")
def test_deep_nesting_takes_bounded_memory(tmp_path: Path) -> None:
    """The limits are 1.5 GB of address space and 100 s for four files."""
    brackets, levels = "brackets are nested too deep", "more than 32 levels"
    expected = {}
    for name, beginning, repeated, message in (
        ("deep.geojson", "", "[", brackets),
        ("deep-objects.geojson", "", '{"a":', brackets),
        ("deep.xml", "", "<a>", levels),
        ("inside.xml", "<ASAP_Annotations><Annotations>", "<Annotation>", levels),
    ):
        path = tmp_path / name
        path.write_text(beginning + repeated * (100_000_000 // len(repeated)))
        expected[path] = message
    done = run_python(READ_ALL, *expected, cwd=tmp_path)
    for line, (path, message) in zip(done.stdout.splitlines(), expected.items(), strict=True):
        assert message in line and str(path) in line


def test_too_large_file_is_refused_without_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.geojson"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(UsageError, match="too large: found 1,099,512 MB, expected at most 128 MiB"):
        read_annotations(path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "type",
                        "features",
                        "geometry",
                        "coordinates",
                        "geometries",
                        "properties",
                        "classification",
                        "id",
                        "name",
                        "names",
                        "objectType",
                    ]
                ),
                inner
                | st.sampled_from(
                    [
                        "Feature",
                        "FeatureCollection",
                        "Polygon",
                        "MultiPolygon",
                        "GeometryCollection",
                    ]
                ),
                max_size=5,
            )
        ),
    )
)
@examples(300)
def test_random_json_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, value: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.geojson"
    path.write_text(json.dumps(value))
    try:
        for outline in read_annotations(path).entries:
            assert isinstance(outline, Outline)
            assert outline.area.is_valid
    except UsageError as error:
        assert str(path) in str(error)


@given(st.binary(max_size=300) | st.text(alphabet="<>/&;!aA\"'= ASAP_Annotations", max_size=200))
@examples(300)
def test_random_bytes_are_refused(
    tmp_path_factory: pytest.TempPathFactory, value: bytes | str
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.xml"
    path.write_bytes(value if isinstance(value, bytes) else value.encode())
    with pytest.raises(UsageError, match=r"fuzzed\.xml"):
        read_annotations(path)


# Labels at ingest and by `annotate`


@pytest.fixture
def skin(tmp_path: Path, data: Path) -> Path:
    """Folder with a real slide in `slides`, and its annotations in `drawn`."""
    for folder in ("slides", "drawn"):
        (tmp_path / folder).mkdir()
    shutil.copy(data / "slides" / "CMU-1-Small-Region.svs", tmp_path / "slides")
    shutil.copy(data / "annotations" / "CMU-1-Small-Region.geojson", tmp_path / "drawn")
    return tmp_path


def patch_labels(store: Path) -> dict[str, list[Any]]:
    """Return label and covered share of each patch, by slide."""
    by_slide = {}
    with Store(store) as opened:
        names = [*opened.classes, None]
        for number, record in opened.complete.items():
            index = opened.index(number)
            labels = [names[label] for label in index["label"].tolist()]
            covered = index.get("covered", np.full(len(labels), -1.0)).tolist()
            by_slide[record.id] = list(zip(labels, covered, strict=True))
    return by_slide


def test_annotate_gives_same_labels_as_ingest(skin: Path) -> None:
    slides, drawn = ["slides", "--patch-size", "64"], ["--annotations", "drawn"]
    store, name = skin / "later.lmdb", "CMU-1-Small-Region"
    succeed("ingest", *slides, "--out", "at-once.lmdb", *drawn)
    succeed("ingest", *slides, "--out", store)
    done = succeed("annotate", store, "drawn", "--json")
    assert json.loads(done)["patches"] == {"Dermis": 156, "Epidermis": 146}
    expected = patch_labels(skin / "at-once.lmdb")
    assert patch_labels(store) == expected
    assert {label for label, _ in expected[name]} == {"Dermis", "Epidermis", None}
    assert "0 slides labelled, 1 already labelled" in succeed("annotate", store, "drawn")
    # After a change of a rule, an ingest without new slides labels the patches again.
    succeed("ingest", *slides, "--out", store, *drawn, "--annotation-threshold", "90%")
    strict = patch_labels(store)[name]
    assert all((label is not None) == (share >= 0.9 - 1e-6) for label, share in strict)
    assert [share for _, share in strict] == [share for _, share in expected[name]]
    # A slide that is ingested again without annotations has no labels.
    os.utime(skin / "slides" / f"{name}.svs")
    succeed("ingest", *slides, "--out", store, "--force")
    assert {label for label, _ in patch_labels(store)[name]} == {None}
    with Store(store) as opened:
        (record,) = opened.slides
    assert (record.annotations, record.patch_labels) == (None, {})
    assert "patch labels were removed" in " ".join(record.notes)


def test_invalid_file_fails_only_its_slide_and_is_retried(skin: Path, run: RunCommand) -> None:
    make_slides(skin / "slides", "--count", "2", "--size", "1024x1024")
    good = asap(("Polygon", "a", square(0, 0, 2000)))
    bad = skin / "drawn" / "slide-001.xml"
    bad.with_name("slide-000.xml").write_text(good)
    bad.write_text(good[:80])
    command = ["ingest", "slides", "--annotations", "drawn", "--tissue", "none"]
    done = run(*command)
    assert done.returncode == 3, done.stderr
    assert "drawn/slide-001.xml: not XML, or truncated" in done.stderr
    store = skin / "patches.lmdb"
    assert set(patch_labels(store)) == {"CMU-1-Small-Region", "slide-000"}
    bad.write_text(good)
    succeed(*command)
    labels = patch_labels(store)["slide-001"]
    assert {label for label, _ in labels} == {"a"}
    bad.write_text(BOMB)
    done = run("annotate", store, "drawn", "--annotation-threshold", "0.3")
    assert done.returncode == 3
    assert "slide-001: failed: drawn/slide-001.xml: XML with a document type" in done.stderr
    assert patch_labels(store)["slide-001"] == labels  # kept


def test_only_region_of_interest_is_tiled(skin: Path, run: RunCommand) -> None:
    slides = ["ingest", "slides", "--patch-size", "64", "--annotations", "drawn", "--out"]
    succeed(*slides, "all.lmdb")
    succeed(*slides, "roi.lmdb", "--roi", "Epidermis")
    whole = patch_labels(skin / "all.lmdb")["CMU-1-Small-Region"]
    is_epidermis = np.array([label == "Epidermis" for label, _ in whole])
    with Store(skin / "roi.lmdb") as roi, Store(skin / "all.lmdb") as every:
        for column in ("x_l0", "y_l0"):
            assert np.array_equal(roi.index(0)[column], every.index(0)[column][is_epidermis])
        assert (roi.spec["roi"], every.spec.get("roi")) == ("Epidermis", None)
        assert (roi.index(0)["label"] == -1).all()  # the outline is a region, not a class
    for flags, code, message in (
        (("none.lmdb", "--roi", "Tumour"), 4, "has no region 'Tumour': found Dermis, Epidermis"),
        (("roi.lmdb",), 2, "roi: Epidermis in the store, None asked for"),
    ):
        done = run(*slides, *flags)
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_slide_without_tissue_has_annotations(tmp_path: Path, run: RunCommand) -> None:
    """A slide without patches is complete in all commands that read annotations."""
    for folder in ("white", "drawn"):
        (tmp_path / folder).mkdir()
    write_slide(
        tmp_path / "white" / "w.svs", [np.full((512, 512, 3), 243, np.uint8)], Size(256, 256)
    )
    outlines = ("a", [square(0, 0, 300)]), ("b", [square(0, 0, 400)])
    write_geojson(tmp_path / "drawn" / "w.geojson", *outlines)
    drawn = ["--annotations", "drawn"]
    for out, options in (("all", []), ("labels", drawn), ("roi", [*drawn, "--roi", "b"])):
        succeed("ingest", "white", "--out", f"{out}.lmdb", *options)
        assert patch_labels(tmp_path / f"{out}.lmdb") == {"w": []}
    done = run("annotate", "all.lmdb", "drawn")
    assert done.returncode == 4
    assert "0 slides labelled, 0 already labelled, 1 without a labelled patch" in done.stdout
    assert patch_labels(tmp_path / "all.lmdb") == {"w": []}


def test_outline_with_many_crossings_is_left_out_quickly(tmp_path: Path) -> None:
    """Repairing such an outline would take quadratic memory."""
    points = np.random.default_rng(1).uniform(0, 2000, (20_000, 2)).round(1).tolist()
    path = write_geojson(tmp_path / "a.geojson", ("a", [points]), ("a", [square(0, 0, 9)]))
    outlines = read_annotations(path)
    assert [outline.feature for outline in outlines.entries] == ["feature f1"]
    assert outlines.notes == ["feature f0 left out: its outline crosses itself too often"]
