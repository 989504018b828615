"""Ingest at the coordinates of other tools: exactly the patches that these tools mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
from PIL import Image

from helpers.commands import Run
from helpers.slide_variants import COPIED, picture, write_slide
from helpers.slides import make_slides
from helpers.tissue_files import write_coords
from histopipe.geometry import Size
from histopipe.store.store import Store

TRIDENT = {"patch_size": 128, "level0_magnification": 20, "target_magnification": 20, "overlap": 0}


pytestmark = pytest.mark.usefixtures("inline_workers")


def patches_of(store: Path, slide: str) -> tuple[list[tuple[int, int]], list[np.ndarray]]:
    with Store(store) as opened:
        number = opened.number(slide)
        columns = opened.index(number)
        corners = list(zip(columns["x_l0"].tolist(), columns["y_l0"].tolist(), strict=True))
        return corners, [opened.read(slide, row) for row in range(len(corners))]


def test_imported_patches_agree_with_openslide(data: Path, tmp_path: Path, run: Run) -> None:
    slide = data / "slides" / "CMU-1-Small-Region.svs"
    corners = [(0, 0), (101, 37), (640, 1203), (2100, 2850)]  # the last one extends beyond the edge
    for name, attributes in (
        ("trident", TRIDENT | {"patch_size_level0": 128}),
        ("clam", {"patch_size": 128, "patch_level": 0, "downsample": [1.0, 1.0]}),
        ("half", TRIDENT | {"patch_size": 64, "target_magnification": 10}),
    ):
        suffix = "" if name == "clam" else "_patches"
        write_coords(tmp_path / name / f"CMU-1-Small-Region{suffix}.h5", corners, **attributes)
        done = run("import-coords", name, slide, "--out", f"{name}.lmdb", "--codec", "png")
        assert done.returncode == 0, done.stderr
        stored_corners, images = patches_of(tmp_path / f"{name}.lmdb", "CMU-1-Small-Region")
        assert stored_corners == corners
        with openslide.OpenSlide(slide) as opened:
            for corner, image in zip(corners, images, strict=True):
                region = opened.read_region(corner, 0, (128, 128))
                white = Image.new("RGBA", region.size, "white")
                expected = Image.alpha_composite(white, region).convert("RGB")
                if name == "half":
                    pixels = np.asarray(expected, np.float64).reshape(64, 2, 64, 2, 3).mean((1, 3))
                    assert np.abs(image - pixels).max() <= 1
                else:
                    assert (image == np.asarray(expected)).all()


def test_imported_patches_beyond_the_scanned_area_have_no_pixels_of_other_tiles(
    tmp_path: Path, run: Run
) -> None:
    """A scanned area smaller than the slide has fewer native tiles than the slide."""
    slide = tmp_path / "in" / "a.scn"
    slide.parent.mkdir()
    variant = next(iter(COPIED.values()))
    write_slide(slide, [picture(Size(40, 40), 40)], Size(16, 16), variant, 0.5, origin=(0, 1))
    corners = [(0, 0), (0, 1), (16, 17), (32, 33), (24, 9), (5, 30)]
    attributes = TRIDENT | {"patch_size": 16, "patch_size_level0": 16}
    write_coords(tmp_path / "co" / "a_patches.h5", corners, **attributes)
    done = run("import-coords", "co", slide, "--codec", "png")
    assert done.returncode == 0, done.stderr
    stored_corners, images = patches_of(tmp_path / "patches.lmdb", "a")
    assert stored_corners == corners
    with openslide.OpenSlide(slide) as opened:
        for corner, image in zip(corners, images, strict=True):
            region = opened.read_region(corner, 0, (16, 16))
            expected = Image.alpha_composite(Image.new("RGBA", region.size, "white"), region)
            assert (image == np.asarray(expected.convert("RGB"))).all(), corner


def test_coarser_level_is_read_if_it_fits(tmp_path: Path, run: Run) -> None:
    make_slides(tmp_path / "in", "--count", "1", "--size", "2048x2048", "--levels", "1,4")
    slide = next((tmp_path / "in").glob("*.svs"))
    corners = [(0, 0), (512, 1024)]
    attributes = TRIDENT | {"level0_magnification": 20, "target_magnification": 5}
    write_coords(tmp_path / "co" / f"{slide.stem}.h5", corners, **attributes)
    done = run("import-coords", "co", slide)
    assert done.returncode == 0, done.stderr
    with Store(tmp_path / "patches.lmdb") as store:
        record = store.slides[0]
        assert record.patch_mpp == pytest.approx(4 * (record.mpp or 0))
        assert (record.read_size or 0) * (record.downsample or 0) == pytest.approx(512, rel=0.02)
        assert store.index(0)["x_l0"].tolist() == [0, 512]


def test_import_coords_skips_forces_and_labels_like_ingest(
    made: Path, tmp_path: Path, run: Run
) -> None:
    slides = sorted(made.glob("*.svs"))
    for slide in slides[:3]:
        write_coords(tmp_path / "co" / f"{slide.stem}_patches.h5", [(0, 0), (128, 256)], **TRIDENT)
    write_coords(tmp_path / "co" / f"{slides[3].stem}.h5", [], **TRIDENT)
    first = run("import-coords", "co", made, "--json")
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert [slide["patches"] for slide in result["slides"]] == [2, 2, 2, 0]
    assert "8 slides have no coordinates: skipped" in first.stderr
    again = json.loads(run("import-coords", "co", made, "--json").stdout)
    assert {slide["status"] for slide in again["slides"]} == {"skipped"}
    write_coords(tmp_path / "co" / f"{slides[0].stem}_patches.h5", [(256, 0)], **TRIDENT)
    forced = json.loads(run("import-coords", "co", made, "--json", "--force").stdout)
    assert [slide["patches"] for slide in forced["slides"]] == [1, 2, 2, 0]
    with Store(tmp_path / "patches.lmdb") as store:
        assert {record.label for record in store.slides} == {"normal", "tumour"}
    mixed = run("ingest", made, "--patch-size", 128, "--tissue", "none")
    assert mixed.returncode == 2
    assert "imported-1" in mixed.stderr


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"nobody": ([(0, 0)], TRIDENT)}, "coordinate files match no slide: found nobody.h5"),
        (
            {"slide-000": ([(0, 0)], {"patch_size": 128})},
            "attributes of the dataset 'coords': found patch_size",
        ),
        (
            {
                "slide-000": (
                    [(0, 0)],
                    {"patch_size": 128, "patch_level": 0, "custom_downsample": 2},
                )
            },
            "custom_downsample",
        ),
        (
            {"slide-000": ([(0, 0)], TRIDENT), "slide-000_patches": ([(0, 0)], TRIDENT)},
            "two coordinate files",
        ),
        (
            {
                "slide-000": ([(0, 0)], TRIDENT),
                "slide-001": ([(0, 0)], TRIDENT | {"patch_size": 64}),
            },
            "coordinates with several sizes or scales",
        ),
        ({}, "has no coordinate files"),
    ],
)
def test_invalid_coordinates_are_refused(
    made: Path, tmp_path: Path, run: Run, files: dict[str, Any], expected: str
) -> None:
    (tmp_path / "co").mkdir()
    for name, (corners, attributes) in files.items():
        write_coords(tmp_path / "co" / f"{name}.h5", corners, **attributes)
    done = run("import-coords", "co", made)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert not (tmp_path / "patches.lmdb").exists()


def test_invalid_coordinates_fail_only_their_slide(made: Path, tmp_path: Path, run: Run) -> None:
    write_coords(tmp_path / "co" / "slide-000.h5", [(0, 0), (90_000, 0)], **TRIDENT)
    write_coords(tmp_path / "co" / "slide-001.h5", [(0, 0)], **TRIDENT)
    small = TRIDENT | {"patch_size_level0": 32}
    write_coords(tmp_path / "fine" / "slide-000.h5", [(0, 0)], **small)
    done = run("import-coords", "co", made)
    assert done.returncode == 3, done.stderr
    assert "are outside the slide: found [90000, 0]" in done.stderr
    enlarged = run("import-coords", "fine", made, "--out", "f.lmdb")
    assert "patches are never upsampled" in enlarged.stderr
    not_h5 = tmp_path / "text" / "slide-000.h5"
    not_h5.parent.mkdir()
    not_h5.write_text("hello")
    refused = run("import-coords", "text", made, "--out", "t.lmdb")
    assert refused.returncode == 2
    assert "has no coordinates" in refused.stderr
