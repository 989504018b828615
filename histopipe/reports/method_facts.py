"""What a run did: sentences about model, training and evaluation. None: the run does not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from histopipe.reports.data_facts import of_cross_validation
from histopipe.reports.run_data import RunData
from histopipe.runs import folder as run_folder
from histopipe.runs.result import METRICS
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig, parse_trainable
from histopipe.splits.splits import SPLITS
from histopipe.system.result import counted, listed

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
    if config.task == "multilabel" or task.positive is not None:
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
    if run.config.task not in ("classification", "multilabel"):
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


FACTS: dict[str, tuple[str, Callable[[RunData], str | None]]] = {
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
