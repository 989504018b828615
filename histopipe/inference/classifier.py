"""Patch classifier of a finished run, with all settings that affect its predictions, and the options of `predict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.evaluation.evaluate import mean_thresholds
from histopipe.evaluation.groups import check_subgroup, labels_columns
from histopipe.evaluation.temperature import tempered
from histopipe.inference.options import PredictSettings
from histopipe.inference.slide_run import BATCHES, Network
from histopipe.inference.trained_patches import TrainedPatches
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import METRICS, read_result
from histopipe.runs.task_config import PatchTrainConfig, load_config
from histopipe.slides.options import SLIDE_FILES
from histopipe.slides.tables import SlideLabel, SlideNames, read_labels, table_columns
from histopipe.splits.slide_table import COLUMNS
from histopipe.splits.splits import SPLITS, trained_on
from histopipe.splits.subsets import LabelsFrom
from histopipe.system.csv_files import NA_VALUES, column_key, nfc
from histopipe.system.files import read_json
from histopipe.system.settings import declared_settings
from histopipe.system.tensorflow import load_quietly
from histopipe.tasks.predictions import ThresholdsByLevel
from histopipe.tasks.task import EvaluationSettings


@dataclass(frozen=True, slots=True)
class Classifier:
    """Patch classifier of a finished run, ready to predict."""

    folder: Path
    network: Network
    """Maps patches to the probabilities of all models, each in the order of `classes`."""
    models: int
    """Number of models."""
    classes: tuple[str, ...]
    patches: TrainedPatches
    labels_from: LabelsFrom
    evaluation_settings: EvaluationSettings
    thresholds: ThresholdsByLevel
    """Decision thresholds, chosen on the validation patches of the run; means of several models."""
    sha256: str
    """SHA-256 of the weights."""
    temperatures: tuple[tuple[float, ...], ...] = ()
    """Temperature of each model; empty if they are not calibrated."""
    in_training: frozenset[tuple[str, str]] = frozenset()
    """Slides on which a model was trained or validated, and their patients."""

    def calibrated(self, probability: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return (N, M, C) probabilities of the models with their temperatures."""
        if not self.temperatures:
            return probability
        by_model = [
            tempered(probability[:, i], temperature)
            for i, temperature in enumerate(self.temperatures)
        ]
        return np.stack(by_model, axis=1).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class PredictOptions(PredictSettings):
    """Options of `predict`, with the rule that divides the patches of a slide into batches."""

    batch_rule: str | None = BATCHES

    def __post_init__(self) -> None:
        if labels_columns(self.subgroup) and self.labels is None:
            raise UsageError(
                "--subgroup", found=f"{', '.join(labels_columns(self.subgroup))}, but no --labels",
                expected="a CSV file with these columns",
            )  # fmt: skip

    @property
    def tiling(self) -> dict[str, Any]:
        """The tiling settings that differ from those of the training."""
        values = {name: getattr(self, name) for name in ("overlap", "tissue", "tissue_threshold")}
        return {name: value for name, value in values.items() if value is not None}

    def check_for_stores(self) -> None:
        """Raise a UsageError if an option is given that applies to slide files only."""
        for name, declared in declared_settings(PredictSettings).items():
            if declared.about.group == SLIDE_FILES and getattr(self, name) != declared.default:
                raise UsageError(
                    declared.flag, found="a store", expected="slides",
                    todo="remove the option: the patches of a store are already tiled",
                )  # fmt: skip

    def read_labels(self, ids: Sequence[str]) -> Mapping[str, SlideLabel] | None:
        """Read the labels file, if there is one, for slides with these ids."""
        if self.labels is None:
            return None
        return read_labels(
            Path(self.labels), SlideNames(ids), groups=labels_columns(self.subgroup),
            allow_extra=self.allow_extra_rows, na=NA_VALUES if self.na is None else self.na,
        )  # fmt: skip

    def completed_by(self, config: TrainConfig) -> PredictOptions:
        """Return the options with missing values and subgroups of the training whose columns are in the labels file."""
        columns = set(COLUMNS)
        if self.labels is not None:
            columns.update(table_columns(Path(self.labels)))
        names = {
            subgroup: column_key(check_subgroup(subgroup)[0])
            for subgroup in (*config.subgroup, *self.subgroup)
        }
        requested = {names[subgroup] for subgroup in self.subgroup}
        present = (
            subgroup
            for subgroup in config.subgroup
            if names[subgroup] in columns and names[subgroup] not in requested
        )
        return replace(
            self, subgroup=(*self.subgroup, *present), na=config.na if self.na is None else self.na
        )


def load_classifier(folders: Sequence[Path], *, devices: str, batch_size: int) -> Classifier:
    """Load the model of a run onto its devices; or those of several runs, whose probabilities are to be averaged.

    Raises:
        UsageError: a run is not finished, its model predicts no classes, or the models differ in classes or patches.
        DamagedStore: a run cannot be read.
        MachineShort: TensorFlow is not installed.
    """
    runs = [_without_network(folder) for folder in folders]
    keras_network = load_quietly("histopipe.inference.keras_network")
    network = keras_network.KerasNetwork(
        lambda: keras_network.load_run_models(folders), name=folders[0].name, devices=devices,
        batch_size=batch_size,
    )  # fmt: skip
    first, *rest = runs
    for other in rest:
        for name in ("classes", "spec", "patch_mpp", "stain_norm", "labels_from", "calibrate"):
            if other[name] != first[name]:
                raise UsageError(
                    f"{other['folder']}: {name}", found=other[name],
                    expected=f"{first[name]}, as in {first['folder']}",
                )  # fmt: skip
    return Classifier(
        folders[0], network, len(folders), first["classes"],
        TrainedPatches(
            folders[0], network.patch_size, first["spec"], first["patch_mpp"], first["stain_norm"]
        ),
        first["labels_from"], first["evaluation_settings"], mean_thresholds([run["thresholds"] for run in runs]),
        network.sha256, temperatures=tuple(run["temperature"] for run in runs if run["temperature"]),
        in_training=frozenset().union(*(trained_on(folder / SPLITS) for folder in folders)),
    )  # fmt: skip


def _without_network(folder: Path) -> dict[str, Any]:
    """Return what the files of a run record of its model."""
    result = read_result(folder)
    config = load_config(folder / run_folder.CONFIG)
    if not isinstance(config, PatchTrainConfig) or config.task != "classification":
        raise UsageError(
            f"the model of {folder} predicts no classes of patches", found=f"--task {config.task}",
            expected="--task classification", todo="use its model.keras, which opens in plain Keras",
        )  # fmt: skip
    metrics = read_json(folder / METRICS)
    return {
        "folder": folder, "classes": tuple(map(nfc, metrics["classes"])), "spec": metrics.get("spec"),
        "patch_mpp": metrics.get("patch_mpp"), "stain_norm": config.stain_norm,
        "labels_from": config.labels_from, "evaluation_settings": config.evaluation_settings,
        "thresholds": result.metrics["validation"].thresholds, "calibrate": config.calibrate,
        "temperature": result.calibration.temperature if result.calibration else (),
    }  # fmt: skip
