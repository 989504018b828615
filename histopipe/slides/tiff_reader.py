"""Read OME-TIFF and plain TIFF files with tifffile: 8-bit RGB or grey, tiled or striped, with any compression.

Source:
    TIFF 6.0; OME-TIFF specification (pyramids in SubIFDs).
"""

from __future__ import annotations

import math
import os
import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tifffile
from defusedxml import ElementTree
from defusedxml.common import DefusedXmlException
from numpy.typing import NDArray

from histopipe.errors import SlideUnreadable
from histopipe.geometry import Level, PointL0, RegionL0, Size
from histopipe.slides.slide import Slide, SlideInfo, overlaps
from histopipe.system.output import counted

_CACHED_BYTES = 64 << 20
"""Bytes of decoded tiles or strips that are kept for the regions that share them."""
_BLOCK_PIXELS = 2048 * 2048
"""Pixels of a block of whole strips, as many as in the blocks of other readers."""
_UM = {
    "": 1.0,
    "µm": 1.0,
    "μm": 1.0,
    "um": 1.0,
    "micron": 1.0,
    "nm": 1e-3,
    "mm": 1e3,
    "cm": 1e4,
    "m": 1e6,
}
"""Micrometres per unit of a physical size. Other units, such as `pixel`, are no lengths."""


_NO_OME: tuple[None, None, None, list[str]] = None, None, None, []


def read_ome(text: str, page: int) -> tuple[str | None, str | None, str | None, list[str]]:
    """Read the image of an OME-XML whose pixels begin at a page of the TIFF file.

    Returns:
        µm per pixel horizontally and vertically, magnification, and names of the channels. There are none for a text
        that cannot be parsed, or has several images, none of which begins there.
    """
    try:
        root: Any = ElementTree.fromstring(text)
    except (ElementTree.ParseError, DefusedXmlException, ValueError):
        return _NO_OME
    images = root.findall("{*}Image[{*}Pixels]")  # each version of OME-XML has another namespace
    chosen = [image for image in images if _first_page(image) == page] or images
    if not chosen or (len(images) > 1 and chosen is images):
        return _NO_OME
    pixels = chosen[0].find("{*}Pixels")
    names = [
        channel.get("Name") or channel.get("Fluor") or f"channel {n}"
        for n, channel in enumerate(pixels.findall("{*}Channel"), 1)
    ]
    mpp_x, mpp_y = (
        _length(pixels.get(f"PhysicalSize{axis}"), pixels.get(f"PhysicalSize{axis}Unit", ""))
        for axis in "XY"
    )
    return mpp_x, mpp_y, _magnification(root, chosen[0]), names


def _first_page(image: Any) -> int:
    pages = (data.get("IFD", "0") for data in image.iterfind("{*}Pixels/{*}TiffData"))
    return min(map(int, filter(str.isdecimal, pages)), default=0)


def _magnification(root: Any, image: Any) -> str | None:
    """Return the magnification of the objective of an image; None if it names none of several."""
    names = [settings.get("ID") for settings in image.iterfind("{*}ObjectiveSettings")]
    powers = {
        objective.get("NominalMagnification")
        for objective in root.iterfind("{*}Instrument/{*}Objective")
        if not names or objective.get("ID") in names
    }
    return powers.pop() if len(powers) == 1 else None


def _length(value: str | None, unit: str) -> str | None:
    try:
        return None if value is None else f"{float(value) * _UM[unit]:.9g}"
    except (ValueError, KeyError):
        return None


