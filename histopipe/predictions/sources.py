"""Predictions by slide, from a finished run or a folder of `histopipe predict`: for heatmaps and the viewer."""

from __future__ import annotations

import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.errors import UsageError
from histopipe.predictions.prediction_tables import (
    FOLDER,
    UNUSUAL,
    patch_value_files,
    read_patch_values,
    read_slide_predictions,
    write_predictions,
)
from histopipe.store.format import STAIN_COLUMNS
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.files import (
    path_within,
    read_json,
    read_json_object,
    reading,
    write_atomically,
)
from histopipe.system.folders import PREDICT_SETTINGS
from histopipe.system.shared_folders import ALL, PARTS, Share, recorded_by_parts
from histopipe.system.table_files import read_columns, read_dicts
from histopipe.tasks.predictions import Predictions

PATCHES = "patches"
"""Folder with the files of each slide."""
SETTINGS = PREDICT_SETTINGS
SLIDES, PATIENTS = "slides.csv", "patients.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSlide:
    """A predicted slide, with the geometry of its patches."""

    slide: str
    patient: str
    label: str | None
    width: int
    height: int
    bounds: list[int]
    """x, y, width and height of the scanned area, or of the core, level-0 pixels."""
    mpp: float | None
    mpp_source: str | None
    size_l0: float
    stride_l0: float
    source: str
    """Identifies the predicted file or patches. If it changes, the slide is predicted again."""
    patches: int = 0
    skipped: int = 0
    notes: list[str] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    """Standard deviation of each class's probability over several models; empty for one."""
    outputs: list[list[float]] = field(default_factory=list)
    """Mean probabilities of each model, for prediction sets; empty without these, and without patches."""
    unusual: float | None = None
    """Distance from the training, of which 1 is the limit; None if unknown."""
    orientation: int | None = None
    """How its image is turned, see `Turn`; None if it is not."""
    scan: list[int] = field(default_factory=list)
    """Of a core, the scanned area of its file, from whose corner QuPath counts; else empty."""
    areas: list[float] = field(default_factory=list)
    """Area of each class of pixels, mm²; pixels of the map if the scale is unknown. Empty for other tasks."""

    @classmethod
    def of(
        cls, record: SlideRecord, *, source: str, patches: int = 0, skipped: int = 0
    ) -> PredictedSlide:
        """Create it from the record of a slide."""
        return cls(
            slide=record.id,
            patient=record.patient or record.id,
            label=record.label,
            width=record.width,
            height=record.height,
            bounds=list(record.bounds) or [0, 0, record.width, record.height],
            mpp=record.mpp,
            mpp_source=record.mpp_source,
            size_l0=record.side_l0,
            stride_l0=(record.stride or 0) * (record.downsample or 0.0),
            source=source,
            patches=patches,
            skipped=skipped,
            notes=list(record.notes),
            orientation=record.orientation,
            scan=list(record.scan),
        )

    @property
    def geometry(self) -> dict[str, Any]:
        """Size and scale of the slide and its patches, as JSON values."""
        names = ("width", "height", "bounds", "mpp", "mpp_source", "size_l0", "stride_l0")
        further = (name for name in ("orientation", "scan") if getattr(self, name))
        return {name: getattr(self, name) for name in (*names, *further)}

    def write(self, path: Path) -> None:
        """Write a JSON file by one rename."""
        write_atomically(path, json.dumps(asdict(self), indent=1, ensure_ascii=False))

    @classmethod
    def read(cls, path: Path) -> PredictedSlide:
        """Read a file written by `write`.

        Raises:
            DamagedStore: the file is damaged.
        """
        with reading(path, todo="remove it, and predict again"):
            slide = cls(**read_json(path))
            numbers = (slide.width, slide.height, *slide.bounds, slide.size_l0, slide.stride_l0)
            if len(slide.bounds) != 4 or not all(isinstance(n, int | float) for n in numbers):
                raise TypeError("numbers expected")
            return slide


FindComplete = Callable[[str, str], PredictedSlide | None]
"""Returns a slide, by id and source, if its files are complete and from the same source."""


def labelled_patches(parts: Sequence[Predictions]) -> list[Predictions]:
    """Return the patches with known labels."""
    return [labelled for part in parts if len(labelled := part.labelled())]


MAPS = "maps"
"""Folder with a map of the classes of each slide."""
AREAS = re.compile(f"area_mm2_|share_|({'|'.join(STAIN_COLUMNS)})$")
"""Beginnings of the columns of areas of classes in a table of slides."""
_MOST_CELLS = 512
"""Most cells of a coarse map along its longer side."""
READING = threading.Lock()
"""Held while a large file is read, so that two requests of the viewer do not read it at the same time."""
_VALUES = ("p_", "sd_", "risk", "predicted_", UNUSUAL)
"""Beginnings of the columns of values in a table of slides."""


