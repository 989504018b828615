"""Results of a cross-validation: its folds, their means over folds or seeds, and the evaluation of all test sets together."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from histopipe.errors import HistopipeError
from histopipe.evaluation.breakdown import (
    Breakdown,
    EvaluatedPredictions,
    break_down,
    breakdown_lines,
)
from histopipe.evaluation.evaluate import (
    Evaluation,
    evaluate,
    evaluate_subsets,
    fold_lines,
    number,
    with_ends,
)
from histopipe.evaluation.label_errors import (
    LABEL_ERRORS,
    LearningCurve,
    count_by_chance,
    find_label_errors,
    label_errors_text,
    learning_curve,
    write_label_errors,
)
from histopipe.evaluation.prediction_sets import PredictionSets, cover_parts
from histopipe.predictions.prediction_tables import PREDICTIONS, write_predictions
from histopipe.runs.config import TrainConfig
from histopipe.runs.run import METRICS, Run, TrainResult
from histopipe.splits.slide_table import Flow, SlideEntry, flow_of, flow_to_json, leaked_patients
from histopipe.studies.study_settings import ALL_PATIENTS, FoldSettings
from histopipe.system.files import write_atomically, write_json
from histopipe.system.folders import CONFIG, SHARE
from histopipe.system.grouping import grouped, grouped_values
from histopipe.system.output import aligned
from histopipe.system.settings import to_toml
from histopipe.system.table_files import write_dicts
from histopipe.tasks.choices import name_of
from histopipe.tasks.intervals import Interval
from histopipe.tasks.predictions import (
    EvaluationSettings,
    ModelPredictions,
    joined_scores,
    mean_intervals,
    mean_resamples,
    with_common_patients,
)
from histopipe.tasks.registry import TASKS
from histopipe.tasks.statistics import bootstrap_draws

_SHOWN = ("patch", "slide_mean", "patient_mean")


@dataclass(frozen=True, slots=True)
class Fold:
    """One fold, of one seed; or without folds, the run of one seed.

    Attributes:
        number: from 1; 0 without folds.
        folder: folder of its run.
        seed: seed of its split and training.
        result: result of a finished fold.
        attempts, seconds: attempts and duration of the last command that trained it.
        error: why it failed.
        share: percentage of the training patients.
    """

    number: int
    folder: Path
    seed: int
    result: TrainResult | None
    attempts: int = 0
    seconds: float = 0.0
    error: HistopipeError | None = None
    share: float = ALL_PATIENTS

    @property
    def run(self) -> Run:
        """Its run."""
        return Run(self.folder)

    @property
    def reason(self) -> str | None:
        """Reason why the fold is not finished."""
        return None if self.result else str(self.error or "not done")

    @property
    def metrics(self) -> dict[str, float]:
        """Defined metrics of the test set, by `LEVEL_METRIC`."""
        return _defined_metrics(self.result.metrics["test"]) if self.result else {}

    def summary(self) -> dict[str, Any]:
        """Return the status, duration and memory use of the fold."""
        done = self.result
        return {
            "fold": self.number,
            **({"seed": self.seed} if "seed" in self.folder.name else {}),
            **({"run": self.folder.name} if self.folder.name != f"fold-{self.number}" else {}),
            **({"share": self.share} if self.share < ALL_PATIENTS else {}),
            "status": "done" if done else ("failed" if self.error else "not done"),
            "reason": self.reason,
            "attempts": self.attempts or None,
            "epochs": done.epochs if done else None,
            "best_epoch": done.best_epoch if done else None,
            "seconds": done.seconds if done else self.seconds,
            "host_mb": done.host_bytes / 1e6 if done else None,
            "gpu_mb": done.gpu_bytes / 1e6 if done and done.gpu_bytes is not None else None,
        }


def plan_folds(settings: FoldSettings, folder: Path, seed: int) -> list[Fold]:
    """Return all folds before their training, those of the first seed `seed` first, and the shares of each fold together."""
    numbers = range(1, int(settings.folds) + 1) if settings.folds else [0]
    return [
        Fold(
            number,
            folder / _name_of_run(seed + repeat, number, share, several_seeds=settings.seeds > 1),
            seed + repeat,
            None,
            share=share,
        )
        for repeat in range(settings.seeds)
        for number in numbers
        for share in settings.shares
    ]


def _name_of_run(seed: int, number: int, share: float, *, several_seeds: bool) -> str:
    parts = [f"seed-{seed}"] * several_seeds + [f"fold-{number}"] * (number > 0)
    return "-".join(parts + [f"{SHARE}{share:g}"] * (share < ALL_PATIENTS))


@dataclass(frozen=True, slots=True, repr=False)
class CrossValidationResult:
    """Result of `cross_validate`.

    Attributes:
        folder: folder of the cross-validation.
        folds: the folds, each with its result or error.
        mean, deviation: mean and sample standard deviation over the folds, of each metric of the test sets, by
            `LEVEL_METRIC`. With several seeds, over the seeds.
        pooled: evaluation of all test sets together, each fold with its own thresholds; None if no fold is finished.
        within_folds: the same, but metrics that rank items, such as the AUC, are formed within each fold; with several
            seeds, means over the seeds, with intervals for other patients and other seeds.
        breakdown: metrics by subgroup within folds, and the check for shortcuts.
        flow: numbers of slides, patients and patches; those tested by a finished fold are "test".
        seeds: with several seeds, the metrics of each: those of all its test sets together.
        intervals: with several seeds, 95 % intervals of `mean`, for other patients and other seeds.
        curve: learning curve, if there is one.
        sets: what the prediction sets of each fold reached, calibrated by the others.
        label_errors: how many slides and patches have a label that models contradict, and how many by chance, as text.
    """

    folder: Path
    folds: tuple[Fold, ...]
    mean: Mapping[str, float]
    deviation: Mapping[str, float]
    pooled: Evaluation | None
    breakdown: Breakdown = field(default_factory=Breakdown)
    flow: Flow = field(default_factory=dict)
    seeds: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    label_errors: str = ""
    curve: LearningCurve | None = None
    sets: PredictionSets | None = None
    within_folds: Evaluation | None = None

    @property
    def failed(self) -> tuple[Fold, ...]:
        """Folds without result."""
        return tuple(fold for fold in self.folds if fold.result is None)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict, as in `summary.json`."""
        return {
            "folds": [
                fold.summary() | ({"metrics": fold.result.to_json()} if fold.result else {})
                for fold in self.folds
            ],
            "mean": dict(self.mean),
            "deviation": dict(self.deviation),
            "pooled": self.pooled.to_json() if self.pooled else None,
            "within_folds": self.within_folds.to_json() if self.within_folds else None,
            "breakdown": self.breakdown.to_json(),
            "flow": flow_to_json(self.flow),
            "label_errors": self.label_errors,
            **({"prediction_sets": asdict(self.sets)} if self.sets else {}),
            **({"learning_curve": self.curve.to_json()} if self.curve else {}),
            **(
                {"seeds": dict(self.seeds), "intervals": dict(self.intervals)} if self.seeds else {}
            ),
        }

    def __repr__(self) -> str:
        task = self.pooled.finest.task if self.pooled else "classification"
        (main, title), (second, second_title) = list(TASKS[task].main.items())[:2]
        levels = [name for name in _SHOWN if not self.mean or f"{name}_{main}" in self.mean]
        titles = [f"{name.replace('_', ' ')} {title}" for name in levels]
        rows = [["fold", "epochs", *titles, second_title, "s", "host MB", "GPU MB"]]
        columns = [*(f"{name}_{main}" for name in levels), f"{levels[0]}_{second}"]
        rows += [
            [
                str(summary.get("run", fold.number)),
                str(summary["epochs"] or summary["status"]),
                *(number(fold.metrics.get(name)) for name in columns),
                *(number(summary[name], 0) for name in ("seconds", "host_mb", "gpu_mb")),
            ]
            for fold in self.folds
            for summary in [fold.summary()]
        ]
        of_seeds = [(f"seed {seed}", metrics) for seed, metrics in self.seeds.items()]
        rows += [
            [title, "", *(number(values.get(name)) for name in columns), "", "", ""]
            for title, values in (*of_seeds, ("mean", self.mean), ("sd", self.deviation))
        ]
        lines, note = aligned(rows), "; its seed is not in the mean" * bool(self.seeds)
        lines += [
            f"mean {name.replace('_', ' ')} {with_ends(self.mean[name], self.intervals[name])}: interval for other patients and seeds"
            for name in columns
            if name in self.intervals
        ]
        lines += [
            f"{fold.folder.name.replace('-', ' ')}: {fold.reason}{note}" for fold in self.failed
        ]
        if self.pooled is not None and self.within_folds is not None:
            lines += fold_lines(self.within_folds, self.pooled)
        lines += breakdown_lines(self.breakdown, task)
        if self.curve:
            lines += ["learning curve", *(f"  {line}" for line in self.curve.lines)]
        lines += self.sets.lines if self.sets else []
        if self.label_errors:
            lines.append(f"labels to check: {self.label_errors}, in {LABEL_ERRORS}")
        return "\n".join(lines)


