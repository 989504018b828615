"""Train a model in a separate process; settings that a user left out, and advice after the training.

Left-out settings are chosen from the data and the network by simple rules: the recipe of a training. With a time budget,
what is trained, epochs and patches are chosen by the time of measured steps. Both are resolved once: `config.toml` of a
run, of a cross-validation and of a search holds the values. The rules were decided by measurement; see
`docs/design/recipes.md`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.selection import store_paths
from histopipe.errors import MachineShort, UsageError, reported_as
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.defaults import DEFAULTS, LITE, NEW, SMALL_CNN, default_model, parse_trainable
from histopipe.runs.observers import Observation
from histopipe.runs.run import TrainResult
from histopipe.runs.supervision import Supervision, supervise
from histopipe.runs.task_config import (
    CONFIGS,
    FORMER,
    PatchTrainConfig,
    changed_config,
    make_config,
    plain_values,
    read_config,
)
from histopipe.store.environment import no_store
from histopipe.store.store import Store
from histopipe.system.folders import CONFIG
from histopipe.system.forecast import spelled
from histopipe.system.output import Progress, counted, default_progress, message, use_progress
from histopipe.system.settings import check_known, declared_settings, flag, select_settings, takes
from histopipe.system.table_cells import refuse_unclear_event
from histopipe.system.tensorflow import in_cluster, load_quietly
from histopipe.system.worker_pool import WorkerDied, WorkerPool
from histopipe.tasks.choices import Subset

_ON_FEATURES: Mapping[str, Any] = {"model": "features", "trainable": "head", "head_copies": 1} | {
    **{"augment": ("none",), "stain_norm": "none", "time_budget": 0.0}
}
"""Settings of a training on features of patches, which cannot be others."""


def with_stores(
    settings: dict[str, Any], stores: str | Path | Sequence[str | Path] | None
) -> dict[str, Any]:
    """Return settings with one or several stores; None changes nothing."""
    paths = (stores,) if isinstance(stores, str | Path) else tuple(stores or ())
    return settings if stores is None else settings | {"stores": paths}


def chosen_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the recipe adds to those of a user.

    Raises:
        HistopipeError: there is no store, or it cannot be opened.
    """
    if settings.get("mil") is not None:
        return {}
    if settings.get("features") is not None:
        plain = plain_values(settings)
        other = [
            flag(name) for name, value in _ON_FEATURES.items() if plain.get(name, value) != value
        ]
        if other:
            raise UsageError(
                "--features",
                found=", ".join(other),
                expected="none of these: only the last layer is trained, on unchanged features",
            )
        declared = declared_settings(PatchTrainConfig)
        chosen = {n: value for n, value in _ON_FEATURES.items() if value != declared[n].default}
        return {name: value for name, value in chosen.items() if name not in settings}
    chosen = {}
    if settings.get("model") is None:
        stores = settings.get("stores") or declared_settings(PatchTrainConfig)["stores"].default
        with Store(store_paths(stores)[0]) as store:
            chosen["model"] = default_model(store.patch_size)
    is_lite = str({**settings, **chosen}["model"]).startswith("efficientnet-lite")
    untrained = ("none",) if is_lite else ("none", "auto")
    if settings.get("weights", "auto") not in untrained:
        defaults, (kind, _) = DEFAULTS["patches"], parse_trainable(settings.get("trainable", "all"))
        (values,) = (v for trained, v in defaults.items() if trained.partition(":")[0] == kind)
        chosen |= {n: value for n, value in values.items() if value != defaults[NEW].get(n)}
        # Features of all patches may take far longer; maps of features are too large.
        if settings.get("max_per_slide") or settings.get("task") == "segmentation":
            chosen.pop("head_copies", None)
    return {name: value for name, value in chosen.items() if name not in settings}