@dataclass(frozen=True, eq=False)
class PredictionSource(ABC):
    """The predictions of a folder. Threads may share it; files are read when they are needed.

    Attributes:
        folder: the folder.
        name: short name for readers.
    """

    folder: Path
    name: str = ""

    @property
    def classes(self) -> Sequence[str]:
        """Class names; empty if there are no predictions of classes of patches."""
        return ()

    @property
    def of_bags(self) -> bool:
        """Whether a slide model made them, so that patches have attention instead of predictions."""
        return (self.folder / FOLDER).is_dir()

    @property
    def of_pixels(self) -> bool:
        """Whether pixels are predicted, so that slides have maps."""
        return (self.folder / MAPS).is_dir()

    @property
    def of_patches(self) -> bool:
        """Whether patches are predicted, and not bags or pixels."""
        return not (self.of_bags or self.of_pixels)

    @property
    def store_paths(self) -> list[Path]:
        """Stores that are named with the predictions."""
        return []

    @property
    def predicted_slides(self) -> Mapping[str, PredictedSlide]:
        """Slides by id whose size and scale are recorded with the predictions."""
        return {}

    def find(self, slide: str) -> PredictedSlide | None:
        """Return a slide if its size and scale are recorded with its predictions, which are complete then."""
        return None

    @abstractmethod
    def slide_ids(self) -> Collection[str]:
        """Return the slides that may have predictions of patches, sorted."""

    @abstractmethod
    def of_slide(self, slide: str) -> Predictions | None:
        """Return the predictions of a slide's patches; None if there are none."""

    @abstractmethod
    def by_slide(self) -> dict[str, dict[str, float | str]]:
        """Return values of each slide: the mean of each output, the predicted class, and the share of correct patches."""

    def class_cells(self, slide: str) -> tuple[NDArray[np.float64], tuple[str, ...]] | None:
        """Return (N, 4) x, y, class number and side of the cells of a coarse map of classes, level-0 pixels; and the classes.

        None if there is no map.
        """
        return None

    def attention(self, slide: str) -> NDArray[np.float64] | None:
        """Return (N, 4) x, y, attention and side of a slide's patches in level-0 pixels; None if there is none."""
        with READING:
            return self._attention.get(slide)

    def unusual(self, slide: str) -> NDArray[np.float64] | None:
        """Return (N, 4) x, y, distance from the training and side of a slide's patches; None if there is none."""
        path = path_within(self.folder / UNUSUAL, f"{slide}.csv")
        return read_patch_values([path], UNUSUAL).get(slide) if path.exists() else None

    @cached_property
    def _attention(self) -> dict[str, NDArray[np.float64]]:
        return read_patch_values(patch_value_files(self.folder))

    def split(self, store: Store, slide: int) -> NDArray[np.int8] | None:
        """Return the subset of each patch of a stored slide: 0, 1, 2 as in `SUBSETS`, -1 for none; None if unknown."""
        return None

    def split_by_slide(self) -> dict[str, str]:
        """Return the subset of each slide; "several" if its patches are in several subsets."""
        return {}


def class_names(path: Path) -> list[str]:
    """Return the names of classes in the header of a table; none if it is of another task."""
    header = read_columns(path)
    return [name[2:] for name in header if name.startswith("p_")] if "predicted" in header else []


