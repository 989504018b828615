"""Networks of NumPy in the place of those of Keras: `embed` and `predict` without TensorFlow and without worker processes.

This module replaces `histopipe.inference.networks`. Results depend on single pixels, and not on other patches of a batch.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.inline import WITH_POOLS, PicklingWorkers, use_inline_workers
from histopipe.features.feature_sets import read_encoder
from histopipe.runs.run import Run
from histopipe.system.files import read_json

DIMENSION = 8
"""Features of a patch."""


def replace_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the networks of `embed` and `predict` by those of this module, and their worker processes by this one."""
    monkeypatch.setitem(sys.modules, "histopipe.inference.networks", sys.modules[__name__])
    modules = (*WITH_POOLS, "histopipe.inference.slide_tiler", "histopipe.exporting.masks")
    use_inline_workers(monkeypatch, PicklingWorkers, modules)


def pixels(images: NDArray[np.uint8], count: int, name: str) -> NDArray[np.float64]:
    """Return (B, count) values of (B, H, W, 3) patches from 0 to 1: pixels that a name chooses."""
    flat = images.reshape(len(images), -1)
    chosen = np.random.default_rng(zlib.crc32(name.encode())).integers(0, flat.shape[1], count)
    return flat[:, chosen] / 255


Compute = Callable[[NDArray[np.uint8]], NDArray[np.float64]]


class KerasNetwork:
    """A network made by `load_run_models` or `keras_encoder`, as of `histopipe.inference.networks`."""

    def __init__(
        self, make: Callable[[], tuple[int, Compute]], *, name: str, devices: str, batch_size: int
    ) -> None:
        self.patch_size, self._compute = make()
        self.batch_size, self.sizes = batch_size, list[int]()
        blank = np.zeros((1, self.patch_size, self.patch_size, 3), np.uint8)
        self.dimension = self._compute(blank).shape[1]
        self.identity: Mapping[str, Any] = {
            "encoder": name,
            "dimension": self.dimension,
            "patch_size": self.patch_size,
            "sha256": f"{zlib.crc32(name.encode()):064x}",
        }

    def prepare(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the images unchanged."""
        return images

    def start(self, inputs: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Record the size of the batch, and repeat a row, as networks on several devices may do."""
        self.sizes.append(len(inputs))
        return np.resize(inputs, (len(inputs) + 1, *inputs.shape[1:]))

    def finish(self, started: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the results of a batch."""
        return self._compute(started).astype(np.float32)


def load_run_models(
    folders: Sequence[Path], whitening: Sequence[NDArray[np.float32]] = ()
) -> tuple[int, Compute]:
    """Return the patch size, and a function that computes the probabilities and the whitened features of each model."""
    metrics = [read_json(folder / "metrics.json") for folder in folders]

    def compute(images: NDArray[np.uint8]) -> NDArray[np.float64]:
        parts = []
        for number, folder in enumerate(folders):
            parts.append(probabilities(images, folder.name, len(metrics[number]["classes"])))
            for matrix in whitening[number : number + 1]:
                parts.append(pixels(images, len(matrix), folder.name) @ matrix)
        return np.concatenate(parts, axis=1)

    return metrics[0]["spec"]["patch_size"], compute


def probabilities(images: NDArray[np.uint8], name: str, classes: int = 2) -> NDArray[np.float64]:
    """Return the (B, C) probabilities of the model in a run's folder of this name."""
    values = np.exp(4 * pixels(images, classes, name))
    return np.asarray(values / values.sum(axis=1, keepdims=True))


def keras_encoder(
    model: str | Path, *, patch_size: int, batch_size: Any, devices: str, **_: Any
) -> KerasNetwork:
    """Return a network of `DIMENSION` features, which depend on the name of the model."""
    name = Path(model).name
    return KerasNetwork(
        lambda: (patch_size, lambda images: pixels(images, DIMENSION, name)),
        name=name,
        devices=devices,
        batch_size=16 if batch_size == "auto" else batch_size,
    )


class TrainedBags:
    """The slide model of a run of classes, which are sums of the mean features."""

    covariates, takes_positions, uses_features = None, False, True
    dimension, sha256 = DIMENSION, "0" * 64

    def __init__(self, run: Run, *, devices: str) -> None:
        self.run, self.config, self.task = run, run.config, run.task
        folders: Any = run.config
        self.encoders = run.metrics_file.get("encoders") or [
            read_encoder(Path(folder)) for folder in folders.mil
        ]

    def predict(
        self, features: NDArray[np.floating], positions: object, covariates: object
    ) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.float64]]:
        """Predict a bag from (N, D) features: probabilities, attention, and contributions of the patches."""
        parts = features.astype(np.float64).reshape(len(features), len(self.run.task.classes), -1)
        parts = parts.sum(axis=2) / len(features)
        values = np.exp(parts.sum(axis=0))
        attention = np.full(len(features), 1 / len(features))
        return (values / values.sum()).astype(np.float32), attention, parts
