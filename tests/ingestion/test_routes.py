"""The routes copy, decode and openslide: when each is used, and that all of them yield the same pixels."""

from __future__ import annotations

import dataclasses
import io
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.commands import with_tensorflow
from helpers.examples import examples
from helpers.slide_variants import (
    COPIED,
    Pixels,
    Variant,
    picture,
    strip_application_segments,
    with_jfif,
    write_slide,
)
from helpers.slides import make_slides
from histopipe.errors import SlideUnreadable
from histopipe.geometry import Mpp, PointL0, Size
from histopipe.ingestion.options import AskedRoute, IngestOptions
from histopipe.ingestion.patch_source import PatchFile, PatchSource, chunks
from histopipe.ingestion.planning import plan_slide
from histopipe.ingestion.slide_job import SlideJob, SlidePlan
from histopipe.slides import tile_check as native_check
from histopipe.slides.native_tiles import (
    NativeLevel,
    NativeTiles,
    NotPlain,
    declared_colour,
    frame_of,
)
from histopipe.slides.slide_files import SlideFile, open_slide
from histopipe.slides.tile_check import find_native
from histopipe.store.record import FailureKind, SlideRecord
from histopipe.tiling.spec import TilingSpec

Spec = dict[str, Any]
ROUTES: tuple[AskedRoute, ...] = ("copy", "decode", "openslide")
PLAIN: Spec = {"tissue": "none", "level": 0}


def plan(path: Path, route: AskedRoute = "auto", **spec: Any) -> SlidePlan | SlideRecord:
    job = SlideJob(SlideFile("a", path, (path,)))
    return plan_slide(job, TilingSpec(**PLAIN | spec), IngestOptions(route=route))


def patches(
    path: Path, route: AskedRoute = "auto", **spec: Any
) -> tuple[SlidePlan, list[PatchFile]]:
    """Return a slide's plan and all its patches, in the order of their numbers."""
    planned = plan(path, route, **spec)
    assert isinstance(planned, SlidePlan), planned
    recipe, values = planned.recipe, dict[int, PatchFile]()
    with PatchSource(recipe) as source:
        for rows in chunks(planned.plan, recipe.route, recipe.spec.patch_size):
            chunk = source.values(planned.plan.take(rows))
            values |= zip(rows.tolist(), chunk, strict=True)
    assert sorted(values) == list(range(len(planned.plan)))
    return planned, [values[row] for row in range(len(values))]


def pillow(value: PatchFile) -> Pixels:
    assert isinstance(value, bytes)
    return np.asarray(Image.open(io.BytesIO(value)).convert("RGB"))


def truth(path: Path, planned: SlidePlan) -> list[Pixels]:
    """Return the region of each patch as read by OpenSlide."""
    choice, side = planned.plan.choice, planned.plan.choice.read_size
    with open_slide(path) as slide:
        return [
            slide.read_region(PointL0(x, y), choice.level.number, Size(side, side))
            for x, y in zip(planned.plan.x_l0.tolist(), planned.plan.y_l0.tolist(), strict=True)
        ]


@pytest.mark.parametrize("suffix", [".svs", ".tiff"])
@pytest.mark.parametrize("name", COPIED)
def test_copied_patches_equal_openslide(tmp_path: Path, name: str, suffix: str) -> None:
    """Compare every pixel with two decoders. Partial tiles at the edges have no patches."""
    path = write_slide(
        tmp_path / f"a{suffix}", [picture(Size(300, 220))], Size(64, 64), COPIED[name]
    )
    planned, values = patches(path, patch_size=64)
    assert planned.record.route == "copy"
    reason = r"patches are native tiles; .* tiles equal to OpenSlide's"
    assert re.fullmatch(reason, str(planned.record.route_reason))
    assert len(values) == 12
    for value, expected in zip(values, truth(path, planned), strict=True):
        assert isinstance(value, bytes)
        assert value.count(b"Adobe") == 1 and b"JFIF" not in value and b"Patient" not in value
        assert (pillow(value) == expected).all()
        assert (simplejpeg.decode_jpeg(value) == expected).all()


