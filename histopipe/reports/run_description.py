"""What a run did: sentences about model, training and evaluation. None: the run does not know."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from histopipe.evaluation.evaluate import (
    main_metric,
    metric_title,
    number,
    remarks,
    with_ends,
    with_interval,
)
from histopipe.evaluation.subgroups import AUTOMATIC, Subgroups
from histopipe.reports.data_description import (
    OTHER_DATA_UNKNOWN,
    STATEMENTS,
    SUBSET_NAMES,
    Description,
    RunData,
    chosen_texts,
    of_cross_validation,
    statement,
)
from histopipe.reports.evaluation_blocks import column_title, shown_levels, units_of
from histopipe.runs import folder as run_folder
from histopipe.runs.result import METRICS
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig, parse_trainable
from histopipe.splits.splits import SPLITS
from histopipe.system.output import counted, listed, plural

_SOFTWARE = {
    "histopipe": "histopipe",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "python": "Python",
}
_AUGMENTATIONS = {
    "flips": "flips and rotations",
    "crop": "random crops",
    "stain": "changes of the stain",
    "colour": "changes of the colour",
}


@statement(run_folder.CONFIG)
def _describe_outcome(run: RunData) -> str:
    return run.evaluated.task.outcome


@statement(METRICS)
def _describe_outputs(run: RunData) -> str:
    return f"The output of the model is {run.evaluated.task.predicted}."


@statement(run_folder.CONFIG)
def _describe_network(run: RunData) -> str:
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
        "all": "all its weights were trained",
        "head": "only its last layer was trained",
        "last": f"its last layer and its last {number} blocks were trained",
        "lora": f"its last layer and low-rank updates of rank {number} were trained",
    }[kind]
    return f"The model is the network {Path(config.model).name} with a dropout rate of {config.dropout:g}; {trained}."


@statement(METRICS)
def _describe_inputs(run: RunData) -> str:
    spec = run.metrics_file.get("spec")
    covariates = getattr(run.config, "covariates", ())
    covariate_text = f", and the covariates {listed(covariates)}" if covariates else ""
    if isinstance(spec, dict):
        side, mpp = spec.get("patch_size"), run.metrics_file.get("patch_mpp")
        scale = f" at {mpp:g} µm per pixel" if isinstance(mpp, int | float) else ""
        return f"The model takes RGB patches of {side} × {side} pixels{scale}{covariate_text}."
    return f"The model takes the features of all patches of a {getattr(run.config, 'bag', 'slide')}{covariate_text}."


@statement(METRICS)
def _describe_software(run: RunData) -> str:
    python = run.metrics_file.get("environment", {}).get("python")
    versions = {**run.metrics_file, **({"python": python} if python else {})}
    names = [f"{title} {versions[name]}" for name, title in _SOFTWARE.items() if name in versions]
    return f"The software was {listed(names)}."


@statement(METRICS)
def _describe_hardware(run: RunData) -> str:
    environment = run.metrics_file.get("environment", {})
    gpus = environment.get("gpus")
    machine = f"{environment.get('cores')} CPU cores and {listed(gpus) if gpus else 'no GPU'}"
    return (
        f"Training took {run.result.seconds:,.0f} s on a computer with {machine}, with precision "
        f"{run.config.precision}."
    )


@statement(run_folder.CONFIG)
def _describe_weights(run: RunData) -> str:
    weights = getattr(run.config, "used_weights", "none")
    if weights == "none":
        return "The weights of the model were initialized at random."
    return f"Training started from the weights {Path(weights).name}."


@statement(run_folder.CONFIG)
def _describe_training(run: RunData) -> str:
    config, result = run.config, run.result
    details = chosen_texts(
        (True, f"learning rate {config.learning_rate:g}, {config.schedule} schedule"),
        (config.optimizer == "adamw", f"weight decay {config.weight_decay:g}"),
        (config.warmup_steps > 0, f"{config.warmup_steps} steps of warm-up"),
        (config.clip_norm > 0, f"gradient norm at most {config.clip_norm:g}"),
        (config.label_smoothing > 0, f"label smoothing {config.label_smoothing:g}"),
    )
    stop = f"; it would stop after {counted(config.patience, 'epoch')} without a better validation result"
    sample = "patch" if config.unit == "patches" else "bag"
    return (
        f"The model was trained with the optimizer {config.optimizer} ({', '.join(details)}) in batches of "
        f"{counted(config.batch_size, sample)} for {result.epochs} of at most {counted(config.epochs, 'epoch')}"
        f"{stop if config.patience else ''}."
    )


@statement(run_folder.CONFIG)
def _describe_augmentation(run: RunData) -> str | None:
    if not isinstance(run.config, PatchTrainConfig):
        return None
    names = [_AUGMENTATIONS[name] for name in run.config.augment if name != "none"]
    return (
        f"Patches were augmented with {listed(names)}." if names else "Patches were not augmented."
    )


@statement(run_folder.CONFIG)
def _describe_imbalance(run: RunData) -> str | None:
    config = run.config
    if not run.evaluated.task.of_classes:
        return None
    weights = "Classes were weighted inversely to their frequency"
    if config.class_weights == "none":
        weights = "Classes had equal weights"
    balance = f"each {config.balance} was drawn equally often"
    if config.balance == "none":
        balance = f"{config.unit} were not balanced"
    return f"{weights}, and {balance}."


@statement(run_folder.CONFIG)
def _describe_threshold(run: RunData) -> str | None:
    config, task = run.config, run.evaluated.task
    if task.has_thresholds:
        rule, _, value = config.threshold.partition(":")
        if rule == "youden":
            return "The decision threshold has the highest sum of sensitivity and specificity on the validation set."
        if value:
            end = "highest" if rule == "sensitivity" else "lowest"
            return f"The decision threshold is the {end} one with a {rule} of at least {value} on the validation set."
        return f"The decision threshold was set to {rule} in advance."
    return "The most probable class is decided." if task.of_classes else None


@statement(run_folder.CONFIG)
def _describe_predictions(run: RunData) -> str:
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


@statement(run_folder.CONFIG)
def _describe_intervals(run: RunData) -> str | None:
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


@statement(run_folder.CONFIG)
def _describe_explanations(run: RunData) -> str:
    on_bags = isinstance(run.config, BagTrainConfig)
    what = (
        "the attention and the contribution of each patch"
        if on_bags
        else "the predictions of patches"
    )
    return f"Heatmaps show {what}."


@statement(run_folder.CONFIG)
def _describe_ensemble(run: RunData) -> str | None:
    """Return that there is one model; None for a fold of a cross-validation, whose models may be an ensemble."""
    return None if of_cross_validation(run) else "One model was trained, which is no ensemble."


@statement(run_folder.CONFIG)
def _describe_settings_file(_: RunData) -> str:
    return f"All settings are in {run_folder.CONFIG}, and the split is in {SPLITS}."


def _main_metric(run: RunData) -> tuple[str, str]:
    """Return the name and the title of the main metric."""
    name = next(iter(run.evaluated.task.main))
    return name, metric_title(name, run.config.task)


@statement(METRICS)
def _describe_subgroup_columns(run: RunData) -> str | None:
    names = [column_title(subgroups.column) for subgroups in run.result.breakdown.subgroups]
    return f"Metrics were also computed by {listed(names)}." if names else None


def _chosen_subgroups(run: RunData) -> list[Subgroups]:
    """Return the subgroups by the site, and by the columns that the user chose."""
    return [
        subgroups
        for subgroups in run.result.breakdown.subgroups
        if subgroups.column == "site" or subgroups.column not in AUTOMATIC
    ]


@statement(METRICS)
def _describe_subgroup_results(run: RunData) -> str:
    name, title = _main_metric(run)
    texts = []
    for subgroups in _chosen_subgroups(run):
        groups = []
        for group in subgroups.groups:
            value = group.values.get(name)
            text = "undefined" if value is None else with_ends(value, group.intervals.get(name))
            groups.append(f"{group.name} {text} (n = {group.count})")
        texts.append(
            f"{title} by {subgroups.column} ({plural(subgroups.level)}): {', '.join(groups)}."
        )
    return " ".join(texts)


@statement(METRICS)
def _describe_heterogeneity(run: RunData) -> str:
    """Return the differences between sites and other columns."""
    name, title = _main_metric(run)
    texts = []
    for subgroups in _chosen_subgroups(run):
        groups = [
            f"{group.name} {with_ends(difference.value, difference.interval, signed=True)}"
            for group in subgroups.groups
            if (difference := group.differences.get(name)) and difference.value is not None
        ]
        if groups:
            texts.append(
                f"{title} minus that of all other groups, by {subgroups.column}: {', '.join(groups)}."
            )
    return " ".join(texts)


@statement(METRICS)
def _describe_shortcut(run: RunData) -> str | None:
    shortcut = run.result.breakdown.shortcut
    return (
        None
        if shortcut is None
        else (
            f"A cross-validated classifier of the origin of slides ({column_title(shortcut.best)}) predicts the label with an "
            f"AUC of {shortcut.auc[shortcut.best]:.3f} (p = {shortcut.p:.3f} by permutation)."
        )
    )


@statement(METRICS)
def _describe_test_set(run: RunData) -> str | None:
    test = run.result.metrics.get("test")
    return (
        None
        if test is None
        else (
            f"The {'' if test.in_training else 'held-out '}test set has {counted(test.finest.patients, 'patient')}."
        )
    )


@statement(METRICS)
def _describe_leaks(run: RunData) -> str:
    return " ".join(
        f"{SUBSET_NAMES[subset].capitalize()}, {remarks(evaluation)[-1]}."
        for subset, evaluation in run.result.metrics.items()
        if evaluation.in_training
    )


@statement(METRICS)
def _describe_performance(run: RunData) -> str:
    name, title = _main_metric(run)
    texts = []
    for subset, evaluation in run.result.metrics.items():
        levels = [
            f"{units_of(level)} {with_interval(metrics, name)} (n = {metrics.count})"
            for level, metrics in shown_levels(evaluation)
        ]
        texts.append(f"{title}, {SUBSET_NAMES[subset]}: {', '.join(levels)}.")
    return " ".join(texts)


@statement(METRICS)
def _describe_accuracy(run: RunData) -> str | None:
    subset, evaluation = run.evaluated.main
    texts = [
        f"{units_of(level)}: sensitivity {with_interval(metrics, 'sensitivity')}, specificity "
        f"{with_interval(metrics, 'specificity')}"
        for level, metrics in shown_levels(evaluation)
        if evaluation.finest.intervals  # else without precision
        and (metrics.values.get("sensitivity"), metrics.values.get("specificity")) != (None, None)
    ]
    return f"{SUBSET_NAMES[subset].capitalize()}, {'; '.join(texts)}." if texts else None


@statement(METRICS)
def _describe_calibration(run: RunData) -> str | None:
    calibration = run.result.calibration
    return (
        None
        if calibration is None
        else (
            "Probabilities were recalibrated on the validation set by temperature scaling (Guo et al. 2017), temperature "
            f"{', '.join(map(number, calibration.temperature))}."
        )
    )


@statement(METRICS)
def _describe_recalibrated(run: RunData) -> str | None:
    """Return the effect of the temperature on the main split."""
    calibration, (subset, evaluation) = run.result.calibration, run.evaluated.main
    if calibration is None or subset not in calibration.before:
        return None
    texts = []
    for level, metrics in shown_levels(evaluation):
        before = calibration.before[subset].get(level, {})
        each = [
            f"{metric_title(name, run.config.task)} {number(before.get(name))} before, {number(metrics.values[name])} after"
            for name in ("log_loss", "calibration_error")
            if name in metrics.values
        ]
        texts.append(f"{units_of(level)}: {', '.join(each)}")
    return f"Effect of the temperature, {SUBSET_NAMES[subset]}: {'; '.join(texts)}."


@statement(METRICS)
def _describe_failures(run: RunData) -> str | None:
    subset, evaluation = run.evaluated.main
    for level, metrics in reversed(list(shown_levels(evaluation))):
        if metrics.confusion:
            wrong = np.sum(metrics.confusion) - np.trace(metrics.confusion)
            hint = " report.html lists those with the highest confidence." if wrong else ""
            return f"{SUBSET_NAMES[subset].capitalize()}: {wrong} of {metrics.count} {units_of(level)} are decided wrongly.{hint}"
    return None


@statement(METRICS)
def _describe_limitations(run: RunData) -> str:
    return " ".join(limitations(run))


def limitations(run: RunData) -> Iterator[str]:
    """Yield sentences about what the metrics of a run do not show."""
    if "test" not in run.result.metrics:
        yield f"There is no test set: the metrics are of the validation {run.config.unit}, by which the model was chosen."
    if run.splits.get("split_by") == "site":
        yield "The test slides are from other sites than the training slides; no other data set was used."
    else:
        yield f"{OTHER_DATA_UNKNOWN}: only one data set was used."
    yield "Variation between splits and seeds is unknown: this is one run."
    for subset, evaluation in run.result.metrics.items():
        for note in (*remarks(evaluation), *evaluation.notes):
            yield f"{SUBSET_NAMES[subset].capitalize()}: {note}."


@statement(run_folder.MODEL, SPLITS)
def _describe_hashes(run: RunData) -> str:
    """Return the hash of the model, and the identifiers of the stores with the hash of the patches that were used."""
    model, texts = run.folder / run_folder.MODEL, []
    if model.is_file():
        with model.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        texts.append(f"SHA-256 of {run_folder.MODEL}: {digest}.")
    slides = sorted((str(entry["id"]), int(entry["crc"])) for entry in run.splits.get("slides", ()))
    digest = hashlib.sha256(repr(slides).encode()).hexdigest()
    stores = listed(run.splits.get("stores", ()))
    return " ".join([*texts, f"Stores: {stores}, SHA-256 of slides and patch checksums: {digest}."])


@statement(METRICS)
def _describe_metric_names(run: RunData) -> str:
    values = run.evaluated.main[1].finest.values
    names = dict.fromkeys(metric_title(name.partition(":")[0], run.config.task) for name in values)
    source = " (Van Calster et al. 2019)" if "calibration_slope" in values else ""
    plots = " Plots: ROC and precision-recall curves, reliability diagrams, and decision curves (Vickers and Elkin 2006)."
    return f"Metrics: {listed(list(names), most=30)}{source}.{plots if run.evaluated.task.of_classes else ''}"


@statement(METRICS)
def _describe_selection(run: RunData) -> str:
    return (
        f"The model of epoch {run.result.best_epoch} was chosen, which has {selection_rule(run)}."
    )


def selection_rule(run: RunData) -> str:
    """Return the property of the chosen epoch, such as "the lowest loss on validation"."""
    lowest_loss = run.config.monitor == "loss"
    rule = "lowest loss" if lowest_loss else f"best {main_metric(run.evaluated.main[1].finest)[0]}"
    return f"the {rule} on validation"


def describe_run(run: RunData) -> Description:
    """Return the statements about a run, by name. Those that it does not know are missing."""
    texts = {name: (describe(run), files) for name, (describe, files) in STATEMENTS.items()}
    return {name: (text, files) for name, (text, files) in texts.items() if text}