def summarize(config: TrainConfig, folder: Path, runs: Sequence[Fold]) -> CrossValidationResult:
    """Summarize the folds, and write `summary.csv`, `summary.json` and their pooled predictions."""
    folds = [run for run in runs if run.share == ALL_PATIENTS]
    done = [fold.run for fold in folds if fold.result is not None]
    partial = {fold.seed for fold in folds if fold.result is None}
    parts, within_folds, breakdown, slides = (
        evaluate_folds(config, done, partial) if done else ([], None, Breakdown(), [])
    )
    settings = config.evaluation_settings
    pooled = evaluate(parts, settings, leaked_from(done)) if done else None
    seeds, intervals = _evaluate_seeds(group_by_seed(done, parts, partial), settings)
    metrics = [*seeds.values()] or [fold.metrics for fold in folds]
    columns = {
        name: [values[name] for values in metrics if name in values]
        for name in dict.fromkeys(name for values in metrics for name in values)
    }
    mean = {name: statistics.fmean(values) for name, values in columns.items()}
    deviation = {
        name: statistics.stdev(values) for name, values in columns.items() if len(values) > 1
    }
    predictions = [predictions for predictions, _ in parts]
    suspected = find_label_errors(predictions, settings) if parts else []
    result = CrossValidationResult(
        folder,
        tuple(runs),
        mean,
        deviation,
        pooled,
        breakdown,
        flow_of(slides),
        seeds,
        intervals,
        label_errors_text(suspected, count_by_chance(predictions, settings)) if suspected else "",
        _curve_of(runs, config),
        _sets_of(parts, done, slides, config),
        within_folds,
    )
    rows = [
        *(fold.summary() | fold.metrics for fold in runs),
        *({"fold": f"seed {seed}", **values} for seed, values in seeds.items()),
        {"fold": "mean", **mean},
        {"fold": "sd", **deviation},
    ]
    if pooled is not None and within_folds is not None:
        rows += [
            {"fold": "within folds", **_defined_metrics(within_folds)},
            {"fold": "pooled", **_defined_metrics(pooled)},
        ]
        tested = [
            ({"split": "test", "fold": run.folder.name.removeprefix("fold-")}, scores)
            for run, (scores, _) in zip(done, parts, strict=True)
        ]
        write_predictions(folder / PREDICTIONS, tested)
        write_label_errors(folder, suspected)
    write_dicts(folder / "summary.csv", rows)
    write_json(folder / "summary.json", result.to_json())
    return result