_LARGEST_SEGMENT = 256 << 20
"""Most bytes of a decoded tile or strip."""
_RAW_BYTES = 1 << 20
"""Uncompressed strips above this size are read row by row instead of completely."""
_CHANNEL_AXES = {"C": "channels", "Z": "focal planes", "T": "time points"}
_KINDS = ((0, 1), (1, 1), (2, 3), (6, 3))
"""Photometric interpretation and samples per pixel: white is zero, black is zero, RGB, YCbCr."""
_OPENSLIDE_KINDS = (*_KINDS, (3, 1), (2, 4, 1), (2, 4, 2))
"""OpenSlide also reads palettes, and RGB with an alpha channel, associated or not. It takes any extra sample for one."""
_JPEGS = (6, 7, 34892, 33007)
"""Compressions whose decoder converts YCbCr to RGB."""
_SMALL_IMAGE = 50
"""Images of less than this fraction of the largest one are overviews, or show no tissue."""
_NO_TISSUE = re.compile("label|macro|overview|thumbnail", re.IGNORECASE)
_MICROMETRES = ("micron", "microns", "um", "µm", "\\u00B5m")
"""Names of the unit in the description of an ImageJ file, whose resolution tags have no unit."""


@dataclass(frozen=True, slots=True, eq=False)
class TiffImage:
    """One image of a TIFF file: its size, and its tiles or strips, called segments; one for each of its colour planes."""

    page: Any
    decode: Callable[..., Any]
    """tifffile's decoder of the page. It must be made while the file is open."""
    size: Size
    segment: Size
    samples: int
    offsets: Sequence[int]
    lengths: Sequence[int]

    @property
    def grid(self) -> tuple[int, int]:
        """Number of rows and of columns of segments."""
        return -(-self.size.height // self.segment.height), -(
            -self.size.width // self.segment.width
        )

    @property
    def is_raw(self) -> bool:
        """Whether segments are uncompressed, and so large that only parts of them are read."""
        is_large = self.segment.area * self.samples > _RAW_BYTES
        in_one_plane = len(self.offsets) == math.prod(self.grid)
        return is_large and int(self.page.compression) == 1 and in_one_plane


