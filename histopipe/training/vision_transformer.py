"""Vision Transformers of pathology foundation models, from stock Keras layers: saved models open in plain Keras.

Source: Dosovitskiy et al. 2021 (ViT), Touvron et al. 2021 (LayerScale), Shazeer 2020 (SwiGLU), Darcet et al. 2024
(registers).
"""

from __future__ import annotations

import keras
from keras import layers, ops

from histopipe.pretrained.architecture import Architecture


def vision_transformer(network: Architecture, size: int) -> keras.Model:
    """Build a network: (B, size, size, 3) float32, normalized, to (B, D) features; random weights.

    Norms, residual sums and the embedding are at least float32, also with a 16-bit dtype policy.
    """
    exact = keras.config.dtype_policy().variable_dtype
    image = keras.Input((size, size, 3), dtype=exact, name="pixels")
    tokens = _embedding(network, image, size, exact)
    for number in range(network.depth):
        tokens = _block(network, tokens, f"block_{number}", exact)
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


def _block(
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
