"""Options of the commands that ingest slides, and the limits that follow from them.

The module imports nothing slow, since `--help` lists the options, and workers start before anything slow is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from histopipe.annotations.rules import ANNOTATIONS, AnnotationRules, FrameOptions
from histopipe.slides.slide_formats import (
    LABELS,
    READERS,
    SLIDE_FILES,
    AskedReader,
    PatchReadingOptions,
    SlideFileOptions,
)
from histopipe.system.parts import MACHINES, PartOptions
from histopipe.system.settings import PathLike, declared_settings, path_unless, setting
from histopipe.tiling.spec import (
    FINDER_NAMES,
    NEWEST,
    PATCHES,
    TISSUE,
    AskedFinder,
    MaskRules,
    TilingSpec,
)

RouteName = Literal["copy", "decode", "openslide"]
AskedRoute = Literal["auto", RouteName]
READING = "Run"
_MASKS_OR_NETWORK = path_unless("otsu", *FINDER_NAMES, "none")

_BASE_SECONDS, _SECONDS_PER_PATCH = 600.0, 0.2
"""Default time limit. It allows five patches per second, a hundredth of the usual rate."""


@dataclass(frozen=True, kw_only=True)
class SpecOptions(MaskRules):
    """Options of `ingest` that a tiling spec records in another form."""

    mag: float | None = setting(
        None, "Scale as a magnification: 20 is 0.5 mpp.", group=PATCHES, above=0
    )
    tissue: PathLike = setting(
        "otsu",
        f"Tissue: otsu (the store's version, else the newest, {NEWEST}), {', '.join(FINDER_NAMES)}, none for all "
        "patches, a folder of masks (SLIDE.geojson or SLIDE.png), or a segmentation network (.onnx or .keras, with a "
        ".json file).",
        group=TISSUE,
        path=_MASKS_OR_NETWORK,
        default_text="otsu; of images, none",
    )
    tissue_fallback: AskedFinder | None = setting(
        None,
        "With a folder of masks: how to find the tissue of slides without a mask.",
        group=TISSUE,
        default_text="they fail",
    )
    exclude: Sequence[str] = setting(
        (),
        "Cut outlines of this class out of the tissue, such as artefacts. They are in --annotations or in the "
        "masks. Can be repeated.",
        group=TISSUE,
        format="repeated",
        metavar="CLASS",
    )


@dataclass(frozen=True, kw_only=True)
class IngestOptions(PatchReadingOptions):
    """Options of `ingest` and `import_coords` that are the same for all slides, apart from the tiling spec."""

    route: AskedRoute = setting(
        "auto", "Route: auto copies tiles, else decodes tiles, else uses OpenSlide.", group=READING
    )
    reader: AskedReader = setting(
        "auto",
        "Library that reads slides; auto: by the file. "
        + "; ".join(f"{name}: {reader.formats}" for name, reader in READERS.items())
        + ".",
        group=READING,
    )
    annotations: PathLike | None = setting(
        None,
        "Label patches from SLIDE.geojson (QuPath), SLIDE.xml (ASAP, ImageScope) or SLIDE.annotations (HALO) in "
        "this folder.",
        group=ANNOTATIONS,
        format="path",
    )
    rules: AnnotationRules = field(default_factory=AnnotationRules)
    masks: MaskRules = field(default_factory=MaskRules)
    tissue_network: Path | None = None
    cores: PathLike | None = setting(
        None,
        "Slides are tissue microarrays, and each core of SLIDE.geojson in this folder of `histopipe tissue --cores` is an entry "
        "with the id SLIDE/CORE.",
        group=SLIDE_FILES,
        format="path",
    )
    patient_regex: str | None = setting(
        None,
        "Find the patient in the id of each slide: the first group of this regular expression, or all of its "
        "match. A patient in --labels comes first.",
        group=LABELS,
        metavar="REGEX",
    )
    slide_list: PathLike | None = setting(
        None,
        "CSV with a column slide: ingest only these slides. URLs in it need not be in SLIDES.",
        group=SLIDE_FILES,
        format="path",
    )
    allow_mixed_mpp: bool = setting(
        False, "With --level: accept slides with different scales.", group=SLIDE_FILES
    )
    slide_timeout: float | None = setting(
        None,
        "Time limit per slide in seconds of worker time.",
        group=READING,
        above=0,
        default_text=f"{_BASE_SECONDS:g}, plus {_SECONDS_PER_PATCH:g} per patch",
    )
    allow_network: bool = setting(
        False, "Accept a store on a network filesystem, at your own risk.", group=READING
    )
    force: bool = setting(False, "Ingest slides again if their file was replaced.", group=READING)
    retry_failed: bool = setting(
        False, "Ingest slides again if their file could not be read.", group=READING
    )

    def seconds_for(self, patches: int) -> float:
        """Return the time limit of a slide with a number of patches, in seconds of worker time."""
        return self.slide_timeout or _BASE_SECONDS + _SECONDS_PER_PATCH * patches

    @property
    def timeout_text(self) -> str:
        """Time limit as text in the records of failed slides. A slide is retried if the limit has changed."""
        per_patch = _SECONDS_PER_PATCH if self.slide_timeout is None else 0
        return f"--slide-timeout {self.seconds_for(0):g}, {per_patch:g} a patch"

    @property
    def unreadable_text(self) -> str:
        """Limit of unreadable patches as text in the records of failed slides."""
        return f"--max-unreadable {self.max_unreadable:g}"


@dataclass(frozen=True, kw_only=True)
class IngestPartOptions(PartOptions):
    """Options of `ingest` and `import_coords` in parts, which fill a folder of stores."""

    scratch: PathLike | None = setting(
        None,
        "Of parts: folder on a local disk of each machine, where stores are filled.",
        group=MACHINES,
        format="path",
        default_text="the temporary folder",
    )
    part_gb: float = setting(
        16.0,
        "Of parts: GB of slides after which a store is moved to --out, and the next one begins.",
        group=MACHINES,
        above=0,
    )


@dataclass(frozen=True, kw_only=True)
class MaskOptions(SlideFileOptions, PartOptions, MaskRules, FrameOptions):
    """Options of `tissue`."""

    cores: PathLike | None = setting(
        None,
        "Find the cores of tissue microarrays in place of masks, and name them from this map: a table of rows and columns, or "
        "with coordinates (QuPath's .qptma, Aperio's .xml). For several maps, a folder with a file for each slide.",
        group=TISSUE,
        format="path",
    )
    tissue: PathLike = setting(
        "otsu",
        f"otsu (the newest version, {NEWEST}), {', '.join(FINDER_NAMES)}, a folder of masks of another tool, or a segmentation "
        "network (.onnx or .keras).",
        group=TISSUE,
        path=_MASKS_OR_NETWORK,
    )
    force: bool = setting(
        False, "Replace masks that exist, also if they were corrected.", group=TISSUE
    )


SETTING_CLASSES = (TilingSpec, SpecOptions, AnnotationRules, IngestOptions)
INGEST_SETTINGS = declared_settings(*SETTING_CLASSES)
"""Options of `ingest` and `plan` by name."""
OF_STORES = frozenset(
    ("route", "allow_mixed_mpp", "slide_timeout", "allow_network", "force", "retry_failed")
)
"""Options that concern the store of an ingest."""
OF_PATCHES = frozenset(
    name for name, each in INGEST_SETTINGS.items() if each.group in (PATCHES, TISSUE)
)
"""Options that choose patches and tissue."""
EMBED_SETTINGS = {n: each for n, each in INGEST_SETTINGS.items() if n not in OF_STORES}
"""Options of `embed` for slide files."""
IMPORT_SETTINGS = {n: each for n, each in INGEST_SETTINGS.items() if n not in OF_PATCHES}
"""Options of `import_coords`, which finds patch size, scale and tissue in the coordinates."""


def prepare() -> None:
    """Import what the workers of an ingest need."""
    for name in ("ingestion.planning", "slides.tiff_tiles"):
        importlib.import_module(f"histopipe.{name}")
    importlib.import_module("cv2").setNumThreads(1)  # each worker has one core
