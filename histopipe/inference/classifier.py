"""Patch classifier of a finished run, with all settings that affect its predictions, and the options of `predict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.dataset.options import LabelsFrom, OnError
from histopipe.errors import UsageError
from histopipe.evaluation.evaluate import JudgeSettings, Thresholds
from histopipe.evaluation.metrics import Metrics
from histopipe.inference.slide_run import Network
from histopipe.inference.trained_patches import TrainedPatches
from histopipe.runs import folder as run_folder
from histopipe.runs.result import METRICS, read_result
from histopipe.runs.task_config import PatchTrainConfig, load_config
from histopipe.slides.tables import SlideLabel, SlideNames, read_labels
from histopipe.system.files import read_json
from histopipe.system.tensorflow import load_quietly


@dataclass(frozen=True, slots=True)
class Classifier:
    """Patch classifier of a finished run, ready to predict."""

    folder: Path
    network: Network
    """Maps patches to probabilities, in the order of `classes`."""
    classes: tuple[str, ...]
    patches: TrainedPatches
    labels_from: LabelsFrom
    judging: JudgeSettings
    thresholds: Thresholds
    """Decision thresholds, chosen on the validation patches of the run."""
    sha256: str
    """SHA-256 of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """Options of `predict` for reading patches. `tiling` holds the tiling settings that differ from the training."""

    batch_size: int = 64
    labels: str | Path | None = None
    allow_extra_rows: bool = False
    on_error: OnError = "raise"
    tiling: Mapping[str, Any]
    mpp_csv: str | Path | None = None
    default_mpp: float | None = None
    max_unreadable: float = 0.01
    workers: int | None = None

    def check_for_stores(self) -> None:
        """Raise a UsageError if an option is given that applies to slide files only."""
        plain = PredictOptions(tiling={})
        names = ("mpp_csv", "default_mpp", "max_unreadable", "workers")
        given = [*self.tiling, *(n for n in names if getattr(self, n) != getattr(plain, n))]
        if given:
            raise UsageError(
                f"--{given[0].replace('_', '-')}", found="a store", expected="slides",
                todo="remove the option: the patches of a store are already tiled",
            )  # fmt: skip

    def read_labels(self, ids: Sequence[str]) -> Mapping[str, SlideLabel] | None:
        """Read the labels file, if there is one, for slides with these ids."""
        if self.labels is None:
            return None
        return read_labels(Path(self.labels), SlideNames(ids), allow_extra=self.allow_extra_rows)


def load_classifier(folder: Path, *, devices: str, batch_size: int) -> Classifier:
    """Load the model of a run onto its devices.

    Raises:
        UsageError: there is no finished run, or its model takes bags of features.
        DamagedStore: the run cannot be read.
        MachineShort: TensorFlow is not installed.
    """
    run_folder.check_one_run(folder)
    result = read_result(folder)
    config = load_config(folder / run_folder.CONFIG)
    if not isinstance(config, PatchTrainConfig):
        raise UsageError(
            f"the model of {folder} takes bags of features, not patches",
            todo="use the predictions and attention in its folder; to predict other slides, train with "
            "them as test slides (--splits)",
        )  # fmt: skip
    if config.task != "classification":
        raise UsageError(
            f"the model of {folder} predicts no classes", found=f"--task {config.task}",
            expected="--task classification", todo="use its model.keras, which opens in plain Keras",
        )  # fmt: skip
    metrics = read_json(folder / METRICS)
    keras_network = load_quietly("histopipe.inference.keras_network")
    network = keras_network.KerasNetwork(
        lambda: keras_network.load_run_model(folder), name=folder.name, devices=devices,
        batch_size=batch_size,
    )  # fmt: skip
    validation = result.metrics["validation"].named() if "validation" in result.metrics else ()
    return Classifier(
        folder, network, tuple(metrics["classes"]),
        TrainedPatches(
            folder, network.patch_size, metrics.get("spec"), metrics.get("patch_mpp"), config.stain_norm
        ),
        config.labels_from, config.judging,
        {name: (it.threshold, None) for name, it in validation if isinstance(it, Metrics)},
        network.sha256,
    )  # fmt: skip
