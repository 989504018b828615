"""Patch classifier of a finished run, with all settings that affect its predictions, and the patches that it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import StainNorm
from histopipe.errors import ScaleError, UsageError
from histopipe.evaluation.evaluate import mean_thresholds, tempered
from histopipe.geometry import Mpp, same_scale
from histopipe.inference.slide_run import Network
from histopipe.runs import folder as run_folder
from histopipe.runs.result import METRICS, read_result
from histopipe.runs.task_config import PatchTrainConfig, load_config
from histopipe.splits.splits import SPLITS, trained_on
from histopipe.splits.subsets import LabelsFrom
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.csv_files import nfc
from histopipe.system.files import read_json
from histopipe.system.output import Progress
from histopipe.system.tensorflow import load_quietly
from histopipe.tasks.predictions import ThresholdsByLevel
from histopipe.tasks.task import EvaluationSettings
from histopipe.tiling.spec import TilingSpec, recorded_tissue, resolved_tissue, spec_from_json


@dataclass(frozen=True, slots=True)
class PatchRequirements:
    """The patches that a model takes: those of its training. `owner` is the folder of the run, for messages."""

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


def check_scale(record: SlideRecord, required: PatchRequirements) -> None:
    """Check that the patches of a slide have the scale of the training patches.

    The scales can differ if patches were read from a pyramid level without resampling.

    Raises:
        ScaleError: the scales differ.
    """
    mpp, expected = record.patch_mpp, required.patch_mpp
    if mpp is None or expected is None or same_scale(Mpp(mpp), Mpp(expected)):
        return
    raise ScaleError(
        f"{record.id}: the scale of its patches differs from the training patches of {required.owner}",
        found=f"{mpp:g} µm per pixel", expected=f"{expected:g}",
        todo="train on patches ingested with --mpp, which selects a level for each slide",
    )  # fmt: skip


def check_store(store: Store, required: PatchRequirements) -> None:
    """Check that the patches of a store have the size and scale of the training patches.

    Raises:
        UsageError, ScaleError: size or scale differ.
    """
    if store.patch_size != required.patch_size:
        raise UsageError(
            f"{store.path}: the size of its patches differs from the training patches of {required.owner}",
            found=f"{store.patch_size} pixels", expected=f"{required.patch_size}",
        )  # fmt: skip
    for record in store.complete.values() if store.spec.get("level") is not None else ():
        check_scale(record, required)
    names = ("mpp", "level")
    spec = required.spec
    if spec is not None and any(store.spec.get(name) != spec.get(name) for name in names):
        raise UsageError(
            f"{store.path}: the scale of its patches differs from the training patches of {required.owner}",
            found=", ".join(f"{name} {store.spec.get(name)}" for name in names),
            expected=", ".join(f"{name} {spec.get(name)}" for name in names),
            todo="ingest the slides with the settings of the training",
        )  # fmt: skip


def spec_for_slides(
    required: PatchRequirements, tiling: Mapping[str, Any], progress: Progress
) -> TilingSpec:
    """Return the tiling of the training, without the parts that do not apply to other slides.

    Raises:
        UsageError: the tiling of the training is unknown.
    """
    spec = required.spec
    if spec is None:
        raise UsageError(
            f"{required.owner} does not record the tiling of its patches, and its store is missing",
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
    patches: PatchRequirements
    labels_from: LabelsFrom
    evaluation_settings: EvaluationSettings
    thresholds: ThresholdsByLevel
    """Decision thresholds, chosen on the validation patches of the run; means of several models."""
    temperatures: tuple[tuple[float, ...], ...] = ()
    """Temperature of each model; empty if they are not calibrated."""
    in_training: frozenset[tuple[str, str]] = frozenset()
    """Slides on which a model was trained or validated, and their patients."""

    def calibrated(self, probability: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return (N, M, C) probabilities of the models with their temperatures."""
        if not self.temperatures:
            return probability
        by_model = map(tempered, probability.swapaxes(0, 1), self.temperatures)
        return np.stack([*by_model], axis=1).astype(np.float32)


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
        PatchRequirements(
            folders[0], network.patch_size, first["spec"], first["patch_mpp"], first["stain_norm"]
        ),
        first["labels_from"], first["evaluation_settings"], mean_thresholds([run["thresholds"] for run in runs]),
        temperatures=tuple(run["temperature"] for run in runs if run["temperature"]),
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
