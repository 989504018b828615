"""What a run found: sentences about performance, subgroups and limits. None: the run does not know."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from histopipe.evaluation.groups import AUTOMATIC
from histopipe.evaluation.table import (
    main_metric,
    metric_title,
    number,
    remarks,
    with_ends,
    with_interval,
)
from histopipe.reports.evaluation_blocks import COLUMN_TITLES, LEVEL_NAMES, shown_levels
from histopipe.reports.fact_texts import SUBSET_NAMES
from histopipe.reports.run_data import RunData
from histopipe.runs import folder as run_folder
from histopipe.runs.result import METRICS
from histopipe.splits.splits import SPLITS
from histopipe.system.result import counted, listed, plural

_PLOTS = "ROC and precision-recall curves, reliability diagrams, and decision curves (Vickers and Elkin 2006)"


def _wanted_columns(run: RunData) -> list[str]:
    """Return the columns that were asked for, and the site."""
    columns = [subgroups.column for subgroups in run.result.breakdown.subgroups]
    return [column for column in columns if column == "site" or column not in AUTOMATIC]


def _subgroup_columns(run: RunData) -> str | None:
    names = [
        COLUMN_TITLES.get(subgroups.column, subgroups.column)
        for subgroups in run.result.breakdown.subgroups
    ]
    return f"Metrics were also computed by {listed(names)}." if names else None


def _subgroup_results(run: RunData) -> str | None:
    columns, texts = _wanted_columns(run), []
    for subgroups in run.result.breakdown.subgroups:
        if subgroups.column in columns:
            name = next(iter(run.evaluated.task.main))
            groups = []
            for group in subgroups.groups:
                value, ends = group.values.get(name), group.intervals.get(name)
                text = "undefined" if value is None else with_ends(value, ends)
                groups.append(f"{group.name} {text} (n = {group.count})")
            title = metric_title(name, run.config.task)
            texts.append(
                f"{title} by {subgroups.column} ({plural(subgroups.level)}): {', '.join(groups)}."
            )
    return " ".join(texts) or None


def _heterogeneity(run: RunData) -> str | None:
    """Return the differences between sites and other columns."""
    columns, texts = _wanted_columns(run), []
    for subgroups in run.result.breakdown.subgroups:
        if subgroups.column in columns:
            name = next(iter(run.evaluated.task.main))
            differences = [(group.name, group.differences.get(name)) for group in subgroups.groups]
            groups = [
                f"{group} {with_ends(difference.value, difference.interval, signed=True)}"
                for group, difference in differences
                if difference is not None and difference.value is not None
            ]
            title = metric_title(name, run.config.task)
            if groups:
                texts.append(
                    f"{title} minus that of all other groups, by {subgroups.column}: {', '.join(groups)}."
                )
    return " ".join(texts) or None


def _shortcut(run: RunData) -> str | None:
    shortcut = run.result.breakdown.shortcut
    if shortcut is None:
        return None
    return (
        f"A cross-validated classifier of the origin of slides ({COLUMN_TITLES.get(shortcut.best, shortcut.best)}) predicts the label with an AUC of "
        f"{shortcut.auc[shortcut.best]:.3f} (p = {shortcut.p:.3f} by permutation)."
    )


def _test_set(run: RunData) -> str | None:
    test = run.result.metrics.get("test")
    return (
        None
        if test is None
        else (
            f"The {'' if test.in_training else 'held-out '}test set has {counted(test.finest.patients, 'patient')}."
        )
    )


def _leaks(run: RunData) -> str | None:
    texts = [
        f"{SUBSET_NAMES[subset].capitalize()}, {remark}."
        for subset, evaluation in run.result.metrics.items()
        if evaluation.in_training
        for remark in remarks(evaluation)[-1:]
    ]
    return " ".join(texts) or None


def _performance(run: RunData) -> str:
    texts = []
    for subset, evaluation in run.result.metrics.items():
        title, _ = main_metric(evaluation.finest)
        levels = []
        for level, metrics in shown_levels(evaluation):
            name = next(iter(run.evaluated.task.main))
            title = metric_title(name, run.config.task)
            levels.append(f"{_level(level)} {with_interval(metrics, name)} (n = {metrics.count})")
        texts.append(f"{title}, {SUBSET_NAMES[subset]}: {', '.join(levels)}.")
    return " ".join(texts)


def _level(name: str) -> str:
    return LEVEL_NAMES[name.partition("_")[0]]


def _accuracy(run: RunData) -> str | None:
    subset, evaluation = run.evaluated.main
    if not evaluation.finest.intervals:
        return None  # without precision
    texts = [
        f"{_level(level)}: sensitivity {with_interval(metrics, 'sensitivity')}, specificity "
        f"{with_interval(metrics, 'specificity')}"
        for level, metrics in shown_levels(evaluation)
        if metrics.values.get("sensitivity") is not None
        or metrics.values.get("specificity") is not None
    ]
    return f"{SUBSET_NAMES[subset].capitalize()}, {'; '.join(texts)}." if texts else None


def _calibration(run: RunData) -> str | None:
    calibration = run.result.calibration
    if calibration is None:
        return None
    values = ", ".join(number(value) for value in calibration.temperature)
    return f"Probabilities were recalibrated on the validation set by temperature scaling (Guo et al. 2017), temperature {values}."


def _recalibrated(run: RunData) -> str | None:
    """Return the effect of the temperature on the main split."""
    calibration, (subset, evaluation) = run.result.calibration, run.evaluated.main
    if calibration is None or subset not in calibration.before:
        return None
    texts = []
    for level, metrics in shown_levels(evaluation):
        before = calibration.before[subset].get(level, {})
        names = [name for name in ("log_loss", "calibration_error") if name in metrics.values]
        each = [
            f"{metric_title(name, run.config.task)} {number(before.get(name))} before, {number(metrics.values[name])} after"
            for name in names
        ]
        texts.append(f"{_level(level)}: {', '.join(each)}")
    return f"Effect of the temperature, {SUBSET_NAMES[subset]}: {'; '.join(texts)}."


def _failures(run: RunData) -> str | None:
    subset, evaluation = run.evaluated.main
    for level, metrics in reversed(list(shown_levels(evaluation))):
        rows = enumerate(metrics.confusion)
        wrong = sum(n for i, row in rows for j, n in enumerate(row) if i != j)
        if metrics.confusion:
            hint = " report.html lists those with the highest certainty." if wrong else ""
            return f"{SUBSET_NAMES[subset].capitalize()}: {wrong} of {metrics.count} {_level(level)} are decided wrongly.{hint}"
    return None


def _limitations(run: RunData) -> str:
    texts = [f"{text}." for text in limitations(run)]
    return " ".join(texts)


def limitations(run: RunData) -> Iterator[str]:
    """Yield what the metrics of a run do not show."""
    if "test" not in run.result.metrics:
        yield f"There is no test set: the metrics are of the validation {run.config.unit}, by which the model was chosen"
    if run.splits.get("split_by") == "site":
        yield "The test slides are from other sites than the training slides; no other data set was used"
    else:
        yield "Performance on slides from another hospital, scanner or stain is unknown: only one data set was used"
    yield "Variation between splits and seeds is unknown: this is one run"
    for subset, evaluation in run.result.metrics.items():
        every = (*remarks(evaluation), *evaluation.notes)
        yield from (f"{SUBSET_NAMES[subset].capitalize()}: {note}" for note in every)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_lines(run: RunData) -> Iterator[str]:
    """Yield the hash of the model, and the identifiers of the stores with the hash of the patches that were used."""
    model = run.folder / run_folder.MODEL
    if model.is_file():
        yield f"SHA-256 of {run_folder.MODEL}: {_sha256(model)}"
    slides = sorted((str(entry["id"]), int(entry["crc"])) for entry in run.splits.get("slides", ()))
    digest = hashlib.sha256(repr(slides).encode()).hexdigest()
    yield f"Stores: {listed(run.splits.get('stores', ()))}, SHA-256 of slides and patch checksums: {digest}"


def _metric_names(run: RunData) -> str:
    values = run.evaluated.main[1].finest.values
    names = dict.fromkeys(metric_title(name.partition(":")[0], run.config.task) for name in values)
    source = " (Van Calster et al. 2019)" if "calibration_slope" in values else ""
    plots = f" Plots: {_PLOTS}." if run.evaluated.task.of_classes else ""
    return f"Metrics: {listed(list(names), most=30)}{source}.{plots}"


def selection_rule(run: RunData) -> str:
    """Return the property of the validation set that the chosen epoch has."""
    if run.config.monitor == "loss":
        return "lowest loss"
    return f"best {main_metric(run.evaluated.main[1].finest)[0]}"


def _selection(run: RunData) -> str:
    return f"The model of epoch {run.result.best_epoch} was chosen, which has the {selection_rule(run)} on validation."


FACTS: dict[str, tuple[str, Callable[[RunData], str | None]]] = {
    "selection": (METRICS, _selection),
    "metric_names": (METRICS, _metric_names),
    "subgroup_columns": (METRICS, _subgroup_columns),
    "subgroup_results": (METRICS, _subgroup_results),
    "heterogeneity": (METRICS, _heterogeneity),
    "shortcut": (METRICS, _shortcut),
    "test_set": (METRICS, _test_set),
    "leaks": (METRICS, _leaks),
    "performance": (METRICS, _performance),
    "accuracy": (METRICS, _accuracy),
    "calibration": (METRICS, _calibration),
    "recalibrated": (METRICS, _recalibrated),
    "failures": (METRICS, _failures),
    "limitations": (METRICS, _limitations),
    "hashes": (
        f"{run_folder.MODEL}, {SPLITS}",
        lambda run: " ".join(f"{line}." for line in hash_lines(run)),
    ),
}
"""Sentences by name, with the file that they come from."""
