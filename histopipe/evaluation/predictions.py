"""Predictions of patches, slides and patients: as arrays, aggregated, and as CSV files."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import SIDES, Side
from histopipe.errors import DamagedStore, UsageError
from histopipe.evaluation.levels import Aggregation, Level
from histopipe.evaluation.target_scores import TargetRows, TargetScores
from histopipe.system.files import appearing


@dataclass(frozen=True, slots=True)
class PatchScores:
    """Predictions of patches; of slides or patients if the model takes bags.

    Attributes:
        classes: class names, by number.
        slides, patients: slide ids and patients, by number.
        slide, patient: (N,) int32, slide and patient of each row.
        x_l0, y_l0: (N,) int64, top left corner, level-0 pixels; 0 if a row is not a patch.
        label: (N,) int32 class numbers, -1 for none.
        probability: (N, C) float32.
        level: level of the rows; in rows of patients, `slide` is the patient.
    """

    classes: tuple[str, ...]
    slides: tuple[str, ...]
    patients: tuple[str, ...]
    slide: NDArray[np.int32]
    patient: NDArray[np.int32]
    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    label: NDArray[np.int32]
    probability: NDArray[np.float32]
    level: Level = "patch"
    VALUES: ClassVar = ("label", "probability")


@dataclass(frozen=True, slots=True)
class Scores:
    """Predictions of patches, slides or patients for the evaluation.

    Attributes:
        label: (N,) int32 class numbers.
        probability: (N, C) float64.
        patient: (N,) int32; the unit of resampling.
        item: (N,) int64, number of the patch, slide or patient.
        left_out: number of slides or patients left out because their patches have several labels.
    """

    label: NDArray[np.int32]
    probability: NDArray[np.float64]
    patient: NDArray[np.int32]
    item: NDArray[np.int64]
    left_out: int = 0


AnyScores = TypeVar("AnyScores", PatchScores, TargetScores, PatchScores | TargetScores)


def of_classes(scores: PatchScores | TargetScores, where: object) -> PatchScores:
    """Return predictions of classes. `where` is for messages.

    Raises:
        UsageError: they are of another task.
    """
    if isinstance(scores, TargetScores):
        raise UsageError(
            f"{where}", found=f"predictions of {scores.task}", expected="predictions of classes"
        )
    return scores


def with_common_patients(parts: Sequence[AnyScores]) -> list[AnyScores]:
    """Return the same predictions, with common patient numbers."""
    names = tuple(sorted({name for part in parts for name in part.patients}))
    number = {name: i for i, name in enumerate(names)}
    renumbered = []
    for part in parts:
        new = np.array([number[name] for name in part.patients], np.int32)
        renumbered.append(replace(part, patients=names, patient=new[part.patient]))
    return renumbered


def joined_scores(parts: Sequence[AnyScores]) -> AnyScores:
    """Concatenate predictions, at least one, of the same classes or targets and level."""
    slides = sorted({name for part in parts for name in part.slides})
    number = {name: i for i, name in enumerate(slides)}
    renumbered: list[Any] = [
        replace(part, slide=np.array([number[name] for name in part.slides], np.int32)[part.slide])
        for part in with_common_patients(parts)
    ]
    together: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in renumbered])
        for name in ("slide", "patient", "x_l0", "y_l0", *renumbered[0].VALUES)
    }
    joined: AnyScores = replace(renumbered[0], slides=tuple(slides), **together)
    return joined


def scores_of(
    patches: PatchScores, level: Level, how: Aggregation, *, top_k: int, positive: int
) -> Scores:
    """Return the scores of patches, or aggregate them to slides or patients.

    "mean": mean probability. "top_k": for two classes, the mean of the `top_k` highest probabilities of the positive class; for
    more, the same for each class, scaled to a sum of 1. "majority": share of patches for which a class is the most probable.
    """
    if level == "patch":
        probability = patches.probability.astype(np.float64)
        items = np.arange(len(patches.label))
        return Scores(patches.label, probability, patches.patient, items)
    group = patches.slide if level == "slide" else patches.patient
    order = np.argsort(group, kind="stable")
    items, starts = np.unique(group[order], return_index=True)
    label = patches.label[order]
    lowest, highest = np.minimum.reduceat(label, starts), np.maximum.reduceat(label, starts)
    probability = patches.probability[order].astype(np.float64)
    match how:
        case "mean":
            aggregated = _group_means(probability, starts)
        case "majority":
            most_probable = probability.argmax(axis=1)[:, None] == np.arange(probability.shape[1])
            aggregated = _group_means(most_probable.astype(np.float64), starts)
        case "top_k":
            aggregated = _highest(probability, starts, top_k, positive)
    one = lowest == highest
    patient = patches.patient[order][starts]
    return Scores(
        lowest[one], aggregated[one], patient[one], items[one].astype(np.int64), int((~one).sum())
    )


def _group_means(values: NDArray[np.float64], starts: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return (G, C) means of the groups of (N, C) rows that begin at `starts`."""
    sizes = np.diff(starts, append=len(values))
    return np.asarray(np.add.reduceat(values, starts, axis=0) / sizes[:, None], np.float64)


def _highest(
    probability: NDArray[np.float64], starts: NDArray[np.intp], top_k: int, positive: int
) -> NDArray[np.float64]:
    """Return (G, C) means of the highest values of each group and class."""
    ends = np.append(starts[1:], len(probability))
    groups = (probability[start:end] for start, end in zip(starts, ends, strict=True))
    top = np.array([np.sort(group, axis=0)[-top_k:].mean(axis=0) for group in groups])
    if probability.shape[1] == 2:
        top[:, 1 - positive] = 1 - top[:, positive]
        return top
    return np.asarray(top / top.sum(axis=1, keepdims=True), np.float64)


