"""Tiling: plans cover the tissue once and stay inside the slide; fast code agrees with slow reference code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from helpers.slides import make_slides
from histopipe.errors import ScaleError, UsageError
from histopipe.geometry import Level, Mpp, PointL0, RegionL0, Size, same_scale
from histopipe.slides.native_tiles import NativeTiles
from histopipe.slides.slide import SlideInfo
from histopipe.slides.slide_files import open_slide
from histopipe.slides.thumbnail import Thumbnail, read_thumbnail, thumbnail_level
from histopipe.slides.tile_check import NativeLevels
from histopipe.tiling.algorithms import (
    FINDERS,
    SATURATION_BOUNDS,
    find_on_thumbnail,
    saturation_and_value,
)
from histopipe.tiling.mask import TissueMask, otsu_threshold
from histopipe.tiling.plan import choose_level, covered_squares, plan_tiles
from histopipe.tiling.spec import TilingSpec, magnification_to_mpp


def info_of(
    size: Size, *, bounds: RegionL0 | None = None, downs: tuple[float, ...] = (1.0,)
) -> SlideInfo:
    levels = tuple(
        Level(i, Size(max(1, int(size.width / d)), max(1, int(size.height / d))), d)
        for i, d in enumerate(downs)
    )
    return SlideInfo(
        "made", levels, bounds or RegionL0(PointL0(0, 0), size), None, None, None, None, False
    )


def blank_thumbnail(info: SlideInfo, reduction: int) -> Thumbnail:
    area = info.levels[0].inside(info.bounds)
    shape = (-(-area.size.height // reduction), -(-area.size.width // reduction), 3)
    return Thumbnail(np.zeros(shape, np.uint8), info.levels[0], area.x, area.y, reduction, Mpp(8.0))


@st.composite
def slides(draw: st.DrawFn) -> SlideInfo:
    size = draw(st.builds(Size, st.integers(1, 3000), st.integers(1, 3000)))
    x, y = draw(st.integers(0, size.width - 1)), draw(st.integers(0, size.height - 1))
    inner = Size(draw(st.integers(1, size.width - x)), draw(st.integers(1, size.height - y)))
    down = draw(st.sampled_from([1.0, 2.0, 2.0005, 4.0, 4.016, 8.00045, 16.0]))
    return info_of(size, bounds=RegionL0(PointL0(x, y), inner), downs=(1.0, down))


@given(slides(), st.integers(8, 400), st.floats(0.1, 4), st.data())
def test_cells_are_inside_and_tile_the_area(
    info: SlideInfo, patch: int, target_mpp: float, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, patch - 1))
    spec = TilingSpec(patch_size=patch, overlap=overlap, mpp=Mpp(target_mpp), tissue="none")
    choice = choose_level("made", info.levels, Mpp(0.1), spec)
    plan = plan_tiles(info, choice, spec, blank_thumbnail(info, 4), None)
    area, read = choice.level.inside(info.bounds), choice.read_size
    assert (plan.x_level >= area.x).all()
    assert (plan.x_level + read <= area.x + area.size.width).all()
    assert (plan.y_level + read <= area.y + area.size.height).all()
    assert (plan.x_l0 >= info.bounds.origin.x - 1).all()
    end = info.bounds.origin.x + info.bounds.size.width
    assert (plan.x_l0 + read * choice.level.downsample <= end + choice.level.downsample).all()
    places = set(zip(plan.x_level.tolist(), plan.y_level.tolist(), strict=True))
    assert len(places) == len(plan)
    columns, rows = {x for x, _ in places}, {y for _, y in places}
    assert len(plan) == len(columns) * len(rows)  # the grid has no holes
    if columns:
        assert np.diff(sorted(columns)).tolist() == [choice.stride] * (len(columns) - 1)
        assert (
            area.x + area.size.width - max(columns) < read + choice.stride
        )  # no room for one more
    else:
        assert area.size.width < read or area.size.height < read
    assert np.isnan(plan.tissue).all()


@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(0, 2**32 - 1),
    st.floats(0.3, 12),
    st.floats(-5, 5),
)
def test_covered_shares_agree_with_slow_reference(
    h: int, w: int, seed: int, cell: float, start: float
) -> None:
    mask = np.random.default_rng(seed).random((h, w)) < 0.5
    x, y = np.meshgrid(np.arange(start, w, cell), np.arange(start, h, cell))
    x, y = x.ravel(), y.ravel()  # some squares are partly or completely outside
    fast = covered_squares(mask, x, y, cell)
    slow = [_covered(mask, *corner, cell) for corner in zip(x, y, strict=True)]
    np.testing.assert_allclose(fast, slow, atol=1e-5)


def _covered(mask: np.ndarray[Any, Any], x: float, y: float, cell: float) -> float:
    rows, columns = np.nonzero(mask)
    width = np.minimum(x + cell, columns + 1) - np.maximum(x, columns)
    height = np.minimum(y + cell, rows + 1) - np.maximum(y, rows)
    return float(np.sum(width.clip(0) * height.clip(0))) / cell**2


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 1))
def test_plan_has_exactly_the_cells_with_enough_tissue(seed: int, threshold: float) -> None:
    info = info_of(Size(640, 512))
    thumbnail = blank_thumbnail(info, 16)
    pixels = np.random.default_rng(seed).random(thumbnail.pixels.shape[:2]) < 0.5
    spec = TilingSpec(patch_size=64, mpp=Mpp(0.5), tissue_threshold=threshold)
    choice = choose_level("made", info.levels, Mpp(0.5), spec)
    plan = plan_tiles(info, choice, spec, thumbnail, TissueMask(pixels))
    share = pixels.reshape(8, 4, 10, 4).mean(axis=(1, 3)).astype(np.float32)
    expected = {
        (x * 64, y * 64) for y, x in zip(*np.nonzero(share >= np.float32(threshold)), strict=True)
    }
    near = {
        (x * 64, y * 64) for y, x in zip(*np.nonzero(abs(share - threshold) < 1e-5), strict=True)
    }
    assert set(zip(plan.x_l0.tolist(), plan.y_l0.tolist(), strict=True)) - near == expected - near


def levels(*downs: float) -> tuple[Level, ...]:
    return info_of(Size(40000, 40000), downs=downs).levels


@pytest.mark.parametrize(
    ("mpp", "downs", "target_mpp", "level", "read", "resampling"),
    [
        (0.5, (1, 4, 16), 0.5, 0, 256, "none"),
        (0.499, (1, 4, 16), 0.5, 0, 256, "none"),
        (0.25, (1, 4, 16), 0.5, 0, 512, "area"),
        (0.25, (1, 2, 4), 0.5, 1, 256, "none"),
        (0.25, (1, 4, 16), 1.0, 1, 256, "none"),
        (0.25, (1, 4.0001, 16.01), 8.0, 2, 512, "area"),
        (0.2325, (1, 4, 16), 0.5, 0, 551, "lanczos"),
        (0.509, (1,), 0.5, 0, 256, "none"),
        # Scales near a whole multiple need no filter.
        (0.2520, (1,), 0.5, 0, 512, "area"),
        (0.2455, (1,), 0.5, 0, 512, "area"),
        (0.2450, (1,), 0.5, 0, 522, "lanczos"),
        (0.2560, (1,), 0.5, 0, 500, "lanczos"),
        (0.1249, (1,), 0.5, 0, 1024, "area"),
        (0.3333, (1,), 0.5, 0, 384, "lanczos"),
    ],
)
def test_coarsest_level_that_is_fine_enough_is_chosen(
    mpp: float, downs: tuple[float, ...], target_mpp: float, level: int, read: int, resampling: str
) -> None:
    spec = TilingSpec(mpp=Mpp(target_mpp), overlap=64)
    choice = choose_level("a", levels(*downs), Mpp(mpp), spec)
    assert (choice.level.number, choice.read_size, choice.resampling) == (level, read, resampling)
    assert choice.stride == round(read * 192 / 256)
    assert choice.mpp is not None
    assert same_scale(choice.mpp, Mpp(target_mpp))


def test_too_coarse_slide_and_missing_level_are_refused() -> None:
    with pytest.raises(ScaleError, match=r"a is too coarse: found 0\.52 mpp at its finest"):
        choose_level("a", levels(1, 4), Mpp(0.52), TilingSpec(mpp=Mpp(0.5)))
    with pytest.raises(ScaleError, match="a has no level 2: found 2 levels, 0 to 1"):
        choose_level("a", levels(1, 4), Mpp(0.5), TilingSpec(level=2))


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"mpp": 0.5, "level": 0},
        {"mpp": 0.5, "patch_size": 4},
        {"mpp": 0.5, "overlap": 256},
        {"mpp": 0.01},
        {"mpp": 0.5, "tissue_threshold": 1.5},
        {"mpp": 0.5, "quality": 0},
        {"mpp": 0.5, "codec": "gif"},
        {"mpp": float("nan")},
    ],
)
def test_invalid_spec_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="found"):
        TilingSpec(**wrong)


def test_magnification_to_mpp() -> None:
    assert magnification_to_mpp(20) == 0.5
    with pytest.raises(UsageError):
        magnification_to_mpp(0)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2, 3]), st.sampled_from([*FINDERS]))
def test_blank_glass_has_no_tissue(seed: int, noise: int, algorithm: str) -> None:
    rng = np.random.default_rng(seed)
    glass = np.clip(rng.normal((243, 242, 244), noise, (80, 90, 3)), 0, 255).astype(np.uint8)
    assert not FINDERS[algorithm](glass, Mpp(8.0)).pixels.any()


@pytest.mark.parametrize("algorithm", FINDERS)
def test_pale_and_dark_stains_are_tissue_and_black_is_not(algorithm: str) -> None:
    picture = np.full((120, 120, 3), 243, np.uint8)
    picture[10:50, 10:50] = (225, 200, 212)  # pale eosin
    picture[60:100, 10:50] = (90, 40, 130)  # dark haematoxylin
    picture[10:50, 60:110] = (10, 8, 12)  # pen, or unscanned area
    mask = FINDERS[algorithm](picture, Mpp(8.0))
    assert mask.pixels[12:48, 12:48].all()
    assert mask.pixels[62:98, 12:48].all()
    assert not mask.pixels[:, 60:].any()
    if algorithm == "otsu-1":
        assert SATURATION_BOUNDS[0] <= (mask.threshold or 0) <= SATURATION_BOUNDS[1]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1000))
def test_saturation_and_value_agree_with_pillow(width: int, height: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    expected = np.asarray(Image.fromarray(pixels).convert("HSV"))[..., 1:]
    assert (np.dstack(saturation_and_value(pixels)) == expected).all()


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=256))
def test_otsu_threshold_separates_classes_best(counts: list[int]) -> None:
    """The variance between the classes is that of the best of all thresholds."""
    bins, weights = np.arange(len(counts)), np.array(counts, float)

    def between(threshold: int) -> float:
        low = bins <= threshold
        if not weights[low].sum() or not weights[~low].sum():
            return 0.0
        means = [np.average(bins[part], weights=weights[part]) for part in (low, ~low)]
        return float(weights[low].sum() * weights[~low].sum() * (means[1] - means[0]) ** 2)

    assert between(otsu_threshold(np.array(counts))) == pytest.approx(
        max(map(between, range(len(counts) - 1)))
    )


def test_note_on_dark_background() -> None:
    info, spec = info_of(Size(640, 640)), TilingSpec(patch_size=64, mpp=Mpp(0.5))
    thumbnail = blank_thumbnail(info, 16)
    choice = choose_level("made", info.levels, Mpp(0.5), spec)
    plan = plan_tiles(info, choice, spec, thumbnail, find_on_thumbnail(thumbnail, "otsu-1"))
    assert plan.notes == ("no tissue found; dark background: try --tissue otsu-3 or none",)


@pytest.mark.parametrize(
    "arguments", [["--levels", "1,4,16"], ["--levels", "1", "--format", "tiff"]]
)
def test_mask_agrees_with_known_outlines(tmp_path: Path, arguments: list[str]) -> None:
    (path,) = make_slides(tmp_path, "--size", "2400x1800", *arguments)
    with open_slide(path) as slide:
        thumbnail = read_thumbnail(slide, Mpp(0.499))
    mask = find_on_thumbnail(thumbnail).pixels
    scale = thumbnail.reduction * thumbnail.level.downsample
    outlines = Image.new("1", mask.shape[::-1])
    for feature in json.loads(path.with_suffix(".geojson").read_text())["features"]:
        ring = [(x / scale, y / scale) for x, y in feature["geometry"]["coordinates"][0]]
        ImageDraw.Draw(outlines).polygon(ring, fill=1)
    truth = np.asarray(outlines)
    assert np.count_nonzero(mask & truth) / np.count_nonzero(mask | truth) > 0.97


def test_thumbnail_is_mean_of_level_pixels(data: Path) -> None:
    with open_slide(data / "slides" / "CMU-1-Small-Region.svs") as slide:
        thumbnail = read_thumbnail(slide, Mpp(0.499))
        whole = slide.read_region(PointL0(0, 0), 0, slide.info.size)
    assert thumbnail.reduction == 16
    h, w = (n // 16 for n in whole.shape[:2])
    means = whole[: h * 16, : w * 16].reshape(h, 16, w, 16, 3).mean(axis=(1, 3))
    assert abs(thumbnail.pixels[:h, :w] - means).max() <= 1


@pytest.mark.parametrize("levels", ["1", "1,2", "1,4"])
def test_thumbnail_from_native_tiles_agrees_with_openslide(tmp_path: Path, levels: str) -> None:
    """Both are means over the same pixels. Scaled decoding, if the reduction allows it, differs slightly."""
    (path,) = make_slides(tmp_path, "--size", "2100x1700", "--mpp", "0.5", "--levels", levels)
    with open_slide(path) as slide:
        native = NativeLevels(slide, (path,))
        assert isinstance(native.get(thumbnail_level(slide.info.levels, Mpp(0.5))), NativeTiles)
        ours, theirs = read_thumbnail(slide, Mpp(0.5), native), read_thumbnail(slide, Mpp(0.5))
    assert ours.pixels.shape == theirs.pixels.shape
    assert (ours.level, ours.reduction, ours.mpp) == (theirs.level, theirs.reduction, theirs.mpp)
    difference = abs(ours.pixels.astype(int) - theirs.pixels).mean()
    assert difference < (1 if ours.reduction > 1 else 0.5)


def test_tissue_share_of_real_slides(data: Path) -> None:
    for name, low, high in [
        ("CMU-1-Small-Region", 0.33, 0.42),
        ("TCGA-CR-7395-01A-01-TS1", 0.58, 0.68),
    ]:
        with open_slide(data / "slides" / f"{name}.svs") as slide:
            thumbnail = read_thumbnail(slide, Mpp(0.5))
        assert low < find_on_thumbnail(thumbnail).pixels.mean() < high
