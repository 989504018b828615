"""The tifffile reader: OME-TIFF and plain TIFF files of all kinds against the arrays that they were made from."""

from __future__ import annotations

import itertools
import random
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import check_pixels
import numpy as np
import openslide
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from peak_memory import peaks_of

from helpers.commands import RunCommand
from helpers.examples import examples
from helpers.slide_variants import picture
from helpers.slides import CMU, TCGA
from helpers.stores import read_store
from histopipe.errors import SlideUnreadable
from histopipe.geometry import Mpp, PointL0, Size
from histopipe.slides.discovery import discover
from histopipe.slides.native_tiles import NativeTiles
from histopipe.slides.openslide_reader import OpenSlideReader
from histopipe.slides.slide_files import open_slide
from histopipe.slides.thumbnail import read_thumbnail
from histopipe.slides.tiff_reader import TiffReader, read_ome
from histopipe.slides.tile_check import NativeLevels
from histopipe.store.store import Store

LOSSLESS: dict[str, dict[str, Any]] = {
    "none": {},
    **{name: {"compression": name} for name in ("lzw", "deflate", "zstd", "packbits")},
    "jpeg2000": {
        "compression": "jpeg2000",
        "compressionargs": {"level": 0, "reversible": True},
    },
}
Pixels = NDArray[np.uint8]
FEW_LAYOUTS = (
    "none-tiles.tif",
    "jpeg-tiles.tif",
    "rgb-none-strips.tif",
    "aperio_jp2000_rgb-tiles.svs",
    ".dcm",
)
CHANNELS: dict[str, Any] = {
    "tile": (128, 128),
    "metadata": {"axes": "CYX", "Channel": {"Name": ["DAPI", "CD3", "CD8", "PanCK"]}},
}


pytestmark = pytest.mark.usefixtures("inline_workers")


def write_pyramid(
    path: Path, pixels: Pixels, *, bigtiff: bool = False, byteorder: Any = "<", **options: Any
) -> list[Pixels]:
    """Write a pyramid with SubIFDs, and return the pixels of its levels."""
    images = [pixels[:: 2**n, :: 2**n] for n in range(3)]
    metadata = {
        "axes": "YXS" if pixels.ndim == 3 else "YX",
        "PhysicalSizeX": 0.5,
        "PhysicalSizeXUnit": "µm",
        "PhysicalSizeY": 500,
        "PhysicalSizeYUnit": "nm",
    }
    options["photometric"] = "rgb" if pixels.ndim == 3 else "minisblack"
    with tifffile.TiffWriter(path, bigtiff=bigtiff, byteorder=byteorder, ome=True) as tiff:
        tiff.write(images[0], subifds=2, metadata=metadata, **options)
        for level in images[1:]:
            tiff.write(level, subfiletype=1, metadata=None, **options)
    return images


@pytest.mark.parametrize(
    ("compression", "byteorder", "bigtiff", "tile", "samples"),
    [
        *(
            (name, order, big, (256, 256), 3)
            for name, order, big in itertools.product(LOSSLESS, "<>", (False, True))
        ),
        *(
            (name, "<", False, tile, samples)
            for name in ("lzw", "none")
            for samples in (1, 3)
            for tile in ((128, 240), (512, 64), None)
        ),
    ],
)
def test_pixels_equal_the_array(
    tmp_path: Path,
    compression: str,
    byteorder: str,
    bigtiff: bool,
    tile: tuple[int, int] | None,
    samples: int,
) -> None:
    path = tmp_path / "a.ome.tiff"
    options: dict[str, Any] = {"tile": tile} if tile else {"rowsperstrip": 37}
    options |= {"byteorder": byteorder, "bigtiff": bigtiff, **LOSSLESS[compression]}
    pixels = picture(Size(913, 700))
    levels = write_pyramid(path, pixels if samples == 3 else pixels[..., 1], **options)
    with open_slide(path) as slide:
        assert slide.info.reader.startswith("tifffile")
        assert slide.info.vendor == "ome-tiff"
        assert (slide.info.mpp_x, slide.info.mpp_y) == ("0.5", "0.5")
        for level, expected in zip(slide.info.levels, levels, strict=True):
            rgb = expected if expected.ndim == 3 else np.repeat(expected[..., None], 3, axis=2)
            assert np.array_equal(slide.read_region(PointL0(0, 0), level.number, level.size), rgb)