def _sets_of(
    parts: Sequence[ModelPredictions],
    runs: Sequence[Run],
    slides: Sequence[SlideEntry],
    config: TrainConfig,
) -> PredictionSets | None:
    """Return what prediction sets reached in each fold with the other folds as calibration; None with one fold."""
    scores = [sets.scores for run in runs if (sets := run.result.sets)]
    if not config.conformal or len(scores) < max(len(parts), 2):
        return None
    rest = [scores[:fold] + scores[fold + 1 :] for fold in range(len(parts))]
    pairs = [(part, calibrations) for (part, _), calibrations in zip(parts, rest, strict=True)]
    return cover_parts(pairs, slides, config.subgroup, config.evaluation_settings, config.conformal)


def _curve_of(runs: Sequence[Fold], config: TrainConfig) -> LearningCurve | None:
    """Return the learning curve, of the seeds and folds that are finished with all shares; None without any."""
    shares, by_fold = {run.share for run in runs}, grouped(runs, attrgetter("seed", "number"))
    whole = [fold for fold in by_fold.values() if all(run.result for run in fold)]
    if len(shares) == 1 or not whole:
        return None
    parts: dict[float, dict[int, list[ModelPredictions]]] = {}
    patients = defaultdict[float, list[int]](list)
    for fold in chain(*whole):
        (part,) = read_parts([fold.run])
        parts.setdefault(fold.share, {}).setdefault(fold.seed, []).append(part)
        trained = fold.run.splits.slides_on("train")
        patients[fold.share].append(len({slide.patient for slide in trained}))
    return learning_curve(
        {share: [*by_seed.values()] for share, by_seed in parts.items()},
        {share: statistics.fmean(counts) for share, counts in patients.items()},
        config.evaluation_settings,
    )


