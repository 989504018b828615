"""Prediction sets: the classes that a slide or patient may have, or an interval of a number, with a stated error rate.

Conformal prediction: patients that have chosen nothing of a model calibrate it. Of new patients from the same population,
at least 1 - alpha have sets that contain the truth, on average over such calibrations. With other patients, such as those
of another hospital, this does not hold: `PredictionSets` shows what was reached.

Source:
    V. Vovk, A. Gammerman and G. Shafer, Algorithmic learning in a random world (2005); by class: M. Sadinle, J. Lei and
    L. Wasserman, Least ambiguous set-valued classifiers, JASA 114 (2019); with several folds: R. F. Barber, E. J. Candès,
    A. Ramdas and R. J. Tibshirani, Predictive inference with the jackknife+, Annals of Statistics 49 (2021), and V. Vovk,
    Cross-conformal predictors, Annals of Mathematics and Artificial Intelligence 74 (2015).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.evaluation.evaluate import with_ends
from histopipe.evaluation.subgroups import NoValue, check_subgroup, groups_of
from histopipe.splits.slide_table import SlideEntry
from histopipe.splits.splits import Splits
from histopipe.system.arrays import FloatArray
from histopipe.system.grouping import grouped_values
from histopipe.tasks.choices import EvaluationLevel, Subset
from histopipe.tasks.intervals import share_interval
from histopipe.tasks.predictions import (
    EvaluationSettings,
    Predictions,
    joined_predictions,
    scores_of,
)
from histopipe.tasks.task import Task

Scores = Mapping[str, Sequence[Sequence[float]]]
"""Sorted scores of the calibration patients of a model, by column: for each class one minus its probability, of the patients
of this class; of a number the absolute errors, as if of one class. A high score is unusual."""
LevelScores = Mapping[EvaluationLevel, Scores]
"""Scores of slides, one for each patient, and of patients."""
Sets = dict[str, NDArray[Any]]
"""Prediction sets by column: (N, C) whether a class is in the set, or (N, 2) ends of an interval."""
_ROUNDING = 9
"""Digits to which counts are exact, so that 0.29 · 100 is no less than 29."""
_ITEMS = 1000
"""Items whose intervals are computed at once: each has a number for each patient who calibrates."""
_LEVEL, _DRAWS = 0.05, 20_000
"""Share of evaluations of patients like those of the calibration that have a warning, over all rows; and draws that decide."""
_POINTS = 50
"""Most points of a curve."""


def class_names(task: Task) -> tuple[str, ...]:
    """Return the classes that each column of a task has; none of numbers."""
    return task.classes or (("0", "1") if task.probabilities else ())


def calibration_scores(predictions: Predictions, settings: EvaluationSettings) -> LevelScores:
    """Return the scores of calibration patients, from predictions of patches, slides or patients with known targets.

    A patient with several slides counts once: with the mean output, and among slides with a random one.
    """
    by_level: dict[EvaluationLevel, Scores] = {}
    for level, how in predictions.task.levels(predictions.level):
        if how == "mean" and level != "patch":
            scores = scores_of(predictions, level, how, settings)
            order = np.random.default_rng(settings.seed).permutation(len(scores))
            one = order[np.unique(scores.patient[order], return_index=True)[1]]
            by_level[level] = _true_scores(scores.rows(one))
    return by_level


def _true_scores(scores: Predictions) -> Scores:
    if not scores.task.probabilities:
        errors = zip(scores.task.columns, np.abs(scores.output - scores.target).T, strict=True)
        return {name: [np.sort(values[np.isfinite(values)]).tolist()] for name, values in errors}
    by_column = zip(_class_scores(scores.task, scores.output).items(), scores.target.T, strict=True)
    return {
        name: [np.sort(values[target == code, code]).tolist() for code in range(values.shape[1])]
        for (name, values), target in by_column
    }


def _class_scores(task: Task, output: FloatArray) -> dict[str, FloatArray]:
    """Return the (..., C) scores of the classes of each column, from (..., K) probabilities."""
    if task.of_classes:
        return {task.columns[0]: 1 - output}
    return {
        name: np.stack([output[..., i], 1 - output[..., i]], axis=-1)
        for i, name in enumerate(task.columns)
    }


def prediction_sets(models: Sequence[Scores], task: Task, output: FloatArray, alpha: float) -> Sets:
    """Return the sets of N items, from (M, N, K) outputs of M models with the scores of their calibration patients.

    A class is in the set if more than a share alpha of the patients of this class, the item included, have a score at least as
    high. The interval of a number is that of the jackknife+ for folds. One model has the quantile ceil((n + 1)(1 - alpha))
    / n; several models that calibrate each other have a guarantee of 1 - 2 alpha, and nearly always reach 1 - alpha.
    """
    if not task.probabilities:
        return {
            name: _interval([model[name][0] for model in models], output[..., i], alpha)
            for i, name in enumerate(task.columns)
        }
    return {
        name: np.stack(
            [
                _fits([model[name][code] for model in models], scores[..., code], alpha)
                for code in range(scores.shape[-1])
            ],
            axis=-1,
        )
        for name, scores in _class_scores(task, output).items()
    }


def _fits(
    calibration: Sequence[Sequence[float]], scores: FloatArray, alpha: float
) -> NDArray[np.bool_]:
    """Return whether (M, N) scores of items are usual among those of each model's calibration patients, (N,)."""
    total = 1 + sum(map(len, calibration))
    higher = 1 + sum(
        len(of_model) - np.searchsorted(of_model, row)
        for of_model, row in zip(calibration, scores, strict=True)
    )
    return np.asarray(np.round(higher - alpha * total, _ROUNDING) > 0)


