"""Maps of classes: overlapping patches are blended row by row, and files show the same classes at the same places."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import shapely
import shapely.geometry
import tifffile

from histopipe.geometry import PointL0, RegionL0, Size
from histopipe.slides.slide import Turn
from histopipe.tiling.class_maps import (
    ClassMap,
    pooled,
    write_class_outlines,
    write_class_tiff,
)

SIDE = 16


def field(height: int, width: int) -> np.ndarray:
    """Return (H, W, 3) smooth probabilities."""
    y, x = np.mgrid[:height, :width]
    raw = np.stack([np.sin(x / 9), np.cos(y / 7), np.sin((x + y) / 11)], axis=-1)
    shares = np.exp(2 * raw)
    return np.asarray(shares / shares.sum(axis=-1, keepdims=True), np.float32)


def blended(
    folder: Path, probabilities: np.ndarray, stride: int, skipped: tuple[int, ...] = ()
) -> ClassMap:
    height, width, classes = probabilities.shape
    padded = np.pad(probabilities, ((0, SIDE), (0, SIDE), (0, 0)))
    result = ClassMap(folder / "map", Size(width, height), side=SIDE, classes=classes)
    places = [(y, x) for y in range(0, height, stride) for x in range(0, width, stride)]
    for number, (y, x) in enumerate(places):
        if number not in skipped:
            result.add(padded[y : y + SIDE, x : x + SIDE], x, y)
    result.close()
    return result


@pytest.mark.parametrize("stride", [5, 12, 16])
@pytest.mark.parametrize(("height", "width"), [(64, 48), (70, 33), (10, 90), (15, 15)])
def test_consistent_patches_give_the_classes_of_the_whole(
    tmp_path: Path, stride: int, height: int, width: int
) -> None:
    probabilities = field(height, width)
    result = blended(tmp_path, probabilities, stride)
    expected = probabilities.argmax(axis=-1) + 1
    assert np.array_equal(result.values, expected)
    assert result.counts.tolist() == [(expected == n).sum() for n in (1, 2, 3)]


def test_overlapping_patches_are_weighted_by_the_distance_from_their_edges(tmp_path: Path) -> None:
    result = ClassMap(tmp_path / "map", Size(24, 16), side=SIDE, classes=2)
    for x, number in ((0, 0), (8, 1)):
        result.add(
            np.repeat(np.eye(2, dtype=np.float32)[number][None, None], 256, 0).reshape(16, 16, 2),
            x,
            0,
        )
    result.close()
    # Columns 8 to 15 are in both: the nearer centre decides.
    assert result.values[8].tolist() == [1] * 12 + [2] * 12


def test_areas_without_patches_have_no_class(tmp_path: Path) -> None:
    result = blended(tmp_path, field(64, 64), 16, skipped=(0, 5, 6, 15))
    blank = np.kron(np.isin(np.arange(16), (0, 5, 6, 15)).reshape(4, 4), np.ones((16, 16))) > 0
    assert ((result.values == 0) == blank).all() and result.counts.sum() == (~blank).sum()


def test_patches_may_be_in_part_outside(tmp_path: Path) -> None:
    result = ClassMap(tmp_path / "map", Size(20, 20), side=SIDE, classes=2)
    probabilities = np.zeros((16, 16, 2), np.float32)
    probabilities[..., 1], probabilities[8:, 10:, 0] = 0.5, 1
    for x, y in ((-10, -8), (10, -8), (-10, 12), (10, 12), (30, 12)):
        result.add(probabilities, x, y)
    result.close()
    expected = np.zeros((20, 20), np.uint8)
    expected[:8, :6] = 1
    expected[:8, 10:] = expected[12:, 10:] = expected[12:, :6] = 2
    expected[:8, 20:] = 1
    assert np.array_equal(result.values, expected)


def test_rows_must_be_sorted(tmp_path: Path) -> None:
    result = ClassMap(tmp_path / "map", Size(32, 64), side=SIDE, classes=2)
    result.add(np.zeros((16, 16, 2), np.float32), 0, 16)
    with pytest.raises(ValueError, match="sorted by row"):
        result.add(np.zeros((16, 16, 2), np.float32), 0, 15)


def test_pooled_probabilities_are_means() -> None:
    probabilities = field(16, 16)
    assert np.array_equal(pooled(probabilities, 1), probabilities)
    np.testing.assert_allclose(
        pooled(probabilities, 4)[1, 2], probabilities[4:8, 8:12].mean(axis=(0, 1)), rtol=1e-6
    )


def test_the_tiff_has_the_map_its_scale_and_a_pyramid(tmp_path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 4, (900, 1300)).astype(np.uint8)
    path = tmp_path / "slide.ome.tif"
    write_class_tiff(values, path, mpp=1.5, classes=("gland", "stroma", "necrosis & fat"))
    with tifffile.TiffFile(path) as tiff:
        metadata = tiff.ome_metadata or ""
        assert tiff.is_ome and 'PhysicalSizeX="1.5"' in metadata
        assert "1: gland; 2: stroma; 3: necrosis &amp; fat" in metadata
        levels = tiff.series[0].levels
        assert [level.shape for level in levels] == [(900, 1300), (450, 650), (225, 325)]
        assert np.array_equal(levels[0].asarray(), values)
        assert np.array_equal(levels[2].asarray(), values[::4, ::4])
    write_class_tiff(values[:20, :30], path, mpp=None, classes=("a", "b", "c"))
    assert np.array_equal(tifffile.imread(path), values[:20, :30])


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("tolerance", [0.0, 8.0])
def test_outlines_have_the_areas_of_the_map(
    tmp_path: Path, orientation: int, tolerance: float
) -> None:
    scale, size = 4.0, Size(800, 600)
    y, x = np.mgrid[:150, :200]
    values = np.where((x - 80) ** 2 + (y - 60) ** 2 < 45**2, 2, 1).astype(np.uint8)
    values[(x - 80) ** 2 + (y - 60) ** 2 < 15**2] = 1  # a hole
    values[:, 190:] = 0
    path, turn = tmp_path / "slide.geojson", Turn(orientation, size)
    # Coordinates of QuPath begin at the corner of the map.
    bounds = RegionL0(PointL0(30, 20) if orientation == 1 else PointL0(0, 0), size)
    write_class_outlines(
        values,
        path,
        scale=scale,
        classes=("stroma", "gland"),
        bounds=bounds,
        turn=turn,
        tolerance=tolerance,
    )
    features = json.loads(path.read_text())["features"]
    areas = {1: 0.0, 2: 0.0}
    for feature in features:
        number = ("stroma", "gland").index(feature["properties"]["classification"]["name"]) + 1
        area = shapely.geometry.shape(feature["geometry"])
        assert area.is_valid
        areas[number] += area.area
        if number == 2 and orientation == 1:
            assert shapely.contains_xy(area, 81 * scale, 30 * scale)
            assert not shapely.contains_xy(area, 81 * scale, 61 * scale)
    for number, total in areas.items():
        assert total == pytest.approx(
            (values == number).sum() * scale**2, rel=0.02 if tolerance else 1e-6
        )
    assert len(features) == 3  # stroma outside and inside of the gland, and the gland


def test_a_sparse_map_takes_the_space_of_its_patches(tmp_path: Path) -> None:
    result = ClassMap(tmp_path / "map", Size(50_000, 20_000), side=256, classes=2)
    probabilities = np.repeat(np.array([[[0.2, 0.8]]], np.float32), 256, 0).repeat(256, 1)
    for y in (0, 9000):
        for x in range(0, 2000, 200):
            result.add(probabilities, 20_000 + x, y)
    result.close()
    assert (tmp_path / "map").stat().st_blocks * 512 < 60e6  # of 1 GB
    assert result.counts.tolist() == [0, 2 * 256 * 2056]