def group_by_seed(
    runs: Sequence[Run], parts: Sequence[ModelPredictions], left_out: Collection[int] = ()
) -> dict[int, list[ModelPredictions]]:
    """Return the predictions of runs by their seeds, without some seeds."""
    by_seed = grouped_values(zip((run.config.seed for run in runs), parts, strict=True))
    return {seed: of_seed for seed, of_seed in by_seed.items() if seed not in left_out}


def _evaluate_seeds(
    by_seed: Mapping[int, Sequence[ModelPredictions]], settings: EvaluationSettings
) -> tuple[Mapping[int, Mapping[str, float]], dict[str, Interval]]:
    """Return the metrics of each seed, and intervals of their means; nothing for one seed."""
    if len(by_seed) < 2:
        return {}, {}
    metrics = {
        seed: _defined_metrics(evaluate(of_seed, replace(settings, resamples=0)))
        for seed, of_seed in by_seed.items()
    }
    means = _means_of_seeds([*by_seed.values()], settings, within_folds=False)
    intervals = {
        f"{level}_{name}": ends
        for level, (_, of_level) in means.items()
        for name, ends in of_level.items()
    }
    return metrics, intervals


def _means_of_seeds(
    by_seed: Sequence[Sequence[ModelPredictions]],
    settings: EvaluationSettings,
    *,
    within_folds: bool,
) -> dict[str, tuple[dict[str, float | None], dict[str, Interval]]]:
    """Return the means of metrics over the seeds by level, and their intervals for other patients and seeds."""
    first, unresampled = by_seed[0][0][0], replace(settings, resamples=0)
    each = [dict(evaluate(p, unresampled, within_folds=within_folds).named()) for p in by_seed]
    draws = bootstrap_draws(len(first.patients), settings.resamples, settings.seed)
    means = {}
    for level, how in first.task.levels(first.level):
        scores = [
            joined_scores(of_seed, level, how, settings, within_folds=within_folds)[0]
            for of_seed in by_seed
        ]
        if all(map(len, scores)):
            resampled = mean_resamples(scores, draws, settings.seed)
            of_seeds = [metrics[name_of(level, how)].values for metrics in each]
            values = {name: _mean([values[name] for values in of_seeds]) for name in of_seeds[0]}
            ends = mean_intervals(scores, draws, resampled) if len(draws) else {}
            means[name_of(level, how)] = values, ends
    return means


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return statistics.fmean(defined) if len(defined) == len(values) else None