@examples(60)
@given(
    x=st.integers(-300, 1000),
    y=st.integers(-300, 800),
    width=st.integers(1, 600),
    height=st.integers(1, 600),
    level=st.integers(0, 2),
    tile=st.sampled_from([(64, 64), (256, 128), None]),
    planar=st.booleans(),
)
def test_any_region_equals_the_array(
    tmp_path_factory: pytest.TempPathFactory,
    x: int,
    y: int,
    width: int,
    height: int,
    level: int,
    tile: tuple[int, int] | None,
    planar: bool,
) -> None:
    pixels = picture(Size(800, 600))
    path = tmp_path_factory.getbasetemp() / f"region-{tile}-{planar}.ome.tiff".replace(" ", "")
    options: dict[str, Any] = {"tile": tile} if tile else {"rowsperstrip": 50}
    options |= {"compression": "lzw"}
    if planar:
        options |= {"photometric": "rgb", "planarconfig": "separate"}
        tifffile.imwrite(path, pixels.transpose(2, 0, 1), **options)
    else:
        write_pyramid(path, pixels, **options)
    step = 1 if planar else 2**level
    white = ((1000, 1000), (1000, 1000), (0, 0))
    padded = np.pad(pixels[::step, ::step], white, constant_values=255)
    left, top = 1000 + round(x / step), 1000 + round(y / step)
    with TiffReader(path) as slide:
        region = slide.read_region(PointL0(x, y), 0 if planar else level, Size(width, height))
    assert np.array_equal(region, padded[top : top + height, left : left + width])


def test_large_striped_image_without_pyramid(tmp_path: Path) -> None:
    pixels = picture(Size(4000, 2001))
    scale: dict[str, Any] = {"resolution": (20000, 20000), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="rgb", rowsperstrip=16, **scale)
    with open_slide(tmp_path / "a.tif") as slide:
        assert slide.info.vendor == "tiff"
        assert slide.info.mpp_x == "0.5"
        region = slide.read_region(PointL0(3000, 1000), 0, Size(1000, 1001))
        assert np.array_equal(region, pixels[1000:, 3000:])
        thumbnail = read_thumbnail(slide, Mpp(0.5)).pixels
    assert thumbnail.shape == (126, 250, 3)
    means = pixels[:2000].reshape(125, 16, 250, 16, 3).mean(axis=(1, 3))
    assert np.abs(thumbnail[:125] - means).max() <= 1


def test_thumbnail_of_a_large_image_needs_little_memory(tmp_path: Path) -> None:
    strips = iter([zlib.compress(bytes([200]) * (100 * 14_000 * 3))] * 60)
    options: dict[str, Any] = {"rowsperstrip": 100, "compression": "deflate", "photometric": "rgb"}
    options |= {"shape": (6_000, 14_000, 3), "dtype": np.uint8}  # 252 MB
    tifffile.imwrite(tmp_path / "a.tif", strips, **options)
    code = (
        "import sys; from pathlib import Path; from histopipe.slides.slide_files import open_slide; "
        "from histopipe.slides.thumbnail import read_thumbnail; "
        "assert read_thumbnail(open_slide(Path(sys.argv[1])), 0.5).pixels.mean() == 200"
    )
    status, peaks = peaks_of([sys.executable, "-P", "-c", code, str(tmp_path / "a.tif")])
    assert status == 0
    assert max(kilobytes for kilobytes, _ in peaks.values()) < 250_000


