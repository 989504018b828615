"""Slides: discovery, ids, scale and pixels."""

from __future__ import annotations

import hashlib
import os
import pkgutil
import shutil
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import pydicom
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from helpers.examples import examples
from helpers.slide_variants import picture, write_slide
from helpers.slides import CMU, TCGA, make_slides
from histopipe.errors import NothingToDo, ScaleError, SlideUnreadable, UsageError
from histopipe.geometry import Level, Mpp, PointL0, RegionL0, Size
from histopipe.slides.dicom_tiles import find_tiles
from histopipe.slides.discovery import discover, show_links
from histopipe.slides.native_tiles import NotNative
from histopipe.slides.openslide_reader import _on_background
from histopipe.slides.scale import MppSource, resolve_mpp
from histopipe.slides.slide import SlideInfo, rgb_image
from histopipe.slides.slide_files import (
    SlideFile,
    SlideHashes,
    _digest,
    fingerprint,
    open_slide,
    pixel_hash,
    tile_hash,
)
from histopipe.slides.slide_formats import READERS, ReaderName, readers_of
from histopipe.slides.staging import StagingArea, staged
from histopipe.slides.thumbnail import colour_note, read_thumbnail


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def ids(*paths: Path) -> list[str]:
    return [slide.id for slide in discover(paths)]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.svs", "B.TIFF", "c/d.ndpi"], ["B", "a", "c/d"]),
        (["a.svs", "._a.svs", ".e.svs", "f.png", ".git/g.svs", "h.svs.part"], ["a"]),
        (["a.svs", "a.tif", "b.svs"], ["a.svs", "a.tif", "b"]),
        (
            [unicodedata.normalize("NFD", "Präparat.svs")],
            [unicodedata.normalize("NFC", "Präparat")],
        ),
    ],
)
def test_slides_are_found_by_suffix_without_hidden_files(
    tmp_path: Path, names: list[str], expected: list[str]
) -> None:
    """Equal ids keep their suffix, ids are in NFC, and a pipe is no file."""
    touch(tmp_path, *names)
    os.mkfifo(tmp_path / "pipe.svs")
    assert ids(tmp_path) == expected


def test_ids_in_several_folders_have_folder_prefix(tmp_path: Path) -> None:
    touch(tmp_path, "x/a.svs", "y/a.svs")
    assert ids(tmp_path / "x", tmp_path / "y") == ["x/a", "y/a"]
    assert ids(tmp_path / "x" / "a.svs") == ["a"]
    with pytest.raises(UsageError, match=r"two slides would have the same id 'a\.svs'"):
        ids(tmp_path / "x" / "a.svs", tmp_path / "y" / "a.svs")


def test_links_are_followed_without_loops_and_duplicates(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.svs", "elsewhere/b.svs")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "z.svs").symlink_to(tmp_path / "in" / "a.svs")
    slides = discover([tmp_path / "in", tmp_path / "in" / "a.svs"])
    assert [(slide.id, slide.links) for slide in slides] == [
        ("a", (tmp_path / "in" / "z.svs",)),
        ("out/b", ()),
    ]
    progress = mock.Mock()
    show_links(slides, progress)
    progress.message.assert_called_once_with(
        f"{tmp_path}/in/z.svs is not used: it is the same file as {tmp_path}/in/a.svs"
    )


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (["a.mrxs", "a/Slidedat.ini", "a/Data0000.dat"], 3),
        (["a.vms", "one.jpg", "map.jpg", "one.opt", "other.jpg"], 4),
    ],
)
def test_slide_includes_the_files_of_its_folder(
    tmp_path: Path, names: list[str], count: int
) -> None:
    touch(tmp_path, *names)
    (tmp_path / names[0]).write_text(
        "[Virtual Microscope Specimen]\nNoJpegColumns=1\nImageFile=one.jpg\nMapFile=map.jpg\nOptimisationFile=one.opt\n"
    )
    (slide,) = discover([tmp_path])
    assert (slide.id, slide.path) == ("a", slide.files[0])
    assert set(slide.files) == {tmp_path / name for name in names[:count]}
    before = fingerprint(slide)
    (tmp_path / names[2]).write_bytes(b"longer")
    assert fingerprint(slide) != before


