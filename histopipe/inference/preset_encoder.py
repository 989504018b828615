"""Encoders by the name of a preset, with their published weights. Imports TensorFlow."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from histopipe.encoders.naming import NAMINGS, select
from histopipe.encoders.presets import Preprocessing, Preset
from histopipe.encoders.tensors import read_tensors
from histopipe.errors import UsageError
from histopipe.inference.keras_network import KerasNetwork
from histopipe.training.vision_transformer import vision_transformer
from histopipe.training.vision_transformer_weights import assign_weights

_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_LIBRARIES = ("tensorflow", "keras", "pillow")


class PresetEncoder(KerasNetwork):
    """The network of a preset: patches (B, H, W, 3) uint8 to (B, D) features.

    Raises:
        UsageError: the weights cannot be used, or a device does not exist.
    """

    def __init__(
        self, preset: Preset, weights: Path, *, patch_size: int, devices: str, batch_size: int
    ) -> None:
        path = weights_file(preset, weights)
        self._preprocessing = preset.preprocessing
        super().__init__(
            lambda: build(preset, path), name=preset.name, devices=devices, batch_size=batch_size
        )
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.identity: Mapping[str, Any] = {
            **self.identity, "patch_size": patch_size, "weights": path.name, "weights_sha256": digest,
            "preprocessing": preprocessing_facts(preset.preprocessing),
            "libraries": {name: version(name) for name in _LIBRARIES},
        }  # fmt: skip

    def prepare(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return (B, S, S, 3) uint8 images, resized and cropped as the preset describes."""
        return preprocess(images, self._preprocessing)


def weights_file(preset: Preset, weights: Path) -> Path:
    """Return the file with the weights: `weights`, or one of the preset's files in the folder `weights`.

    Raises:
        UsageError: there is no such file.
    """
    if weights.is_file():
        return weights
    found = [weights / name for name in preset.files if (weights / name).is_file()]
    if not found:
        raise UsageError(
            f"no weights of {preset.name} at {weights}", expected=f"{' or '.join(preset.files)}",
            todo=f"download them as `histopipe encoders {preset.name}` describes",
        )  # fmt: skip
    return found[0]


def build(preset: Preset, path: Path) -> keras.Model:
    """Build the network with its weights: (B, S, S, 3) uint8 to (B, D) features."""
    naming, preprocessing = NAMINGS[preset.naming], preset.preprocessing
    tensors = select(
        read_tensors(path), preset.architecture, naming, preprocessing.trained_size, path
    )
    network = vision_transformer(preset.architecture, preprocessing.size)
    assign_weights(network, preset.architecture, naming, tensors)
    image = keras.Input((preprocessing.size, preprocessing.size, 3), dtype="uint8", name="image")
    std = np.array(preprocessing.std)
    normalized = keras.layers.Rescaling(
        (1 / (255 * std)).tolist(), offset=(-np.array(preprocessing.mean) / std).tolist()
    )(image)
    return keras.Model(image, network(normalized), name="encoder")


def preprocess(images: NDArray[np.uint8], settings: Preprocessing) -> NDArray[np.uint8]:
    """Resize (B, H, H, 3) patches by PIL, as the published recipes do, and crop their centre."""
    side, size = settings.resize or images.shape[1], settings.size
    if images.shape[1] != side:
        resized = [
            np.asarray(Image.fromarray(one).resize((side, side), _FILTERS[settings.interpolation]))
            for one in images
        ]
        images = np.stack(resized)
    first = (side - size) // 2
    return np.ascontiguousarray(images[:, first : first + size, first : first + size])


def preprocessing_facts(settings: Preprocessing) -> dict[str, Any]:
    """Return the preprocessing as JSON values."""
    return {
        "resize": settings.resize, "size": settings.size, "interpolation": settings.interpolation,
        "mean": list(settings.mean), "std": list(settings.std),
    }  # fmt: skip


def check_scale(preset: Preset, patch_size: int, mpps: Sequence[float], *, allowed: bool) -> float:
    """Return the mpp of the network's input. It may differ by 15 % from that of its training.

    Published recipes resize patches of 256 pixels at 0.5 mpp to 224, which is 0.57 mpp.

    Raises:
        UsageError: the scale or the size of the patches does not fit, and `allowed` is false.
    """
    raise NotImplementedError
