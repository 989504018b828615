"""Ingest at the coordinates of other tools: exactly the patches that these tools mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
from PIL import Image

from helpers.commands import RunCommand, messages
from helpers.slide_variants import COPIED, picture, write_slide
from helpers.slides import CMU, make_slides
from helpers.stores import outcomes
from helpers.tissue_files import write_coords
from histopipe.errors import UsageError
from histopipe.geometry import Size
from histopipe.ingestion.ingest import import_coords
from histopipe.store.store import Store
from histopipe.system.output import Progress

TRIDENT = {"patch_size": 128, "level0_magnification": 20, "target_magnification": 20, "overlap": 0}

CORNERS = [(0, 0), (101, 37), (640, 1203), (2100, 2850)]  # the last one extends beyond the edge
SMALL = TRIDENT | {"patch_size": 16, "patch_size_level0": 16}
pytestmark = pytest.mark.usefixtures("inline_workers")


@pytest.mark.parametrize(
    ("slide", "suffix", "corners", "attributes", "reduction"),
    [
        (CMU, "_patches", CORNERS, TRIDENT | {"patch_size_level0": 128}, 1),
        (CMU, "", CORNERS, {"patch_size": 128, "patch_level": 0, "downsample": [1.0, 1.0]}, 1),
        (CMU, "_patches", CORNERS, TRIDENT | {"patch_size": 64, "target_magnification": 10}, 2),
        # A scanned area smaller than the slide has fewer native tiles than the slide.
        ("a", "_patches", [(0, 0), (0, 1), (16, 17), (32, 33), (24, 9), (5, 30)], SMALL, 1),
    ],
)
def test_imported_patches_agree_with_openslide(
    data: Path,
    tmp_path: Path,
    run: RunCommand,
    slide: str,
    suffix: str,
    corners: list[tuple[int, int]],
    attributes: dict[str, Any],
    reduction: int,
) -> None:
    path = data / "slides" / f"{slide}.svs"
    if slide == "a":
        path, variant = tmp_path / "a.scn", next(iter(COPIED.values()))
        write_slide(path, [picture(Size(40, 40), 40)], Size(16, 16), variant, 0.5, origin=(0, 1))
    write_coords(tmp_path / "co" / f"{slide}{suffix}.h5", corners, **attributes)
    assert run("import-coords", "co", path, "--codec", "png").returncode == 0
    with Store(tmp_path / "patches.lmdb") as store:
        columns = store.index(store.number(slide))
        images = [store.read(slide, row) for row in range(len(corners))]
    assert [*zip(columns["x_l0"], columns["y_l0"], strict=True)] == corners
    side = images[0].shape[0]
    with openslide.OpenSlide(path) as opened:
        for corner, image in zip(corners, images, strict=True):
            region = opened.read_region(corner, 0, (reduction * side,) * 2)
            white = Image.new("RGBA", region.size, "white")
            pixels = np.asarray(Image.alpha_composite(white, region).convert("RGB"), np.float64)
            means = pixels.reshape(side, reduction, side, reduction, 3).mean((1, 3))
            assert np.abs(image - means).max() <= reduction - 1, corner


def test_coarser_level_is_read_if_it_fits(tmp_path: Path, run: RunCommand) -> None:
    (slide,) = make_slides(tmp_path / "in", "--size", "2048x2048", "--levels", "1,4")
    attributes = TRIDENT | {"target_magnification": 5}
    write_coords(tmp_path / "co" / f"{slide.stem}.h5", [(0, 0), (512, 1024)], **attributes)
    assert run("import-coords", "co", slide).returncode == 0
    with Store(tmp_path / "patches.lmdb") as store:
        record = store.slides[0]
        assert record.patch_mpp == pytest.approx(4 * (record.mpp or 0))
        assert (record.read_size or 0) * (record.downsample or 0) == pytest.approx(512, rel=0.02)
        assert store.index(0)["x_l0"].tolist() == [0, 512]


def test_import_coords_skips_forces_and_labels_like_ingest(
    made: Path, tmp_path: Path, run: RunCommand
) -> None:
    slides = sorted(made.glob("*.svs"))
    for slide in slides[:3]:
        write_coords(tmp_path / "co" / f"{slide.stem}_patches.h5", [(0, 0), (128, 256)], **TRIDENT)
    write_coords(tmp_path / "co" / f"{slides[3].stem}.h5", [], **TRIDENT)
    first = run("import-coords", "co", made, "--json")
    assert [slide["patches"] for slide in outcomes(first.stdout).values()] == [2, 2, 2, 0]
    assert "8 slides have no coordinates: skipped" in messages(first, 0)
    write_coords(tmp_path / "co" / f"{slides[0].stem}_patches.h5", [(256, 0)], **TRIDENT)
    assert run("import-coords", "co", made, "--force").returncode == 0
    with Store(tmp_path / "patches.lmdb") as store:
        assert [record.planned for record in store.slides] == [1, 2, 2, 0]
        assert {record.label for record in store.slides} == {"normal", "tumour"}
    assert "imported-1" in messages(run("ingest", made, "--patch-size", 128, "--tissue", "none"), 2)


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
        ({"slide-000": None}, "has no coordinates"),
    ],
)
def test_invalid_coordinates_are_refused(
    tmp_path: Path, files: dict[str, Any], expected: str
) -> None:
    (tmp_path / "co").mkdir()
    for name, content in files.items():
        path = tmp_path / "co" / f"{name}.h5"
        if content is None:
            path.write_text("hello")
        else:
            write_coords(path, content[0], **content[1])
    for name in ("slide-000", "slide-001"):
        (tmp_path / f"{name}.svs").touch()
    with pytest.raises(UsageError, match=expected):
        import_coords(tmp_path / "co", tmp_path, tmp_path / "s.lmdb", progress=Progress())
    assert not (tmp_path / "s.lmdb").exists()


def test_invalid_coordinates_fail_only_their_slide(
    made: Path, tmp_path: Path, run: RunCommand
) -> None:
    write_coords(tmp_path / "co" / "slide-000.h5", [(0, 0), (90_000, 0)], **TRIDENT)
    write_coords(tmp_path / "co" / "slide-001.h5", [(0, 0)], **TRIDENT)
    attributes = TRIDENT | {"patch_size_level0": 32}
    write_coords(tmp_path / "fine" / "slide-000.h5", [(0, 0)], **attributes)
    assert "are outside the slide: found [90000, 0]" in messages(
        run("import-coords", "co", made), 3
    )
    enlarged = run("import-coords", "fine", made, "--out", "f.lmdb")
    assert "patches are never upsampled" in enlarged.stderr
