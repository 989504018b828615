"""The folder of predictions.

Each slide has a CSV file of patches, a thumbnail and a JSON file, written last. Tables list the slides and patients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from histopipe.errors import UsageError
from histopipe.predictions.tables import read_slide_predictions, write_predictions
from histopipe.store.record import SlideRecord
from histopipe.system.csv_files import write_table
from histopipe.system.files import (
    path_within,
    read_json,
    reading,
    record_or_check,
    write_atomically,
)
from histopipe.tasks.choices import Aggregation, EvaluationLevel
from histopipe.tasks.classification import Classification
from histopipe.tasks.predictions import (
    Predictions,
    ThresholdsByLevel,
    joined_predictions,
    scores_of,
)
from histopipe.tasks.task import EvaluationSettings

PATCHES = "patches"
"""Folder with the files of each slide."""
SETTINGS = "predict.json"
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
    """x, y, width and height of the scanned area, level-0 pixels."""
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

    @classmethod
    def of(
        cls, record: SlideRecord, *, source: str, patches: int = 0, skipped: int = 0
    ) -> PredictedSlide:
        """Create it from the record of a slide."""
        scale = record.downsample or 0.0
        return cls(
            slide=record.id, patient=record.patient or record.id, label=record.label,
            width=record.width, height=record.height,
            bounds=list(record.bounds) or [0, 0, record.width, record.height], mpp=record.mpp,
            mpp_source=record.mpp_source, size_l0=(record.read_size or 0) * scale,
            stride_l0=(record.stride or 0) * scale, source=source, patches=patches,
            skipped=skipped, notes=list(record.notes),
        )  # fmt: skip

    @property
    def geometry(self) -> dict[str, Any]:
        """Size and scale of the slide and its patches, as JSON values."""
        names = ("width", "height", "bounds", "mpp", "mpp_source", "size_l0", "stride_l0")
        return {name: getattr(self, name) for name in names}

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
            value: dict[str, Any] = read_json(path)
            slide = cls(**value)
            numbers = (slide.width, slide.height, *slide.bounds, slide.size_l0, slide.stride_l0)
            if len(slide.bounds) != 4 or not all(isinstance(n, int | float) for n in numbers):
                raise TypeError("numbers expected")
            return slide


class CompleteSlides(Protocol):
    """A folder that knows which slides are complete."""

    def complete(self, slide: str, source: str) -> PredictedSlide | None:
        """Return a slide if its files are complete and from the same source."""


class PredictionsFolder:
    """A folder of predictions, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        """Whether it is a folder of predictions."""
        return (self.path / SETTINGS).is_file()

    def record(self, settings: Mapping[str, Any]) -> None:
        """Record the settings of the predictions, or compare them with the recorded ones.

        Raises:
            UsageError: the folder holds predictions with other settings, or other files.
        """
        if not self.exists and any(self.path.iterdir()):
            raise UsageError(
                f"{self.path} holds files that are not predictions", found=min(self.path.iterdir()).name,
                todo="choose another --out",
            )  # fmt: skip
        # A run folder may be moved, so the weights are compared instead of the path.
        record_or_check(
            self.path / SETTINGS,
            settings,
            ignored=("histopipe", "run", "batches"),
            contents="predictions",
        )

    def csv(self, slide: str) -> Path:
        """Return the path of a slide's patch table: slide,patient,x_l0,y_l0,label,predicted,p_CLASS….

        Raises:
            DamagedStore: the path is outside of the folder.
        """
        return path_within(self.path / PATCHES, f"{slide}.csv")

    def json(self, slide: str) -> Path:
        """Return the path of a slide's JSON file. If it exists, the slide's predictions are complete."""
        return path_within(self.path / PATCHES, f"{slide}.json")

    def thumbnail(self, slide: str) -> Path:
        """Return the path of a slide's thumbnail. Heatmaps use it, so they need neither store nor slide."""
        return path_within(self.path / PATCHES, f"{slide}.jpg")

    def complete(self, slide: str, source: str) -> PredictedSlide | None:
        """Return a slide if its predictions are complete and from the same source."""
        path = self.json(slide)
        if not path.exists():
            return None
        predicted = PredictedSlide.read(path)
        return predicted if predicted.source == source else None

    def write(
        self, slide: PredictedSlide, scores: Predictions, thumbnail: bytes | None = None
    ) -> None:
        """Write a slide's predictions and thumbnail, then its JSON file."""
        path = self.csv(slide.slide)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.json(slide.slide).unlink(missing_ok=True)  # it describes an old source
        write_predictions(path, [({}, scores)])
        if thumbnail is not None:
            write_atomically(self.thumbnail(slide.slide), thumbnail)
        slide.write(self.json(slide.slide))

    def slides(self) -> dict[str, PredictedSlide]:
        """Return all complete slides by id, sorted by id."""
        return {name: PredictedSlide.read(self.json(name)) for name in self.names()}

    def names(self) -> list[str]:
        """Return the ids of all complete slides, sorted."""
        folder = self.path / PATCHES
        paths = (path for path in folder.rglob("*.json") if not path.name.startswith("."))
        return sorted(path.relative_to(folder).as_posix().removesuffix(".json") for path in paths)

    def read(self, slide: str) -> Predictions:
        """Read the predictions of a slide."""
        return read_slide_predictions(self.csv(slide))