class PredictionsFolder(PredictionSource):
    """A folder of `histopipe predict`, which need not exist yet: predictions of patches, or attention of a slide model."""

    @property
    def exists(self) -> bool:
        """Whether it is a folder of predictions."""
        return (self.folder / SETTINGS).is_file()

    def record(self, settings: Mapping[str, Any], share: Share = ALL) -> None:
        """Record the version and the settings of the predictions, or compare the settings with the recorded ones.

        Raises:
            UsageError: the folder holds predictions with other settings, or other files.
        """
        path = self.folder / SETTINGS
        files = (
            []
            if recorded_by_parts(path)
            else sorted({*self.folder.iterdir()} - {self.folder / PARTS})
        )
        if not self.exists and files:
            raise UsageError(
                f"{self.folder} holds files that are not predictions",
                found=files[0].name,
                todo="choose another --out",
            )
        # A run folder may be moved, so the weights are compared instead of the path.
        share.record(
            path,
            {"histopipe": __version__, **settings},
            ignored=("histopipe", "run", "models", "batches"),
            contents="predictions",
        )

    def path_of(self, slide: str, suffix: Literal[".csv", ".json", ".jpg"]) -> Path:
        """Return the path of a file of a slide.

        `.csv` is the table of its patches: slide,patient,x_l0,y_l0,label,predicted,p_CLASS…. If `.json`, the description,
        exists, the predictions are complete. `.jpg` is the thumbnail, so that heatmaps need neither store nor slide.

        Raises:
            DamagedStore: the path is outside of the folder.
        """
        return path_within(self.folder / PATCHES, f"{slide}{suffix}")

    def complete(self, slide: str, source: str) -> PredictedSlide | None:
        """Return a slide if its predictions are complete and from the same source."""
        predicted = self.find(slide)
        return predicted if predicted is not None and predicted.source == source else None

    def find(self, slide: str) -> PredictedSlide | None:  # noqa: D102
        path = self.path_of(slide, ".json")
        return PredictedSlide.read(path) if path.exists() else None

    def write(
        self, slide: PredictedSlide, scores: Predictions, thumbnail: bytes | None = None
    ) -> None:
        """Write a slide's predictions and thumbnail, then its JSON file."""
        path = self.path_of(slide.slide, ".csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path_of(slide.slide, ".json").unlink(missing_ok=True)  # it describes an old source
        write_predictions(path, [({}, scores)])
        if thumbnail is not None:
            write_atomically(self.path_of(slide.slide, ".jpg"), thumbnail)
        slide.write(self.path_of(slide.slide, ".json"))

    def map_of(self, slide: str) -> Path:
        """Return the path of the map of a slide's classes. Raise DamagedStore if it would be outside of the folder."""
        return path_within(self.folder / MAPS, f"{slide}.ome.tif")

    def class_cells(  # noqa: D102
        self, slide: str
    ) -> tuple[NDArray[np.float64], tuple[str, ...]] | None:
        from tifffile import TiffFile  # imported late: few need it

        path, predicted = self.map_of(slide), self.find(slide)
        if predicted is None or not path.exists():
            return None
        with reading(path), TiffFile(path) as file:
            levels = file.series[0].levels
            fine = sum(max(level.shape) > _MOST_CELLS for level in levels)
            number = min(fine, len(levels) - 1)
            values = levels[number].asarray()
        rows, columns = np.nonzero(values)
        settings, (left, top, *_) = read_json_object(self.folder / SETTINGS), predicted.bounds
        # The last cells of a row can reach beyond the scanned area, so its width does not give the side.
        scale = predicted.size_l0 / settings["patch_size"] * settings["map_reduction"]
        side = scale * 2**number
        places = left + columns * side, top + rows * side
        cells = np.stack([*places, values[rows, columns] - 1.0], axis=1)
        return np.insert(cells, 3, side, axis=1), tuple(self.classes)

    def write_pixels(self, slide: PredictedSlide, thumbnail: bytes | None) -> None:
        """Write the thumbnail of a slide whose map is complete, then its JSON file."""
        path = self.path_of(slide.slide, ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        if thumbnail is not None:
            write_atomically(self.path_of(slide.slide, ".jpg"), thumbnail)
        slide.write(path)

    def read(self, slide: str) -> Predictions:
        """Read the predictions of a slide."""
        return read_slide_predictions(self.path_of(slide, ".csv"))

    @cached_property
    def classes(self) -> Sequence[str]:
        """Class names, from the first slide with patches; of a slide model, from the table of slides."""
        if self.of_pixels:
            return tuple(read_json_object(self.folder / SETTINGS)["pixel_classes"])
        if not self.of_patches:
            return class_names(self.folder / SLIDES) if (self.folder / SLIDES).exists() else ()
        some = next((name for name, slide in self.predicted_slides.items() if slide.patches), None)
        return self.read(some).task.classes if some else ()

    @cached_property
    def predicted_slides(self) -> Mapping[str, PredictedSlide]:
        """All complete slides by id, sorted by id. They are read once."""
        return {name: PredictedSlide.read(self.path_of(name, ".json")) for name in self._names()}

    def _names(self) -> list[str]:
        folder = self.folder / PATCHES
        return sorted(
            path.relative_to(folder).as_posix().removesuffix(".json")
            for path in folder.rglob("*.json")
            if not path.name.startswith(".")
        )

    def slide_ids(self) -> Collection[str]:  # noqa: D102
        return self._names() if self.of_patches else ()

    def of_slide(self, slide: str) -> Predictions | None:  # noqa: D102
        predicted = self.find(slide) if self.of_patches else None
        return self.read(slide) if predicted is not None and predicted.patches else None

    def by_slide(self) -> dict[str, dict[str, float | str]]:  # noqa: D102
        path = self.folder / SLIDES
        with suppress(FileNotFoundError), reading(path):
            return {
                row["slide"]: {
                    name.removeprefix("p_"): cell if name == "predicted" else float(cell)
                    for name, cell in row.items()
                    if name == "predicted" or (cell and name.startswith(_VALUES))
                }
                for row in read_dicts(path)
            }
        return {}
