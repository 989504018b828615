"""Options of commands that read slide files. The module imports nothing slow, since `--help` lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from histopipe.geometry import Mpp
from histopipe.slides.scale import PLAUSIBLE_MPP
from histopipe.slides.slide_formats import IMAGE_FORMATS, ReaderName
from histopipe.system.settings import PathLike, setting

AskedReader = Literal["auto", ReaderName]

SLIDE_FILES, LABELS = "Slide files", "Labels"


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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
