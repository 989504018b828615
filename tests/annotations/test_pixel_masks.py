"""The class of each pixel, by outlines and by label images, against an exact test of each centre."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from shapely.affinity import scale, translate

from histopipe.annotations.pixel_masks import OutlinePixels, paint, read_pixel_classes
from histopipe.annotations.regions import Outline
from histopipe.annotations.rules import NOT_ANNOTATED, PixelRules
from histopipe.errors import UsageError
from histopipe.geometry import Mpp, PointL0, RegionL0, Size

Area = shapely.Polygon | shapely.MultiPolygon
SIZE = Size(120, 90)
WHOLE = RegionL0(PointL0(0, 0), SIZE)


def centres(x: float, y: float, side: float, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the centres of the pixels of a square, (size, size) each."""
    places = (np.arange(size) + 0.5) * side / size
    return np.meshgrid(x + places, y + places)


@st.composite
def polygons(draw: st.DrawFn) -> Area:
    """Return valid polygons with holes, of several parts, in part outside of the square."""
    number = st.floats(-40, 90, allow_nan=False)
    parts = draw(st.lists(st.lists(st.tuples(number, number), min_size=3, max_size=9), max_size=3))
    area = shapely.union_all([shapely.make_valid(shapely.Polygon(part)) for part in parts])
    holes = draw(st.lists(st.tuples(number, number, st.floats(1, 20)), max_size=2))
    cut = shapely.union_all([shapely.Point(x, y).buffer(r) for x, y, r in holes])
    return shapely.MultiPolygon(
        [p for p in shapely.get_parts(shapely.difference(area, cut)) if p.geom_type == "Polygon"]
    )


@given(polygons(), st.floats(-10, 30), st.floats(-10, 30), st.sampled_from([16.0, 30.5, 64.0]))
def test_pixels_are_painted_whose_centres_are_inside(
    area: Area, x: float, y: float, side: float
) -> None:
    mask = np.zeros((32, 32), np.uint8)
    if not area.is_empty:
        paint(mask, area, 7, (x, y), side / 32)
    points = shapely.points(*centres(x, y, side, 32))
    # Centres on an edge, to rounding, may be on either side.
    with np.errstate(divide="ignore"):
        clear = shapely.distance(area.boundary, points) > 1e-4 if not area.is_empty else True
    expected = shapely.contains(area, points)
    assert np.array_equal((mask == 7) & clear, expected & clear)
    assert set(np.unique(mask)) <= {0, 7}


def test_neighbours_share_the_centres_on_their_edge() -> None:
    """Squares that meet at centres of pixels cover each of them once."""
    total = np.zeros((8, 8), np.uint8)
    for left in (0.5, 4.5):
        for top in (0.5, 4.5):
            part = np.zeros_like(total)
            paint(part, shapely.box(left, top, left + 4, top + 4), 1, (0.0, 0.0), 1.0)
            total += part
    assert (total == 1).all()


def outlines(*entries: tuple[str | None, Area, bool]) -> OutlinePixels:
    return OutlinePixels([Outline("x", name, area, excluded) for name, area, excluded in entries])


def test_the_first_outline_takes_precedence_and_excluded_areas_have_no_class() -> None:
    pixels = outlines(
        (None, shapely.box(0, 0, 4, 4), True),
        ("gland", shapely.box(2, 2, 10, 10), False),
        ("tissue", shapely.box(0, 0, 16, 16), False),
    )
    mask = pixels.mask(0, 0, 32, 32)
    gland, tissue = pixels.classes.index("gland"), pixels.classes.index("tissue")
    assert (mask[:4, :4] == NOT_ANNOTATED).all()
    assert (mask[4:10, 4:10] == gland).all() and mask[2, 5] == gland
    assert mask[12, 12] == tissue and mask[0, 5] == tissue
    assert (mask[16:] == NOT_ANNOTATED).all()
    assert (mask == gland).sum() == 64 - 4


def test_an_outline_of_many_points_is_painted_as_one() -> None:
    """It is split into pieces, whose common edges belong to one of them."""
    angle = np.linspace(0, 2 * np.pi, 5000, endpoint=False)
    radius = 40 + 5 * np.sin(40 * angle)
    star = shapely.Polygon(np.stack([50 + radius * np.cos(angle), 50 + radius * np.sin(angle)], 1))
    mask = outlines(("gland", star, False)).mask(0, 0, 100, 200)
    assert np.array_equal(mask == 0, shapely.contains_xy(star, *centres(0, 0, 100, 200)))


def geojson(folder: Path, *areas: tuple[str, Area]) -> Path:
    path = folder / "s.geojson"
    features = ",".join(
        f'{{"type":"Feature","geometry":{shapely.to_geojson(area)},"properties":'
        f'{{"objectType":"annotation","classification":{{"name":"{name}"}}}}}}'
        for name, area in areas
    )
    path.write_text(f'{{"type":"FeatureCollection","features":[{features}]}}')
    return path


