"""Finished runs side by side: what differs in their settings, and how sure it is that one is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.errors import DamagedStore, UsageError
from histopipe.evaluation.evaluate import (
    LEVELS,
    Evaluation,
    JudgeSettings,
    Part,
    evaluate,
    levels_of,
    name_of,
    positive_class,
)
from histopipe.evaluation.metrics import bootstrap_draws
from histopipe.evaluation.scores import (
    Level,
    with_common_patients,
)
from histopipe.runs import folder as run_folder
from histopipe.runs.folder import is_cross_validation
from histopipe.runs.result import is_finished, read_result
from histopipe.runs.settings import declared_settings, read_settings
from histopipe.runs.task_config import CONFIGS, make_config, read_config
from histopipe.studies.cross_validation import SPLITS as FOLD_SPLITS
from histopipe.studies.fold_summary import read_parts
from histopipe.studies.pairing import Difference, differences_of, tested_items
from histopipe.studies.settings import FoldSettings
from histopipe.system.files import read_json


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
    return _Loaded(run, read_parts([result]), make_config(settings).judging, uuids)


def _load_folds(folder: Path) -> _Loaded:
    settings = read_settings(folder / run_folder.CONFIG, *CONFIGS, FoldSettings)
    places = [folder / f"fold-{number}" for number in range(1, settings["folds"] + 1)]
    done = [read_result(place) for place in places if is_finished(place)]
    if not done:
        raise UsageError(f"{folder} has no finished fold")
    own = {name: value for name, value in settings.items() if name in _TRAIN_NAMES}
    judging = make_config(own).judging
    parts = read_parts(done)
    missing = len(places) - len(done)
    notes = (f"{missing} of {len(places)} folds are not finished",) if missing else ()
    run = JudgedRun(folder, settings, evaluate(parts, judging), notes)
    return _Loaded(run, parts, judging, _uuids(folder / FOLD_SPLITS / "fold-1.json"))


_LOCAL = frozenset(["fold_timeout", "retries", "parallel_folds"])
"""Settings that no result depends on."""
_TRAIN_NAMES = frozenset(declared_settings(*CONFIGS))


def _tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}


def _uuids(path: Path) -> tuple[str, ...]:
    try:
        return tuple(read_json(path)["stores"])
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
    same_stores = sorted(first.uuids) == sorted(other.uuids)
    found: dict[str, dict[str, Difference]] = {}
    notes: dict[Level, str] = {}
    units = {here[0][0].level, there[0][0].level}
    common_levels = [it for it in LEVELS if all(it in levels_of(unit) for unit in units)]
    for level, how in common_levels:
        ours = tested_items(here, level, how, first.judging, positive, by_patches=same_stores)
        theirs = tested_items(there, level, how, other.judging, positive, by_patches=same_stores)
        if level == "patch" and not same_stores:
            notes[level] = "patches of other stores"
        elif ours.keys != theirs.keys or ours.repeats:
            common = len(set(ours.keys) & set(theirs.keys))
            notes[level] = (
                f"{level}: tested on others ({len(ours.keys)} and {len(theirs.keys)}, {common} of them the same)"
            )
        elif not np.array_equal(ours.scores.label, theirs.scores.label):
            notes[level] = f"{level}: labelled otherwise"
        elif ours.keys:
            found[name_of(level, how)] = differences_of(ours, theirs, positive, draws)
    return found, tuple(notes.values())