def test_jpeg_tiles_are_copied_and_equal_the_decoder(tmp_path: Path, run: RunCommand) -> None:
    path = tmp_path / "a.ome.tiff"
    options: dict[str, Any] = {"compression": "jpeg", "compressionargs": {"level": 90}}
    write_pyramid(path, picture(Size(2048, 1536)), tile=(256, 256), **options)
    with TiffReader(path) as slide, NativeLevels(slide, (path,)) as levels:
        for level in slide.info.levels:
            tiles = levels.get(level)
            assert isinstance(tiles, NativeTiles)
            assert tiles.comparison.endswith("equal to OpenSlide's")
    done = run("ingest", path, "--tissue", "none")
    assert done.returncode == 0, done.stderr
    with Store(tmp_path / "patches.lmdb") as store:
        record = store.complete[0]
    assert (record.route, record.stored) == ("copy", 48)
    assert str(record.reader).startswith("tifffile")


@pytest.mark.parametrize(
    "name",
    [
        CMU,
        pytest.param(TCGA, marks=pytest.mark.nightly(reason="another slide")),
    ],
)
def test_slides_of_openslide_give_the_same_patches(
    data: Path, run: RunCommand, tmp_path: Path, name: str
) -> None:
    readers = ("openslide", "tifffile", "fastslide")
    flags = ("--default-mpp", "0.5", "--codec", "png")
    for reader in readers:
        out = ("--out", f"{reader}.lmdb", "--reader", reader)
        done = run("ingest", data / "slides" / f"{name}.svs", *out, *flags)
        assert done.returncode == 0, done.stderr
    first, second, third = (read_store(tmp_path / f"{reader}.lmdb")[name] for reader in readers)
    assert first[3] == second[3]  # the patches
    assert first[2]["x_l0"] == second[2]["x_l0"] == third[2]["x_l0"]
    assert first[1]["mpp"] == second[1]["mpp"] == third[1]["mpp"]
    recorded = [contents[1]["reader"].split()[0] for contents in (first, second, third)]
    assert recorded == list(readers)


