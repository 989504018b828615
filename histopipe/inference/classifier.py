"""A run's model, with all that its predictions go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.dataset.options import LabelsFrom, StainNorm
from histopipe.errors import ScaleError, UsageError
from histopipe.evaluation.evaluate import JudgeSettings, Thresholds
from histopipe.geometry import Mpp, same_scale
from histopipe.inference.stream import Network
from histopipe.runs import folder as run_folder
from histopipe.runs.folder import check_one_run
from histopipe.runs.result import METRICS, TrainResult, read_result
from histopipe.runs.task_config import PatchTrainConfig, load_config
from histopipe.store.record import SlideRecord
from histopipe.system.files import read_json
from histopipe.system.tensorflow import load_quietly


@dataclass(frozen=True, slots=True)
class Classifier:
    """A finished run on patches, ready to predict.

    Attributes:
        folder: the run's.
        network: patches to probabilities, on the devices asked for.
        classes: names, by number.
        patch_size: side of the patches that it takes.
        spec: how the patches that it was trained on were made; None where the run does not say.
        patch_mpp: their scale; None where that is not known.
        stain_norm: what their stain was made to be.
        labels_from: what its classes are of.
        judging: what it was judged by.
        thresholds: as they were chosen on validation.
        sha256: of its weights.
    """

    folder: Path
    network: Network
    classes: tuple[str, ...]
    patch_size: int
    spec: Mapping[str, Any] | None
    patch_mpp: float | None
    stain_norm: StainNorm
    labels_from: LabelsFrom
    judging: JudgeSettings
    thresholds: Thresholds
    sha256: str


def load_classifier(folder: Path, *, devices: str, batch_size: int) -> Classifier:
    """The model of a run's folder.

    Args:
        folder: the run's.
        devices: as for training.
        batch_size: patches at once, over all devices.

    Raises:
        UsageError: there is no finished run, or its model takes bags of features.
        DamagedStore: it cannot be read.
        MachineShort: TensorFlow is not installed.
    """
    check_one_run(folder)
    result = read_result(folder)
    config = load_config(folder / run_folder.CONFIG)
    if not isinstance(config, PatchTrainConfig):
        raise UsageError(
            f"the model of {folder} takes bags of features, not patches",
            todo="its predictions and attention are in its folder; other slides are predicted by training with "
            "them as test slides (--splits)",
        )  # fmt: skip
    facts = read_json(folder / METRICS)
    forward = load_quietly("histopipe.inference.forward")
    network = forward.Forward(
        lambda: forward.trained_model(folder), devices=devices, batch_size=batch_size
    )
    return Classifier(
        folder, network, tuple(facts["classes"]), network.patch_size,
        facts.get("spec"), facts.get("patch_mpp"), config.stain_norm, config.labels_from,
        config.judging, _thresholds(result), network.sha256,
    )  # fmt: skip


def check_scale(record: SlideRecord, classifier: Classifier) -> None:
    """Refuse a slide whose patches, of a pyramid level taken as it is, have another scale than the training's.

    Raises:
        ScaleError: they have.
    """
    found, expected = record.patch_mpp, classifier.patch_mpp
    if found is None or expected is None or same_scale(Mpp(found), Mpp(expected)):
        return
    raise ScaleError(
        f"{record.id}: patches of another scale than the model of {classifier.folder} was trained on",
        found=f"{found:g} µm a pixel", expected=f"{expected:g}",
        todo="train on patches by --mpp, which finds the level of each slide",
    )  # fmt: skip


def _thresholds(result: TrainResult) -> Thresholds:
    named = result.metrics["validation"].named() if "validation" in result.metrics else ()
    return {name: (metrics.threshold, None) for name, metrics in named}
