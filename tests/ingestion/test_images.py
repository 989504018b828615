"""Images as slides: their pixels, the files that are taken, the default settings, and patches at the edge."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from helpers.commands import RunCommand, messages
from helpers.inline import InlineWorkers
from histopipe.errors import SlideUnreadable, UsageError
from histopipe.geometry import Micrometres, Mpp, PointL0, Size
from histopipe.inference import slide_tiler
from histopipe.inference.options import PredictOptions
from histopipe.inference.stored_slides import PatchRequirements
from histopipe.ingestion.ingest import ingest
from histopipe.ingestion.preview import plan
from histopipe.ingestion.request import read_request
from histopipe.slides.discovery import discover
from histopipe.slides.scale import resolve_mpp
from histopipe.slides.slide_files import is_image, open_slide
from histopipe.splits.splits import DROPPED
from histopipe.splits.splitting import make_splits
from histopipe.store.store import Store
from histopipe.system.output import Progress
from histopipe.tiling.plan import cell_starts
from histopipe.tiling.spec import Edge, TilingSpec, spec_from_json, spec_of_store

Pixels = NDArray[np.uint8]
SILENT = Progress()


pytestmark = pytest.mark.usefixtures("inline_workers")


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    """Return pixels that differ everywhere, with few colours, so that a palette has them all."""
    y, x = np.mgrid[:height, :width]
    red, green = (x * 7 + y * 3 + seed) % 12 * 20, (x + y * 5) % 10 * 25
    return np.stack([red, green, (red + green) // 2], axis=2).astype(np.uint8)


def write(path: Path, height: int = 40, width: int = 60, seed: int = 0, **save: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(height, width, seed)).save(path, **save)
    return path


def pixels_of(path: Path) -> Pixels:
    with open_slide(path) as slide:
        return slide.read_region(PointL0(0, 0), 0, slide.info.size)


RGB = picture(40, 60)
GREY = np.repeat(RGB[..., :1], 3, axis=2)
ALPHA = np.where(np.arange(60) < 30, 255, 0).astype(np.uint8)[None].repeat(40, axis=0)
ON_WHITE = np.where(ALPHA[..., None] == 255, RGB, 255).astype(np.uint8)


def with_alpha(alpha: Pixels) -> Image.Image:
    return Image.fromarray(np.dstack([RGB, alpha]), "RGBA")


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


@pytest.mark.parametrize(
    ("name", "image", "save", "expected", "note"),
    [
        ("a.png", Image.fromarray(RGB), {}, RGB, None),
        ("a.bmp", Image.fromarray(RGB), {}, RGB, None),
        ("a.webp", Image.fromarray(RGB), {"lossless": True}, RGB, None),
        ("a.PNG", Image.fromarray(GREY).convert("L"), {}, GREY, None),
        ("a.png", Image.fromarray(RGB).quantize(256), {}, RGB, "palette"),
        ("a.png", with_alpha(np.full_like(ALPHA, 255)), {}, RGB, "transparent"),
        ("a.png", with_alpha(ALPHA), {}, ON_WHITE, "transparent pixels, if any, are white"),
        ("a.webp", with_alpha(ALPHA), {"lossless": True}, ON_WHITE, "transparent"),
        (
            "a.png",
            Image.fromarray(RGB),
            {"transparency": tuple(RGB[0, 0].tolist())},
            np.where((RGB[0, 0] == RGB).all(axis=2, keepdims=True), 255, RGB),
            "transparent",
        ),
        ("a.png", Image.fromarray(RGB), {"exif": exif(3)}, RGB[::-1, ::-1], "orientation 3"),
        ("a.png", Image.fromarray(RGB), {"exif": exif(6)}, np.rot90(RGB, -1), "orientation 6"),
    ],
)
def test_images_have_the_right_pixels(
    tmp_path: Path,
    name: str,
    image: Image.Image,
    save: Any,
    expected: Pixels,
    note: str | None,
) -> None:
    image.save(tmp_path / name, **save)
    assert np.array_equal(pixels_of(tmp_path / name), expected)
    with open_slide(tmp_path / name) as slide:
        assert len(slide.info.levels) == 1
        assert slide.info.reader.startswith("pillow ")
        assert (note or "") in " ".join(slide.info.notes)
        assert bool(slide.info.notes) == (note is not None)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_jpeg_is_applied(tmp_path: Path, orientation: int) -> None:
    """The pixels are those of the image that was turned before it was compressed."""
    path = write(tmp_path / "a.jpg", 48, 64, exif=exif(orientation), quality=95, subsampling=0)
    stored = np.asarray(Image.open(path))
    turned = {
        1: stored, 2: stored[:, ::-1], 3: stored[::-1, ::-1], 4: stored[::-1],
        5: stored.transpose(1, 0, 2), 6: np.rot90(stored, -1), 7: np.rot90(stored, 2).transpose(1, 0, 2),
        8: np.rot90(stored),
    }  # fmt: skip
    assert (pixels_of(path) == turned[orientation]).all()


def chunk(name: bytes, content: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    crc = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", crc)


def png(width: int, height: int, bits: int, colour: int, data: bytes = b"") -> bytes:
    """Return a PNG file of any header."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(data))
        + chunk(b"IEND", b"")
    )