_COLUMNS: Mapping[Level, tuple[str, ...]] = {
    "patch": ("slide", "patient", "x_l0", "y_l0", "label", "predicted"),
    "slide": ("slide", "patient", "label", "predicted"),
    "patient": ("patient", "label", "predicted"),
}


def write_predictions(
    path: Path,
    parts: Iterable[tuple[Mapping[str, object], PatchScores | TargetScores]],
) -> None:
    """Write predictions atomically.

    Each of the parts, at least one, has columns with one value for all rows, such as the split.
    """
    with (
        appearing(path) as part,
        part.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        for number, (common, scores) in enumerate(parts):
            if isinstance(scores, TargetScores):
                header, rows = scores.header, scores.rows()
            else:
                names = (f"p_{name}" for name in scores.classes)
                header, rows = (*_COLUMNS[scores.level], *names), _rows(scores)
            if number == 0:
                writer.writerow([*common, *header])
            writer.writerows([*common.values(), *row] for row in rows)


def _rows(scores: PatchScores) -> Iterator[list[object]]:
    most_probable = scores.probability.argmax(axis=1)
    for i in range(len(scores.label)):
        columns = {
            "slide": scores.slides[scores.slide[i]],
            "patient": scores.patients[scores.patient[i]],
            "x_l0": scores.x_l0[i],
            "y_l0": scores.y_l0[i],
            "label": scores.classes[scores.label[i]] if scores.label[i] >= 0 else "",
            "predicted": scores.classes[most_probable[i]],
        }
        yield [
            *(columns[name] for name in _COLUMNS[scores.level]),
            # Nine digits are enough to read back the same float32.
            *(f"{p:.9g}" for p in scores.probability[i].tolist()),
        ]  # fmt: skip


def read_predictions(path: Path) -> dict[Side, PatchScores | TargetScores]:
    """Read the predictions of a run by split.

    Raises:
        UsageError: the file does not exist.
        DamagedStore: the file is damaged.
    """
    found = _read(path, by_split=True)
    return {side: found[side] for side in SIDES if side in found}


def read_slide_predictions(path: Path) -> PatchScores | TargetScores:
    """Read predictions of one or several slides, without a column for the split. Raise as `read_predictions`."""
    return _read(path, by_split=False)[""]


def _read(path: Path, *, by_split: bool) -> dict[str, PatchScores | TargetScores]:
    """Return predictions by split, from the first column; by "" if there is no column for the split."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            header = next(reader)
            if by_split:
                first, *header = header
                header = header if first == "split" else [first, *header]
            found: dict[str, _Rows | TargetRows] = {} if by_split else {"": _rows_of(header)}
            for row in reader:
                side, values = (row[0], row[1:]) if by_split else ("", row)
                if side not in found:
                    found[side] = _rows_of(header)
                found[side].add(values)
            return {side: rows.scores() for side, rows in found.items()}
    except FileNotFoundError as error:
        raise UsageError(
            f"{path} does not exist", todo="pass the folder of a finished run"
        ) from error
    except (OSError, ValueError, KeyError, IndexError, StopIteration, OverflowError) as error:
        raise DamagedStore(f"{path} is damaged", found=repr(error)[:200]) from error


def _rows_of(header: Sequence[str]) -> _Rows | TargetRows:
    """Return an empty table for a header. Raise ValueError if it has unknown columns."""
    for level, columns in _COLUMNS.items():
        if tuple(header[: len(columns)]) == columns:
            names = header[len(columns) :]
            return _Rows(level, tuple(name.removeprefix("p_") for name in names))
    return TargetRows(header)


class _Rows:
    """Collect rows into arrays."""

    def __init__(self, level: Level, classes: Sequence[str]) -> None:
        self._level, self._classes = level, tuple(classes)
        self._names = _COLUMNS[level]
        self._numbers = {name: number for number, name in enumerate(classes)} | {"": -1}
        self._slides: dict[str, int] = {}
        self._patients: dict[str, int] = {}
        self._codes, self._places = array("i"), array("q")
        self._probabilities = array("f")

    def add(self, row: Sequence[str]) -> None:
        values = dict(zip(self._names, row, strict=False))
        probabilities = row[len(self._names) :]
        if len(probabilities) != len(self._classes):
            raise ValueError(f"{len(probabilities)} probabilities for {len(self._classes)} classes")
        patient, label = values["patient"], self._numbers[values["label"]]
        slide = self._slides.setdefault(values.get("slide", patient), len(self._slides))
        self._codes.extend((slide, self._patients.setdefault(patient, len(self._patients)), label))
        self._places.extend((int(values.get("x_l0", 0)), int(values.get("y_l0", 0))))
        self._probabilities.extend(map(float, probabilities))

    def scores(self) -> PatchScores:
        codes: Any = np.frombuffer(self._codes, np.int32).reshape(-1, 3)
        places: Any = np.frombuffer(self._places, np.int64).reshape(-1, 2)
        probability: Any = np.frombuffer(self._probabilities, np.float32)
        return PatchScores(
            self._classes, tuple(self._slides), tuple(self._patients), slide=codes[:, 0],
            patient=codes[:, 1], x_l0=places[:, 0], y_l0=places[:, 1], label=codes[:, 2],
            probability=probability.reshape(-1, len(self._classes)), level=self._level,
        )  # fmt: skip
