"""Slide models of finished runs, with all that their predictions depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.errors import DamagedStore, UsageError
from histopipe.runs import folder as run_folder
from histopipe.runs.result import METRICS, is_finished, read_result
from histopipe.runs.task_config import BagTrainConfig, load_config
from histopipe.splits.covariates import Covariates
from histopipe.system.csv_files import nfc
from histopipe.system.files import read_json
from histopipe.system.progress import message
from histopipe.system.tensorflow import load_quietly
from histopipe.tasks.predictions import ThresholdsByLevel
from histopipe.tasks.registry import make_task
from histopipe.tasks.task import EvaluationSettings, Task

if TYPE_CHECKING:
    from histopipe.inference.bag_network import BagNetwork


@dataclass(frozen=True, slots=True)
class TrainedBags:
    """The slide model of a finished run."""

    folder: Path
    config: BagTrainConfig
    network: BagNetwork
    task: Task
    """Task of the training, with the form of the predictions."""
    covariates: Covariates | None
    encoders: tuple[Mapping[str, Any] | None, ...]
    """Record of the encoder of each feature set; None for those of other tools."""
    thresholds: ThresholdsByLevel
    """Chosen on the validation bags."""
    temperature: tuple[float, ...] = ()
    """Of the probabilities; empty if they are not calibrated."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Columns of the labels file with the target; none for classification."""
        return () if self.task.of_classes else self.task.columns

    @property
    def evaluation_settings(self) -> EvaluationSettings:
        """Settings of the evaluation."""
        return self.config.evaluation_settings


def run_folders(folder: Path) -> list[Path]:
    """Return the folder of a run, or the folders of the finished folds of a cross-validation.

    Raises:
        UsageError: no fold is finished.
    """
    if not run_folder.is_cross_validation(folder):
        return [folder]
    folds = sorted(folder.glob("fold-*"), key=lambda path: (len(path.name), path.name))
    done = [path for path in folds if is_finished(path)]
    if not done:
        raise UsageError(
            f"{folder} has no finished fold", todo="continue it with `histopipe train --resume`"
        )
    if len(done) < len(folds):
        message(f"warning: {len(folds) - len(done)} of {len(folds)} folds are not finished")
    return done


def load_bags(folder: Path, *, devices: str) -> TrainedBags:
    """Load the slide model of a finished run.

    Raises:
        UsageError: there is no finished run.
        DamagedStore: the run cannot be read.
        MachineShort: TensorFlow is not installed.
    """
    result = read_result(folder)
    config = load_config(folder / run_folder.CONFIG)
    assert isinstance(config, BagTrainConfig)  # noqa: S101 - the caller has checked it
    metrics = read_json(folder / METRICS)
    try:
        covariates = (
            Covariates.from_json(metrics["covariates"]) if "covariates" in metrics else None
        )
        classes = tuple(map(nfc, metrics["classes"]))
        task = make_task(config.task, metrics.get("targets", ()), classes)
        network_module = load_quietly("histopipe.inference.bag_network")
        network = network_module.load_bag_network(
            folder, config, metrics.get("objective", {}), devices=devices,
            outputs=len(classes if task.of_classes else task.columns),
            covariates=0 if covariates is None else len(covariates.inputs),
        )  # fmt: skip
        return TrainedBags(
            folder, config, network, network.described(task), covariates, _encoders(metrics, config),
            result.metrics["validation"].thresholds,
            result.calibration.temperature if result.calibration else (),
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise DamagedStore(
            f"{folder / METRICS} is damaged, or of an earlier version", found=repr(error)[:200],
            todo=f"evaluate the model again with `histopipe train --resume --out {folder}`",
        ) from error  # fmt: skip


def _encoders(
    metrics: Mapping[str, Any], config: BagTrainConfig
) -> tuple[Mapping[str, Any] | None, ...]:
    encoders: Sequence[Mapping[str, Any] | None] = metrics.get("encoders") or [None] * len(
        config.mil
    )
    return tuple(encoders)


def check_alike(models: Sequence[TrainedBags]) -> None:
    """Check that models can be averaged: the same task, outputs, inputs and encoders.

    Raises:
        UsageError: they differ.
    """
    first, *rest = models
    for other in rest:
        for name, value, required in (
            ("task", other.task.name, first.task.name),
            ("classes", other.task.classes, first.task.classes),
            ("targets", other.targets, first.targets),
            ("--bag", other.config.bag, first.config.bag),
            ("--covariates", other.config.covariates, first.config.covariates),
            ("features per patch", other.network.dimension, first.network.dimension),
        ):
            if value != required:
                raise UsageError(
                    f"{other.folder}: {name}",
                    found=value,
                    expected=f"{required}, as in {first.folder}",
                )