def test_tensorflow_decodes_copied_patches(tmp_path: Path) -> None:
    """One patch of each kind, in one process that has loaded TensorFlow."""
    jpegs, expected = dict[str, Any](), list[Pixels]()
    for name, variant in COPIED.items():
        path = write_slide(tmp_path / "a.svs", [picture(Size(64, 64))], Size(64, 64), variant)
        planned, (value,) = patches(path, patch_size=64)
        assert planned.record.route == "copy" and isinstance(value, bytes)
        jpegs[name] = np.frombuffer(value, np.uint8)
        expected += truth(path, planned)
    np.savez(tmp_path / "a.npz", expected=expected, **jpegs)
    code = (
        "import sys, numpy as np, tensorflow as tf\n"
        "arrays = dict(np.load(sys.argv[1]))\n"
        "for pixels, (name, jpeg) in zip(arrays.pop('expected'), arrays.items(), strict=True):\n"
        "    decoded = tf.io.decode_jpeg(jpeg.tobytes(), channels=3, dct_method='INTEGER_ACCURATE')\n"
        "    print(name, (decoded.numpy() == pixels).all(), sep=': ')"
    )
    done = with_tensorflow(code, tmp_path / "a.npz")
    assert done.stdout.splitlines() == [f"{name}: True" for name in COPIED], done.stderr


@pytest.mark.parametrize(
    ("name", "patch_size", "least"),
    [
        # RGB tiles with shared tables and no marker. They are 4:4:4, but the header declares 4:2:0.
        ("CMU-1-Small-Region.svs", 240, 100),
        ("dicom/jpeg/camelyon16-overview.dcm", 256, 8),
    ],
)
def test_copied_patches_of_real_slides_equal_openslide(
    data: Path, name: str, patch_size: int, least: int
) -> None:
    planned, values = patches(data / "slides" / name, patch_size=patch_size)
    assert planned.record.route == "copy" and len(values) >= least
    assert np.array_equal([*map(pillow, values)], truth(data / "slides" / name, planned))


def test_tiles_of_slide_with_bounds_are_copied(tmp_path: Path) -> None:
    (path,) = make_slides(
        tmp_path, "--format", "scn", "--size", "1500x1000", "--bounds", "640,320,3000,2500"
    )
    planned, values = patches(path)
    assert planned.record.route == "copy"
    assert sorted(set(planned.plan.x_l0.tolist())) == [640 + 256 * i for i in range(5)]
    assert sorted(set(planned.plan.y_l0.tolist())) == [320 + 256 * i for i in range(3)]
    assert np.array_equal([*map(pillow, values)], truth(path, planned))


@pytest.mark.parametrize(
    ("variant", "spec", "route", "why"),
    [
        (Variant("grey", "L"), {}, "decode", "native tiles are grey, patches RGB"),
        (Variant(), {"patch_size": 48}, "decode", "patches are 48 pixels, native tiles 64×64"),
        (Variant(), {"overlap": 16}, "decode", "patches are not aligned with native tiles"),
        (Variant(), {"codec": "jpeg"}, "decode", "--codec jpeg re-encodes patches"),
        (Variant(), {"level": None, "mpp": 1.0}, "decode", "reduced from 128 to 64 pixels"),
        (Variant(edit=lambda tiles: [b""] * len(tiles)), {}, "openslide", "its longest tile"),
    ],
)
def test_route_reason_if_patches_cannot_be_copied(
    tmp_path: Path, variant: Variant, spec: Spec, route: str, why: str
) -> None:
    path = write_slide(tmp_path / "a.svs", [picture(Size(300, 220))], Size(64, 64), variant)
    planned, values = patches(path, **{"patch_size": 64, **spec})
    assert planned.record.route == route
    assert why in str(planned.record.route_reason)
    assert all(isinstance(value, bytes) for value in values)


