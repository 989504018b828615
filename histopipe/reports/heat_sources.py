"""Where the values of heatmaps come from: a folder of predictions, a run's test patches, or the attention of a bag model."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.evaluation.predictions_file import read_predictions
from histopipe.evaluation.scores import PatchScores, joined_scores
from histopipe.inference.predictions_folder import PredictionFolder, is_prediction
from histopipe.inference.slide_info import SlideFacts
from histopipe.reports.heat import SlideHeat, ranks
from histopipe.runs import folder as run_folder
from histopipe.store.store import Store

HeatOf = Callable[[], SlideHeat | None]
Arrays = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class HeatSource:
    """Slides that heatmaps can be drawn of.

    Attributes:
        place: the folder that holds their values.
        stores: that tell where patches lie, where the folder does not.
        class_name: whose probability is drawn; the last one if not given.
    """

    place: Path
    stores: Sequence[Store]
    class_name: str | None = None

    def slides(self, only: Sequence[str] = ()) -> Iterator[tuple[str, HeatOf]]:
        """Each slide, those named or all, with what reads its values: None where it has no patch.

        Reading raises NothingToDo where a store is needed that tells where its patches lie, and DamagedStore.

        Raises:
            UsageError: the folder holds no values, or not of these slides or this class.
            DamagedStore: it cannot be read.
        """
        if is_prediction(self.place):
            yield from self._predicted(only)
        elif (self.place / run_folder.ATTENTION).is_dir():
            yield from self._attention(only)
        elif (self.place / run_folder.PREDICTIONS).exists():
            yield from self._judged(only)
        else:
            raise UsageError(
                f"{self.place} holds no predictions",
                expected="a folder of `histopipe predict`, or of a finished run",
            )

    def _predicted(self, only: Sequence[str]) -> Iterator[tuple[str, HeatOf]]:
        folder = PredictionFolder(self.place)
        facts = folder.slides()

        def heat_of(name: str) -> SlideHeat | None:
            if not facts[name].patches:
                return None
            scores = folder.read(name)
            return self._heat(scores, np.arange(len(scores.label)), facts[name])

        for name in _chosen(only, facts, self.place):
            yield name, partial(heat_of, name)

    def _judged(self, only: Sequence[str]) -> Iterator[tuple[str, HeatOf]]:
        """Of validation and test patches: a slide's other patches were trained on."""
        sides = list(read_predictions(self.place / run_folder.PREDICTIONS).values())
        if sides and sides[0].level != "patch":
            raise UsageError(
                f"{self.place} predicts whole {sides[0].level}s, and has no attention",
                todo="train with --pooling gated or attention",
            )
        names = sorted({name for side in sides for name in side.slides})

        def heat_of(name: str) -> SlideHeat:
            # Both sides of a slide that is divided between them.
            scores = joined_scores([side for side in sides if name in side.slides])
            rows = np.flatnonzero(scores.slide == scores.slides.index(name))
            return self._heat(scores, rows, self._recorded(name))

        for name in _chosen(only, names, self.place):
            yield name, partial(heat_of, name)

    def _attention(self, only: Sequence[str]) -> Iterator[tuple[str, HeatOf]]:
        if self.class_name is not None:
            raise UsageError("--class", found="attention", expected="nothing: it is of no class")
        found = {
            slide: values
            for path in sorted((self.place / run_folder.ATTENTION).rglob("*.csv"))
            for slide, values in _read_attention(path).items()
        }

        def heat_of(name: str) -> SlideHeat:
            x, y, attention, side = found[name]
            facts = self._recorded(name)
            return SlideHeat(
                name, "attention, rank among the slide's patches", x, y, side or facts.size_l0,
                ranks(attention), None, _bounds(facts), facts.mpp,
            )  # fmt: skip

        for name in _chosen(only, found, self.place):
            yield name, partial(heat_of, name)

    def _heat(self, scores: PatchScores, rows: NDArray[np.intp], facts: SlideFacts) -> SlideHeat:
        name = scores.classes[-1] if self.class_name is None else self.class_name
        if name not in scores.classes:
            raise UsageError("--class", found=repr(name), expected=" or ".join(scores.classes))
        probability = scores.probability[rows]
        return SlideHeat(
            facts.slide, f"probability of {name}", scores.x_l0[rows], scores.y_l0[rows],
            facts.size_l0, probability[:, scores.classes.index(name)],
            np.array(scores.classes, object)[probability.argmax(axis=1)], _bounds(facts), facts.mpp,
        )  # fmt: skip

    def _recorded(self, slide: str) -> SlideFacts:
        """Where the patches of a slide lie, by the store that holds them."""
        name, _, store_uuid = slide.partition("@")
        for store in self.stores:
            for record in store.complete.values():
                if record.id == name and store.uuid.startswith(store_uuid):
                    return SlideFacts.of(record, source="")
        raise NothingToDo(
            f"no store holds slide {slide}", found=", ".join(str(s.path) for s in self.stores) or "no store",
            todo="give the store of its patches with --store",
        )  # fmt: skip


def _bounds(facts: SlideFacts) -> tuple[float, float, float, float]:
    left, top, width, height = facts.bounds
    if min(width, height, facts.size_l0) <= 0:
        raise DamagedStore(
            f"slide {facts.slide}: its size, or that of its patches", found=f"{width}×{height}, {facts.size_l0}"
        )  # fmt: skip
    return left, top, width, height


def _chosen(only: Sequence[str], names: Collection[str], place: Path) -> list[str]:
    missing = [name for name in only if name not in names]
    if missing:
        some = ", ".join(list(names)[:3])
        raise UsageError(
            f"{place} has no predictions of slide {missing[0]!r}", expected=f"such as {some}"
        )
    return list(only) or list(names)


def _read_attention(path: Path) -> dict[str, tuple[*Arrays, float]]:
    """Corners, attention and side of patches by slide; those whose place is not known are left out."""
    rows: dict[str, list[tuple[int, int, float, float]]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["x_l0"]:
                    value = float(row["attention"]), float(row["size_l0"] or 0)
                    rows.setdefault(row["slide"], []).append(
                        (int(row["x_l0"]), int(row["y_l0"]), *value)
                    )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedStore(f"{path} is damaged", found=repr(error)[:200]) from error
    found = {}
    for slide, values in rows.items():
        table = np.array(values)
        x, y = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
        found[slide] = (x, y, table[:, 2].astype(np.float32), float(table[0, 3]))
    return found