def write_level_table(
    path: Path,
    parts: Sequence[Predictions],
    slides: Sequence[PredictedSlide],
    level: EvaluationLevel,
    how: Aggregation,
    *,
    classes: Sequence[str],
    evaluation_settings: EvaluationSettings,
    thresholds: ThresholdsByLevel,
) -> None:
    """Write a CSV file with a row per slide or patient: ids, label, patches, predicted and decided class, probability.

    Slides predicted by several models also have standard deviations. Slides and patients without patches are not in `parts`. Their classes and probabilities are empty.
    """
    aggregated = _aggregated(parts, level, how, evaluation_settings, thresholds) if parts else {}
    labels = _labels(slides, level)
    patient = {slide.slide: slide.patient for slide in slides}
    names = sorted({slide.slide if level == "slide" else slide.patient for slide in slides})
    ids = ["slide", "patient"] if level == "slide" else ["patient"]
    spread = {slide.slide: slide.spread for slide in slides if slide.spread and level == "slide"}
    probabilities = [f"p_{name}" for name in classes] + [f"sd_{name}" for name in classes if spread]
    nothing: list[object] = [0, "", "", *("" for _ in classes)]
    unknown: list[object] = ["" for _ in classes if spread]
    rows = (
        [
            name,
            *([patient[name]] if level == "slide" else []),
            labels.get(name, ""),
            *aggregated.get(name, nothing),
            *spread.get(name, unknown),
        ]
        for name in names
    )
    write_table(path, [*ids, "label", "patches", "predicted", "decided", *probabilities], rows)


def _aggregated(
    parts: Sequence[Predictions],
    level: EvaluationLevel,
    how: Aggregation,
    evaluation_settings: EvaluationSettings,
    thresholds: ThresholdsByLevel,
) -> dict[str, list[object]]:
    """Return the number of patches, predicted and decided class, and probabilities by slide or patient."""
    # Without labels, so that patches with different labels are aggregated too.
    scores = joined_predictions(parts).without_targets()
    aggregated = scores_of(scores, level, how, evaluation_settings, thresholds)
    task = cast(Classification, aggregated.task)
    decided, (group, names) = task.decide(aggregated.output, aggregated.limits), scores.owner(level)
    counts = np.bincount(group, minlength=len(names))
    classes = task.classes
    return {
        names[item]: [
            int(counts[item]), classes[aggregated.output[i].argmax()], classes[decided[i]],
            *(f"{p:.9g}" for p in aggregated.output[i].tolist()),
        ]
        for i, item in enumerate(aggregated.item.tolist())
    }  # fmt: skip


def _labels(slides: Sequence[PredictedSlide], level: EvaluationLevel) -> dict[str, str]:
    """Return labels by slide, or by patient if all slides of the patient have the same label."""
    by_name: dict[str, set[str]] = {}
    for slide in slides:
        if slide.label is not None:
            by_name.setdefault(slide.slide if level == "slide" else slide.patient, set()).add(
                slide.label
            )
    return {name: labels.pop() for name, labels in by_name.items() if len(labels) == 1}


def labelled_patches(parts: Sequence[Predictions]) -> list[Predictions]:
    """Return the patches with known labels."""
    return [labelled for part in parts if len(labelled := part.known())]
