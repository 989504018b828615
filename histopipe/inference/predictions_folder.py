"""The folder of a prediction: for each slide a CSV of its patches, and its facts, which are written last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from histopipe.evaluation.predictions_file import read_slide_predictions, write_predictions
from histopipe.evaluation.scores import PatchScores
from histopipe.features.folder import path_within
from histopipe.inference.slide_info import SlideFacts
from histopipe.system.files import appearing

PATCHES = "patches"
"""Its folder of slides."""
ABOUT = "predict.json"
SLIDES, PATIENTS = "slides.csv", "patients.csv"


class PredictionFolder:
    """Where predictions lie.

    Args:
        path: the folder; it need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def csv(self, slide: str) -> Path:
        """A slide's patches: slide,patient,x_l0,y_l0,label,predicted,p_CLASS….

        Raises:
            DamagedStore: the id points out of the folder.
        """
        return path_within(self.path / PATCHES, f"{slide}.csv")

    def facts_path(self, slide: str) -> Path:
        """A slide's facts. Where they are there, its patches are."""
        return path_within(self.path / PATCHES, f"{slide}.json")

    def thumbnail(self, slide: str) -> Path:
        """A JPEG of a slide, for its heatmap: store and slide need not be at hand by then."""
        return path_within(self.path / PATCHES, f"{slide}.jpg")

    def done(self, slide: str, source: str) -> SlideFacts | None:
        """The facts of a slide that is predicted already, from the same source."""
        path = self.facts_path(slide)
        if not path.exists():
            return None
        facts = SlideFacts.read(path)
        return facts if facts.source == source else None

    def write(self, facts: SlideFacts, scores: PatchScores, thumbnail: bytes | None = None) -> None:
        """A slide's predictions and picture, then its facts."""
        path = self.csv(facts.slide)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.facts_path(facts.slide).unlink(missing_ok=True)  # of a file that was replaced since
        write_predictions(path, [({}, scores)], hidden=True)
        if thumbnail is not None:
            with appearing(self.thumbnail(facts.slide), hidden=True) as part:
                part.write_bytes(thumbnail)
        facts.write(self.facts_path(facts.slide))

    def slides(self) -> dict[str, SlideFacts]:
        """The facts of all slides that are there, by id, in order."""
        found = (SlideFacts.read(path) for path in self._facts_files())
        return dict(sorted((facts.slide, facts) for facts in found))

    def read(self, slide: str) -> PatchScores:
        """A slide's predictions.

        Raises:
            UsageError: it has none.
            DamagedStore: they cannot be read.
        """
        return read_slide_predictions(self.csv(slide))

    def _facts_files(self) -> Iterator[Path]:
        for path in (self.path / PATCHES).rglob("*.json"):
            if not path.name.startswith("."):
                yield path


def is_prediction(path: Path) -> bool:
    """Whether a folder is one of predictions."""
    return (path / ABOUT).is_file()
