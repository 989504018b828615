"""Read and write `predictions.csv`: one row per patch, with slide id and corner; or per slide or patient, for models of bags."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.dataset.options import SIDES, Side
from histopipe.errors import DamagedStore, UsageError
from histopipe.evaluation.scores import Level, PatchScores
from histopipe.system.files import appearing

_COLUMNS: Mapping[Level, tuple[str, ...]] = {
    "patch": ("slide", "patient", "x_l0", "y_l0", "label", "predicted"),
    "slide": ("slide", "patient", "label", "predicted"),
    "patient": ("patient", "label", "predicted"),
}


def write_predictions(
    path: Path, parts: Iterable[tuple[Mapping[str, object], PatchScores]], *, hidden: bool = False
) -> None:
    """Write predictions by one rename; `hidden` as for `appearing`.

    Each part, of at least one, has columns with the same value in all of its rows, such as the split.
    """
    with (
        appearing(path, hidden=hidden) as part,
        part.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        for number, (common, scores) in enumerate(parts):
            if number == 0:
                names = (f"p_{name}" for name in scores.classes)
                writer.writerow([*common, *_COLUMNS[scores.level], *names])
            writer.writerows(_rows(common, scores))


def _rows(common: Mapping[str, object], scores: PatchScores) -> Iterable[list[object]]:
    likeliest = scores.probability.argmax(axis=1)
    for i in range(len(scores.label)):
        columns = {
            "slide": scores.slides[scores.slide[i]],
            "patient": scores.patients[scores.patient[i]],
            "x_l0": scores.x_l0[i],
            "y_l0": scores.y_l0[i],
            "label": scores.classes[scores.label[i]] if scores.label[i] >= 0 else "",
            "predicted": scores.classes[likeliest[i]],
        }
        yield [
            *common.values(), *(columns[name] for name in _COLUMNS[scores.level]),
            # Nine digits: enough to read back the same float32.
            *(f"{p:.9g}" for p in scores.probability[i].tolist()),
        ]  # fmt: skip


def read_predictions(path: Path) -> dict[Side, PatchScores]:
    """Read the predictions of a run by split.

    Raises:
        UsageError: there is no such file.
        DamagedStore: the file is damaged.
    """
    found = _read(path, by_split=True)
    return {side: found[side] for side in SIDES if side in found}


def read_slide_predictions(path: Path) -> PatchScores:
    """Read predictions without further columns, of one slide or several. Raises as `read_predictions`."""
    return _read(path, by_split=False)[""]


def _read(path: Path, *, by_split: bool) -> dict[str, PatchScores]:
    """Return predictions by the value of their first column, the split; or by "" if they have no such column."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            level, classes = _level_and_classes(next(reader), ("split",) if by_split else ())
            found: dict[str, _Rows] = {} if by_split else {"": _Rows(level, classes)}
            for row in reader:
                side, values = (row[0], row[1:]) if by_split else ("", row)
                if side not in found:
                    found[side] = _Rows(level, classes)
                found[side].add(values)
            return {side: rows.scores() for side, rows in found.items()}
    except FileNotFoundError as error:
        raise UsageError(
            f"{path} does not exist", todo="name the folder of a finished run"
        ) from error
    except (OSError, ValueError, KeyError, IndexError, StopIteration, OverflowError) as error:
        raise DamagedStore(f"{path} is damaged", found=repr(error)[:200]) from error


def _level_and_classes(
    header: Sequence[str], before: tuple[str, ...]
) -> tuple[Level, tuple[str, ...]]:
    for level, columns in _COLUMNS.items():
        known = (*before, *columns)
        if tuple(header[: len(known)]) == known:
            return level, tuple(name.removeprefix("p_") for name in header[len(known) :])
    raise ValueError(f"columns {', '.join(header)}")


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