def _interval(errors: Sequence[Sequence[float]], output: FloatArray, alpha: float) -> FloatArray:
    """Return (N, 2) intervals of (M, N) predictions, from the errors of each model; infinite with too few patients."""
    if output.shape[1] > _ITEMS:
        parts = np.array_split(output, -(-output.shape[1] // _ITEMS), axis=1)
        return np.concatenate([_interval(errors, part, alpha) for part in parts])
    reach = np.concatenate(errors)
    centre = np.repeat(output.T, [len(of_model) for of_model in errors], axis=1)
    left_out = math.floor(round(alpha * (len(reach) + 1), _ROUNDING))
    if not left_out:
        return np.tile([-np.inf, np.inf], (output.shape[1], 1))
    lows, highs = np.sort(centre - reach, axis=1), np.sort(centre + reach, axis=1)
    return np.stack([lows[:, left_out - 1], highs[:, -left_out]], axis=1)


def set_cells(task: Task, sets: Sets) -> dict[str, list[str]]:
    """Return columns of a table: `set` with classes such as `a|b`, `set_LABEL`, or `low_COLUMN` and `high_COLUMN`."""
    cells: dict[str, list[str]] = {}
    for column, values in sets.items():
        if task.probabilities:
            name = "set" if task.of_classes else f"set_{column}"
            named = [np.array(class_names(task), object)[row] for row in values]
            cells[name] = ["|".join(classes) or "(none)" for classes in named]
        else:
            for name, ends in zip((f"low_{column}", f"high_{column}"), values.T, strict=True):
                cells[name] = [f"{end:.9g}" for end in ends]
    return cells


def check_calibration(splits: Sequence[Splits], subset: Subset, alpha: float) -> None:
    """Check that the patients of a subset of several splits can calibrate: at least 1 / alpha - 1 for each class.

    Raises:
        UsageError: there are fewer, so that every set would contain the class.
    """
    task, needed = splits[0].task, math.ceil(round(1 / alpha - 1, _ROUNDING))
    targets = grouped_values(
        (slide.patient, each.target(slide)) for each in splits for slide in each.slides_on(subset)
    )
    one = np.array([values[0] for values in targets.values() if len(set(values)) == 1])
    by_column = task.finite_targets(one.reshape(len(one), len(task.columns)))
    for column, values in by_column.items():
        names = class_names(task)
        counts = [int((values == number).sum()) for number in range(len(names))] or [len(values)]
        for name, count in zip(names or ("a value",), counts, strict=True):
            if count < needed:
                raise UsageError(
                    f"--conformal {alpha:g}: {column} {name}",
                    found=f"{count} patients who calibrate",
                    expected=f"at least 1 / {alpha:g} - 1, which is {needed}",
                    todo="use a higher --conformal or --calibration-share, or --folds, where all patients calibrate",
                )


@dataclass(frozen=True, slots=True)
class PredictionSets:
    """Calibration of prediction sets, and what they reached on slides or patients with known targets.

    Attributes:
        alpha: rate of sets that may miss the truth.
        scores: those of the calibration patients; empty of results of several models.
        level: "patient", or "slide" if patients have several targets.
        rows: what was reached, by target column and group, which is "all", a class, or a value of a column of the slides:
            number of items (count) and of patients, share of sets with the truth (coverage) and its 95 % interval or None,
            mean number of classes or width of the interval (size), and share of sets with one class (single; None of numbers);
            p, the probability of a coverage as low or lower if these patients are like those of the calibration (None of
            slides, and if several models calibrate).
        curve: shares of the most confident items, and of wrong ones among them (risk-coverage curve).
    """

    alpha: float
    scores: LevelScores
    level: EvaluationLevel = "patient"
    rows: Sequence[Mapping[str, Any]] = ()
    curve: Sequence[tuple[float, float]] = ()

    @property
    def lines(self) -> list[str]:
        """The coverage of all in a line for each column, and the groups in which it is below its level."""
        texts, tested = [], sum(row.get("p") is not None for row in self.rows)
        for row in self.rows:
            what = f"{row['column']}, {row['group']}"
            reached = (
                f"{with_ends(row['coverage'], row['interval'])} of {row['count']} {self.level}s"
            )
            if row["group"] == "all":
                texts.append(
                    f"prediction sets for {1 - self.alpha:.0%} of {what}: right for {reached}, mean size {row['size']:.3g}"
                )
            if row.get("p") is not None and row["p"] < _LEVEL / tested:
                texts.append(
                    f"warning: prediction sets for {1 - self.alpha:.0%} of {what}: right for only {reached}, who differ from "
                    f"the patients of the calibration (p {row['p']:.2g}, of {tested} comparisons)"
                )
        return texts


def cover(
    scores: Predictions,
    sets: Sets,
    slides: Sequence[SlideEntry],
    requested: Iterable[str],
    alpha: float,
    *,
    calibration: Scores | None = None,
) -> PredictionSets:
    """Return what the sets of slides or patients with targets reached: all, and by class, site and subgroup.

    `slides` are the table of slides, `requested` values of `--subgroup`. `calibration` has the scores of one model, of patients
    if the items are patients: then the coverage of each row is compared with what chance allows.
    """
    task, rows = scores.task, []
    of_slides = _groups(scores.ids(scores.unit), scores.unit, slides, requested)
    for column, target in zip(task.columns, scores.target.T, strict=True):
        of_column, labelled = sets[column], np.isfinite(target)
        codes = np.nan_to_num(target * task.probabilities).astype(np.intp)
        if task.probabilities:
            covered, size = of_column[np.arange(len(codes)), codes], of_column.sum(axis=1)
        else:
            covered = (of_column[:, 0] <= target) & (target <= of_column[:, 1])
            size = of_column[:, 1] - of_column[:, 0]
        of_class = {name: target == code for code, name in enumerate(class_names(task))}
        shares = _coverage_by_chance(calibration[column], alpha) if calibration else []
        for name, members in {"all": labelled, **of_class, **of_slides}.items():
            inside = np.flatnonzero(members & labelled)
            if len(inside):
                patient = scores.patient[inside]
                rows.append(
                    {
                        "column": column,
                        "group": name,
                        "count": len(inside),
                        "patients": len(np.unique(patient)),
                        "coverage": float(covered[inside].mean()),
                        "interval": share_interval(covered[inside], patient),
                        "size": float(size[inside].mean()),
                        "single": float((size[inside] == 1).mean()) if task.probabilities else None,
                        "p": _p_value(covered[inside], codes[inside], shares),
                    }
                )
    return PredictionSets(alpha, {}, scores.unit, rows, _risk_coverage(scores))


def _coverage_by_chance(calibration: Sequence[Sequence[float]], alpha: float) -> list[FloatArray]:
    """Return draws of the share of new patients of each class whose set has it: Beta(n + 1 - l, l), l = floor(alpha (n + 1)).

    So the number of right sets among m patients is beta-binomial.

    Source:
        A. N. Angelopoulos and S. Bates, Conformal prediction: a gentle introduction, Foundations and Trends in Machine
        Learning 16 (2023), section 3.2.
    """
    rng, shares = np.random.default_rng(0), []
    for scores in calibration:
        missed = math.floor(round(alpha * (len(scores) + 1), _ROUNDING))
        size = len(scores) + 1 - missed
        shares.append(rng.beta(size, missed, _DRAWS) if missed else np.ones(_DRAWS))
    return shares


def _p_value(
    covered: NDArray[np.bool_], codes: NDArray[np.intp], shares: Sequence[FloatArray]
) -> float | None:
    """Return the probability that at most as many sets are right, from draws of the share of each class; None without these."""
    if not shares:
        return None
    rng, counts = np.random.default_rng(1), np.bincount(codes, minlength=len(shares))
    right = sum(rng.binomial(count, share) for count, share in zip(counts, shares, strict=True))
    return float((1 + (right <= covered.sum()).sum()) / (1 + _DRAWS))


def _groups(
    names: Sequence[str],
    level: EvaluationLevel,
    slides: Sequence[SlideEntry],
    requested: Iterable[str],
) -> dict[str, NDArray[np.bool_]]:
    """Return the items, (N,), with each value of the site and of requested columns; columns with one value have none."""
    groups: dict[str, NDArray[np.bool_]] = {}
    for column, width in {"site": None, **dict(map(check_subgroup, requested))}.items():
        of_items = grouped_values((getattr(slide, level), slide.value(column)) for slide in slides)
        values = [
            min(cells) if len(cells) == 1 else NoValue.SEVERAL
            for cells in (set(of_items.get(name, ())) for name in names)
        ]
        titles, numbers = groups_of(values, width, categories=column == "site")
        if len(titles) > 1:
            groups |= {
                f"{column} {title}": np.array(numbers) == number
                for number, title in enumerate(titles)
            }
    return groups


def _risk_coverage(scores: Predictions) -> tuple[tuple[float, float], ...]:
    """Return shares of the most confident items, and of wrong ones among them; nothing but for classes.

    Source:
        R. El-Yaniv and Y. Wiener, On the foundations of noise-free selective classification, JMLR 11 (2010).
    """
    if not scores.task.of_classes or not len(scores):
        return ()
    confidence = scores.output.max(axis=1)
    wrong = scores.output.argmax(axis=1) != scores.label
    order = np.argsort(-confidence, kind="stable")
    last = np.flatnonzero(np.diff(confidence[order], append=-np.inf))  # of equal confidences
    risk = np.cumsum(wrong[order])[last] / (last + 1)
    chosen = np.unique(np.linspace(0, len(last) - 1, _POINTS).round().astype(np.intp))
    shares = (last[chosen] + 1) / len(order)
    return tuple(zip(shares.tolist(), risk[chosen].tolist(), strict=True))


def calibrate_sets(
    predicted: Mapping[Subset, Predictions],
    slides: Sequence[SlideEntry],
    requested: Iterable[str],
    settings: EvaluationSettings,
    alpha: float | None,
) -> PredictionSets | None:
    """Calibrate the prediction sets of a run by its calibration patients; in a fold by its test patients.

    Return None without `alpha`.
    """
    if alpha is None:
        return None
    subset: Subset = "calibration" if "calibration" in predicted else "test"
    scores = calibration_scores(predicted[subset], settings)
    if subset == "test" or "test" not in predicted:
        return PredictionSets(alpha, scores)
    tested = [(predicted["test"], [scores])]
    return replace(cover_parts(tested, slides, requested, settings, alpha), scores=scores)


def cover_parts(
    parts: Sequence[tuple[Predictions, Sequence[LevelScores]]],
    slides: Sequence[SlideEntry],
    requested: Iterable[str],
    settings: EvaluationSettings,
    alpha: float,
) -> PredictionSets:
    """Return what prediction sets reached on patients, or on slides if patients have several targets.

    Each part is predicted by one model, with the scores of one or several calibrations.
    """
    level, each = _whole([part for part, _ in parts], settings)
    sets = [
        prediction_sets(
            [scores[level] for scores in calibrations],
            part.task,
            np.stack([part.output] * len(calibrations)),
            alpha,
        )
        for part, (_, calibrations) in zip(each, parts, strict=True)
    ]
    joined = {name: np.concatenate([of_part[name] for of_part in sets]) for name in sets[0]}
    calibrations = [scores[level] for _, of_part in parts for scores in of_part]
    one = calibrations[0] if level == "patient" and len(calibrations) == 1 else None
    return cover(joined_predictions(each), joined, slides, requested, alpha, calibration=one)


def _whole(
    parts: Sequence[Predictions], settings: EvaluationSettings
) -> tuple[EvaluationLevel, list[Predictions]]:
    """Return the scores of patients, or of slides if patients have several targets."""
    levels: list[EvaluationLevel] = ["patient", "slide"]
    for level in levels[: 1 + (parts[0].level != "patient")]:
        each = [scores_of(part, level, "mean", settings) for part in parts]
        if not any(scores.left_out for scores in each):
            break
    return level, each


@dataclass(frozen=True, slots=True)
class NamedSets:
    """Prediction sets of slides and patients by level, each with the names of these; none if a model is not calibrated."""

    models: Sequence[PredictionSets | None]
    task: Task
    by_level: dict[EvaluationLevel, tuple[Sequence[str], Sets]] = field(default_factory=dict)

    def add(
        self, level: EvaluationLevel, names: Sequence[str], output: FloatArray
    ) -> dict[str, dict[str, str]]:
        """Add the sets of N items, from (M, N, K) outputs, and return the cells of each column by name."""
        models = [model for model in self.models if model]
        if not names or not models or len(models) < len(self.models):
            return {}
        scores = [model.scores[level] for model in models]
        sets = prediction_sets(scores, self.task, output, models[0].alpha)
        self.by_level[level] = names, sets
        cells = set_cells(self.task, sets).items()
        return {column: dict(zip(names, of_items, strict=True)) for column, of_items in cells}

    def cover(
        self,
        predictions: Predictions,
        slides: Sequence[SlideEntry],
        requested: Iterable[str],
        settings: EvaluationSettings,
    ) -> PredictionSets | None:
        """Return what they reached on predictions with known targets; None without sets."""
        if not self.by_level:
            return None
        level, (scores,) = _whole([predictions], settings)
        names, sets = self.by_level[level]
        row_of = {name: row for row, name in enumerate(names)}
        rows = [row_of[name] for name in scores.ids(level)]
        chosen = {name: of_items[rows] for name, of_items in sets.items()}
        models = [model for model in self.models if model]
        one = models[0].scores[level] if level == "patient" and len(models) == 1 else None
        return cover(scores, chosen, slides, requested, models[0].alpha, calibration=one)