def test_impossible_route_is_failure_of_option(tmp_path: Path) -> None:
    path = write_slide(tmp_path / "a.svs", [picture(Size(300, 220))], Size(64, 64))
    failed = plan(path, "copy", patch_size=48)
    assert isinstance(failed, SlideRecord) and failed.error_kind is FailureKind.OPTION
    assert "cannot use --route copy: found patches are 48 pixels" in str(failed.error)
    for route in ROUTES[1:]:
        planned, _ = patches(path, route, patch_size=64)
        assert planned.record.route == route
        assert str(planned.record.route_reason).startswith("requested")


def test_jpeg_2000_uses_openslide(data: Path) -> None:
    planned = plan(data / "slides" / "TCGA-CR-7395-01A-01-TS1.svs", patch_size=256)
    assert isinstance(planned, SlidePlan)
    assert (planned.record.route, planned.record.route_reason) == (
        "openslide",
        "its tiles are JPEG 2000",
    )


def with_other_tile(folder: Path, change: Callable[[bytes], bytes]) -> Path:
    """Write a slide whose tile of row 1, column 1 is changed: that of patch 5 of 12."""

    def edit(tiles: list[bytes]) -> list[bytes]:
        return [*tiles[:6], change(tiles[6]), *tiles[7:]]

    return write_slide(
        folder / "a.svs", [picture(Size(300, 220))], Size(64, 64), Variant(edit=edit)
    )


def test_missing_tiles_are_read_through_openslide(tmp_path: Path) -> None:
    path = with_other_tile(tmp_path, lambda _: b"")
    for route in ROUTES[:2]:
        planned, values = patches(path, route, patch_size=64)
        assert (pillow(values[5]) == 255).all()
        assert (pillow(values[0]) == truth(path, planned)[0]).all() == (route == "copy")


@pytest.mark.parametrize(
    "damage",
    [
        lambda tile: tile[:-20],
        lambda tile: bytes(len(tile)),
        lambda tile: tile[:-2] + b"\0\0",
        lambda tile: tile[:30],
    ],
)
@pytest.mark.parametrize("route", ["copy", "decode"])
def test_damaged_tile_loses_only_its_patch(
    tmp_path: Path, damage: Callable[[bytes], bytes], route: AskedRoute
) -> None:
    _, values = patches(with_other_tile(tmp_path, damage), route, patch_size=64)
    lost = [number for number, value in enumerate(values) if isinstance(value, SlideUnreadable)]
    assert lost == [5]
    assert "row 1, column 1" in str(values[5])