class TiffReader(Slide):
    """A slide that tifffile opens.

    Raises:
        SlideUnreadable: the file is no TIFF, has several channels or another kind of pixels, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._decoded: dict[int, Callable[[int], NDArray[np.uint8] | None]] = {}
        try:
            with tifffile.TiffFile(path) as tiff:
                self._images, self.info = read_pyramid(path, tiff)
        except SlideUnreadable:
            raise
        except OSError as error:
            raise SlideUnreadable(f"{path} cannot be read", found=str(error)) from error
        except Exception as error:  # on a damaged header, tifffile may raise any exception
            raise SlideUnreadable(
                f"{path} cannot be read as a TIFF file",
                found=f"{type(error).__name__}: {error}"[:200],
            ) from error
        first = self._images[0]
        if not first.page.is_tiled:
            width = first.size.width
            self.natural_block = Size(width, max(first.segment.height, _BLOCK_PIXELS // width))

    def fill(
        self, out: NDArray[np.uint8], origin: PointL0, level: int, left: int, top: int
    ) -> None:
        """Write the pixels of a region; see `Slide`."""
        image, size = self._images[level], Size(out.shape[1], out.shape[0])
        for row, column, place, part in overlaps(left, top, size, image.segment):
            try:
                pixels = self._part(level, row * image.grid[1] + column, *part)
            except Exception as error:  # the decoders raise many types
                raise SlideUnreadable(
                    f"{self.path}: level {level} cannot be read at ({origin.x}, {origin.y})",
                    found=f"{type(error).__name__}: {error}"[:200],
                ) from error
            if pixels is not None:  # in photometric interpretation 0, white is zero
                out[place] = 255 - pixels if image.page.photometric == 0 else pixels

    @cached_property
    def handle(self) -> BinaryIO:
        """The open file."""
        return self.path.open("rb", buffering=0)

    def close(self) -> None:
        """Close the file, and free the decoded tiles."""
        self._decoded = {}
        super().close()

    __del__ = close

    def _part(
        self, level: int, index: int, rows: slice, columns: slice
    ) -> NDArray[np.uint8] | None:
        """Return some pixels of a tile or strip, (H, W, 1 or 3); None if it was never written."""
        image = self._images[level]
        if image.is_raw:
            return self._raw(image, index, rows, columns)
        if level not in self._decoded:
            # Only one level is cached. The weak reference avoids a reference cycle of this object and its cache.
            count = max(1, _CACHED_BYTES // (image.segment.area * image.samples))
            decode = partial(TiffReader._decode, weakref.proxy(self), image)
            self._decoded = {level: lru_cache(count)(decode)}
        pixels = self._decoded[level](index)
        return None if pixels is None else pixels[rows, columns]

    def _decode(self, image: TiffImage, index: int) -> NDArray[np.uint8] | None:
        """Return all pixels of a tile or strip; None if it was never written."""
        # The planes of the first colour come first, then those of the second.
        numbers = range(index, len(image.offsets), math.prod(image.grid))
        planes = [self._plane(image, number) for number in numbers]
        written = [plane for plane in planes if plane is not None]
        if 0 < len(written) < len(planes):
            raise ValueError("a colour plane is missing")
        return np.concatenate(written, axis=2) if len(written) > 1 else next(iter(written), None)

    def _plane(self, image: TiffImage, number: int) -> NDArray[np.uint8] | None:
        length = image.lengths[number]
        data = os.pread(self.handle.fileno(), length, image.offsets[number])
        if len(data) < length:
            raise ValueError(f"{len(data)} of {length} bytes: the file is truncated")
        # Without data, of a tile or strip that was never written, the decoder returns None.
        pixels, _, _ = image.decode(data or None, number)
        if pixels is None:
            return None
        planes: NDArray[np.uint8] = np.asarray(pixels)
        if planes.ndim != 4 or planes.shape[0] != 1 or planes.dtype != np.uint8:
            raise ValueError(f"pixels of shape {planes.shape}, {planes.dtype}")
        width = min(image.segment.width, image.size.width)
        if planes.shape[2] < width and not image.page.is_tiled:
            raise ValueError(f"a strip of {planes.shape[2]} pixels, expected {width}")
        return planes.squeeze(axis=0)

    def _raw(self, image: TiffImage, index: int, rows: slice, columns: slice) -> NDArray[np.uint8]:
        """Read some rows of an uncompressed strip or tile."""
        wide = image.segment.width if image.page.is_tiled else image.size.width
        count = (columns.stop - columns.start) * image.samples
        places = [
            (row * wide + columns.start) * image.samples for row in range(rows.start, rows.stop)
        ]
        file, first = self.handle.fileno(), image.offsets[index]
        data = b"".join(os.pread(file, count, first + place) for place in places)
        if len(data) < count * len(places) or places[-1] + count > image.lengths[index]:
            raise ValueError("the file is truncated")
        return np.frombuffer(data, np.uint8).reshape(len(places), -1, image.samples)


def read_pyramid(path: Path, tiff: tifffile.TiffFile) -> tuple[list[TiffImage], SlideInfo]:
    """Return the levels of the largest image of a TIFF file, and its header.

    Raises:
        SlideUnreadable: it has several channels, other pixels than 8-bit RGB or grey, or a damaged header.
    """
    if not tiff.series:
        raise SlideUnreadable(f"{path} has no image", todo="check that the copy is complete")
    series = max(
        tiff.series,
        key=lambda image: image.shape[image.axes.index("Y")] * image.shape[image.axes.index("X")],
    )
    mpp_x, mpp_y, power, channels = (
        read_ome(tiff.ome_metadata or "", series.keyframe.index) if tiff.is_ome else _NO_OME
    )
    _check_axes(path, series, channels)
    images = [_image(path, level) for level in series.levels]
    page, size = images[0].page, images[0].size
    levels = tuple(
        Level(n, image.size, (size.width / image.size.width + size.height / image.size.height) / 2)
        for n, image in enumerate(images)
    )
    if tiff.is_svs:
        text = page.description
        mpp_x = mpp_y = _number_after("MPP", text)
        power = _number_after("AppMag", text)
    elif not tiff.is_ome:
        units: dict[int, float] = {tifffile.RESUNIT.CENTIMETER: 1e4, tifffile.RESUNIT.INCH: 25400.0}
        if (tiff.imagej_metadata or {}).get("unit") in _MICROMETRES:
            units[tifffile.RESUNIT.NONE] = 1.0
        mpp_x, mpp_y = (_mpp(page, name, units) for name in ("XResolution", "YResolution"))
    turned = page.tags.valueof("Orientation", 1)
    notes = (f"its orientation {turned} is not applied",) if turned != 1 else ()
    return images, SlideInfo(
        vendor="ome-tiff" if tiff.is_ome else "aperio" if tiff.is_svs else "tiff",
        levels=levels,
        bounds=RegionL0(PointL0(0, 0), size),
        mpp_x=mpp_x,
        mpp_y=mpp_y,
        objective_power=power,
        quickhash=None,
        has_icc_profile="InterColorProfile" in page.tags,
        reader=f"tifffile {tifffile.__version__}",
        notes=notes
        + _other_images(path, [(one.name, one.keyframe) for one in tiff.series], series.keyframe),
    )


def _other_images(path: Path, images: Sequence[tuple[str, Any]], read: Any) -> tuple[str, ...]:
    """Return a note about images of a file that may show tissue, but are neither read nor levels of the one that is.

    `images` are names and pages, and `read` is the page that is read.

    Raises:
        SlideUnreadable: three grey images of one size are probably the channels of one.
    """
    width, height = read.imagewidth, read.imagelength
    shapes = [(page.samplesperpixel, page.imagewidth, page.imagelength) for _, page in images]
    planes = shapes.count((1, width, height))
    if planes > 2:
        raise _several_channels(path, f"{planes} grey images of {width}×{height} pixels")
    reduced = [(width >> power, height >> power) for power in range(1, 16)]
    unread = [
        f"{page.imagewidth}×{page.imagelength}"
        for name, page in images
        if page.index != read.index
        and page.imagewidth * page.imagelength * _SMALL_IMAGE >= width * height
        and not _NO_TISSUE.search(name)
        and not any(
            max(abs(page.imagewidth - level[0]), abs(page.imagelength - level[1])) <= 1
            for level in reduced
        )
    ]
    note = f"only its image of {width}×{height} pixels is read, not {counted(len(unread), 'other image')}: "
    return (note + ", ".join(unread[:5]),) if unread else ()


def _check_axes(path: Path, series: Any, channels: Sequence[str]) -> None:
    """Refuse images with several channels, focal planes or time points, which are not slides of three colours."""
    axes = series.axes
    if axes in ("YXS", "YX", "SYX"):
        return
    counts = [
        f"{count} {_CHANNEL_AXES.get(axis, 'images')}"
        for axis, count in zip(axes, series.shape, strict=True)
        if axis not in "YXS"
    ]
    names = f": {', '.join(channels)}" if "C" in axes and channels else ""
    raise _several_channels(path, ", ".join(counts) + names if counts else f"axes {axes}")


def _several_channels(path: Path, actual: str) -> SlideUnreadable:
    return SlideUnreadable(
        f"{path} is a multi-channel image or a stack",
        found=actual,
        expected="one 8-bit RGB or grey image",
        todo="export the stain, focal plane or image to be analysed as one RGB image",
    )


def _image(path: Path, level: Any) -> TiffImage:
    """Return one level of the pyramid.

    Raises:
        SlideUnreadable: its pixels are of another kind than 8-bit RGB or grey.
    """
    page = level.pages[0]
    if len(level.pages) != 1 or page is None or page.parent is not level.keyframe.parent:
        raise SlideUnreadable(
            f"{path}: the pixels of a level are in several images or files",
            todo="export the slide as one RGB image in one file",
        )
    key = level.keyframe
    _check_pixels(path, key)
    samples = int(key.samplesperpixel)
    planes = samples if int(key.planarconfig) == 2 else 1
    size = Size(int(key.imagewidth), int(key.imagelength))
    segment = (
        Size(int(key.tilewidth), int(key.tilelength))
        if key.is_tiled
        else Size(size.width, min(int(key.rowsperstrip), size.height))
    )
    image = TiffImage(
        key,
        partial(key.decode, jpegtables=page.jpegtables),
        size,
        segment,
        samples,
        tuple(page.dataoffsets),
        tuple(page.databytecounts),
    )
    expected = math.prod(image.grid) * planes
    if min(size.width, size.height, segment.width, segment.height) < 1 or not (
        len(image.offsets) == len(image.lengths) == expected
    ):
        raise SlideUnreadable(
            f"{path}: the header is damaged",
            found=f"{len(image.offsets)} tiles or strips",
            expected=expected,
        )
    if segment.area * samples > _LARGEST_SEGMENT and not image.is_raw:
        raise SlideUnreadable(
            f"{path}: its {'tiles' if key.is_tiled else 'strips'} are too large to decode for a few patches",
            found=f"{segment} pixels",
            expected=f"at most {_LARGEST_SEGMENT >> 20} MB",
            todo="convert it to a tiled pyramid, for example with `vips tiffsave --tile --pyramid`",
        )
    return image


def check_openslide_pages(path: Path, tiff: tifffile.TiffFile) -> tuple[str, ...]:
    """Check the pixels of the images that OpenSlide may read as levels: the tiled ones, or the first one.

    OpenSlide reads 16-bit, signed and CIELAB pixels, too, as black or shifted colours.

    Returns:
        A note about other images. It applies to generic TIFF files, of which OpenSlide reads the first image.

    Raises:
        SlideUnreadable: they are of another kind than 8-bit RGB, YCbCr, grey or palette.
    """
    every: list[Any] = list(tiff.pages)
    pages = [page for page in every if page.is_tiled] or every[:1]
    for page in pages:
        _check_kind(path, page, _OPENSLIDE_KINDS)
    return _other_images(path, [(page.description, page) for page in pages], pages[0])


def _check_kind(path: Path, page: Any, pixel_types: Collection[tuple[int, ...]]) -> None:
    """Refuse pixels that are not 8-bit samples of one of the kinds: photometric interpretation, samples, alpha."""
    bits = set(np.ravel(page.bitspersample).tolist())
    samples, alpha = int(page.samplesperpixel), tuple(map(int, page.extrasamples))
    if (
        bits != {8}
        or page.dtype != np.uint8
        or (int(page.photometric), samples, *alpha) not in pixel_types
    ):
        kind = "" if page.dtype is None or page.dtype.kind == "u" else f" ({page.dtype})"
        raise SlideUnreadable(
            f"{path} has pixels that cannot be used",
            found=f"{counted(samples, 'sample')} of {'/'.join(map(str, sorted(bits)))} bits{kind}, photometric "
            f"{getattr(page.photometric, 'name', page.photometric)}"
            + "".join(
                f", extra sample {getattr(extra, 'name', extra)}" for extra in page.extrasamples
            ),
            expected="8-bit RGB, YCbCr or grey",
            todo="scale its values to 0 to 255, and convert it to 8-bit RGB",
        )


def _check_pixels(path: Path, key: Any) -> None:
    """Refuse pixels of another kind than 8-bit RGB or grey, and unknown compressions."""
    _check_kind(path, key, _KINDS)
    if key.fillorder != 1:
        raise SlideUnreadable(f"{path} has bits in reverse order", todo="convert it to 8-bit RGB")
    try:
        tifffile.TIFF.DECOMPRESSORS[key.compression]
    except (KeyError, ValueError):
        raise SlideUnreadable(
            f"{path} has a compression that tifffile cannot decode", found=str(key.compression)
        ) from None
    if int(key.photometric) == 6 and int(key.compression) not in _JPEGS:
        raise SlideUnreadable(f"{path} has YCbCr pixels without JPEG", expected="RGB")


def _mpp(page: Any, name: str, units: Mapping[int, float]) -> str | None:
    """Return µm per pixel of a resolution tag; None if it has none of the units, whose lengths are in µm."""
    um = units.get(int(page.tags.valueof("ResolutionUnit", tifffile.RESUNIT.INCH)))
    above, below = page.tags.valueof(name, (0, 0))
    return f"{um * below / above:.9g}" if um and above and below else None


def _number_after(name: str, text: str) -> str | None:
    """Return the number of an entry `NAME = NUMBER` of an Aperio description."""
    match = re.search(rf"\|\s*{name}\s*=\s*([0-9.]+)", text)
    return match[1] if match else None
