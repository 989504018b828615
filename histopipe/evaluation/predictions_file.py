"""`predictions.csv`: one row a patch, by slide id and level-0 corner; or one a slide or patient, if bags were predicted."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.dataset.options import SIDES, Side
from histopipe.errors import DamagedStore, UsageError
from histopipe.evaluation.scores import Level, PatchScores
from histopipe.system.files import appearing

_FACTS: Mapping[Level, tuple[str, ...]] = {
    "patch": ("slide", "patient", "x_l0", "y_l0", "label", "predicted"),
    "slide": ("slide", "patient", "label", "predicted"),
    "patient": ("patient", "label", "predicted"),
}


def write_predictions(
    path: Path,
    parts: Iterable[tuple[Mapping[str, object], PatchScores]],
    *,
    hidden: bool = False,
) -> None:
    """Write predictions by one rename.

    Args:
        path: where to.
        parts: each with columns that are the same in all its rows, such as the side; at least one.
        hidden: see `appearing`.
    """
    with (
        appearing(path, hidden=hidden) as part,
        part.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        header: list[str] = []
        for facts, scores in parts:
            if not header:
                header = [*facts, *_FACTS[scores.level], *(f"p_{name}" for name in scores.classes)]
                writer.writerow(header)
            writer.writerows(_rows(facts, scores))


def _rows(facts: Mapping[str, object], scores: PatchScores) -> Iterable[list[object]]:
    likeliest = scores.probability.argmax(axis=1)
    for i in range(len(scores.label)):
        told = {
            "slide": scores.slides[scores.slide[i]],
            "patient": scores.patients[scores.patient[i]],
            "x_l0": scores.x_l0[i],
            "y_l0": scores.y_l0[i],
            "label": scores.classes[scores.label[i]] if scores.label[i] >= 0 else "",
            "predicted": scores.classes[likeliest[i]],
        }
        yield [
            *facts.values(), *(told[name] for name in _FACTS[scores.level]),
            # Nine digits: a float32 comes back as it was.
            *(f"{p:.9g}" for p in scores.probability[i].tolist()),
        ]  # fmt: skip


def read_predictions(path: Path) -> dict[Side, PatchScores]:
    """What `write_predictions` wrote for a run, by side.

    Raises:
        UsageError: there is no such file.
        DamagedStore: it is not one of predictions.
    """
    with _opened(path) as reader:
        level, classes = _level_and_classes(next(reader), ("split",))
        columns: dict[str, _Columns] = {}
        for row in reader:
            side = row[0]
            if side not in columns:
                columns[side] = _Columns(level, classes)
            columns[side].add(row[1:])
        return {side: columns[side].scores() for side in SIDES if side in columns}


def read_slide_predictions(path: Path) -> PatchScores:
    """What `write_predictions` wrote without further columns: of one slide, or of several.

    Raises:
        UsageError: there is no such file.
        DamagedStore: it is not one of predictions.
    """
    with _opened(path) as reader:
        level, classes = _level_and_classes(next(reader), ())
        columns = _Columns(level, classes)
        for row in reader:
            columns.add(row)
        return columns.scores()


@contextmanager
def _opened(path: Path) -> Iterator[Iterator[list[str]]]:
    """The rows of a CSV; whatever is wrong with it is told with its name."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            yield csv.reader(file)
    except FileNotFoundError as error:
        raise UsageError(
            f"{path} does not exist", todo="name the folder of a finished run"
        ) from error
    except (OSError, ValueError, KeyError, IndexError, StopIteration, OverflowError) as error:
        raise DamagedStore(f"{path} is damaged", found=repr(error)[:200]) from error


def _level_and_classes(
    header: Sequence[str], before: tuple[str, ...]
) -> tuple[Level, tuple[str, ...]]:
    for level, facts in _FACTS.items():
        known = (*before, *facts)
        if tuple(header[: len(known)]) == known:
            return level, tuple(name.removeprefix("p_") for name in header[len(known) :])
    raise ValueError(f"columns {', '.join(header)}")


class _Columns:
    """Rows on their way into arrays."""

    def __init__(self, level: Level, classes: Sequence[str]) -> None:
        self._level, self._classes = level, tuple(classes)
        self._facts = _FACTS[level]
        self._numbers = {name: number for number, name in enumerate(classes)}
        self._slides: dict[str, int] = {}
        self._patients: dict[str, int] = {}
        self._codes, self._places = array("i"), array("q")
        self._probabilities = array("f")

    def add(self, row: Sequence[str]) -> None:
        told = dict(zip(self._facts, row, strict=False))
        probabilities = row[len(self._facts) :]
        if len(probabilities) != len(self._classes):
            raise ValueError(f"{len(probabilities)} probabilities for {len(self._classes)} classes")
        self._codes.append(
            self._slides.setdefault(told.get("slide", told["patient"]), len(self._slides))
        )
        self._codes.append(self._patients.setdefault(told["patient"], len(self._patients)))
        self._codes.append(self._numbers[told["label"]] if told["label"] else -1)
        self._places.extend((int(told.get("x_l0", 0)), int(told.get("y_l0", 0))))
        self._probabilities.extend(map(float, probabilities))

    def scores(self) -> PatchScores:
        codes: Any = np.frombuffer(self._codes, np.int32).reshape(-1, 3)
        places: Any = np.frombuffer(self._places, np.int64).reshape(-1, 2)
        return PatchScores(
            self._classes, tuple(self._slides), tuple(self._patients), slide=codes[:, 0],
            patient=codes[:, 1], x_l0=places[:, 0], y_l0=places[:, 1], label=codes[:, 2],
            probability=np.frombuffer(self._probabilities, np.float32).reshape(
                -1, len(self._classes)
            ),
            level=self._level,
        )  # fmt: skip