def test_damaged_dicom_header_is_in_reason_without_warnings(
    tmp_path: Path, data: Path, recwarn: pytest.WarningsRecorder
) -> None:
    source = data / "slides" / "dicom" / "jpeg" / "camelyon16-overview.dcm"
    with open_slide(source) as slide:
        level = slide.info.levels[0]
    syntax, wrong = b"1.2.840.10008.1.2.4.50", b"1.2.840.10008.1x2.4.50"
    (tmp_path / "damaged.dcm").write_bytes(source.read_bytes().replace(syntax, wrong))
    assert ids(tmp_path) == ["damaged"]
    reason = r"its tiles are .*\(damaged header: Invalid value for VR UI: '1\.2\.840\.10008\.1x2"
    with pytest.raises(NotNative, match=reason):
        find_tiles((tmp_path / "damaged.dcm",), level)
    assert not recwarn.list


def test_dicom_series_is_one_slide(tmp_path: Path, data: Path) -> None:
    touch(tmp_path, "broken.dcm", "case/0001.dcm")
    for kind, name in (("jpeg", "case/0001"), ("jpeg", "case/0002"), ("j2k", "one")):
        source = data / "slides" / "dicom" / kind / "camelyon16-overview.dcm"
        shutil.copy(source, tmp_path / f"{name}.dcm")
    assert {slide.id: len(slide.files) for slide in discover([tmp_path])} == {
        "broken": 1,
        "case": 2,
        "one": 1,
    }