@pytest.mark.parametrize("route", ["copy", "decode"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_tile_with_other_frame_is_read_through_openslide(
    tmp_path: Path, route: AskedRoute, mode: str
) -> None:
    """The tile is the longest one, so the frame of the level is that of most tiles."""
    other = io.BytesIO()
    image = Image.fromarray(picture(Size(64, 64))).convert(mode)
    image.save(other, "JPEG", subsampling=0, quality=100)
    path = with_other_tile(tmp_path, lambda _: other.getvalue())
    codec = "auto" if route == "copy" else "png"
    planned, values = patches(path, route, patch_size=64, codec=codec)
    if mode == "L":  # OpenSlide refuses a grey tile of a colour level
        assert isinstance(values[5], SlideUnreadable)
        assert "Bogus JPEG colorspace" in str(values[5])
        return
    differences = abs(np.array([*map(pillow, values)], int) - truth(path, planned))
    if route == "copy":  # only the other tile is compressed again
        assert differences[5].mean() < 6
        differences[5] = 0
    assert differences.max() == 0


def moved(level: NativeLevel) -> NativeLevel:
    return dataclasses.replace(
        level, offsets=np.roll(level.offsets, 1), lengths=np.roll(level.lengths, 1)
    )


def with_other_colour(level: NativeLevel) -> NativeLevel:
    return dataclasses.replace(level, colour="rgb")


@pytest.mark.parametrize("wrong", [moved, with_other_colour])
@pytest.mark.parametrize("size", [Size(300, 220), Size(301, 223)])
def test_wrong_native_tiles_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any, size: Size
) -> None:
    """Test level 0, where pixels must be equal, and a level that OpenSlide interpolates."""
    pixels = picture(size)
    half = np.asarray(Image.fromarray(pixels).resize((size.width // 2, size.height // 2)))
    path = write_slide(tmp_path / "a.svs", [pixels, half], Size(32, 32))
    for level in (0, 1):
        monkeypatch.setattr(native_check, "find_native", find_native)
        planned, _ = patches(path, patch_size=32, level=level)
        assert planned.record.route == "copy"
        reason = str(planned.record.route_reason)
        assert ("approximate" in reason) == (not planned.plan.choice.level.downsample.is_integer())
        monkeypatch.setattr(native_check, "find_native", lambda *of: wrong(find_native(*of)))
        planned, values = patches(path, patch_size=32, level=level)
        assert planned.record.route == "openslide"
        assert "differ from OpenSlide's pixels" in str(planned.record.route_reason)
        expected = truth(path, planned)[0].astype(int)
        assert abs(pillow(values[0]) - expected).mean() < 8


def test_shift_by_one_pixel_is_detected_on_interpolated_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = picture(Size(1027, 823))
    half = np.asarray(Image.fromarray(pixels).resize((513, 411)))
    path = write_slide(tmp_path / "a.svs", [pixels, half], Size(64, 64))
    monkeypatch.setattr(
        native_check, "find_native", lambda *of: dataclasses.replace(find_native(*of), x_level=1)
    )
    planned = plan(path, patch_size=64, level=1)
    assert isinstance(planned, SlidePlan) and planned.record.route == "openslide"
    assert "least when shifted by (-1, 0)" in str(planned.record.route_reason)


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_scaled_decoding_agrees_with_averaging(data: Path, factor: int, tmp_path: Path) -> None:
    """On real tissue; the pictures of other tests have noise that no slide has."""
    with open_slide(data / "slides" / "CMU-1-Small-Region.svs") as slide:
        pixels = slide.read_region(PointL0(600, 600), 0, Size(1024, 1024))
    quality = Variant(save={"quality": 90, "subsampling": 0})
    path = write_slide(tmp_path / "a.svs", [pixels], Size(256, 256), quality, mpp=0.25)
    spec: Spec = {"patch_size": 64, "level": None, "mpp": Mpp(0.25 * factor)}
    planned, fast = patches(path, **spec)
    assert (planned.record.route, planned.record.resampling) == ("decode", "dct")
    assert f"decoded at 1/{factor}" in str(planned.record.route_reason)
    exactly, exact = patches(path, resample="exact", **spec)
    assert exactly.record.resampling == "area"
    expected = [np.asarray(Image.fromarray(t).reduce(factor)) for t in truth(path, planned)]
    for values, limit in ((fast, 4.2), (exact, 3.8)):
        differences = np.array([*map(pillow, values)], int) - expected
        assert abs(differences).mean() < limit  # the error of JPEG encoding at quality 90


def test_exact_resampling_is_identical_on_both_routes(tmp_path: Path) -> None:
    path = write_slide(tmp_path / "a.svs", [picture(Size(600, 500))], Size(64, 64), mpp=0.25)
    for mpp, overlap in ((0.5, 12), (0.6, 0)):  # averaged, filtered
        spec: Spec = {"patch_size": 48, "level": None, "mpp": Mpp(mpp), "codec": "png"}
        _, ours = patches(path, "decode", overlap=overlap, **spec)
        read, theirs = patches(path, "openslide", overlap=overlap, **spec)
        assert len(ours) > 4 and ours == theirs
        if read.record.resampling == "area":
            assert (read.record.read_size, read.record.stride) == (96, 72)
            reduced = [np.asarray(Image.fromarray(t).reduce(2)) for t in truth(path, read)]
            assert np.array_equal([*map(pillow, theirs)], reduced)


Settings40 = settings(
    examples(40), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@Settings40
@given(data=st.data())
def test_routes_agree_on_random_slides(data: st.DataObject) -> None:
    """For any size, origin, tile, patch, overlap and scale, cells are valid and all routes yield the same pixels."""
    size = Size(data.draw(st.integers(40, 330)), data.draw(st.integers(40, 330)))
    tile = Size(*(16 * data.draw(st.integers(1, 6)) for _ in range(2)))
    patch = data.draw(st.one_of(st.integers(8, 100), st.just(tile.width)))
    overlap = data.draw(st.one_of(st.just(0), st.integers(0, patch - 1)))
    mpp = data.draw(st.sampled_from([0.25, 0.25, 0.3, 0.5, 0.503, 0.75, 1.0]))
    variant = data.draw(st.sampled_from(list(COPIED.values())))
    edge = data.draw(st.sampled_from(["drop", "drop", "shift", "pad"]))
    spec: Spec = {
        "patch_size": patch,
        "overlap": overlap,
        "level": None,
        "mpp": Mpp(mpp),
        "edge": edge,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / data.draw(st.sampled_from(["a.svs", "a.tiff", "a.scn"]))
        origin = data.draw(st.tuples(st.integers(0, 200), st.integers(0, 200)))
        origin = origin if path.suffix == ".scn" else (0, 0)
        write_slide(path, [picture(size, patch)], tile, variant, mpp=0.25, origin=origin)
        planned, by_openslide = patches(path, "openslide", codec="png", **spec)
        _, decoded = patches(path, codec="png", **spec)
        assert decoded == by_openslide
        automatic, values = patches(path, **spec)
        if edge == "drop" and overlap == 0:  # cells cover every pixel of their area once
            cells, side = planned.plan, planned.plan.choice.read_size
            covered = np.zeros((size.height, size.width), int)
            for x, y in zip(cells.x_level - origin[0], cells.y_level - origin[1], strict=True):
                covered[y : y + side, x : x + side] += 1
            rows, columns = size.height // side * side, size.width // side * side
            assert (covered[:rows, :columns] == 1).all()
            assert len(cells) * side * side == rows * columns
        for name in ("x_level", "y_level", "x_l0", "y_l0"):
            assert (getattr(automatic.plan, name) == getattr(planned.plan, name)).all()
        if automatic.record.route == "copy":
            assert np.array_equal([*map(pillow, values)], [*map(pillow, by_openslide)])


def test_patches_read_together_equal_patches_read_alone(tmp_path: Path) -> None:
    path = write_slide(tmp_path / "a.svs", [picture(Size(900, 700))], Size(64, 64))
    planned, joined = patches(path, "openslide", patch_size=50, overlap=13, codec="png")
    with PatchSource(planned.recipe) as source:
        alone = [source.values(planned.plan.take(np.array([row])))[0] for row in range(len(joined))]
    assert alone == joined


def jpeg(**save: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture(Size(32, 16))).save(buffer, "JPEG", **save)
    return buffer.getvalue()


def plain(tile: bytes) -> bytes:
    size, none = Size(32, 16), np.zeros((0, 0), np.int64)
    level = NativeLevel(Path("/dev/null"), 0, 0, size, size, "ycbcr", b"", none, none)
    with NativeTiles(level) as tiles:
        return tiles.plain(tile)


def test_frames_are_read_from_headers() -> None:
    assert str(frame_of(jpeg(subsampling=2))) == "32×16 of 8 bits, sampling 2×2, 1×1, 1×1"
    # Any number of fill bytes may precede a marker.
    filled = jpeg(subsampling=0).replace(b"\xff\xc0\x00\x11", b"\xff\xff\xff\xc0\x00\x11")
    assert frame_of(filled).sampling == ((1, 1),) * 3
    assert (pillow(plain(filled)) == pillow(filled)).all()


@pytest.mark.parametrize(
    ("tile", "why"),
    [
        (b"", "no end marker"),
        (bytes(100), "no end marker"),
        (b"GIF89a" + jpeg(), "47 49 at its start"),
        (jpeg()[:-2], "truncated"),
        (jpeg()[:40] + b"\xff\xd9", "truncated header"),
        (jpeg(streamtype=2), "no quantisation tables"),
        (jpeg(streamtype=1), "no baseline or progressive frame"),
        (jpeg().replace(b"\xff\xdb", b"\x00\xdb", 1), "where a marker should be"),
    ],
)
def test_reason_if_tile_is_not_plain_jpeg(tile: bytes, why: str) -> None:
    with pytest.raises(NotPlain, match=why):
        plain(tile)


@pytest.mark.parametrize(
    ("tile", "colour"),
    [
        (jpeg(subsampling=0), "ycbcr"),
        (jpeg(keep_rgb=True), "rgb"),
        (with_jfif([jpeg(keep_rgb=True)])[0], "rgb"),
        (
            strip_application_segments([jpeg(keep_rgb=True)])[0],
            "rgb",
        ),  # by the names of its components
        (
            strip_application_segments([jpeg(subsampling=2)])[0],
            "ycbcr",
        ),  # only chroma is subsampled
        (strip_application_segments([jpeg(subsampling=0)])[0], None),
        (jpeg()[:30], None),
        (b"", None),
    ],
)
def test_colours_that_a_tile_declares(tile: bytes, colour: str | None) -> None:
    assert declared_colour(tile) == colour


@pytest.mark.parametrize(
    ("header", "save", "text"),
    [
        ("ycbcr", {"keep_rgb": True}, "declares YCbCr pixels, but 9 of 9 of its tiles declare RGB"),
        ("rgb", {"subsampling": 0}, "declares RGB pixels, but 9 of 9 of its tiles declare YCbCr"),
        ("rgb", {"keep_rgb": True}, None),
        ("ycbcr", {"subsampling": 2}, None),
    ],
)
def test_tiles_that_contradict_the_header_are_noted(
    tmp_path: Path, header: str, save: dict[str, Any], text: str | None
) -> None:
    path = write_slide(
        tmp_path / "a.svs", [picture(Size(300, 220))], Size(64, 64), Variant(header, save=save)
    )
    for route in ROUTES:
        notes = patches(path, route, patch_size=64)[0].record.notes
        assert len(notes) == (text is not None) and (text or "") in "".join(notes)


@pytest.mark.parametrize("compression", ["jpeg", "deflate"])
def test_tissue_in_missing_tiles_is_noted(tmp_path: Path, compression: str) -> None:
    """Two tiles of level 0 are missing where its smaller level shows tissue, and two on the glass."""
    path = tmp_path / "a.tif"
    pixels = np.full((512, 512, 3), 240, np.uint8)
    pixels[128:384, 128:384] = picture(Size(256, 256)) // 2
    layout: dict[str, Any] = {"photometric": "rgb", "compression": compression, "tile": (64, 64)}
    layout |= {"metadata": None, "resolutionunit": 3}
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(pixels, resolution=(1e4, 1e4), **layout)
        tiff.write(pixels[::8, ::8], resolution=(1250, 1250), subfiletype=1, **layout)
    with tifffile.TiffFile(path, mode="r+") as tiff:
        lengths = list(tiff.pages.first.databytecounts)
        for place in (0, 1, 27, 28):
            lengths[place] = 0
        tiff.pages.first.tags["TileByteCounts"].overwrite(lengths)
    for patch, tissue, count in ((64, "otsu-1", 2), (128, "otsu-1", 2), (64, "none", 4)):
        planned = plan(path, patch_size=patch, level=None, mpp=Mpp(1), tissue=tissue)
        assert isinstance(planned, SlidePlan)
        (note,) = [note for note in planned.record.notes if "does not contain" in note]
        assert note.startswith(f"{count} patches partly in tiles")
