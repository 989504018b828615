"""Compare finished runs: differing settings, test metrics, and confidence intervals of differences."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.errors import UsageError
from histopipe.evaluation.breakdown import Breakdown, breakdown_lines
from histopipe.evaluation.evaluate import Evaluation, evaluation_lines, with_ends
from histopipe.runs import folder as run_folder
from histopipe.runs.run import Run
from histopipe.runs.task_config import CONFIGS, make_config, read_config
from histopipe.splits.splits import DROPPED, Splits, load_splits
from histopipe.studies.fold_results import evaluate_folds, group_by_seed, read_parts
from histopipe.studies.study_settings import CompareOptions, FoldSettings
from histopipe.system.folders import CONFIG, FOLD_SPLITS
from histopipe.system.grouping import grouped_values
from histopipe.system.output import aligned, counted
from histopipe.system.settings import (
    declared_settings,
    make_settings,
    read_settings,
    select_settings,
    takes,
)
from histopipe.system.table_cells import nfc
from histopipe.tasks.choices import LEVELS, Aggregation, EvaluationLevel, TaskName, name_of
from histopipe.tasks.intervals import Difference
from histopipe.tasks.predictions import (
    EvaluationSettings,
    ModelPredictions,
    Predictions,
    differences_of,
    fold_of_patients,
    joined_predictions,
    scores_of,
    with_common_patients,
)
from histopipe.tasks.registry import TASKS
from histopipe.tasks.statistics import bootstrap_draws


def tested_items(
    parts: Sequence[ModelPredictions],
    level: EvaluationLevel,
    how: Aggregation,
    evaluation_settings: EvaluationSettings,
    *,
    by_patches: bool,
) -> tuple[list[tuple[Any, ...]], Predictions]:
    """Return the test items of a level, sorted by keys that identify them across runs.

    With `by_patches`, slides and patients are equal if their patches are equal, otherwise if their names are equal.
    """
    keys, each = [], []
    for part, thresholds in parts:
        part_keys = _keys(part, level, by_patches=by_patches)
        each.append(scores_of(part, level, how, evaluation_settings, thresholds))
        items = range(len(part)) if level == "patch" else each[-1].owner(level)[0].tolist()
        keys += [part_keys[item] for item in items]
    scores = joined_predictions(each, as_folds=len(each) > 1)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return [keys[i] for i in order], scores.rows(np.array(order, np.intp))


def _keys(
    scores: Predictions, level: EvaluationLevel, *, by_patches: bool
) -> list[tuple[Any, ...]]:
    """Return a key for each patch, slide or patient."""
    columns = (scores.slide.tolist(), scores.x_l0.tolist(), scores.y_l0.tolist())
    patches = [(scores.slides[slide], x, y) for slide, x, y in zip(*columns, strict=True)]
    if level == "patch":
        return patches
    owner, names = scores.owner(level)
    if not by_patches or scores.level != "patch":
        return [(name,) for name in names]
    members = grouped_values(zip(owner.tolist(), patches, strict=True))
    return [
        (name, hashlib.sha256(repr(sorted(members.get(number, ()))).encode()).hexdigest())
        for number, name in enumerate(names)
    ]


_LOCAL = ("fold_timeout", "retries", "parallel_folds")
"""Settings that do not affect the results."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run or a cross-validation with finished folds.

    Attributes:
        folder: folder of the run.
        settings: its settings as in config.toml.
        test: evaluation of the test patches; of a cross-validation, within folds.
        parts: their predictions, and the thresholds, of each model, by seed.
        splits: the split of each model, and of folds that are not finished.
        notes: remarks for the reader.
        breakdown: of `test`.
    """

    folder: Path
    settings: Mapping[str, Any]
    test: Evaluation
    parts: Sequence[Sequence[ModelPredictions]] = field(repr=False)
    splits: Sequence[Splits] = field(repr=False)
    notes: tuple[str, ...] = ()
    breakdown: Breakdown = field(default_factory=Breakdown)

    @property
    def evaluation_settings(self) -> EvaluationSettings:
        """Settings of the evaluation."""
        return make_config(select_settings(self.settings, *CONFIGS)).evaluation_settings


@dataclass(frozen=True, slots=True, repr=False)
class CompareResult:
    """Result of `compare`.

    Attributes:
        runs: the runs in the given order.
        settings: settings that differ, by name; one value per run, None if a run does not have the setting.
        differences: for every run except the first: differences from the first run, by level and metric.
        notes: for every run except the first: reasons why levels are not compared.
        splits: for every run except the first: how its split differs from that of the first run; None if it does not.
    """

    runs: tuple[ComparedRun, ...]
    settings: Mapping[str, tuple[Any, ...]]
    differences: tuple[Mapping[str, Mapping[str, Difference]], ...]
    notes: tuple[tuple[str, ...], ...]
    splits: tuple[str | None, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        runs = [
            {
                "folder": str(run.folder),
                "test": run.test.to_json(),
                "notes": list(run.notes),
                "breakdown": run.breakdown.to_json(),
            }
            for run in self.runs
        ]
        differences = [
            {
                "folder": str(run.folder),
                "less": str(self.runs[0].folder),
                "splits": splits,
                "notes": list(notes),
                **{
                    level: {
                        name: {"difference": difference.value, "interval": difference.interval}
                        for name, difference in metrics.items()
                    }
                    for level, metrics in levels.items()
                },
            }
            for run, levels, notes, splits in self._compared()
        ]
        return {
            "runs": runs,
            "settings": {name: list(values) for name, values in self.settings.items()},
            "differences": differences,
        }

    @property
    def scope(self) -> str:
        """For what the intervals of the differences hold, as text."""
        seeds = any(len(run.parts) > 1 for run in self.runs)
        return (
            f"intervals are for other patients{' and other seeds' if seeds else ', with these models'}, each for one metric at one "
            "level: of 20 differences without a cause, one is expected to have an interval without 0"
        )

    def _compared(self) -> Iterator[tuple[Any, ...]]:
        """Yield every run except the first, with its differences, notes and splits."""
        return zip(self.runs[1:], self.differences, self.notes, self.splits, strict=True)

    def __repr__(self) -> str:
        names = [str(run.folder) for run in self.runs]
        rows = [
            ["setting", *names],
            *([name, *map(_text, values)] for name, values in self.settings.items()),
        ]
        lines = aligned(rows) if self.settings else ["no settings differ"]
        for run in self.runs:
            lines += ["", *evaluation_lines(str(run.folder), run.test)]
            subgroups = run.settings.get("subgroup", ())
            breakdown = breakdown_lines(run.breakdown, run.test.finest.task, subgroups)
            lines += [f"  {line}" for line in (*run.notes, *breakdown)]
        for run, levels, notes, splits in self._compared():
            lines += ["", f"{run.folder} minus {names[0]}:"]
            lines += [] if splits is None else [f"  {splits}"]
            if levels:
                lines += aligned(_difference_rows(levels, run.test.finest.task))
            lines += [f"  not compared: {note}" for note in notes]
        return "\n".join([*lines, *[self.scope] * any(self.differences)])


def _difference_rows(
    levels: Mapping[str, Mapping[str, Difference]], task_name: TaskName
) -> list[list[str]]:
    """Return a row per level, without patients if each patient has one slide."""
    task = TASKS[task_name]
    titles = {**task.main, **task.plain}
    rows = [["", *(titles[name] for name in task.compared)]]
    for name, metrics in levels.items():
        level, _, how = name.partition("_")
        if level != "patient" or metrics != levels.get(f"slide_{how}"):
            cells = [
                with_ends(metrics[metric].value, metrics[metric].interval, signed=True)
                for metric in task.compared
            ]
            rows.append([f"  {level} {how}".rstrip(), *cells])
    return rows


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "-" if value is None else str(value)


@takes(declared_settings(CompareOptions))
def compare(runs: Sequence[str | Path], *, seed: int = 1, **settings: Any) -> CompareResult:
    """Compare finished runs or cross-validations with the first one.

    If two runs were tested on the same patches, slides or patients, the difference of their metrics has a
    confidence interval. The same patients are resampled for both runs, so that variation between patients cancels out.

    Args:
        runs: folders of two or more runs.
        seed: seed of the resamples.
        settings: options by name, as in docs/reference/settings.md.

    Returns:
        Settings that differ, test metrics, and their differences.

    Raises:
        UsageError: there are fewer than two runs, or a run is not finished or has no test patches.
        DamagedStore: the files of a run cannot be read.

    Example:
        `compare(["runs/a", "runs/b"]).differences[0]["slide_mean"]["auc"].interval`
    """
    resamples = make_settings(CompareOptions, settings).resamples
    if len(runs) < 2 or len(set(map(str, runs))) < len(runs):
        raise UsageError(
            "RUNS", found=", ".join(map(str, runs)), expected="two or more different runs"
        )
    loaded = [_load(Path(folder)) for folder in runs]
    names = dict.fromkeys(name for run in loaded for name in run.settings if name not in _LOCAL)
    columns = {name: tuple(run.settings.get(name) for run in loaded) for name in names}
    compared = [_compare_two(loaded[0], other, resamples, seed) for other in loaded[1:]]
    return CompareResult(
        tuple(loaded),
        {name: values for name, values in columns.items() if len(set(map(repr, values))) > 1},
        tuple(differences for differences, _ in compared),
        tuple(notes for _, notes in compared),
        tuple(_different_splits(loaded[0], other) for other in loaded[1:]),
    )


def _load(folder: Path) -> ComparedRun:
    if run_folder.is_cross_validation(folder):
        return _load_folds(folder)
    run = Run(folder)
    result = run.result
    if "test" not in result.metrics:
        raise UsageError(f"{folder} has no test patches", todo="compare runs that have a test set")
    return ComparedRun(
        folder,
        read_config(folder / CONFIG),
        result.metrics["test"],
        [read_parts([run])],
        [run.splits],
        breakdown=result.breakdown,
    )


def _load_folds(folder: Path) -> ComparedRun:
    settings = read_settings(folder / CONFIG, *CONFIGS, FoldSettings)
    runs = [Run(fold) for fold in run_folder.runs_of(folder)]
    done = [run for run in runs if run.is_finished]
    if not done:
        raise UsageError(f"{folder} has no finished fold")
    missing = len(runs) - len(done)
    notes = (f"{missing} of {len(runs)} folds are not finished",) if missing else ()
    config = make_config(select_settings(settings, *CONFIGS))
    parts, evaluation, breakdown, _ = evaluate_folds(config, done)
    by_seed = group_by_seed(done, parts)
    splits = [load_splits(folder / FOLD_SPLITS / f"{run.folder.name}.json") for run in runs]
    return ComparedRun(folder, settings, evaluation, [*by_seed.values()], splits, notes, breakdown)


def _different_splits(first: ComparedRun, other: ComparedRun) -> str | None:
    """Return how the subsets of slides differ between two runs, or in any of their folds; None if they do not."""
    subsets: list[dict[str, list[Any]]] = [defaultdict(list), defaultdict(list)]
    for by_name, run in zip(subsets, (first, other), strict=True):
        # Models of several seeds may have one split.
        different = {
            tuple((slide.id, slide.subsets.tobytes()) for slide in splits.slides): splits
            for splits in run.splits
        }
        for slide in (slide for splits in different.values() for slide in splits.slides):
            used = np.unique(slide.subsets[slide.subsets != DROPPED]).tolist()
            by_name[nfc(slide.id)].append(used if len(used) < 2 else slide.subsets.tolist())
    if subsets[0] == subsets[1]:
        return None
    common = subsets[0].keys() & subsets[1].keys()
    moved = sum(subsets[0][name] != subsets[1][name] for name in common)
    origins = [
        f"column {splits.column}" if splits.column else splits.algorithm
        for splits in (first.splits[0], other.splits[0])
    ]
    return (
        f"different splits ({' and '.join(origins)}): {moved} of {counted(len(common), 'common slide')} in other subsets, "
        f"{counted(len(subsets[0].keys() ^ subsets[1].keys()), 'slide')} in one split only"
    )


def _compare_two(
    first: ComparedRun, other: ComparedRun, resamples: int, seed: int
) -> tuple[dict[str, dict[str, Difference]], tuple[str, ...]]:
    """Return differences by level and metric, and reasons why other levels are not compared."""
    difference = _different_targets(first, other)
    if difference is not None:
        return {}, (difference,)
    of_seeds = [*first.parts, *other.parts]
    both = [part for of_seed in of_seeds for part in of_seed]
    parts = with_common_patients([scores for scores, _ in both])
    paired = iter((scores, chosen) for scores, (_, chosen) in zip(parts, both, strict=True))
    seeds = [list(islice(paired, len(of_seed))) for of_seed in of_seeds]
    strata = [fold_of_patients([scores for scores, _ in of_seed]) for of_seed in seeds]
    same_folds = len({None if each is None else each.tobytes() for each in strata}) == 1
    draws = bootstrap_draws(
        len(parts[0].patients), resamples, seed, strata[0] if same_folds else None
    )
    same_stores = sorted(first.splits[0].uuids) == sorted(other.splits[0].uuids)
    differences: dict[str, dict[str, Difference]] = {}
    notes: dict[EvaluationLevel, str] = {}
    units, levels_of = {part.level for part in parts}, parts[0].task.levels
    for level, how in [at for at in LEVELS if all(at in levels_of(unit) for unit in units)]:
        items = [
            tested_items(of_seed, level, how, run.evaluation_settings, by_patches=same_stores)
            for run, of_seed in zip(
                [first] * len(first.parts) + [other] * len(other.parts), seeds, strict=True
            )
        ]
        keys, scores = items[0]
        other_keys = next((others_keys for others_keys, _ in items if others_keys != keys), keys)
        distinct = set(keys)
        if level == "patch" and not same_stores:
            notes[level] = "patches of different stores"
        # Items share a key if, for example, parts of a slide are in different folds.
        elif keys != other_keys or len(distinct) < len(keys):
            common = len(distinct.intersection(other_keys))
            notes[level] = (
                f"{level}: tested on different items ({len(keys)} and {len(other_keys)}, {common} in common)"
            )
        elif any(
            not np.array_equal(scores.target, part.target, equal_nan=True) for _, part in items
        ):
            notes[level] = f"{level}: different labels"
        elif keys:
            each, count = [part for _, part in items], len(first.parts)
            differences[name_of(level, how)] = differences_of(each[:count], each[count:], draws)
    return differences, tuple(notes.values())


def _different_targets(first: ComparedRun, other: ComparedRun) -> str | None:
    """Return what differs in the predictions of two runs, so that they cannot be compared; None if nothing does."""
    a, b = (
        loaded.parts[0][0][0].task.with_settings(loaded.evaluation_settings)
        for loaded in (first, other)
    )
    if (a.name, a.columns) != (b.name, b.columns):
        return "different targets"
    if a.classes != b.classes:
        return "different classes"
    return None if a.positive == b.positive else "different positive classes"
