"""Poolings that see all patches of a bag together: the two streams of DSMIL, and self-attention with positions.

Both work on tensors and on symbolic inputs of Keras, so that training and the saved model share one definition.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import keras
from keras import ops

_QUERY = 128
"""Width of DSMIL's queries."""
_POINTS, _HEADS, _BLOCKS = 64, 8, 2
_PERIODS = tuple(2.0**power for power in range(2, 10))
"""Wavelengths of the positions: 4 to 512 patches."""


class Together(NamedTuple):
    """The result of pooling (B, N, H) hidden features."""

    pooled: Any
    """(B, W), the input of the last layer."""
    shares: Any
    """(B, N, S) attention; the sum over the patches is 1."""
    values: Any
    """(B, N, V) features whose sum, weighted by `shares`, is pooled."""
    scores: Any = None
    """(B, N, C) scores of single patches, in DSMIL."""


class JointPooling(Protocol):
    """A pooling of all patches of a bag together."""

    def __call__(self, hidden: Any, positions: Any) -> Together:
        """Pool (B, N, H) hidden features. Positions are (B, N, 2), in patches; None if the pooling has no use for them."""


class DualStream:
    """DSMIL: the best patch of each output, and attention by the similarity to it.

    The last layer takes the attended features of all outputs; `Together.pooled` ends with the scores of the best patches.

    Source:
        B. Li, Y. Li and K. W. Eliceiri, "Dual-stream Multiple Instance Learning Network" (2021), equations 2 to 6.
    """

    def __init__(self, outputs: int, width: int, dtype: Any) -> None:
        self._outputs, self._width, self._dtype = outputs, width, dtype
        self._instances = keras.layers.Dense(outputs, dtype=dtype, name="instance_scores")
        self._query = keras.layers.Dense(_QUERY, activation="tanh", name="query")

    def __call__(self, hidden: Any, positions: Any) -> Together:
        """Pool; see `JointPooling`."""
        scores = self._instances(hidden)
        queries = ops.cast(self._query(hidden), self._dtype)
        best = ops.expand_dims(ops.argmax(scores, axis=1), -1)
        critical = ops.take_along_axis(queries, best, axis=1)
        near = ops.matmul(queries, ops.transpose(critical, (0, 2, 1))) / math.sqrt(_QUERY)
        shares = _shares(near)
        values = ops.cast(hidden, self._dtype)
        attended = ops.matmul(ops.transpose(shares, (0, 2, 1)), values)
        flat = ops.reshape(attended, (-1, self._outputs * self._width))
        pooled = ops.concatenate([flat, ops.max(scores, axis=1)], axis=1)
        return Together(pooled, shares, values, scores)


class InducedAttention:
    """Self-attention between patches through 64 learned points, with sine waves of the positions.

    Work and memory grow with the number of patches, not with its square. The weights of the positions start at 0.

    Source:
        Z. Shao et al., "TransMIL" (2021): self-attention of patches with positions, in two layers; J. Lee et al., "Set
        Transformer" (2019): induced points, in place of TransMIL's approximation.
    """

    def __init__(self, width: int, dtype: Any) -> None:
        layers, self._dtype = keras.layers, dtype
        self._place = layers.Dense(
            width, use_bias=False, kernel_initializer="zeros", name="positions_in"
        )
        self._blocks = [
            (
                layers.LayerNormalization(name=f"norm_{number}"),
                layers.Dense(_POINTS, dtype=dtype, name=f"points_{number}"),
                layers.MultiHeadAttention(_HEADS, width // _HEADS, name=f"attention_{number}"),
            )
            for number in range(1, _BLOCKS + 1)
        ]
        self._norm = layers.LayerNormalization(dtype=dtype, name="norm_last")
        self._score = layers.Dense(1, dtype=dtype, name="attention_score")

    def __call__(self, hidden: Any, positions: Any) -> Together:
        """Pool; see `JointPooling`."""
        waves = [
            wave(positions * (2 * math.pi / p)) for p in _PERIODS for wave in (ops.sin, ops.cos)
        ]
        values = hidden + self._place(ops.concatenate(waves, axis=-1))
        for norm, toward, attend in self._blocks:
            inner = norm(values)
            shares = ops.cast(_shares(toward(inner)), inner.dtype)
            points = ops.matmul(ops.transpose(shares, (0, 2, 1)), inner)
            values = values + attend(inner, points)
        values = self._norm(values)
        shares = _shares(self._score(values))
        pooled = ops.sum(shares * values, axis=1)
        return Together(pooled, shares, values)


def _shares(scores: Any) -> Any:
    """Return the softmax of (B, N, S) scores over the patches, without Keras' warning for bags of one patch."""
    return ops.exp(scores - ops.logsumexp(scores, axis=1, keepdims=True))
