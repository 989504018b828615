"""What a run did: sentences about data, model and training. None: the run does not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from histopipe.reports.fact_texts import listed
from histopipe.reports.run_data import RunData
from histopipe.runs import folder as run_folder
from histopipe.runs.result import METRICS
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig


def _outcome(run: RunData) -> str:
    if run.config.task == "classification":
        return f"Classes {listed(run.classes)}"
    return f"{run.config.task.capitalize()} of {listed(run.config.target_columns)}"


def _network(run: RunData) -> str:
    config = run.config
    if isinstance(config, BagTrainConfig):
        encoders = [
            str((it or {}).get("encoder", "unknown")) for it in run.metrics_file.get("encoders", ())
        ]
        encoder = f" on features of the encoder {listed(encoders)}" if encoders else ""
        return f"Multiple-instance learning with {config.pooling} pooling{encoder}, in {config.bag} bags"
    model = getattr(config, "model", "")
    trainable = getattr(config, "trainable", "all")
    return f"Network {model}, trained weights: {trainable}, dropout {config.dropout:g}"


def _inputs(run: RunData) -> str | None:
    spec = run.metrics_file.get("spec")
    covariates = getattr(run.config, "covariates", ())
    more = f", and the covariates {listed(covariates)}" if covariates else ""
    if isinstance(spec, dict):
        side, mpp = spec.get("patch_size"), run.metrics_file.get("patch_mpp")
        scale = f" at {mpp:g} µm per pixel" if isinstance(mpp, int | float) else ""
        return f"RGB patches of {side} × {side} pixels{scale}{more}"
    return f"Features of all patches of a {getattr(run.config, 'bag', 'slide')}{more}"


def _outputs(run: RunData) -> str:
    kinds = {
        "classification": f"A probability for each class ({listed(run.classes)}), with a sum of 1",
        "multilabel": f"A probability for each label ({listed(run.config.target_columns)})",
        "regression": f"A value for each column ({listed(run.config.target_columns)})",
        "survival": "A risk, and the probability of survival at ten times",
    }
    return kinds[run.config.task]


def _tiling(run: RunData) -> str | None:
    spec = run.metrics_file.get("spec")
    if not isinstance(spec, dict):
        return None
    scale = f"{spec['mpp']:g} µm per pixel" if spec.get("mpp") else f"level {spec.get('level')}"
    return (
        f"Patches of {spec.get('patch_size')} pixels at {scale}, overlap {spec.get('overlap')} pixels, "
        f"tissue detection {spec.get('tissue')}, at least {spec.get('tissue_threshold'):.0%} tissue, "
        f"resampling {spec.get('resample')}, JPEG quality {spec.get('quality')}"
    )


def _preprocessing(run: RunData) -> str | None:
    stain = getattr(run.config, "stain_norm", None)
    return None if stain is None else f"Stain normalization: {stain}"


def _patch_selection(run: RunData) -> str | None:
    config = run.config
    if not isinstance(config, PatchTrainConfig):
        return None
    chosen = config.labelling.patch_filter
    bounds = (
        f"tissue at least {chosen.min_tissue:g}, focus at least {chosen.min_focus:g}, pen at most "
        f"{chosen.exclude_pen:g}, folds and black at most {chosen.exclude_dark:g}"
    )
    cap = (
        f"; at most {config.max_per_slide} patches per slide and epoch"
        if config.max_per_slide
        else ""
    )
    return (
        f"Patches with {bounds}{cap}" if chosen.active or cap else f"All patches with tissue{cap}"
    )


def _labels(run: RunData) -> str:
    by_patch = getattr(run.config, "labels_from", "slide") == "annotation"
    return "Class of each patch from annotations" if by_patch else "One label per slide or patient"


def _split(run: RunData) -> str:
    splits = run.splits
    shares = " / ".join(f"{it:.0%}" for it in splits.get("fractions", ()))
    return f"Random split, stratified by class, seed {splits.get('seed')}, training / validation / test {shares}"


def _split_level(run: RunData) -> str:
    return f"Disjoint by {run.splits.get('split_by')}"


def _software(run: RunData) -> str:
    facts = run.metrics_file
    versions = [
        f"{name} {facts[name]}" for name in ("histopipe", "tensorflow", "keras") if name in facts
    ]
    return ", ".join([*versions, f"Python {facts.get('environment', {}).get('python', 'unknown')}"])


def _hardware(run: RunData) -> str:
    environment = run.metrics_file.get("environment", {})
    gpus = listed(environment.get("gpus") or ["no GPU"])
    return (
        f"{environment.get('cores')} CPU cores, {gpus}; training took {run.result.seconds:,.0f} s"
    )


def _weights(run: RunData) -> str | None:
    weights = getattr(run.config, "weights", None)
    if weights is None:
        return "Random initial weights of the slide model"
    return (
        "Random initial weights" if weights == "none" else f"Initial weights: {Path(weights).name}"
    )


def _training(run: RunData) -> str:
    config, result = run.config, run.result
    return (
        f"Optimizer {config.optimizer}, learning rate {config.learning_rate:g} ({config.schedule}), batch size "
        f"{config.batch_size}, {result.epochs} of at most {config.epochs} epochs, patience {config.patience}, "
        f"label smoothing {config.label_smoothing:g}, precision {config.precision}, seed {config.seed}"
    )


def _augmentation(run: RunData) -> str | None:
    chosen = getattr(run.config, "augment", None)
    return None if chosen is None else f"Augmentation: {listed(chosen)}"


def _intervals(run: RunData) -> str:
    return (
        f"95 % confidence intervals with patients as units: score intervals, or {run.config.resamples:,} bootstrap "
        "resamples of the patients"
    )


def _explanations(run: RunData) -> str | None:
    if isinstance(run.config, BagTrainConfig):
        return "Attention and contribution of each patch"
    return "Heatmaps of patch predictions"


def _threshold(run: RunData) -> str | None:
    if run.config.task not in ("classification", "multilabel"):
        return None
    return f"Threshold by the rule {run.config.threshold}, chosen on validation"


def _imbalance(run: RunData) -> str:
    config = run.config
    return f"Class weights: {config.class_weights}; sampling balance: {config.balance}"


def _predictions(run: RunData) -> str:
    if isinstance(run.config, BagTrainConfig):
        return f"The model predicts each {run.config.bag}"
    return "Probabilities of patches, aggregated to slides and patients by mean, top-k and majority"


def _settings_file(_: RunData) -> str:
    return f"All settings are in {run_folder.CONFIG}, the split is in {run_folder.SPLITS}"


FACTS: dict[str, tuple[str, Callable[[RunData], str | None]]] = {
    "outcome": (METRICS, _outcome),
    "network": (run_folder.CONFIG, _network),
    "inputs": (METRICS, _inputs),
    "outputs": (METRICS, _outputs),
    "tiling": (METRICS, _tiling),
    "preprocessing": (run_folder.CONFIG, _preprocessing),
    "patch_selection": (run_folder.CONFIG, _patch_selection),
    "labels": (run_folder.CONFIG, _labels),
    "split": (run_folder.SPLITS, _split),
    "split_level": (run_folder.SPLITS, _split_level),
    "software": (METRICS, _software),
    "hardware": (METRICS, _hardware),
    "weights": (run_folder.CONFIG, _weights),
    "training": (run_folder.CONFIG, _training),
    "augmentation": (run_folder.CONFIG, _augmentation),
    "intervals": (run_folder.CONFIG, _intervals),
    "explanations": (run_folder.CONFIG, _explanations),
    "threshold": (run_folder.CONFIG, _threshold),
    "imbalance": (run_folder.CONFIG, _imbalance),
    "predictions": (run_folder.CONFIG, _predictions),
    "ensemble": (run_folder.CONFIG, lambda _: "One model, no ensemble"),
    "settings_file": (run_folder.CONFIG, _settings_file),
}
"""Sentence by name, with the file that it comes from."""
