"""Measures of focus, pen, folds and black on real tissue: original, blurred, marked and folded."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from helpers.commands import succeed
from helpers.inline import run_tasks_here
from helpers.slides import make_slides
from helpers.stores import flip_a_byte
from histopipe.geometry import Mpp, PointL0, Size
from histopipe.ingestion.ingest import ingest
from histopipe.measure.quality import (
    ALGORITHMS,
    dark_mask,
    focus_of,
    pen_mask,
    quality,
    reduction_to,
)
from histopipe.slides.slide_files import open_slide
from histopipe.slides.thumbnail import read_thumbnail
from histopipe.store.store import Store
from histopipe.system.output import Progress

REAL = {"CMU-1-Small-Region.svs": 0.499, "TCGA-CR-7395-01A-01-TS1.svs": 0.25}
INKS = {
    "blue": [(30, 60, 160), (60, 120, 190), (30, 65, 130)],
    "green": [(20, 110, 60), (45, 115, 100), (30, 75, 60)],
    "red": [(210, 40, 50), (220, 60, 60), (190, 30, 40)],
}


pytestmark = pytest.mark.usefixtures("inline_workers")


@pytest.mark.parametrize("name", REAL)
def test_blur_lowers_focus(name: str, data: Path) -> None:
    """Regions of the slides at about 1 µm per pixel."""
    with open_slide(data / "slides" / name) as slide:
        pixels = slide.read_region(PointL0(600, 600), 0, Size(1536, 1536))
    sharp = Image.fromarray(pixels).reduce(round(1 / REAL[name])).convert("L")
    radii = (0, 0.5, 1, 2, 4)
    values = [focus_of(np.asarray(sharp.filter(ImageFilter.GaussianBlur(r)))) for r in radii]
    assert all(a > 1.8 * b for a, b in itertools.pairwise(values))
    assert values[0] > 50 * values[3]


def thumbnail(data: Path, name: str) -> NDArray[np.uint8]:
    with open_slide(data / "slides" / name) as slide:
        return read_thumbnail(slide, Mpp(REAL[name])).pixels


@given(st.integers(3, 20), st.integers(3, 20), st.integers(0, 255))
def test_focus_agrees_with_definition(height: int, width: int, grey: int) -> None:
    assert focus_of(np.full((height, width), grey)) == 0
    picture = np.random.default_rng(grey).integers(0, 256, (height, width))
    answers = [
        picture[r - 1, c]
        + picture[r + 1, c]
        + picture[r, c - 1]
        + picture[r, c + 1]
        - 4 * picture[r, c]
        for r in range(1, height - 1)
        for c in range(1, width - 1)
    ]
    assert focus_of(picture) == pytest.approx(float(np.var(answers)), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", REAL)
def test_clean_tissue_has_no_pen_and_no_folds(name: str, data: Path) -> None:
    picture = thumbnail(data, name)
    assert pen_mask(picture).mean() < 0.001
    assert dark_mask(picture).mean() < 0.002
    # The transmittances of layers of tissue multiply.
    light = (picture.astype(float) + 1) / 256
    folded = dark_mask(np.clip(256 * light**3 - 1, 0, 255).astype(np.uint8))
    density = -np.log10(light).sum(axis=2)
    assert folded[density > 0.9].mean() > 0.95
    assert not folded[density < 0.5].any()


@pytest.mark.parametrize("ink", [ink for inks in INKS.values() for ink in inks], ids=str)
def test_ink_is_found_on_tissue_and_glass(ink: tuple[int, int, int], data: Path) -> None:
    picture = thumbnail(data, "CMU-1-Small-Region.svs")
    marked = picture.copy()
    # Ink on glass; over tissue, the transmittances of ink and tissue multiply.
    over = (picture.astype(float) + 1) * (np.array(ink) + 1) / 256 - 1
    marked[40:60] = np.clip(over[40:60], 0, 255)
    before, masked = (pen_mask(each) | dark_mask(each) for each in (picture, marked))
    assert masked[40:60].mean() > 0.8
    assert np.array_equal(masked[:40], before[:40])


def test_black_is_no_pen() -> None:
    black = np.full((4, 4, 3), 30, np.uint8)
    assert dark_mask(black).all()
    assert not pen_mask(black).any()


@given(st.floats(0.05, 50) | st.none(), st.sampled_from([64, 224, 225, 240, 256, 299, 331, 512]))
def test_reductions_are_near_wanted_scale(mpp: float | None, side: int) -> None:
    for target in (Mpp(1.0), Mpp(8.0)):
        by = reduction_to(target, mpp, side)
        assert by == 1 or side / by >= 4
        if mpp is not None and 1 < by < side // 4:
            assert abs(mpp * by - target) <= mpp / 2 + 1e-9
    assert reduction_to(Mpp(1.0), 0.5, 256) == 2
    assert reduction_to(Mpp(8.0), 0.5, 256) == 16


# Quality of a store


@pytest.fixture(scope="module")
def marked_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of a synthetic slide of 0.5 mpp, with a horizontal blue stripe of 256 pixels: JPEG and PNG patches."""
    folder = tmp_path_factory.mktemp("marked")
    (slide,) = make_slides(folder / "in", "--size", "2048x2048", "--count", "1")
    with open_slide(slide) as opened:
        pixels = np.array(opened.read_region(PointL0(0, 0), 0, Size(2048, 2048)))
    pixels[512:768] = INKS["blue"][0]
    path = folder / "marked.tiff"
    scale: dict[str, Any] = {"resolution": (20_000, 20_000), "resolutionunit": 3}
    tifffile.imwrite(path, pixels, tile=(256, 256), photometric="rgb", **scale)
    with pytest.MonkeyPatch.context() as patch:
        run_tasks_here(folder, patch)
        for name, codec in (("patches", "auto"), ("png", "png")):
            ingest(path, folder / f"{name}.lmdb", tissue="none", codec=codec, progress=Progress())
    return folder


