"""Patch classifier of a finished run, with all settings that affect its predictions, and the options of `predict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import StainNorm
from histopipe.errors import ScaleError, UsageError
from histopipe.evaluation.evaluate import mean_thresholds, tempered
from histopipe.evaluation.subgroups import check_subgroup, labels_columns
from histopipe.geometry import Mpp, same_scale
from histopipe.inference.options import PredictSettings
from histopipe.inference.slide_run import BATCHES, Network
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import METRICS, read_result
from histopipe.runs.task_config import PatchTrainConfig, load_config
from histopipe.slides.options import SLIDE_FILES
from histopipe.slides.tables import SlideLabel, SlideNames, read_labels, table_columns
from histopipe.splits.slide_table import COLUMNS
from histopipe.splits.splits import SPLITS, trained_on
from histopipe.splits.subsets import LabelsFrom
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.csv_files import NA_VALUES, column_key, nfc
from histopipe.system.files import read_json
from histopipe.system.output import Progress
from histopipe.system.settings import declared_settings
from histopipe.system.tensorflow import load_quietly
from histopipe.tasks.predictions import ThresholdsByLevel
from histopipe.tasks.task import EvaluationSettings
from histopipe.tiling.spec import TilingSpec, recorded_tissue, resolved_tissue, spec_from_json


@dataclass(frozen=True, slots=True)
class TrainedPatches:
    """The patches of a training. `owner` is the folder of the run, for messages."""

    owner: Path
    patch_size: int
    spec: Mapping[str, Any] | None
    """Tiling of the patches; None if it is not recorded."""
    patch_mpp: float | None
    stain_norm: StainNorm

    def fit(self, store: Store) -> bool:
        """Return whether the patches of a store have this size and scale."""
        try:
            check_store(store, self)
        except (UsageError, ScaleError):
            return False
        return True


def check_scale(record: SlideRecord, trained: TrainedPatches) -> None:
    """Check that the patches of a slide have the scale of the training patches.

    The scales can differ if patches were read from a pyramid level without resampling.

    Raises:
        ScaleError: the scales differ.
    """
    mpp, expected = record.patch_mpp, trained.patch_mpp
    if mpp is None or expected is None or same_scale(Mpp(mpp), Mpp(expected)):
        return
    raise ScaleError(
        f"{record.id}: the scale of its patches differs from the training patches of {trained.owner}",
        found=f"{mpp:g} µm per pixel", expected=f"{expected:g}",
        todo="train on patches ingested with --mpp, which selects a level for each slide",
    )  # fmt: skip


def check_store(store: Store, trained: TrainedPatches) -> None:
    """Check that the patches of a store have the size and scale of the training patches.

    Raises:
        UsageError, ScaleError: size or scale differ.
    """
    if store.patch_size != trained.patch_size:
        raise UsageError(
            f"{store.path}: the size of its patches differs from the training patches of {trained.owner}",
            found=f"{store.patch_size} pixels", expected=f"{trained.patch_size}",
        )  # fmt: skip
    for record in store.complete.values() if store.spec.get("level") is not None else ():
        check_scale(record, trained)
    names = ("mpp", "level")
    spec = trained.spec
    if spec is not None and any(store.spec.get(name) != spec.get(name) for name in names):
        raise UsageError(
            f"{store.path}: the scale of its patches differs from the training patches of {trained.owner}",
            found=", ".join(f"{name} {store.spec.get(name)}" for name in names),
            expected=", ".join(f"{name} {spec.get(name)}" for name in names),
            todo="ingest the slides with the settings of the training",
        )  # fmt: skip


def spec_for_slides(
    trained: TrainedPatches, tiling: Mapping[str, Any], progress: Progress
) -> TilingSpec:
    """Return the tiling of the training, without the parts that do not apply to other slides.

    Raises:
        UsageError: the tiling of the training is unknown.
    """
    spec = trained.spec
    if spec is None:
        raise UsageError(
            f"{trained.owner} does not record the tiling of its patches, and its store is missing",
            todo="ingest the slides with the settings of the training, and predict the store",
        )
    tiling, algorithms = dict(tiling), spec.get("algorithms")
    all_tissue = "all patches with tissue are predicted"
    if isinstance(algorithms, Mapping) and algorithms.get("grid") == "imported-1":
        progress.message(f"the training patches were chosen by another tool: {all_tissue}")
        tiling.setdefault("tissue", "otsu")
    if spec.get("roi") is not None:
        progress.message(f"the training patches were in the region {spec['roi']!r}: {all_tissue}")
    if recorded_tissue(spec) == "masks" or spec.get("exclude"):
        progress.message(f"the tissue of the training was in files of masks: {all_tissue}")
        tiling.setdefault("tissue", spec.get("tissue_fallback", "otsu"))
    elif recorded_tissue(spec) == "model":
        progress.message("the tissue of the training was found by a network: --tissue otsu is used")
        tiling.setdefault("tissue", "otsu")
    if "tissue" in tiling:
        tiling["tissue"] = resolved_tissue(tiling["tissue"], spec)
    return spec_from_json(spec, **tiling)


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
            if declared.group == SLIDE_FILES and getattr(self, name) != declared.default:
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
    keras_network = load_quietly("histopipe.inference.networks")
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
    if not isinstance(config, PatchTrainConfig) or not config.task_type.of_classes:
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
