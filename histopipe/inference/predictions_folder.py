"""The folder of predictions: for each slide a CSV file of its patches, a thumbnail, and a JSON file, written last."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore
from histopipe.evaluation.predictions_file import read_slide_predictions, write_predictions
from histopipe.evaluation.scores import PatchScores
from histopipe.store.record import SlideRecord
from histopipe.system.files import appearing, path_within, read_json

PATCHES = "patches"
"""Folder with the files of each slide."""
SETTINGS = "predict.json"
SLIDES, PATIENTS = "slides.csv", "patients.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSlide:
    """A predicted slide, and the positions of its patches."""

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
    """Identifies the file or the patches that were predicted; another source is predicted again."""
    patches: int = 0
    skipped: int = 0
    notes: list[str] = field(default_factory=list)

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

    def write(self, path: Path) -> None:
        """Write a JSON file, by one rename."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        with appearing(path, hidden=True) as part:
            part.write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> PredictedSlide:
        """Read what `write` wrote.

        Raises:
            DamagedStore: the file holds something else.
        """
        try:
            value: dict[str, Any] = read_json(path)
            slide = cls(**value)
            numbers = (slide.width, slide.height, *slide.bounds, slide.size_l0, slide.stride_l0)
            if len(slide.bounds) != 4 or not all(isinstance(n, int | float) for n in numbers):
                raise TypeError("numbers expected")  # noqa: TRY301 - reported with the others
        except (OSError, ValueError, TypeError) as error:
            raise DamagedStore(
                f"{path} is damaged", found=str(error)[:200], todo="remove it, and predict again"
            ) from error
        return slide


class PredictionsFolder:
    """A folder of predictions, which may be missing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        """Whether it is a folder of predictions."""
        return (self.path / SETTINGS).is_file()

    def csv(self, slide: str) -> Path:
        """Return the path of a slide's patches: slide,patient,x_l0,y_l0,label,predicted,p_CLASS….

        Raises:
            DamagedStore: the id leads out of the folder.
        """
        return path_within(self.path / PATCHES, f"{slide}.csv")

    def json(self, slide: str) -> Path:
        """Return the path of a slide's JSON file. If it exists, the slide's predictions are complete."""
        return path_within(self.path / PATCHES, f"{slide}.json")

    def thumbnail(self, slide: str) -> Path:
        """Return the path of a slide's thumbnail. With it, heatmaps need neither store nor slide."""
        return path_within(self.path / PATCHES, f"{slide}.jpg")

    def complete(self, slide: str, source: str) -> PredictedSlide | None:
        """Return a slide if its predictions are complete and from the same source."""
        path = self.json(slide)
        if not path.exists():
            return None
        found = PredictedSlide.read(path)
        return found if found.source == source else None

    def write(
        self, slide: PredictedSlide, scores: PatchScores, thumbnail: bytes | None = None
    ) -> None:
        """Write a slide's predictions and thumbnail, then its JSON file."""
        path = self.csv(slide.slide)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.json(slide.slide).unlink(missing_ok=True)  # of another source
        write_predictions(path, [({}, scores)], hidden=True)
        if thumbnail is not None:
            with appearing(self.thumbnail(slide.slide), hidden=True) as part:
                part.write_bytes(thumbnail)
        slide.write(self.json(slide.slide))

    def slides(self) -> dict[str, PredictedSlide]:
        """Return all complete slides by id, sorted by id."""
        paths = (self.path / PATCHES).rglob("*.json")
        found = (PredictedSlide.read(path) for path in paths if not path.name.startswith("."))
        return dict(sorted((slide.slide, slide) for slide in found))

    def read(self, slide: str) -> PatchScores:
        """Read the predictions of a slide."""
        return read_slide_predictions(self.csv(slide))
