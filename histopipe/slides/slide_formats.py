"""The formats of slides, by the reader that reads them; and the options of commands that read slide files.

Discovery, `--reader` and other help texts, `doctor` and docs/reference/formats.md are made from `READERS`. A new format is
a subclass of `Slide` and its entry here. The module imports nothing slow, since `--help` lists the formats and the options.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from histopipe.geometry import Mpp
from histopipe.slides.scale import PLAUSIBLE_MPP
from histopipe.system.settings import PathLike, setting

ReaderName = Literal["openslide", "tifffile", "pillow", "fastslide"]
TIFF_SUFFIXES = (".tif", ".tiff")
"""A TIFF file may be a slide, or one image."""
FOLDER_SUFFIX = ".zarr"
"""Suffix of the format in which a folder is one slide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader of slides.

    Attributes:
        formats: names of the formats, for help texts and the documentation.
        suffixes: suffixes of the names of its files. There are none if the content of a file decides.
        opener: MODULE:NAME of the function or class that opens a path.
        package: name of its library among the installed packages.
        extra: extra that has the library.
        images: the files are images and not scans: next to slides, they are masks, thumbnails, or parts of a slide.
        native_tiles: the files may have tiles that can be copied or decoded directly.
    """

    formats: str
    suffixes: tuple[str, ...] = ()
    opener: str
    package: str
    extra: str | None = None
    images: bool = False
    native_tiles: bool = False


READERS: Mapping[str, Reader] = {
    "openslide": Reader(
        formats="Aperio, Hamamatsu, Leica, MIRAX, Philips TIFF, Sakura, Trestle, Ventana, Zeiss, DICOM, generic tiled TIFF",
        suffixes=(
            *(".svs", ".ndpi", ".vms", ".vmu", ".scn", ".mrxs", ".svslide", ".bif", ".czi", ".dcm"),
            *TIFF_SUFFIXES,
        ),
        opener="histopipe.slides.slide_files:open_with_openslide",
        package="openslide-python",
        native_tiles=True,
    ),
    "tifffile": Reader(
        formats="OME-TIFF with pyramids in SubIFDs, other TIFF that OpenSlide refuses",
        opener="histopipe.slides.tiff_reader:TiffReader",
        package="tifffile",
        native_tiles=True,
    ),
    "pillow": Reader(
        formats="PNG, JPEG, BMP, WebP",
        suffixes=(".png", ".jpg", ".jpeg", ".bmp", ".webp"),
        opener="histopipe.slides.image_reader:ImageReader",
        package="pillow",
        images=True,
    ),
    "fastslide": Reader(
        formats="iSyntax, VSI, QPTIFF, OME-Zarr 0.5, CZI that OpenSlide refuses (experimental)",
        suffixes=(".isyntax", ".i2syntax", ".vsi", ".qptiff", FOLDER_SUFFIX, ".czi"),
        opener="histopipe.slides.fastslide_reader:FastSlideReader",
        package="fastslide",
        extra="fastslide",
    ),
}
"""All readers by name. Those of one suffix are tried in this order."""
SUFFIXES = frozenset(suffix for reader in READERS.values() for suffix in reader.suffixes)
"""File name suffixes of all formats."""
IMAGE_SUFFIXES = frozenset(
    suffix for reader in READERS.values() if reader.images for suffix in reader.suffixes
)
IMAGE_FORMATS = ", ".join(reader.formats for reader in READERS.values() if reader.images)


@functools.cache
def is_installed(name: str) -> bool:
    """Return whether the library of a reader is installed."""
    return READERS[name].extra is None or importlib.util.find_spec(name) is not None


def readers_of(path: Path) -> tuple[str, ...]:
    """Return the readers of a file by its suffix: the installed ones, if any. OpenSlide is tried for all other files."""
    suffix = path.suffix.lower()
    named = tuple(name for name, reader in READERS.items() if suffix in reader.suffixes)
    return tuple(filter(is_installed, named)) or named or ("openslide",)


def has_slide_name(path: Path) -> bool:
    """Return whether a file name is that of a slide, in a format that an installed library reads."""
    is_format = path.suffix.lower() in SUFFIXES - IMAGE_SUFFIXES
    return is_format and is_installed(readers_of(path)[0]) and not path.name.startswith(".")


def has_image_name(path: Path) -> bool:
    """Return whether a file name is that of an image in a format that is not one of slides."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def is_slide_folder(path: Path) -> bool:
    """Return whether a folder is one slide, in a format that an installed library reads: OME-Zarr."""
    return path.suffix.lower() == FOLDER_SUFFIX and has_slide_name(path) and path.is_dir()


AskedReader = Literal["auto", ReaderName]

SLIDE_FILES, LABELS = "Slide files", "Labels"


@dataclass(frozen=True, init=False, repr=False, eq=False, kw_only=True)
class SlideFileOptions:
    """Options of every command that reads slide files."""

    mpp_csv: PathLike | None = setting(
        None,
        "CSV: slide,mpp. Takes precedence over the slides' headers.",
        group=SLIDE_FILES,
        format="path",
    )
    default_mpp: Mpp | None = setting(
        None,
        "Level-0 mpp of slides without a scale.",
        group=SLIDE_FILES,
        at_least=PLAUSIBLE_MPP[0],
        at_most=PLAUSIBLE_MPP[1],
    )
    workers: int | None = setting(
        None, "Number of processes.", group=SLIDE_FILES, at_least=1, default_text="one per core"
    )

    @property
    def worker_count(self) -> int:
        """Number of processes to start."""
        # Imported late: `--help` does not need it.
        from histopipe.system.worker_pool import count_usable_cores

        return self.workers or count_usable_cores()


@dataclass(frozen=True, init=False, repr=False, eq=False, kw_only=True)
class PatchReadingOptions(SlideFileOptions):
    """Options of commands that read all patches of slide files, and labels of slides."""

    images: bool = setting(
        False,
        f"Take only images: {IMAGE_FORMATS}, and TIFF files of one image without tiles. Images are taken "
        "without this flag if there is no slide.",
        group=SLIDE_FILES,
    )
    max_unreadable: float = setting(
        0.01,
        "Maximum share of unreadable patches per slide.",
        group=SLIDE_FILES,
        at_least=0,
        at_most=1,
        format="share",
    )
    stage: PathLike | None = setting(
        None,
        "Copy slide files to this folder on a local disk before they are read. Slides at URLs are always "
        "copied.  [default for URLs: the temporary folder]",
        group=SLIDE_FILES,
        format="path",
        metavar="DIR",
    )
    stage_gb: float = setting(
        50.0, "Maximum size of all copies at once in GB.", group=SLIDE_FILES, above=0
    )
    labels: PathLike | None = setting(
        None,
        "CSV file with the columns slide, label, and optionally patient and site.",
        group=LABELS,
        format="path",
        default_text="labels.csv in the slide folder, else the sub-folders",
    )
    na: Sequence[str] | None = setting(
        None,
        "Cells of --labels that are missing values, apart from the empty cell; replaces the default list.",
        group=LABELS,
    )
    allow_extra_rows: bool = setting(False, "Ignore CSV rows of unknown slides.", group=LABELS)

    @property
    def stage_bytes(self) -> int:
        """Most bytes of all copies in the staging folder together."""
        return int(self.stage_gb * 1e9)