def test_reading_is_chosen_by_the_file(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tiled, striped = (
        data / "slides" / f"{CMU}.svs",
        tmp_path / "tiled.tif",
        tmp_path / "striped.tif",
    )
    options: dict[str, Any] = {"tile": (256, 256), "compression": "lzw", "photometric": "rgb"}
    tifffile.imwrite(tiled, picture(Size(512, 512)), **options)
    tifffile.imwrite(striped, picture(Size(512, 512)), photometric="rgb", rowsperstrip=64)
    for path, reader in (
        (real, OpenSlideReader),
        (tiled, OpenSlideReader),
        (striped, TiffReader),
    ):
        with open_slide(path) as slide:
            assert isinstance(slide, reader)
    damaged = mock.Mock(side_effect=SlideUnreadable(f"{real} is damaged"))
    monkeypatch.setattr("histopipe.slides.slide_files.OpenSlideReader", damaged)
    with pytest.raises(SlideUnreadable, match=r"\.svs is damaged$"):  # no other library is tried
        open_slide(real)


@pytest.mark.long(reason="writes and reads 180 files: each kind of pixels in few layouts")
def test_accepted_files_have_the_right_pixels(tmp_path: Path) -> None:
    """A part of the matrix of `tools/check_pixels.py`: each kind of pixels in few layouts, and DICOM."""
    outcomes = Counter[str]()
    for case in itertools.chain(check_pixels.tiff_cases(), check_pixels.dicom_cases()):
        if case.name.endswith(FEW_LAYOUTS):
            path = case.write(tmp_path)
            outcome = "unwritten" if path is None else check_pixels.check(case, path, "auto")
            assert outcome in ("unwritten", "equal", "refused", "noted"), case.name
            outcomes[outcome] += 1
    assert outcomes["equal"] >= 30
    assert outcomes["refused"] >= 80
    assert outcomes["noted"] >= 8


def test_scale_and_channels_are_those_of_the_image_that_is_read(tmp_path: Path) -> None:
    units = {f"PhysicalSize{axis}Unit": "µm" for axis in "XY"}
    images = [
        ("macro", 8.0, Size(150, 100)),
        ("tissue", 0.5, Size(800, 600)),
        ("other", 0.25, Size(800, 500)),
    ]
    with tifffile.TiffWriter(tmp_path / "a.ome.tiff", ome=True) as tiff:
        for name, mpp, size in images:
            scale = {f"PhysicalSize{axis}": mpp for axis in "XY"}
            metadata = {"axes": "YXS", "Name": name, **scale, **units}
            tiff.write(picture(size), photometric="rgb", metadata=metadata)
    with open_slide(tmp_path / "a.ome.tiff") as slide:
        assert (slide.info.mpp_x, slide.info.mpp_y) == ("0.5", "0.5")
        assert slide.info.notes == (
            "only its image of 800×600 pixels is read, not 1 other image: 800×500",
        )


def test_objective_is_that_of_the_image_that_is_read() -> None:
    def ome(*settings: str) -> str:
        images = "".join(
            f'<Image>{text}<Pixels><Channel Name="{n}"/><TiffData IFD="{n}"/></Pixels></Image>'
            for n, text in enumerate(settings)
        )
        objectives = "".join(
            f'<Objective ID="O{power}" NominalMagnification="{power}"/>' for power in (4, 40)
        )
        return f"<OME><Instrument>{objectives}</Instrument>{images}</OME>"

    used = '<ObjectiveSettings ID="O40"/>'
    assert read_ome(ome('<ObjectiveSettings ID="O4"/>', used), 1)[2] == "40"
    assert read_ome(ome(used, ""), 1)[2] is None  # it names none of the two
    assert read_ome(ome("", ""), 1)[3] == ["1"]
    assert read_ome(ome("", ""), 5) == (None, None, None, [])
    assert read_ome(ome(used), 5)[2] == "40"  # the only image


@pytest.mark.parametrize(
    ("sizes", "noted_size"),
    [
        ([Size(512, 512), Size(384, 512)], "384×512"),
        ([Size(128, 128), Size(512, 512)], "512×512"),
        ([Size(512, 512), Size(256, 256)], None),
    ],
)
def test_other_images_of_generic_files_are_noted(
    tmp_path: Path, sizes: list[Size], noted_size: str | None
) -> None:
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as tiff:
        for size in sizes:
            tiff.write(picture(size), photometric="rgb", tile=(128, 128), metadata=None)
    with open_slide(path) as slide:
        assert isinstance(slide, OpenSlideReader)
        assert slide.info.size == sizes[0]
        assert len(slide.info.notes) == (noted_size is not None)
        assert noted_size is None or slide.info.notes[0].endswith(f"1 other image: {noted_size}")


@pytest.mark.parametrize("tile", [(64, 64), None])
@pytest.mark.parametrize("name", ["planes.tif", "planes.ome.tif"])
def test_three_grey_pages_are_no_slide(
    tmp_path: Path, name: str, tile: tuple[int, int] | None
) -> None:
    """They are probably the colours of one image; two pages are an image and its mask, and get a note."""
    pixels = np.random.default_rng(0).integers(0, 255, (3, 256, 320), np.uint8)
    for count in (3, 2):
        with tifffile.TiffWriter(tmp_path / name, ome=False) as file:
            for plane in pixels[:count]:
                file.write(plane, tile=tile, metadata=None, photometric="minisblack")
        if count == 3 or tile is None:
            with pytest.raises(SlideUnreadable, match="is a multi-channel image or a stack: found"):
                open_slide(tmp_path / name)
        else:
            with open_slide(tmp_path / name) as slide:
                assert "not 1 other image: 320×256" in slide.info.notes[0]


@pytest.mark.parametrize(
    ("name", "pixels", "options", "message"),
    [
        ("a.ome.tif", np.zeros((4, 300, 400), np.uint8), CHANNELS, "4 channels: DAPI, CD3, CD8, PanCK"),
        ("a.ome.tif", np.zeros((5, 300, 400, 3), np.uint8), {"metadata": {"axes": "ZYXS"}}, "5 focal planes"),
        ("a.ome.tif", np.zeros((300, 400), np.uint16), {"metadata": {"axes": "YX"}}, "16 bits"),
        ("a.tif", np.zeros((5, 64, 64, 3), np.uint8), {}, "found 5 images.*export the stain, focal plane or image"),
        ("a.tif", np.zeros((64, 64), np.float32), {}, "float32.*scale its values to 0 to 255"),
    ],
)  # fmt: skip
def test_other_images_are_refused_with_advice(
    name: str, pixels: NDArray[Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kind = "rgb" if pixels.shape[-1] == 3 else "minisblack"
    tifffile.imwrite(tmp_path / name, pixels, photometric=kind, **{"metadata": None, **options})
    with pytest.raises(SlideUnreadable, match=message) as raised:
        open_slide(tmp_path / name)
    assert "copy is complete" not in str(raised.value)


def test_reason_of_an_unreadable_level_is_named(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = mock.Mock(side_effect=openslide.OpenSlideError("the sensor was asleep"))
    monkeypatch.setattr("openslide.lowlevel._read_region", failure)
    with (
        OpenSlideReader(data / "slides" / "small.svs") as slide,
        pytest.raises(SlideUnreadable, match=r"no part of level 0.*the sensor was asleep"),
    ):
        read_thumbnail(slide, Mpp(0.5))


def test_damaged_files_are_refused_or_read_without_another_error(tmp_path: Path) -> None:
    """Change bytes at random: a reader raises SlideUnreadable, or returns pixels."""
    numbers, sources, refused = random.Random(7), [], 0
    path = tmp_path / "a.ome.tiff"
    pixel_types: list[dict[str, Any]] = [
        {"compression": "lzw", "tile": (64, 64)},
        {"compression": "jpeg", "tile": (64, 64)},
        {"rowsperstrip": 20, "compression": "deflate"},
        {"rowsperstrip": 300},
    ]
    for options in pixel_types:
        write_pyramid(path, picture(Size(400, 300)), **options)
        sources.append(path.read_bytes())
    for trial in range(120):
        content = bytearray(numbers.choice(sources))
        head = 3000 if trial % 2 else len(content)
        for _ in range(numbers.randint(1, 6)):
            content[numbers.randrange(head)] = numbers.randrange(256)
        if trial % 5 == 0:
            del content[numbers.randrange(len(content)) :]
        path.write_bytes(content)
        try:
            with TiffReader(path) as slide:
                if slide.info.size.area < 10**7:
                    slide.read_region(PointL0(0, 0), 0, slide.info.size)
        except SlideUnreadable:
            refused += 1
    assert 20 < refused < 100


def test_zarr_folder_is_one_slide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("a.ome.zarr", "sub/b.zarr"):
        (tmp_path / folder / "0" / "c").mkdir(parents=True)
        (tmp_path / folder / "zarr.json").write_text("{}")
        (tmp_path / folder / "0" / "c" / "0.tif").write_bytes(b"x")
    assert [(slide.id, len(slide.files)) for slide in discover([tmp_path])] == [
        ("a.ome", 2),
        ("sub/b", 2),
    ]
    (alone,) = discover([tmp_path / "a.ome.zarr"])
    assert alone.id == "a.ome"
    with pytest.raises(SlideUnreadable, match="fastslide"):
        open_slide(alone.path)
    monkeypatch.setattr(
        "histopipe.slides.slide_formats.is_installed", lambda name: name != "fastslide"
    )
    assert [slide.path.suffix for slide in discover([tmp_path])] == [".tif", ".tif"]