def with_recipe(
    settings: Mapping[str, Any], recorded: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return settings with those of the recipe, and report these.

    Args:
        settings: settings by name.
        recorded: all settings that a study began with. They take the place of the recipe and of defaults.

    Raises:
        UsageError: version 0.2 began the study.
        HistopipeError: as `chosen_settings`.
    """
    if recorded is not None:
        refuse_former(recorded)
        kind = CONFIGS[settings.get("mil") is not None]
        return {**FORMER, **select_settings(recorded, kind), **settings}
    refuse_unclear_event(settings.get("event"))
    chosen = chosen_settings(settings)
    if chosen:
        plain = {n: ",".join(v) if isinstance(v, tuple) else v for n, v in chosen.items()}
        texts = [f"{name.replace('_', ' ')} {value}" for name, value in plain.items()]
        message(f"settings by default: {', '.join(texts)}")
    return {**settings, **chosen}


@takes(declared_settings(*CONFIGS))
def train(
    stores: str | Path | Sequence[str | Path] | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    in_process: bool = False,
    callbacks: Sequence[Any] = (),
    progress: Progress | None = None,
    **settings: Any,
) -> TrainResult:
    """Train a patch model on stores, or with `mil=` a slide model on features.

    The training runs in a separate process, so its memory is freed and a crash does not affect this process.

    Args:
        stores: a store, or several with one patch size. Default: "patches.lmdb", or the stores of the resumed run.
        out: folder for the run.
        resume: continue the run in `out`, with its recorded settings and the given changes.
        in_process: train in this process. Keras keeps 4 to 50 MB of each model until the process ends. Running out of
            memory may kill the process. All trainings must use the devices of the first.
        callbacks: objects with `on_train_begin(logs)`, `on_epoch_end(epoch, logs)` and `on_train_end(logs)`, such as Keras
            callbacks, which are called in this process; each epoch once, also after a restart for memory. They have no
            `self.model`. With `in_process`, all methods of Keras callbacks are called, with the model.
        progress: where to show progress. Default: `default_progress()`.
        settings: settings by name, as in docs/reference/settings.md and as the flags of `histopipe train`.

    Returns:
        The metrics of the best model on validation and test, and the folder. Without validation, those of the last epoch.

    Raises:
        UsageError: a setting is unknown, or does not fit the data or the machine.
        NothingToDo: there is no store, or fewer than two classes.
        DamagedStore: a store or run is damaged.
        MachineShort: the disk is full, or memory ran out even with the smallest micro-batches.
        WorkerLost: another worker is lost.
        Interrupted: a signal stopped the training; the state is saved.

    Example:
        >>> result = train("patches.lmdb", out="runs/first", epochs=5)  # doctest: +SKIP
        >>> result.metrics["test"].patch.auc  # doctest: +SKIP
    """
    folder, settings = Path(out), with_stores(settings, stores)
    observation = Observation(() if in_process else callbacks, folder, resume=resume)
    for callback in callbacks if in_process else ():
        if not hasattr(callback, "set_model"):
            raise UsageError(
                "callbacks",
                found=type(callback).__name__,
                expected="Keras callbacks, with in_process=True",
            )
    if resume:
        run_folder.check(folder, resume=True)
        config = resumed_config(read_config(folder / CONFIG), settings)
    else:
        make_config(settings)  # checks them before a store is opened
        with use_progress(progress or default_progress()):
            config = make_config(with_recipe(settings))
    if not in_process:
        # Frequent mistakes are detected before TensorFlow is loaded, which takes seconds.
        if not (resume or in_cluster()):
            run_folder.check(folder, resume=False)
        for path in store_paths(config.stores) if isinstance(config, PatchTrainConfig) else ():
            if not path.exists():
                raise no_store(path)
    with use_progress(progress or default_progress()):
        config = within_budget(config, settings)
    if not in_process:
        watch = Supervision(progress=progress or default_progress(), epoch=observation.epoch)
        observation.begin()
        result = supervise(config, folder, watch=watch, resume=resume)
        observation.end()
        if config.more_time:
            watch.progress.message(config.more_time)
        return result
    with use_progress(progress or default_progress()):
        return cast(
            TrainResult,
            load_quietly("histopipe.training.trainer").train_here(
                config, folder, resume=resume, callbacks=callbacks
            ),
        )


_METRICS = {"r2": (0.05, 0.5), "c_index": (0.55, 0.7), "auc": (0.6, 0.9), "dice": (0.1, 0.8)}
"""Metrics of tasks in rows of `history.csv`: up to the first value one shows nothing, from the second it needs no advice."""
_GAP = 0.15
"""Difference between training and validation that shows overfitting."""
_FEWEST_PATIENTS, _MOST, _PERFECT = 10, 2, 0.999


def advise(
    config: TrainConfig,
    history: Sequence[Mapping[str, Any]],
    best_epoch: int,
    patients: int,
    shortages: Sequence[str] = (),
) -> str:
    """Return one line with what to try after a training; empty if nothing shows a weak setting.

    Args:
        config: settings of the training.
        history: rows of `history.csv`.
        best_epoch: epoch of the saved model, from 1; 0 for the covariates alone.
        patients: number of patients in all subsets.
        shortages: one line for each subset with less than half of its share.
    """
    texts = ["use features of another encoder: no epoch was better than the covariates alone"]
    if best_epoch:
        # First: without enough patients or patches in a subset, its figures mean little.
        texts = [
            *(f"split with another --seed, or use --folds: {text}" for text in shortages[:1]),
            *_advice(config, history[best_epoch - 1], len(history), patients),
        ]
    return f"to improve: {'; '.join(texts[:_MOST])}" if texts else ""


def _advice(
    config: TrainConfig, best: Mapping[str, Any], epochs: int, patients: int
) -> Iterator[str]:
    name = next((name for name in _METRICS if name in best), "auc")
    (chance, good), trained, validated = _METRICS[name], best.get(name), best.get(f"val_{name}")
    weak, on_patches = validated is None or validated < good, hasattr(config, "model")
    if weak and getattr(config, "model", "") == SMALL_CNN:
        yield f"use a network with trained weights (--model {LITE}; small-cnn is for tests)"
    if patients < _FEWEST_PATIENTS:
        yield f"use more than {counted(patients, 'patient')}, and --folds: the result depends on the split"
    if validated is not None and validated <= chance:
        yield (
            f"check labels and scale: validation is near chance ({name} {validated:.2f})"
            if on_patches
            else f"use features of another encoder: validation is near chance ({name} {validated:.2f})"
        )
    elif trained is not None and validated is not None and trained - validated > _GAP:
        how = "--augment flips,colour" if on_patches else "--dropout 0.5"
        yield (
            f"use more patients, or {how}: {name} {trained:.2f} in training, {validated:.2f} in validation"
        )
    elif (
        f"val_{name}" in best
        and best["epoch"] == config.epochs == epochs
        and (validated or 0) < _PERFECT
    ):
        # A fold has given splits, and is not continued after its end.
        resume = "--resume " if config.splits is None else ""
        yield f"train longer ({resume}--epochs {2 * epochs}): the last epoch was the best"


def refuse_former(recorded: Mapping[str, Any]) -> None:
    """Raise a UsageError if version 0.2 recorded the settings of a run: its loss and batch statistics were other ones."""
    if "task" not in recorded:
        raise UsageError(
            "the training cannot be resumed",
            found="one of version 0.2",
            expected="one of version 0.3 or later",
            todo="continue it with histopipe 0.2 if it has not ended, or train again",
        )


def resumed_config(recorded: Mapping[str, Any], changes: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of a resumed run: its recorded settings with changes.

    Raises:
        UsageError: a change would invalidate the training so far, or version 0.2 began it.
    """
    refuse_former(recorded)
    declared, before = declared_settings(*CONFIGS), plain_values(recorded)
    check_known(changes, declared)
    refused = [
        "STORES" if name == "stores" else flag(name)
        for name, value in plain_values(changes).items()
        if not declared[name].resume and value != before.get(name)
    ]
    if refused:
        raise UsageError(
            "--resume continues with the settings of the run",
            found=", ".join(refused),
            expected="only --out and "
            + ", ".join(entry.flag for entry in declared.values() if entry.resume),
        )
    return make_config({**FORMER, **recorded, **changes})


_PLANNED = 0.8
"""Share of the time that is planned: a few steps are not the whole training."""
_SHARE, _MOST_SECONDS = 0.02, 20.0
"""Share of the time for steps that are measured, training and prediction each; and the most seconds."""
_ALL = "more time would change nothing"
_BLOCK, _BLOCK_STEP = "last:1", 1.25
"""The last block, and the time of its step in times of a prediction: 1.0 on GlaS, and a margin."""
_FEWEST_EPOCHS, _FEWEST_PATCHES, _FEWER = 3, 8, 0.8
"""Fewest epochs, fewest patches of a slide, and the factor from one number of patches to the next."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Measured speed of a training.

    Attributes:
        step, prediction: seconds of a sample in a step of the training, and in a prediction.
        start: seconds until the first step.
        samples: (S,) int samples of each slide in each subset.
    """

    step: float
    prediction: float
    start: float
    samples: Mapping[Subset, NDArray[np.int64]]

    def seconds(self, config: TrainConfig, runs: int = 1) -> float:
        """Return the expected seconds of `runs` trainings. They share the features of a frozen network."""
        most = getattr(config, "patches_per_slide", 0) or math.inf
        samples = {subset: np.minimum(n, most) for subset, n in self.samples.items()}
        drawn = np.minimum(samples["train"], config.max_per_slide or math.inf).sum()
        validated, tested = samples["validation"].sum(), samples["test"].sum()
        copies = getattr(config, "head_copies", 0)
        once = self.prediction * (copies * drawn + validated + tested) if copies else 0.0
        of_block = _BLOCK_STEP * self.prediction
        step = min(self.step, of_block) if getattr(config, "trainable", "") == _BLOCK else self.step
        epoch = 0.0 if copies else drawn * step + validated * self.prediction
        last = 0.0 if copies else self.prediction * (validated + tested)
        return float(once + runs * (self.start + config.epochs * epoch + last))


def within_budget(config: TrainConfig, fixed: Mapping[str, Any], *, runs: int = 1) -> TrainConfig:
    """Return a configuration whose trainings take at most `time_budget`; without a budget, the same.

    The best of these that fits: all as configured; fewer epochs, but three; the last block; the last layer on features of
    augmented copies; without copies; and then fewer patches of each slide. `fixed` settings do not change. A choice is
    recorded in `more_time`, and not made again.

    Raises:
        UsageError: none fits, or this is one of several workers.
        MachineShort: memory ran out.
        HistopipeError: as a training.
    """
    budget = config.time_budget
    if not budget or config.more_time:
        return config
    if in_cluster():
        raise UsageError(
            "--time-budget", found="several workers (TF_CONFIG or Slurm)", expected="one machine"
        )
    message("measuring some steps for --time-budget")
    unchanged = {"head_copies": 0} if isinstance(config, PatchTrainConfig) else {}
    measured, limit = changed_config(config, **unchanged), min(_MOST_SECONDS, _SHARE * budget)
    ended = reported_as(
        MachineShort,
        "the measurement for --time-budget ended: probably out of memory",
        WorkerDied,
        todo="use a smaller --batch-size or --model",
    )
    with ended, WorkerPool(1) as pool:
        pace = pool.submit(_measured, measured, limit).result()
    return chosen(config, fixed, pace, runs)


def chosen(config: TrainConfig, fixed: Collection[str], pace: Pace, runs: int) -> TrainConfig:
    """Return the best configuration that fits the budget at a measured speed; see `within_budget`."""
    budget = spelled(config.time_budget)
    largest = max(int(n.max(initial=0)) for n in pace.samples.values())
    for changes in _plans(config, fixed, largest):
        planned = changed_config(config, **changes)
        seconds = pace.seconds(planned, runs)
        if seconds <= _PLANNED * config.time_budget:
            break
    else:
        raise UsageError(
            f"--time-budget {budget}",
            found=f"about {spelled(seconds / _PLANNED)}{_text(planned, changes, ' for ')}",
            expected="enough time for this",
            todo="give more time or fewer slides, and leave out --epochs, --trainable and --patches-per-slide",
        )
    message(f"--time-budget {budget}: about {spelled(seconds)}{_text(planned, changes, ' for ')}")
    minutes = math.ceil(pace.seconds(config, runs) / _PLANNED / 60)
    text = f"with --time-budget {minutes}m: {_text(config, changes)}" if changes else _ALL
    return changed_config(planned, more_time=text)


def _measured(config: TrainConfig, seconds: float) -> Pace:
    module = load_quietly("histopipe.training.pace", lean=True)
    return cast(Pace, module.measured_pace(config, seconds))


def _plans(config: TrainConfig, fixed: Collection[str], most: int) -> Iterator[dict[str, Any]]:
    """Yield changes of settings that are not fixed, the best ones first. Slides have at most `most` patches."""
    changes: dict[str, Any] = {}
    yield changes
    copies = getattr(config, "head_copies", 0)
    for epochs in range(config.epochs - 1, _FEWEST_EPOCHS - 1, -1):
        if "epochs" not in fixed and not copies:
            changes = {"epochs": epochs}
            yield changes
    if not isinstance(config, PatchTrainConfig):
        return
    if not ("trainable" in fixed or config.max_per_slide or config.used_weights == "none"):
        for trainable, kind in ((_BLOCK, "last:N"), ("head", "head")):
            values = {"trainable": trainable, **DEFAULTS["patches"][kind]}
            changes = {name: value for name, value in values.items() if name not in fixed}
            yield changes
    if changes.get("head_copies", copies) > 1 and "head_copies" not in fixed:
        changes = changes | {"head_copies": 1}
        yield changes
    while "patches_per_slide" not in fixed and (most := int(most * _FEWER)) >= _FEWEST_PATCHES:
        yield changes | {"patches_per_slide": most}


def _text(config: TrainConfig, changes: Mapping[str, Any], before: str = "") -> str:
    """Return the values of changed settings as text, after `before` if there is any."""
    texts = [
        f"{name.replace('_', ' ')} {getattr(config, name) or 'all'}"
        for name in ("trainable", "epochs", "head_copies", "patches_per_slide")
        if name in changes and (getattr(config, name) or name != "head_copies")
    ]
    return before * bool(texts) + ", ".join(texts)
