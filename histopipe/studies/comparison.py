"""Finished runs side by side: what differs in their settings, and how sure it is that one is better."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, UsageError
from histopipe.evaluation.evaluate import (
    LEVELS,
    Evaluation,
    JudgeSettings,
    Part,
    evaluate,
    joined,
    name_of,
    positive_class,
)
from histopipe.evaluation.metrics import FIGURES, bootstrap_draws, decide, interval_of
from histopipe.evaluation.scores import Aggregation, Level, Scores, with_common_patients
from histopipe.evaluation.statistics import Statistics
from histopipe.studies.cross_validation import SPLITS as FOLD_SPLITS
from histopipe.studies.cross_validation import FoldSettings, is_cross_validation
from histopipe.studies.fold_summary import read_parts
from histopipe.training import run_folder
from histopipe.training.config import TrainConfig
from histopipe.training.result import is_finished, read_result
from histopipe.training.settings_file import read_config

_PART_BITS = 32


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of one run less that of another, on the same patients.

    Attributes:
        value: None where one of them is not defined.
        interval: 95 %, from resampling the patients of both at once.
    """

    value: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """A run, or a cross-validation, as it was judged on test patches.

    Attributes:
        folder: its folder.
        settings: as its config.toml has them.
        test: how good it is.
        notes: what to know about it.
    """

    folder: Path
    settings: Mapping[str, Any]
    test: Evaluation
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side.

    Attributes:
        runs: in the order given.
        settings: those that differ, by name, a value a run; None where a run has none.
        differences: of every run but the first, by level and figure: its figures less the first one's.
        notes: of every run but the first, why a level is not compared.
    """

    runs: tuple[JudgedRun, ...]
    settings: Mapping[str, tuple[Any, ...]]
    differences: tuple[Mapping[str, Mapping[str, Difference]], ...]
    notes: tuple[tuple[str, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        return {
            "runs": [
                {"folder": str(run.folder), "test": run.test.to_json(), "notes": list(run.notes)}
                for run in self.runs
            ],
            "settings": {name: list(values) for name, values in self.settings.items()},
            "differences": [
                {
                    "folder": str(run.folder),
                    "less": str(self.runs[0].folder),
                    "notes": list(notes),
                    **{
                        level: {
                            name: {"difference": it.value, "interval": it.interval}
                            for name, it in figures.items()
                        }
                        for level, figures in levels.items()
                    },
                }
                for run, levels, notes in zip(
                    self.runs[1:], self.differences, self.notes, strict=True
                )
            ],
        }


@dataclass(frozen=True, slots=True)
class _Loaded:
    run: JudgedRun
    parts: list[Part]
    judging: JudgeSettings
    uuids: tuple[str, ...]


def compare(runs: Sequence[str | Path], *, resamples: int = 1000, seed: int = 1) -> Comparison:
    """Hold finished runs, or cross-validations, against the first of them.

    Where two were tested on the same patches, slides or patients, the difference of their figures comes with an interval: both are
    resampled by the same patients, which leaves out what makes all runs better or worse on some.

    Args:
        runs: two folders or more.
        resamples: of the patients; 0 for no intervals.
        seed: of these.

    Raises:
        UsageError: fewer than two, or one that is not finished, or has no test patches.
        DamagedStore: a run's files cannot be read.
    """
    if len(runs) < 2 or len(set(map(str, runs))) < len(runs):
        raise UsageError(
            "RUNS", found=", ".join(map(str, runs)), expected="two different ones or more"
        )
    loaded = [_load(Path(folder)) for folder in runs]
    names = dict.fromkeys(name for it in loaded for name in it.run.settings if name not in _LOCAL)
    columns = {name: tuple(it.run.settings.get(name) for it in loaded) for name in names}
    compared = [_against(loaded[0], other, resamples, seed) for other in loaded[1:]]
    return Comparison(
        tuple(it.run for it in loaded),
        {name: values for name, values in columns.items() if len(set(map(repr, values))) > 1},
        tuple(differences for differences, _ in compared), tuple(notes for _, notes in compared),
    )  # fmt: skip


def _load(folder: Path) -> _Loaded:
    if is_cross_validation(folder):
        return _load_folds(folder)
    result = read_result(folder)
    if "test" not in result.metrics:
        raise UsageError(f"{folder} has no test patches", todo="compare runs that held some out")
    settings = read_config(folder / run_folder.CONFIG)
    run = JudgedRun(folder, settings, result.metrics["test"])
    uuids = _uuids(folder / run_folder.SPLITS)
    return _Loaded(run, read_parts([result]), TrainConfig(**_tuples(settings)).judging, uuids)


def _load_folds(folder: Path) -> _Loaded:
    settings = read_config(folder / run_folder.CONFIG, TrainConfig, FoldSettings)
    places = [folder / f"fold-{number}" for number in range(1, settings["folds"] + 1)]
    done = [read_result(place) for place in places if is_finished(place)]
    if not done:
        raise UsageError(f"{folder} has no finished fold")
    own = {name: value for name, value in settings.items() if name in _TRAIN_NAMES}
    judging = TrainConfig(**_tuples(own)).judging
    parts = read_parts(done)
    missing = len(places) - len(done)
    notes = (f"{missing} of {len(places)} folds are not finished",) if missing else ()
    run = JudgedRun(folder, settings, evaluate(parts, judging), notes)
    return _Loaded(run, parts, judging, _uuids(folder / FOLD_SPLITS / "fold-1.json"))


_LOCAL = frozenset(["fold_timeout", "retries", "parallel_folds"])
"""Settings that no result depends on."""
_TRAIN_NAMES = frozenset(TrainConfig.__dataclass_fields__)


def _tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}


def _uuids(path: Path) -> tuple[str, ...]:
    try:
        return tuple(json.loads(path.read_text(encoding="utf-8"))["stores"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedStore(f"{path} is damaged", found=repr(error)[:200]) from error


def _against(
    first: _Loaded, other: _Loaded, resamples: int, seed: int
) -> tuple[dict[str, dict[str, Difference]], tuple[str, ...]]:
    """Differences by level and figure, and why other levels have none."""
    classes = first.parts[0][0].classes
    if other.parts[0][0].classes != classes:
        return {}, ("other classes",)
    positive = positive_class(classes, first.judging.positive)
    if positive_class(classes, other.judging.positive) != positive:
        return {}, ("another positive class",)
    parts = with_common_patients([scores for scores, _ in [*first.parts, *other.parts]])
    thresholds = [chosen for _, chosen in [*first.parts, *other.parts]]
    paired = list(zip(parts, thresholds, strict=True))
    here, there = paired[: len(first.parts)], paired[len(first.parts) :]
    draws = bootstrap_draws(len(parts[0].patients), resamples, seed)
    found: dict[str, dict[str, Difference]] = {}
    notes: dict[Level, str] = {}
    for level, how in LEVELS:
        ours = _items(here, level, how, first.judging, positive)
        theirs = _items(there, level, how, other.judging, positive)
        if level == "patch" and first.uuids != other.uuids:
            notes[level] = "patches of other stores"
        elif not ours.same_as(theirs):
            common = len(set(ours.keys) & set(theirs.keys))
            notes[level] = (
                f"{level}: tested on others ({len(ours.keys)} and {len(theirs.keys)}, {common} of them the same)"
            )
        elif ours.keys:
            found[name_of(level, how)] = _differences(ours, theirs, positive, draws)
    return found, tuple(notes.values())


@dataclass(frozen=True, slots=True)
class _Items:
    """What a run was tested on at one level, in the order of its keys."""

    keys: list[tuple[Any, ...]]
    scores: Scores
    decided: NDArray[np.intp]

    def same_as(self, other: _Items) -> bool:
        return self.keys == other.keys and np.array_equal(self.scores.label, other.scores.label)


def _items(
    parts: Sequence[Part],
    level: Level,
    how: Aggregation,
    judging: JudgeSettings,
    positive: int | None,
) -> _Items:
    scores, threshold, _ = joined(parts, level, how, judging)
    decided = decide(scores, positive, threshold)
    keys = [
        _key(parts[item >> _PART_BITS], item >> _PART_BITS, item & ((1 << _PART_BITS) - 1), level)
        for item in scores.item.tolist()
    ]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    taken = replace(
        scores, label=scores.label[order], probability=scores.probability[order],
        patient=scores.patient[order], item=scores.item[order],
    )  # fmt: skip
    return _Items([keys[i] for i in order], taken, decided[order])


def _key(part: Part, number: int, item: int, level: Level) -> tuple[Any, ...]:
    """What tells an item from all others, in any run. Parts of one slide in several folds are several items."""
    scores, _ = part
    if level == "patch":
        return scores.slides[scores.slide[item]], int(scores.x_l0[item]), int(scores.y_l0[item])
    return (scores.slides if level == "slide" else scores.patients)[item], number


def _differences(
    ours: _Items, theirs: _Items, positive: int | None, draws: NDArray[np.float64]
) -> dict[str, Difference]:
    first = Statistics(ours.scores, ours.decided, positive)
    # Whose an item is may be said otherwise there; it is resampled as here.
    scores = replace(theirs.scores, patient=ours.scores.patient)
    other = Statistics(scores, theirs.decided, positive)
    patients = len(np.unique(ours.scores.patient))
    whole = np.ones((1, first.patients))
    drawn = draws[:, : first.patients]
    values = _less(other, first, whole)
    resampled = _less(other, first, drawn) if len(draws) and patients > 1 else None
    return {
        name: Difference(
            float(values[name][0]) if np.isfinite(values[name][0]) else None,
            interval_of(resampled[name], patients)
            if resampled is not None and np.isfinite(values[name][0])
            else None,
        )
        for name in FIGURES
    }


def _less(
    a: Statistics, b: Statistics, weights: NDArray[np.float64]
) -> dict[str, NDArray[np.float64]]:
    ours, theirs = a.figures(weights), b.figures(weights)
    return {name: ours[name] - theirs[name] for name in FIGURES}