@pytest.fixture
def marked(marked_stores: Path, tmp_path: Path) -> Path:
    """Copy of the store with JPEG patches, next to that with PNG patches."""
    shutil.copytree(marked_stores, tmp_path, dirs_exist_ok=True)
    return tmp_path / "patches.lmdb"


def columns(store: Path) -> dict[str, NDArray[Any]]:
    with Store(store) as opened:
        return opened.index(0)


def test_pen_at_ingest_agrees_with_quality(marked: Path) -> None:
    before = columns(marked)
    stripe = before["y_l0"] == 512
    assert stripe.sum() == 8
    assert (before["pen"][stripe] > 0.95).all()
    assert (before["pen"][~stripe] < 0.05).all()
    assert np.isnan(before["focus"]).all()
    result = json.loads(succeed("quality", marked, "--json"))
    assert (result["patches"], result["damaged"]) == (64, 0)
    assert set(result["done"]["marked"]) == set(ALGORITHMS)
    after = columns(marked)
    assert np.allclose(after["pen"], before["pen"], atol=0.05)
    assert (after["focus"][stripe] < 1).all()
    assert after["focus"][~stripe].max() > 50
    assert set(before) | set(ALGORITHMS) == set(after)
    for name in set(before) - set(ALGORITHMS):
        np.testing.assert_array_equal(before[name], after[name])
    # A second run writes nothing.
    written = (marked / "data.mdb").stat().st_mtime_ns
    assert "0 slides measured, 1 already measured" in succeed("quality", marked)
    assert (marked / "data.mdb").stat().st_mtime_ns == written
    assert "1 slide measured" in succeed("quality", marked, "--force")


def test_damaged_patch_has_no_values(marked: Path) -> None:
    flip_a_byte(marked, 0, 5)
    result = quality(marked, progress=Progress())
    assert (result.damaged, list(result.done)) == (1, ["marked"])
    assert "1 slide measured, 0 already measured, 0 failed" in repr(result)
    focus = columns(marked)["focus"]
    assert [i for i, value in enumerate(focus.tolist()) if math.isnan(value)] == [5]


def test_jpeg_and_png_have_similar_measures(marked: Path) -> None:
    """libjpeg decodes the JPEG at half size; the PNG is decoded and averaged."""
    stores = (marked, marked.with_name("png.lmdb"))
    for store in stores:
        quality(store, progress=Progress())
    jpeg, png = map(columns, stores)
    assert np.corrcoef(jpeg["focus"], png["focus"])[0, 1] > 0.99
    assert np.allclose(jpeg["pen"], png["pen"], atol=0.05)