def test_files_that_are_not_read_are_named(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images next to slides, images that no reader takes, and DICOM files without suffix; not files of slides."""
    touch(tmp_path, "a.vms", "one.jpg", "b.png", "c.png", "d.jp2", "E.GIF", "notes.txt", "x/1.2.3")
    (tmp_path / "a.vms").write_text("[Virtual Microscope Specimen]\nImageFile=one.jpg\n")
    os.mkfifo(tmp_path / "pipe")  # reading it would never end
    source = data / "slides" / "dicom" / "jpeg" / "camelyon16-overview.dcm"
    for name in ("x/1.2.840.113619.2.5", "x/IM000001"):
        shutil.copy(source, tmp_path / name)
    assert ids(tmp_path) == ["a"]
    messages = capsys.readouterr().err
    assert "images not read: 1 × .gif, 1 × .jp2, 2 × .png; next to slides" in messages
    assert "2 DICOM files not read: name them *.dcm" in messages
    assert ids(tmp_path / "a.vms") == ["a"] and not capsys.readouterr().err
    with pytest.raises(NothingToDo):
        discover([tmp_path / "x"])
    assert "2 DICOM files not read: name them *.dcm" in capsys.readouterr().err


def test_undecodable_file_name_is_problem_of_its_slide_only(tmp_path: Path) -> None:
    touch(tmp_path, "a.svs")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff.svs")).write_bytes(b"x")
    a, b = discover([tmp_path])
    assert (a.problem, b.id) == (None, "b\\xff")
    assert "not UTF-8" in str(b.problem)


def test_missing_path_and_folder_without_slides_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none cannot be read: found No such file"):
        discover([tmp_path / "none"])
    touch(tmp_path, "a.gif")
    with pytest.raises(NothingToDo, match=r"1 other files \(1 × \.gif\)"):
        discover([tmp_path])


def header(mpp: str | None = None, power: str | None = None, mpp_y: str | None = None) -> SlideInfo:
    size = Size(10, 10)
    scale = (mpp, mpp_y or mpp, power, None)
    return SlideInfo("made", (Level(0, size, 1.0),), RegionL0(PointL0(0, 0), size), *scale, False)


@pytest.mark.parametrize(
    ("info", "csv", "default", "mpp", "source"),
    [
        (header("0.25", "20"), None, 1.0, 0.25, MppSource.PROPERTIES),
        (header("0.25", "20"), 0.5, 1.0, 0.5, MppSource.CSV),
        (header("0.25"), 0.25, None, 0.25, MppSource.PROPERTIES),
        (header("0.25"), 0.2501, None, 0.2501, MppSource.CSV),
        (header("0.25", mpp_y="0.5"), 0.3, None, 0.3, MppSource.CSV),
        (header(None, "20"), 0.4, 1.0, 0.4, MppSource.CSV),
        (header(None, "40"), None, 1.0, 0.25, MppSource.OBJECTIVE),
        (header(), None, 1.0, 1.0, MppSource.DEFAULT),
        (header("352.7777"), None, 1.0, 1.0, MppSource.DEFAULT),
        (header("264.58", "20"), None, None, 0.5, MppSource.OBJECTIVE),
        (header("0.001"), 0.5, None, 0.5, MppSource.CSV),
        (header("nonsense"), None, 0.5, 0.5, MppSource.DEFAULT),
        (header("0.25", mpp_y="0.252"), None, None, 0.251, MppSource.PROPERTIES),
    ],
)
def test_scale_comes_from_most_reliable_source(
    info: SlideInfo, csv: float | None, default: float | None, mpp: float, source: MppSource
) -> None:
    resolved = resolve_mpp(
        "a", info, from_csv=Mpp(csv) if csv else None, default=Mpp(default) if default else None
    )
    assert resolved.mpp == pytest.approx(mpp)
    assert resolved.source is source


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (header("352.777"), r"352\.777 mpp in its header.*72-dpi.*--mpp-csv"),
        (header("0.25", mpp_y="0.5"), r"not square: found 0\.25 by 0\.5 mpp"),
    ],
)
def test_error_contains_rejected_scale(info: SlideInfo, message: str) -> None:
    with pytest.raises(ScaleError, match=message):
        resolve_mpp("a", info)


@pytest.mark.parametrize(
    ("info", "mpp", "note"),
    [
        (header("0.25"), 0.5, "0.5 mpp from the CSV is used; the slide's header has 0.25"),
        (header("0.25", mpp_y="0.5"), 0.5, "the slide's header has 0.25 by 0.5 mpp"),
        (header("0.25"), 0.2501, "None"),
    ],
)
def test_note_if_csv_scale_differs_from_header(info: SlideInfo, mpp: float, note: str) -> None:
    assert str(resolve_mpp("a", info, from_csv=Mpp(mpp)).note).endswith(note)


def test_background_of_a_wrong_colour_space_is_noted(data: Path) -> None:
    pixels = np.full((90, 120, 3), 241, np.uint8)
    pixels[20:60, 30:90] = (150, 70, 160)  # stained tissue
    image = Image.fromarray(pixels)
    as_rgb = np.asarray(image.convert("YCbCr"))
    assert "YCbCr pixels were read as RGB" in str(colour_note(as_rgb))
    as_ycbcr = Image.frombytes("YCbCr", image.size, image.tobytes()).convert("RGB")
    assert "RGB pixels were read as YCbCr" in str(colour_note(np.asarray(as_ycbcr)))
    right = [pixels, pixels[:0]]
    for name in (CMU, TCGA):
        with open_slide(data / "slides" / f"{name}.svs") as slide:
            right.append(read_thumbnail(slide, Mpp(0.5)).pixels)
    right.append(right[-1][10:20, 10:20])
    assert [colour_note(thumbnail) for thumbnail in right] == [None] * 5


@given(st.integers(0, 60), st.integers(1, 60), st.sampled_from([1.0, 2.0, 4.016129, 8.00045]))
def test_level_region_is_inside_level_0_region(start: int, length: int, down: float) -> None:
    level = Level(1, Size(1000, 1000), down)
    area = level.inside(RegionL0(PointL0(start, start), Size(length, length)))
    assert area.x * down >= start - 0.01 * down
    assert (area.x + area.size.width) * down <= start + length + 0.01 * down or area.size.width == 0


def test_transparent_pixels_are_composited_on_background() -> None:
    """Expected is the definition: the premultiplied colour plus (1 - alpha) times the background."""
    rng = np.random.default_rng(0)
    colour, alpha = rng.integers(0, 256, (50, 40, 3)), rng.integers(0, 256, (50, 40, 1))
    premultiplied = np.rint(colour * (alpha / 255)).astype(np.uint8)
    bgra = np.concatenate([premultiplied[..., ::-1], alpha.astype(np.uint8)], axis=2)
    composited = np.asarray(rgb_image(_on_background(bgra, (10, 200, 240)))).astype(int)
    expected = premultiplied + (1 - alpha / 255) * np.array([10, 200, 240])
    assert abs(composited - expected).max() < 2
    opaque = np.concatenate([premultiplied, np.full((50, 40, 1), 255, np.uint8)], axis=2)
    assert _on_background(opaque, (10, 200, 240)) is opaque


def test_bounds_and_transparency(tmp_path: Path) -> None:
    bounds = ("--bounds", "640,320,3000,2500")
    (path,) = make_slides(tmp_path, "--format", "scn", "--size", "1500x1000", *bounds)
    with open_slide(path) as slide:
        assert slide.info.size == Size(3000, 2500)
        assert slide.info.bounds == RegionL0(PointL0(640, 320), Size(1500, 1000))
        outside = slide.read_region(PointL0(0, 0), 0, Size(64, 64))
    assert (outside == 255).all()  # the unscanned area becomes white


def test_tile_hash_of_tiff_without_quickhash(tmp_path: Path) -> None:
    a, copy, b = paths = [tmp_path / f"{name}.tiff" for name in ("a", "copy", "b")]
    for seed, path in enumerate((a, b)):  # large: no quickhash
        noise = np.random.default_rng(seed).integers(0, 256, (1536, 1536, 3), np.uint8)
        tifffile.imwrite(path, noise, tile=(256, 256), photometric="rgb", metadata=None)
    shutil.copy(a, copy)
    with open_slide(a) as slide:
        assert slide.info.quickhash is None
    assert tile_hash(a) == tile_hash(copy) != tile_hash(b)
    assert tile_hash(Path(__file__)) is None
    recorded = SlideHashes(tile_hash(a), tile_hash(a))  # as in stores of earlier versions
    files = [SlideFile(path.stem, path, (path,)) for path in paths]
    for quickhash in (None, "ab"):  # of another reader
        info = replace(slide.info, quickhash=quickhash)
        assert [recorded.match_file(file, info) for file in files] == [True, True, False]
        assert not SlideHashes("other").match_file(files[0], info)


def test_slides_with_equal_smallest_levels_have_different_pixel_hashes(tmp_path: Path) -> None:
    """A copy under another name, with another time, has the same one."""
    slides: list[tuple[SlideFile, SlideInfo]] = []
    for name, seed in (("a", 1), ("b", 2), ("copy of a", 1)):
        level = picture(Size(200, 150), seed)
        levels = [level, level[::8, ::8], np.full((1, 1, 3), 240, np.uint8)]
        path = write_slide(tmp_path / f"{name}.svs", levels, Size(64, 64))
        with open_slide(path) as slide:
            slides.append((SlideFile(name, path, (path,)), slide.info))
    first, other, copy = (pixel_hash(file, info.size) for file, info in slides)
    assert first == copy != other and None not in (first, other)
    (content,) = {info.quickhash for _, info in slides}
    assert content is not None
    for recorded, expected in (
        (SlideHashes(content), [True, True, True]),  # all that earlier versions recorded
        (SlideHashes(content, None, first), [True, False, True]),
        (SlideHashes("other", None, first), [False, False, False]),
        (SlideHashes(), [True, True, True]),
    ):
        assert [recorded.match_file(*slide) for slide in slides] == expected


def write_tree(base: Path, name: str, kind: str, data: Path) -> tuple[Path, Path, Path, Size]:
    """Write a slide. Return the argument for `discover`, a file with pixels, one with names only, and the size."""
    base.mkdir()
    path = base / f"{name}.{kind.partition(' ')[0]}"
    if kind.startswith("tif"):
        shape: dict[str, Any] = {"tile": (64, 64)} if kind == "tif tiled" else {"rowsperstrip": 16}
        shape |= {"compression": None if kind == "tif raw" else "deflate", "photometric": "rgb"}
        with tifffile.TiffWriter(path) as tiff:
            for pixels in (picture(SIZE), picture(SIZE)[::4, ::4]):
                tiff.write(pixels, description=name, **shape)
        return path, path, path, SIZE
    if kind.startswith("dcm"):
        header = pydicom.dcmread(data / "slides" / "dicom" / kind[4:] / "camelyon16-overview.dcm")
        header.ContainerIdentifier = name
        header.save_as(path)
        size = Size(header.TotalPixelMatrixColumns, header.TotalPixelMatrixRows)
        return path, path, path, size
    files = [base / template.format(name) for template in TREES[kind]]
    rng = np.random.default_rng(0)
    for file in files[1:]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(f"Image={name}".encode() if file == files[1] else rng.bytes(50_000))
    text = "ImageFile=one.jpg\nMapFile=two.jpg\nOptimisationFile=map.opt\n"
    files[0].write_text(text if kind == "vms" else name)
    return path, files[-1], files[1], SIZE


SIZE = Size(200, 150)
TREES = {
    "mrxs": ("{}.mrxs", "{}/Slidedat.ini", "{}/Data0000.dat", "{}/Data0001.dat"),
    "vms": ("{}.vms", "map.opt", "one.jpg", "two.jpg"),
    "vsi": ("{}.vsi", "_{}_/stack1/notes.txt", "_{}_/stack1/frame_t.ets"),
    "zarr": ("{}.zarr/zarr.json", "{}.zarr/.zattrs", "{}.zarr/0/0/1", "{}.zarr/0/1/0"),
}


@pytest.mark.parametrize(
    "kind",
    ["tif tiled", "tif striped", "tif raw", "dcm jpeg", "dcm j2k", "mrxs", "vms", "vsi", "zarr"],
)
def test_pixel_hash_depends_on_pixels_only(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Not on names, paths and headers; also of a local copy of the slide. One changed byte of the pixels changes it."""
    monkeypatch.setattr("histopipe.slides.slide_formats.is_installed", lambda _: True)
    hashes = []
    for name in ("a", "a longer name", "changed", "renamed"):
        path, pixels, text, size = write_tree(tmp_path / name, name, kind, data)
        if name == "changed":
            content = bytearray(pixels.read_bytes())
            content[tile_begin(path) if path.suffix == ".tif" else len(content) * 2 // 3] ^= 1
            pixels.write_bytes(content)
        elif text != pixels:
            text.write_bytes(b"other names")
        (slide,) = discover([path])
        hashes.append(pixel_hash(slide, size))
    assert hashes[0] is not None
    assert hashes[0] == hashes[1] == hashes[3] != hashes[2]
    with StagingArea(tmp_path / "stage", 10**8) as stage:
        ((_, copy),) = filter(None, staged(stage, [slide], lambda slide: slide))
        assert isinstance(copy, SlideFile)
        assert pixel_hash(copy, size) == hashes[0]
    pixels.unlink()
    assert pixel_hash(slide, size) is None


def tile_begin(path: Path) -> int:
    """Return the place of the second tile or strip of the first image."""
    with tifffile.TiffFile(path) as tiff:
        return int(tiff.pages.first.dataoffsets[1])


@examples(40)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60_000)), min_size=1, max_size=60),
    st.integers(0, 3),
)
def test_blocks_of_tiles_are_those_of_their_sequence(
    tmp_path_factory: pytest.TempPathFactory, tiles: Sequence[tuple[int, int]], gap: int
) -> None:
    """Expected is the definition in the reference, on the bytes of all tiles in one array."""
    folder, rng = tmp_path_factory.mktemp("tiles"), np.random.default_rng(1)
    places, whole = [], b""
    for file, length in tiles:
        tile, path = rng.bytes(length), folder / str(file)
        with path.open("ab") as out:
            places.append((path, out.tell() + gap, length))
            out.write(bytes(gap) + tile)
        whole += tile
    if not whole:
        with pytest.raises(IndexError):
            _digest(Size(3, 2), *zip(*places, strict=True))
        return
    lengths = [length for _, length in tiles]
    expected = hashlib.sha256(np.array([3, 2, *lengths], "<i8").tobytes())
    written = [length for length in lengths if length]
    count, size = (4096, 256) if len(written) > 1 and len(set(written)) == 1 else (64, 16384)
    for begin in np.linspace(0, max(0, len(whole) - size), count).astype(int).tolist():
        expected.update(whole[begin : begin + size])
    assert _digest(Size(3, 2), *zip(*places, strict=True)) == expected.hexdigest()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken.svs", "a text file"),
        ("git-lfs-pointer.ndpi", "a Git LFS pointer"),
        ("unopenable.tiff", "Unsupported TIFF compression"),
        ("not-a-pyramid.tif", "1 sample of 16 bits, photometric MINISBLACK"),
        ("empty.svs", "an empty file"),
        ("missing.svs", r"missing\.svs"),
    ],
)
def test_error_of_bad_file_describes_its_content(
    data: Path, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "empty.svs").touch()
    with pytest.raises(SlideUnreadable, match=message) as caught:
        open_slide((tmp_path if name == "empty.svs" else data / "bad") / name)
    assert name in str(caught.value)


def test_slide_can_be_read_after_an_error(tmp_path: Path) -> None:
    (path,) = make_slides(tmp_path, "--levels", "1", "--size", "1024x1024", "--format", "tiff")
    with tifffile.TiffFile(path) as tiff, path.open("r+b") as file:
        file.seek(tiff.pages.first.dataoffsets[0])
        file.write(bytes(tiff.pages.first.databytecounts[0]))
    with open_slide(path) as slide:
        with pytest.raises(SlideUnreadable, match=r"cannot be read at \(0, 0\)"):
            slide.read_region(PointL0(0, 0), 0, Size(256, 256))
        assert slide.read_region(PointL0(768, 768), 0, Size(256, 256)).mean() > 100


def test_every_reader_has_a_name_and_an_opener() -> None:
    assert [*READERS] == [*get_args(ReaderName)]
    for name, reader in READERS.items():
        assert callable(pkgutil.resolve_name(reader.opener))
        assert all(name in readers_of(Path(f"a{suffix.upper()}")) for suffix in reader.suffixes)
