"""Initial weights of slide models: of covariates, from files of gated attention, and from finished runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, UsageError, first_line, reported_as
from histopipe.features.feature_sets import check_encoder, read_encoder
from histopipe.pretrained.architecture import Family, SlideArchitecture, select_weights
from histopipe.pretrained.checkpoints import Tensor, read_tensors
from histopipe.pretrained.presets import load_preset, slide_preset_names
from histopipe.runs import folder as run_folder
from histopipe.runs.run import METRICS, Run
from histopipe.runs.task_config import BagTrainConfig
from histopipe.splits.labelling import Covariates
from histopipe.splits.splits import SPLITS, Splits, names_of, trained_on
from histopipe.system.files import file_sha256, read_json
from histopipe.system.output import message
from histopipe.tasks.choices import EVALUATED, Subset
from histopipe.training.bag_model import ATTENTION, HEADS, HIDDEN, BagModel, feature_dimension
from histopipe.training.models import digest
from histopipe.training.objective import Objective
from histopipe.training.slide_encoder import expected_weights
from histopipe.training.slide_networks import FAMILIES


def _names(hidden: str, attention: str) -> Mapping[str, str]:
    parts = {"tanh": "attention_a.0", "gate": "attention_b.0", "score": "attention_c"}
    return {
        "hidden": hidden,
        **{f"attention_{part}": f"{attention}.{name}" for part, name in parts.items()},
    }


GATED_LAYERS: Mapping[Family, Mapping[str, str]] = {
    "abmil": _names("patch_embed.0", "global_attn"),
    "clam": _names("attention_net.0", "attention_net.3"),
}
"""Names of the layers in files of FEATHER, and of CLAM and CHIEF."""


@dataclass(frozen=True, slots=True)
class BagWeights:
    """Initial weights of a `BagModel`: of each layer by name. `attention` and `scaled` as for the model."""

    layers: Mapping[str, Sequence[NDArray[Any]]] = field(default_factory=dict)
    attention: int = ATTENTION
    scaled: bool = False
    description: Mapping[str, Any] = field(default_factory=dict)
    """Origin of the weights, as JSON values."""

    def assign(self, model: BagModel) -> None:
        """Set the weights of all layers but those for the task."""
        if self.layers:
            layers = {layer.name: layer for layer in model.training.layers if layer.weights}
            for name in layers.keys() - {*HEADS}:
                layers[name].set_weights(self.layers[name])


def read_bag_weights(config: BagTrainConfig, folders: Sequence[Path], dimension: int) -> BagWeights:
    """Read the weights that `--weights` names, for features in folders; none without it.

    Raises:
        UsageError: they are of another model, or for features of another encoder.
        DamagedStore: a run cannot be read.
    """
    source = Path(config.weights)
    if config.weights == "none":
        return BagWeights()
    if run_folder.is_cross_validation(source):
        raise UsageError(
            f"--weights {source}", found="a cross-validation", expected="one of its runs"
        )
    is_run = source.is_dir() and run_folder.has_begun(source)
    if is_run and not (source / METRICS).exists():
        raise UsageError(f"--weights {source}", found="a run that has not ended", todo="resume it")
    weights, features = _of_run(source, config) if is_run else _of_file(source, config, folders)
    if features != dimension:
        raise UsageError(
            f"--weights {source}",
            found=f"weights for {features} features per patch",
            expected=f"{dimension}, as in {' and '.join(map(str, folders))}",
        )
    return weights


def _of_file(path: Path, config: BagTrainConfig, folders: Sequence[Path]) -> tuple[BagWeights, int]:
    if path.is_dir():
        files = (path / name for name in ("model.safetensors", "pytorch_model.bin"))
        path = next(filter(Path.is_file, files), path)
    tensors = read_tensors(path)
    family = next(
        (f for f in GATED_LAYERS if any(n.endswith(FAMILIES[f].first) for n in tensors)), None
    )
    if family is None or config.pooling != "gated":
        raise UsageError(
            f"--weights {path}",
            found=f"--pooling {config.pooling}" if family else "no gated attention",
            expected="--pooling gated" if family else f"weights such as {FAMILIES['abmil'].first}",
        )
    names = GATED_LAYERS[family]
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    features = _width(shapes, f"{names['hidden']}.weight", 1)
    hidden = _width(shapes, f"{names['attention_tanh']}.weight", 0)
    network = SlideArchitecture(family=family, features=features, width=HIDDEN, hidden=hidden)
    selected = select_weights(
        tensors,
        expected_weights(network),
        path,
        first=FAMILIES[family].first,
        unused=FAMILIES[family].unused,
    )
    _check_encoder(network, folders, path, allowed=config.allow_mismatch)
    layers = {layer: _linear(selected, name) for layer, name in names.items()}
    description = {"initial_weights": {"file": path.name, "sha256": file_sha256(path)}}
    return BagWeights(layers, hidden, description=description), features


def _width(shapes: Mapping[str, tuple[int, ...]], name: str, axis: int) -> int:
    """Return the size of a matrix whose name has any prefix; 1 if the file has no such matrix, which is reported later."""
    shape = next((shape for key, shape in shapes.items() if key.endswith(name)), ())
    return shape[axis] if len(shape) == 2 else 1


def _linear(tensors: Mapping[str, Tensor], name: str) -> list[NDArray[np.float32]]:
    return [tensors[f"{name}.{part}"].read().T for part in ("weight", "bias")]


def _check_encoder(
    network: SlideArchitecture, folders: Sequence[Path], path: Path, *, allowed: bool
) -> None:
    """Check that features are those of the encoder of a published file, which is recognised by its number of features."""
    parts = attrgetter("family", "features", "hidden")
    presets = map(load_preset, slide_preset_names())
    same = [preset for preset in presets if parts(preset.network) == parts(network)]
    if not same or len(folders) > 1:
        message(
            f"warning: {path} does not name the encoder of its features: only their number is compared"
        )
        return
    same[0].check_features(read_encoder(folders[0]), network.features, folders[0], allowed=allowed)


def _of_run(folder: Path, config: BagTrainConfig) -> tuple[BagWeights, int]:
    other = Run(folder).config
    if not isinstance(other, BagTrainConfig) or other.pooling != config.pooling:
        raise UsageError(
            f"--weights {folder}",
            found=f"--pooling {other.pooling}"
            if isinstance(other, BagTrainConfig)
            else "a run on patches",
            expected=f"a run with --pooling {config.pooling}",
        )
    records = read_json(folder / METRICS).get("encoders") or []
    for features, expected in zip(config.mil, records, strict=False):
        record = read_encoder(Path(features))
        if record is not None and expected is not None and not config.allow_mismatch:
            check_encoder(record, expected, features)
    with reported_as(
        DamagedStore,
        f"{folder / run_folder.MODEL} cannot be read",
        (OSError, ValueError, KeyError, TypeError),
        reason=first_line,
    ):
        saved = keras.models.load_model(folder / run_folder.MODEL, safe_mode=True)  # runs no code
    layers = {layer.name: layer for layer in saved.layers if layer.weights}
    tanh = layers.get("attention_tanh")
    description = {"initial_weights": {"run": folder.name, "sha256": digest(saved.weights)}}
    weights = BagWeights(
        {name: layer.get_weights() for name, layer in layers.items()},
        ATTENTION if tanh is None else tanh.units,
        "scaling" in layers,
        description,
    )
    return weights, feature_dimension(saved)


def warn_of_leaks(config: BagTrainConfig, splits: Splits) -> None:
    """Warn if patients who are evaluated were in the training of the run that gives the weights."""
    path = Path(config.weights) / SPLITS
    before = trained_on(path) if config.weights != "none" and path.exists() else set()
    held_out = [s for subset in EVALUATED[1:] for s in splits.slides_on(subset)]
    seen = [slide.id for slide in held_out if before & {*names_of(slide.id, slide.patient)}]
    if seen:
        message(
            f"warning: {len(seen)} of {len(held_out)} validation and test {config.bag}s were in the training of "
            f"{config.weights}: their metrics are optimistic"
        )


def baseline_weights(
    splits: Splits, covariates: Covariates, objective: Objective
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (K, C) kernel and (C,) bias of a last layer that predicts as the model of the covariates alone."""
    return objective.fit_linear(
        encoded_covariates(splits, covariates, "train"), splits.targets_on("train")
    )


def encoded_covariates(
    splits: Splits, covariates: Covariates, subset: Subset
) -> NDArray[np.float64]:
    """Return the (N, K) covariates of the slides in a subset."""
    return np.array(
        [covariates.encode(slide.covariates) for slide in splits.slides_on(subset)], np.float64
    )
