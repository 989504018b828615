"""What a run did: sentences about model, training and evaluation. None: the run does not know."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from histopipe.evaluation.evaluate import (
    main_metric,
    metric_title,
    number,
    remarks,
    with_ends,
    with_interval,
)
from histopipe.evaluation.subgroups import AUTOMATIC
from histopipe.reports import data_description
from histopipe.reports.data_description import SUBSET_NAMES, RunData, of_cross_validation
from histopipe.reports.evaluation_blocks import COLUMN_TITLES, LEVEL_NAMES, shown_levels
from histopipe.runs import folder as run_folder
from histopipe.runs.result import METRICS
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig, parse_trainable
from histopipe.splits.splits import SPLITS
from histopipe.system.output import counted, listed, plural

_FRAMEWORKS = {"histopipe": "histopipe", "tensorflow": "TensorFlow", "keras": "Keras"}
_AUGMENTATIONS = {
    "flips": "flips and rotations", "crop": "random crops", "stain": "changes of the stain", "colour": "changes of the colour",
}  # fmt: skip


def _network(run: RunData) -> str:
    config = run.config
    if isinstance(config, BagTrainConfig):
        names = [
            str(encoder["encoder"]) if encoder and encoder.get("encoder") else "an unknown encoder"
            for encoder in run.metrics_file.get("encoders", ())
        ]
        encoders = f", on features of {listed(names)}" if names else ""
        return (
            f"The model is multiple-instance learning with {config.pooling} pooling{encoders}; a bag holds all patches "
            f"of a {config.bag}. Its dropout rate is {config.dropout:g}."
        )
    assert isinstance(config, PatchTrainConfig)  # noqa: S101 - for mypy
    kind, number = parse_trainable(config.trainable)
    trained = {
        "all": "all its weights were trained", "head": "only its last layer was trained",
        "last": f"its last layer and its last {number} blocks were trained",
        "lora": f"its last layer and low-rank updates of rank {number} were trained",
    }[kind]  # fmt: skip
    return f"The model is the network {Path(config.model).name} with a dropout rate of {config.dropout:g}; {trained}."


def _inputs(run: RunData) -> str:
    spec = run.metrics_file.get("spec")
    covariates = getattr(run.config, "covariates", ())
    covariate_text = f", and the covariates {listed(covariates)}" if covariates else ""
    if isinstance(spec, dict):
        side, mpp = spec.get("patch_size"), run.metrics_file.get("patch_mpp")
        scale = f" at {mpp:g} µm per pixel" if isinstance(mpp, int | float) else ""
        return f"The model takes RGB patches of {side} × {side} pixels{scale}{covariate_text}."
    return f"The model takes the features of all patches of a {getattr(run.config, 'bag', 'slide')}{covariate_text}."


def _software(run: RunData) -> str:
    facts = run.metrics_file
    versions = [f"{title} {facts[name]}" for name, title in _FRAMEWORKS.items() if name in facts]
    python = facts.get("environment", {}).get("python")
    return f"The software was {listed([*versions, *([f'Python {python}'] if python else [])])}."


def _hardware(run: RunData) -> str:
    environment = run.metrics_file.get("environment", {})
    gpus = environment.get("gpus")
    machine = f"{environment.get('cores')} CPU cores and {listed(gpus) if gpus else 'no GPU'}"
    return (
        f"Training took {run.result.seconds:,.0f} s on a computer with {machine}, with precision "
        f"{run.config.precision}."
    )


def _weights(run: RunData) -> str:
    weights = getattr(run.config, "used_weights", "none")
    if weights == "none":
        return "The weights of the model were initialized at random."
    return f"Training started from the weights {Path(weights).name}."


def _training(run: RunData) -> str:
    config, result = run.config, run.result
    rate = f"learning rate {config.learning_rate:g}, {config.schedule} schedule"
    details = [
        text
        for active, text in (
            (config.optimizer == "adamw", f"weight decay {config.weight_decay:g}"),
            (config.warmup_steps > 0, f"{config.warmup_steps} steps of warm-up"),
            (config.clip_norm > 0, f"gradient norm at most {config.clip_norm:g}"),
            (config.label_smoothing > 0, f"label smoothing {config.label_smoothing:g}"),
        )
        if active
    ]
    stop = (
        f"; it would stop after {counted(config.patience, 'epoch')} without a better validation result"
        if config.patience
        else ""
    )
    sample = "patch" if config.unit == "patches" else "bag"
    return (
        f"The model was trained with the optimizer {config.optimizer} ({', '.join([rate, *details])}) in batches of "
        f"{counted(config.batch_size, sample)} for {result.epochs} of at most {counted(config.epochs, 'epoch')}{stop}."
    )


def _augmentation(run: RunData) -> str | None:
    chosen = getattr(run.config, "augment", None)
    if chosen is None:
        return None
    if "none" in chosen or not chosen:
        return "Patches were not augmented."
    return f"Patches were augmented with {listed([_AUGMENTATIONS[name] for name in chosen])}."


def _imbalance(run: RunData) -> str | None:
    config = run.config
    if not run.evaluated.task.of_classes:
        return None
    weights = "Classes had equal weights" if config.class_weights == "none" else (
        "Classes were weighted inversely to their frequency"
    )  # fmt: skip
    if config.balance == "none":
        return f"{weights}, and {config.unit} were not balanced."
    return f"{weights}, and each {config.balance} was drawn equally often."


def _threshold(run: RunData) -> str | None:
    config, task = run.config, run.evaluated.task
    if task.has_thresholds:
        rule, _, value = config.threshold.partition(":")
        if rule == "youden":
            return "The decision threshold has the highest sum of sensitivity and specificity on the validation set."
        if value:
            end = "highest" if rule == "sensitivity" else "lowest"
            return f"The decision threshold is the {end} one with a {rule} of at least {value} on the validation set."
        return f"The decision threshold was set to {rule} in advance."
    if task.of_classes:
        return "The most probable class is decided."
    return None


def _predictions(run: RunData) -> str:
    config = run.config
    if isinstance(config, BagTrainConfig):
        patient_text = ""
        if config.bag == "slide" and run.evaluated.main[1].patient:
            patient_text = "; patients have the mean of their slides"
        return f"The model predicts each {config.bag}{patient_text}."
    if len(run.evaluated.task.aggregations) == 1:
        return "Slides and patients have the mean of the predictions of their patches."
    return (
        "Patches were aggregated to slides and patients in three ways: the mean of their probabilities, the mean of the "
        f"{config.top_k} highest, and the share of patches for which a class is the most probable."
    )


def _intervals(run: RunData) -> str | None:
    resamples = run.config.resamples
    if not resamples:
        return None
    resampled = f"{resamples:,} bootstrap resamples of the patients"
    if not run.evaluated.task.probabilities:
        return f"95 % confidence intervals come from {resampled}."
    return (
        "95 % confidence intervals have patients as units: score intervals for AUC (Newcombe 2006), average precision "
        f"and shares, sandwich estimators for calibration intercept and slope, and {resampled} for other metrics."
    )


def _explanations(run: RunData) -> str:
    if isinstance(run.config, BagTrainConfig):
        return "Heatmaps show the attention and the contribution of each patch."
    return "Heatmaps show the predictions of patches."


def _ensemble(run: RunData) -> str | None:
    """Return that there is one model; None for a fold of a cross-validation, whose models may be an ensemble."""
    return None if of_cross_validation(run) else "One model was trained, which is no ensemble."


def _settings_file(_: RunData) -> str:
    return f"All settings are in {run_folder.CONFIG}, and the split is in {SPLITS}."


METHOD_FACTS: dict[str, tuple[str, Callable[[RunData], str | None]]] = {
    "outcome": (run_folder.CONFIG, lambda run: run.evaluated.task.outcome),
    "network": (run_folder.CONFIG, _network),
    "inputs": (METRICS, _inputs),
    "outputs": (METRICS, lambda run: f"The output of the model is {run.evaluated.task.predicted}."),
    "software": (METRICS, _software),
    "hardware": (METRICS, _hardware),
    "weights": (run_folder.CONFIG, _weights),
    "training": (run_folder.CONFIG, _training),
    "augmentation": (run_folder.CONFIG, _augmentation),
    "imbalance": (run_folder.CONFIG, _imbalance),
    "threshold": (run_folder.CONFIG, _threshold),
    "predictions": (run_folder.CONFIG, _predictions),
    "intervals": (run_folder.CONFIG, _intervals),
    "explanations": (run_folder.CONFIG, _explanations),
    "ensemble": (run_folder.CONFIG, _ensemble),
    "settings_file": (run_folder.CONFIG, _settings_file),
}
"""Sentences by name, with the file that they come from."""


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


RESULT_FACTS: dict[str, tuple[str, Callable[[RunData], str | None]]] = {
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


class Fact(NamedTuple):
    """A sentence, and the file or files that it comes from."""

    text: str
    source: str


Facts = Mapping[str, Fact]


def facts_of(run: RunData) -> Facts:
    """Return the facts that a run knows, by name. Names of facts that it cannot know are missing."""
    facts = {}
    for name, (source, make) in (data_description.FACTS | METHOD_FACTS | RESULT_FACTS).items():
        text = make(run)
        if text:
            facts[name] = Fact(text, source)
    return facts