def encoded(image: Image.Image, kind: str, **save: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **save)
    return buffer.getvalue()


MOVIE = [Image.fromarray(picture(40, 60, seed)) for seed in (1, 2)]
RGB_PNG = encoded(Image.fromarray(RGB), "PNG")
LARGE_PNG = encoded(Image.fromarray(picture(80, 90)), "PNG")
RGB_JPEG = encoded(Image.fromarray(RGB), "JPEG")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("rgb16.png", png(4, 4, 16, 2, (b"\0" + bytes(24)) * 4), "16 bits per sample"),
        ("grey16.png", png(4, 4, 16, 0, (b"\0" + bytes(8)) * 4), "16 bits per sample"),
        ("rgba16.png", png(4, 4, 16, 6, (b"\0" + bytes(32)) * 4), "16 bits per sample"),
        ("clear.png", encoded(with_alpha(np.zeros_like(ALPHA)), "PNG"), "transparent everywhere"),
        ("bits.png", encoded(Image.new("1", (9, 9)), "PNG"), "mode 1"),
        ("print.jpg", encoded(Image.new("CMYK", (9, 9)), "JPEG"), "mode CMYK"),
        (
            "movie.png",
            encoded(MOVIE[0], "PNG", save_all=True, append_images=MOVIE[1:]),
            "animation of 2.*save one of them",
        ),
        (
            "movie.webp",
            encoded(MOVIE[0], "WEBP", save_all=True, append_images=MOVIE[1:]),
            "animation of 2",
        ),
        ("bomb.png", png(60_000, 60_000, 8, 2), "DecompressionBombError"),
        (
            "large.png",
            png(10_000, 10_000, 8, 2),
            "too large to decode as a whole: found 10000×10000",
        ),
        ("empty.png", b"", "an empty file"),
        ("text.jpg", b"this is no image", "a text file"),
        ("slide.png", b"II*\0" + bytes(40), "a TIFF that is not a tiled slide"),
        ("header.png", RGB_PNG[:20], "check that the copy is complete"),
        ("cut.png", RGB_PNG[: len(RGB_PNG) // 2], "cannot be read as an image"),
        ("cut.jpg", RGB_JPEG[: len(RGB_JPEG) // 2], "truncated"),
        (
            "flipped.png",
            RGB_PNG[:60] + bytes([RGB_PNG[60] ^ 255]) + RGB_PNG[61:],
            "cannot be read as an image",
        ),
    ],
)
def test_images_that_would_be_wrong_are_refused(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SlideUnreadable, match=reason) as error:
        pixels_of(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_orientation_after_the_pixels_is_refused(tmp_path: Path) -> None:
    late = chunk(b"eXIf", exif(6).tobytes().removeprefix(b"Exif\0\0"))
    (tmp_path / "a.png").write_bytes(RGB_PNG[:-12] + late + RGB_PNG[-12:])
    with pytest.raises(SlideUnreadable, match="40×60 pixels when decoded, expected 60×40"):
        pixels_of(tmp_path / "a.png")


def test_regions_beyond_the_image_are_white(tmp_path: Path) -> None:
    around = np.full((300, 300, 3), 255, np.uint8)
    around[100:140, 100:160] = RGB
    with open_slide(write(tmp_path / "a.png")) as slide:
        for x, y in np.random.default_rng(1).integers(-90, 130, (50, 2)).tolist():
            region = slide.read_region(PointL0(x, y), 0, Size(29, 23))
            assert (region == around[y + 100 : y + 123, x + 100 : x + 129]).all()


def test_changed_image_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.png")
    assert (pixels_of(path) == RGB).all()
    write(path, seed=3)
    assert (pixels_of(path) == picture(40, 60, 3)).all()


@pytest.mark.parametrize(
    ("name", "save", "mpp"),
    [
        ("a.png", {}, None),
        ("a.png", {"dpi": (25400 / 0.5, 25400 / 0.5)}, 0.5),
        ("a.jpg", {"dpi": (50800, 50800)}, 0.5),
        *(
            (f"a.{kind}", {"dpi": (dpi, dpi)}, None)
            for kind in ("png", "jpg", "bmp", "tif")
            for dpi in (72, 96, 300, 600, 1200)
        ),
    ],
)
def test_resolution_for_screens_and_printers_is_no_scale(
    tmp_path: Path, name: str, save: Any, mpp: float | None
) -> None:
    with open_slide(write(tmp_path / name, **save)) as slide:
        scale = resolve_mpp("a", slide.info, default=Mpp(7.0)).mpp
    assert scale == pytest.approx(mpp or 7.0, rel=1e-4)


def test_scale_of_imagej_is_in_micrometres(tmp_path: Path) -> None:
    for unit, expected in (("micron", "0.25"), ("\\u00B5m", "0.25"), ("pixel", None)):
        path = tmp_path / "a.tif"
        tifffile.imwrite(path, RGB, imagej=True, resolution=(4, 4), metadata={"unit": unit})
        with open_slide(path) as slide:
            assert slide.info.mpp_x == expected, unit


# Discovery


def names(*paths: Path, images: bool = False) -> list[str]:
    slides = discover(paths, images=images)
    return [slide.path.name + "!" * (slide.problem is not None) for slide in slides]


def test_images_next_to_slides_are_not_taken(tmp_path: Path) -> None:
    both, only, vms = (tmp_path / name for name in ("both", "only", "vms"))
    for folder in (both, only):
        write(folder / "a.png")
        write(folder / "b" / "c.jpeg")
        (folder / "._d.png").write_bytes(b"x")
    (both / "a.svs").write_bytes(b"x")
    for name in ("s-0.jpg", "mask.jpg"):
        write(vms / name)
    (vms / "s.vms").write_text("[Virtual Microscope Specimen]\nImageFile=s-0.jpg\n")
    assert names(both) == ["a.svs"]
    assert names(only) == ["a.png", "c.jpeg"]
    assert names(both, only) == ["a.svs"]  # as before images were read
    assert names(only, images=True) == names(only)
    assert names(both, images=True) == ["a.png", "c.jpeg"]
    assert names(both / "a.png") == ["a.png"]
    # Such a file failed before, and does so still: its name was given, so it is not left out.
    assert names(both / "a.svs", both / "a.png") == ["a.png!", "a.svs"]
    assert names(*vms.iterdir()) == ["mask.jpg!", "s.vms", "s-0.jpg!"]
    assert names(vms, images=True) == ["mask.jpg"]


def test_files_that_are_left_out_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "images" / "a.png")
    slide = tmp_path / "scan.tif"
    tifffile.imwrite(slide, picture(64, 64), tile=(32, 32), photometric="rgb")
    discover([slide, tmp_path / "images"])
    assert "images has no slide: found 1 other files (1 × .png)" in capsys.readouterr().err
    slide.rename(tmp_path / "images" / "scan.tif")
    discover([tmp_path / "images"], images=True)
    assert "1 slide left out, because of --images" in capsys.readouterr().err


def test_images_saved_again_without_loss_are_copies(tmp_path: Path) -> None:
    write(tmp_path / "a.png")
    write(tmp_path / "b.bmp")
    write(tmp_path / "c.png", compress_level=1)
    write(tmp_path / "d.png", seed=1)
    write(tmp_path / "e.png", 60, 40)
    (tmp_path / "labels.csv").write_text("slide,label\na,x\nb,y\nc,x\nd,y\ne,x\n")
    ingest(tmp_path, tmp_path / "s.lmdb", patch_size=16, progress=SILENT)
    with Store(tmp_path / "s.lmdb") as store:
        hashes = {record.id: record.pixel_hash for record in store.complete.values()}
        assert hashes["a"] == hashes["b"] == hashes["c"]
        assert len(set(hashes.values())) == 3
        splits = make_splits([store], split_by="slide", seed=1, fractions=(0.5, 0.5, 0.0))
    assert len({slide.content for slide in splits.slides if slide.id in "abc"}) == 1


def test_tiff_files_of_one_image_are_images(tmp_path: Path) -> None:
    write(tmp_path / "mask.png")
    write(tmp_path / "region.tif", compression="tiff_lzw")
    assert names(tmp_path) == ["region.tif"]  # it was a slide before
    tifffile.imwrite(tmp_path / "scan.tif", picture(64, 64), tile=(32, 32), photometric="rgb")
    tifffile.imwrite(tmp_path / "a.ome.tif", picture(64, 64), photometric="rgb")
    (tmp_path / "broken.tif").write_bytes(b"II*\0")
    assert {slide.path.name: is_image(slide) for slide in discover([tmp_path])} == {
        "region.tif": True,
        "scan.tif": False,
        "a.ome.tif": False,
        "broken.tif": None,
    }
    assert names(tmp_path, images=True) == ["broken.tif", "mask.png", "region.tif"]


def test_orientation_of_tiff_is_noted(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", RGB, extratags=[(274, "H", 1, 6, True)])
    with open_slide(tmp_path / "a.tif") as slide:
        assert slide.info.notes == ("its orientation 6 is not applied",)


# Default settings


def spec_for(folder: Path, store: Path | None = None, **settings: Any) -> TilingSpec:
    return read_request(folder, store or folder / "none.lmdb", settings, SILENT)[1]


def test_defaults_of_images(tmp_path: Path) -> None:
    write(tmp_path / "a.png", 300, 320)
    assert spec_for(tmp_path) == TilingSpec(level=0, tissue="none", edge="shift")
    spec = spec_for(tmp_path, patch_size=64, mpp=1.0, tissue="otsu", edge="drop", default_mpp=0.5)
    assert spec == TilingSpec(patch_size=64, mpp=Mpp(1.0))
    assert spec_for(tmp_path, mpp=1.0, default_mpp=0.5).patch_size == 150
    assert spec_for(tmp_path, mag=10, default_mpp=0.5).patch_size == 150
    write(tmp_path / "b.png", 96, 200)
    assert spec_for(tmp_path).patch_size == 96
    (tmp_path / "c.png").write_bytes(b"cut")
    assert spec_for(tmp_path).patch_size == 96
    write(tmp_path / "d.png", 1, 1)
    assert spec_for(tmp_path).patch_size == 8  # the smallest; the image has no patch
    for number in range(40):  # few small images do not make patches small
        write(tmp_path / "many" / f"{number}.png", 20 if number < 2 else 64, 70)
    assert spec_for(tmp_path / "many").patch_size == 64


def test_images_with_and_without_a_scale_are_not_mixed(tmp_path: Path, run: RunCommand) -> None:
    write(tmp_path / "in" / "a.png", dpi=(50_800, 50_800))
    write(tmp_path / "in" / "b.png")
    (tmp_path / "in" / "c.png").write_bytes(LARGE_PNG[:90])
    assert "found 0.5 mpp (a), and 2 slides without a scale (b, c)" in messages(
        run("ingest", "in", "--out", "s.lmdb"), 2
    )
    assert not (tmp_path / "s.lmdb").exists()
    # Only the damaged image fails.
    assert run("ingest", "in", "--out", "s.lmdb", "--default-mpp", "0.5").returncode == 3


def test_old_command_has_old_defaults(tmp_path: Path, run: RunCommand) -> None:
    """Slides have the defaults of before, and so have images in a store that an earlier version wrote."""
    slides = tmp_path / "slides"
    write(slides / "a.png")
    tifffile.imwrite(slides / "a.tif", picture(64, 64), tile=(32, 32), photometric="rgb")
    assert spec_for(slides) == TilingSpec(mpp=Mpp(0.5))
    regions, store = tmp_path / "regions", tmp_path / "old.lmdb"
    write(regions / "a.tif", 300, 300)
    old: Any = {"patch_size": 64, "mpp": 0.5, "tissue": "otsu", "edge": "drop"}
    ingest(regions, store, progress=SILENT, default_mpp=0.5, **old)
    assert spec_for(regions).edge == "shift"
    assert spec_for(regions, store) == TilingSpec(patch_size=64, mpp=Mpp(0.5))


def test_spec_without_edge_is_that_of_earlier_versions() -> None:
    """The bytes in `meta` of a store that an earlier version wrote with the same settings."""
    assert json.dumps(TilingSpec(mpp=Mpp(0.5)).to_json()) == (
        '{"patch_size": 256, "overlap": 0, "mpp": 0.5, "level": null, "tissue": "otsu", "tissue_threshold": 0.5, '
        '"codec": "auto", "quality": 90, "subsampling": "444", "resample": "fast", "algorithms": {"grid": "grid-1", '
        '"thumbnail": "native-1", "tissue": "otsu-3", "resample": "area-lanczos-2"}}'
    )
    for edge in ("shift", "pad"):
        spec = TilingSpec(level=0, edge=edge)
        stored = json.loads(json.dumps(spec.to_json()))
        assert spec_of_store(stored) == spec_from_json(stored) == spec  # `repair` and `predict`


# The whole way


def test_folder_of_images_with_a_damaged_one(tmp_path: Path, run: RunCommand) -> None:
    for name in ("benign/P1-a.png", "benign/P1-b.png", "malignant/P2-a.jpg", "malignant/P2-b.jpg"):
        write(tmp_path / "images" / name, 70, 100, seed=4)
    (tmp_path / "images" / "benign" / "P9-c.png").write_bytes(LARGE_PNG[:90])
    command = (
        "ingest",
        "images",
        "--out",
        "s.lmdb",
        "--patient-regex",
        r"(P\d)-",
        "--codec",
        "png",
    )
    printed = messages(run(*command), 3)
    assert "default is --edge shift --level 0 --patch-size 70 --tissue none" in printed
    assert "P9-c.png: no part of level 0 can be read: found OSError: image file is" in printed
    with Store(tmp_path / "s.lmdb") as store:
        records = {record.id: record for record in store.complete.values()}
        assert {name: (r.label, r.patient, r.planned) for name, r in records.items()} == {
            "benign/P1-a": ("benign", "P1", 2),
            "benign/P1-b": ("benign", "P1", 2),
            "malignant/P2-a": ("malignant", "P2", 2),
            "malignant/P2-b": ("malignant", "P2", 2),
        }
        assert store.index(store.number("benign/P1-a"))["x_l0"].tolist() == [0, 30]
        whole = picture(70, 100, 4)
        assert (store.read("benign/P1-a", 0) == whole[:, :70]).all()
        assert (store.read("benign/P1-a", 1) == whole[:, 30:]).all()
    assert "edge: shift in the store, drop asked for" in run(*command, "--edge", "drop").stderr
    run(*command, "--patient-regex", r"(P\d-\w)")
    with Store(tmp_path / "s.lmdb") as store:
        assert {record.patient for record in store.complete.values()} >= {"P1-a", "P1-b"}


def test_patients_come_from_ids(tmp_path: Path) -> None:
    for name in ("x-1", "x-2", "y-1"):
        write(tmp_path / f"{name}.png")
    (tmp_path / "labels.csv").write_text("slide,label,patient\nx-1,a,Q\nx-2,a,\ny-1.png,b,\n")
    ingest(tmp_path, tmp_path / "s.lmdb", patient_regex=r"^\w", progress=SILENT)
    with Store(tmp_path / "s.lmdb") as store:
        assert {r.id: r.patient for r in store.complete.values()} == {
            "x-1": "Q",
            "x-2": "x",
            "y-1": "y",
        }
    with pytest.raises(UsageError, match="finds no patient in 1 slide: found y-1"):
        spec_for(tmp_path, patient_regex="x-(.)")
    with pytest.raises(UsageError, match="--patient-regex"):
        spec_for(tmp_path, patient_regex="(")


def test_images_smaller_than_a_patch_are_padded_or_named(tmp_path: Path) -> None:
    write(tmp_path / "a.png", 40, 60)
    beyond = "1 patch partly beyond the edge: blank there"
    for edge, patches, note in (
        ("drop", 0, "no patch fits"),
        ("shift", 0, "no patch fits"),
        ("pad", 1, beyond),
    ):
        preview = plan(tmp_path, patch_size=64, edge=edge, progress=SILENT)
        (record,) = preview.records.values()
        assert record.planned == patches
        assert note in " ".join(record.notes)


# Patches at the edge


@given(st.integers(0, 300), st.integers(1, 120), st.data())
def test_cells_at_the_edge(extent: int, cell: int, data: st.DataObject) -> None:
    stride, first = data.draw(st.integers(1, cell)), data.draw(st.integers(0, 50))
    by_edge = {
        edge: cell_starts(first, extent, cell, stride, edge).tolist() for edge in get_args(Edge)
    }
    regular = [first + n * stride for n in range(extent) if n * stride + cell <= extent]
    assert by_edge["drop"] == regular
    for edge in ("shift", "pad"):
        starts = by_edge[edge]
        assert starts[: len(regular)] == regular  # so patches of the regular grid keep their place
        assert len(starts) <= len(regular) + 1
        assert starts == sorted(set(starts))
        covered = {x for start in starts for x in range(start, start + cell)}
        if edge == "pad" or extent >= cell:
            assert covered >= set(range(first, first + extent))
    assert all(first <= start <= first + extent - cell for start in by_edge["shift"])
    assert all(first <= start < first + extent for start in by_edge["pad"])


def test_patches_of_an_image_cover_it(tmp_path: Path, run: RunCommand) -> None:
    """Each patch has the pixels at its corner, and together they have all pixels of the image."""
    whole = np.random.default_rng(2).integers(0, 256, (97, 131, 3), np.uint8)
    Image.fromarray(whole).save(tmp_path / "a.png")
    for edge in ("shift", "pad"):
        store = f"{edge}.lmdb"
        settings = ("--patch-size", 32, "--overlap", 5, "--codec", "png", "--edge", edge)
        assert run("ingest", "a.png", "--out", store, *settings).returncode == 0
        around = np.full((200, 200, 3), 255, np.uint8)
        around[:97, :131] = whole
        covered = np.zeros((200, 200), bool)
        with Store(tmp_path / store) as opened:
            index = opened.index(0)
            for row, (x, y) in enumerate(zip(index["x_l0"], index["y_l0"], strict=True)):
                assert (opened.read("a", row) == around[y : y + 32, x : x + 32]).all()
                covered[y : y + 32, x : x + 32] = True
        assert covered[:97, :131].all()
        assert covered[97:].any() == covered[:, 131:].any() == (edge == "pad")


def test_overlapping_patches_are_on_one_side_of_a_split_by_region(
    tmp_path: Path, run: RunCommand
) -> None:
    for name in ("a/1", "a/2", "b/3", "b/4"):
        write(tmp_path / "images" / f"{name}.png", 403, 617, seed=int(name[-1]))
    run("ingest", "images", "--out", "s.lmdb", "--patch-size", 24, "--default-mpp", 0.5)
    with Store(tmp_path / "s.lmdb") as store:
        splits = make_splits([store], split_by="region", seed=1, region=Micrometres(60.0))
        overlapping = 0
        for slide in splits.slides:
            index = store.index(slide.slide)
            corners = np.stack([index["x_l0"], index["y_l0"]], axis=1)
            distance = abs(corners[:, None] - corners[None]).max(axis=2)
            overlapping += int(((distance > 0) & (distance < 24)).sum())
            kept = slide.subsets != DROPPED
            separated = kept[:, None] & kept[None] & (slide.subsets[:, None] != slide.subsets[None])
            assert separated.any()
            assert (distance[separated] >= 1.5 * 24 - 1).all()  # patches do not overlap, nor touch
        assert overlapping > 0


def test_predict_tiles_images_like_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slide_tiler, "WorkerPool", InlineWorkers)
    write(tmp_path / "a.png", 40, 60)
    (tmp_path / "b.svs").write_bytes(b"not read")
    spec = TilingSpec(patch_size=32, level=0, tissue="none", edge="shift", codec="png")
    trained = PatchRequirements(Path("run"), 32, spec.to_json(), None, "none")
    options = PredictOptions(images=True, batch_size=4)
    failed: dict[str, str] = {}
    run: Any = SimpleNamespace(fail=failed.__setitem__)
    with slide_tiler.source_of_files([tmp_path], trained, options, SILENT) as source:
        assert source.spec == spec
        (slide,) = source._planned(source.jobs, run)
        assert slide is not None and not failed
        batch = slide.load(0)
    assert batch.corners.tolist() == [[0, 0], [28, 0], [0, 8], [28, 8]]
    assert (batch.images[3] == RGB[8:, 28:]).all()
    of_scale = PatchRequirements(Path("run"), 32, spec.to_json(), 0.5, "none")
    with slide_tiler.source_of_files([tmp_path], of_scale, options, SILENT) as source:
        assert list(source._planned(source.jobs, run)) == []
    assert "its scale is unknown: expected 0.5 µm per pixel, as in training" in failed["a"]