def _defined_metrics(evaluation: Evaluation) -> dict[str, float]:
    return {
        f"{level}_{name}": value
        for level, metrics in evaluation.named()
        for name, value in metrics.values.items()
        if value is not None
    }


def read_parts(runs: Sequence[Run]) -> list[ModelPredictions]:
    """Read the test predictions of finished runs, each with its thresholds.

    Raises:
        DamagedStore: the predictions cannot be read.
    """
    common = with_common_patients([run.predictions["test"] for run in runs])
    return [
        (scores, run.result.metrics["test"].thresholds)
        for scores, run in zip(common, runs, strict=True)
    ]


def leaked_from(runs: Sequence[Run]) -> set[str]:
    """Return the test patients of finished runs that were also used in the training."""
    leaking = [run for run in runs if run.result.metrics["test"].in_training]
    return set().union(*(leaked_patients(run.splits)["test"] for run in leaking))


def tested_slides(folds: Sequence[Run]) -> list[SlideEntry]:
    """Return all slides, each as in the fold that tests it, or else as in the last fold."""
    by_id: dict[str, SlideEntry] = {}
    for slide in chain.from_iterable(fold.slides for fold in folds):
        if "test" not in getattr(by_id.get(slide.slide), "status", ""):
            by_id[slide.slide] = slide
    return list(by_id.values())


def evaluate_folds(
    config: TrainConfig, runs: Sequence[Run], partial: Collection[int] = ()
) -> tuple[list[ModelPredictions], Evaluation, Breakdown, list[SlideEntry]]:
    """Return the test predictions of finished folds, their evaluation within folds and breakdown, and the tested slides.

    Metrics are means over the seeds if there are several that are not `partial`; counts, decisions and checks are then
    those of the first seed.
    """
    parts, slides = read_parts(runs), tested_slides(runs)
    settings = config.evaluation_settings
    by_seed = [*group_by_seed(runs, parts, partial).values()]
    counted_once = by_seed[0] if len(by_seed) > 1 else parts
    evaluation = evaluate(counted_once, settings, leaked_from(runs), within_folds=True)
    if len(by_seed) > 1:
        evaluation = evaluation.changed(_means_of_seeds(by_seed, settings, within_folds=True))
    evaluated = EvaluatedPredictions({"test": evaluation}, {}, settings, parts=parts)
    return parts, evaluation, break_down(evaluated, slides, config.subgroup), slides


def reevaluate(folder: Path, requested: TrainConfig) -> TrainResult:
    """Evaluate a finished run again from its predictions, if the evaluation settings have changed.

    Raises:
        UsageError, DamagedStore: the files of the run cannot be read.
    """
    run, settings = Run(folder), requested.evaluation_settings
    predictions = run.predictions  # read in any case: what cannot be read is evaluated again
    if run.config.evaluation_settings == settings:
        return run.result
    evaluations = evaluate_subsets(predictions, settings, leaked_patients(run.splits))
    evaluated = EvaluatedPredictions(evaluations, predictions, settings)
    breakdown = break_down(evaluated, run.slides, run.config.subgroup)
    changed = replace(run.result, metrics=evaluations, breakdown=breakdown)
    config = replace(
        run.config,
        positive=requested.positive,
        threshold=requested.threshold,
        top_k=requested.top_k,
        resamples=requested.resamples,
        horizon=requested.horizon,
    )
    write_json(folder / METRICS, {**run.metrics_file, **changed.to_json()})
    # The configuration is written last: if this process dies before, the run is evaluated again.
    write_atomically(folder / CONFIG, to_toml(config))
    return changed