def read(path: Path, mpp: float | None = 0.5, **rules: Any) -> np.ndarray:
    """Return the class names of the pixels of the first 64 pixels of level 0; empty where none is annotated."""
    of_slide = read_pixel_classes(
        path,
        PixelRules(**rules),
        size=SIZE,
        bounds=WHOLE,
        mpp=None if mpp is None else Mpp(mpp),
    )
    names = np.array([*of_slide.classes, *[""] * (256 - len(of_slide.classes))])
    return names[of_slide.mask(0, 0, 64, 64)]


def test_the_annotated_area(tmp_path: Path) -> None:
    path = geojson(
        tmp_path, ("gland", shapely.box(10, 10, 20, 20)), ("Ignore*", shapely.box(30, 10, 40, 20))
    )
    inside = np.zeros((64, 64), bool)
    inside[10:20, 10:20] = True
    drawn = read(path)
    assert (drawn[inside] == "gland").all() and (drawn[~inside] == "").all()
    whole = read(path, annotated_area="all")
    ignored = np.zeros((64, 64), bool)
    ignored[10:20, 30:40] = True
    assert (whole[inside] == "gland").all() and (whole[ignored] == "").all()
    assert (whole[~inside & ~ignored] == "background").all()
    near = read(path, annotated_area="3")  # µm: 6 pixels
    assert (near[inside] == "gland").all() and (near[ignored] == "").all()
    assert near[15, 25] == "background" and near[15, 26] == "" and near[4, 15] == "background"
    with pytest.raises(UsageError, match="without a scale"):
        read(path, None, annotated_area="3")


@pytest.mark.parametrize("area", ["", "some", "-1", "0", "inf", "nan"])
def test_the_annotated_area_is_checked(area: str) -> None:
    with pytest.raises(UsageError, match="annotated-area"):
        PixelRules(annotated_area=area)


@pytest.mark.parametrize(
    "values", [("gland",), ("1=",), ("=a",), ("1=a", "1=b"), ("-1=a",), ("70000=a",)]
)
def test_values_of_label_images_are_checked(values: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="mask-values"):
        PixelRules(mask_values=values)


def test_outlines_outside_of_the_slide_are_of_another_one(tmp_path: Path) -> None:
    path = geojson(
        tmp_path,
        ("gland", shapely.box(500, 500, 600, 600)),
        ("gland", shapely.box(200, 0, 300, 50)),
    )
    with pytest.raises(UsageError, match=r"s\.geojson seems to be of another slide"):
        read(path)


@pytest.mark.parametrize("mode", ["L", "I;16", "P"])
def test_a_label_image_is_read_at_its_scale(tmp_path: Path, mode: str) -> None:
    """Each pixel has the value of the image at its centre."""
    rng = np.random.default_rng(1)
    values = rng.integers(0, 4, (30, 40)).astype(np.uint16 if mode == "I;16" else np.uint8)
    path = tmp_path / "s.png"
    image = Image.fromarray(values)
    if mode == "P":
        image.putpalette([0, 0, 0, 255, 0, 0] * 4)
    image.save(path)
    names = {0: "", 1: "gland", 2: "", 3: ""}
    rules: dict[str, Any] = {"mask_values": ("1=gland", "2=Ignore*")}
    by_pixel = np.repeat(np.repeat(values, 3, axis=0), 3, axis=1)[:64, :64]
    assert np.array_equal(read(path, **rules), np.vectorize(names.get)(by_pixel))
    whole = {0: "background", 1: "gland", 2: "", 3: "background"}
    assert np.array_equal(
        read(path, annotated_area="all", **rules), np.vectorize(whole.get)(by_pixel)
    )


def test_a_label_image_has_a_margin_as_outlines_do(tmp_path: Path) -> None:
    values = np.zeros((90, 120), np.uint8)
    values[20:30, 20:30] = 1
    Image.fromarray(values).save(tmp_path / "s.png")
    by_image = read(tmp_path / "s.png", mask_values=("1=gland",), annotated_area="4")
    by_outline = read(geojson(tmp_path, ("gland", shapely.box(20, 20, 30, 30))), annotated_area="4")
    assert (by_image != by_outline).sum() < 40  # distances to centres, and to edges
    assert {*by_image.ravel()} == {"", "background", "gland"}


@pytest.mark.parametrize("wrong", ["colour", "shape", "text"])
def test_other_images_are_refused(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "s.png"
    shape = {"colour": (90, 120, 3), "shape": (90, 90), "text": (90, 120)}[wrong]
    Image.fromarray(np.zeros(shape, np.uint8)).save(path)
    if wrong == "text":
        path.write_text("no image")
    with pytest.raises(UsageError, match=r"s\.png"):
        read(path, mask_values=("1=gland",))


def test_outlines_that_were_moved_mirrored_or_scaled_are_noticed() -> None:
    """The comparison above would find each of these errors."""
    area = shapely.Polygon([(5, 5), (50, 9), (30, 40), (12, 33)])
    right = outlines(("gland", area, False)).mask(0, 0, 64, 64)
    for wrong in (
        translate(area, 1, 0),
        translate(area, 0, 1),
        scale(area, -1, 1),
        scale(area, 1, -1),
        scale(area, 1.05, 1.05, origin=(0, 0)),
        shapely.transform(area, lambda points: points[:, ::-1]),
    ):
        assert (outlines(("gland", wrong, False)).mask(0, 0, 64, 64) != right).sum() > 20
