"""What slide encoders are made of: named weights, and attention whose memory grows with the number of patches.

Attention is computed for blocks of queries, and position biases for the same blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.errors import SlideError
from histopipe.system.output import counted

BLOCKS = {"CPU": 1 << 22, "GPU": 1 << 26}
"""Attention scores computed at once, if at least `QUERIES` have so many: the cores of a CPU share its cache."""
QUERIES = 256
"""Queries computed at once, at least: 200 MB of scores for 200,000 patches."""
_ROWS = 1 << 14
"""Patches of which the widest layer is computed at once."""
_OFF_GRID = 0.25
"""Largest distance of a patch from its place in the grid, in patches."""


class PlacedPatches(NamedTuple):
    """Features and places of the patches of a slide."""

    features: Any
    """(N, D) features of any float type."""
    corners: NDArray[np.float64] | None = None
    """(N, 2) top left corners in level-0 pixels."""
    side: float = 0.0
    """Side of the patches in level-0 pixels."""

    def grid(self) -> NDArray[np.float64]:
        """Return (N, 2) columns and rows of the patches in their grid.

        Raises:
            SlideError: there are no places, or the patches overlap or are of no grid.
        """
        problem = "no coords, or no side of the patches"
        if self.corners is not None and self.side > 0:
            exact = (self.corners - self.corners.min(axis=0)) / self.side
            cells = np.round(exact)
            apart = np.abs(exact - cells).max()
            same = len(cells) - len(np.unique(cells, axis=0))
            problem = f"{counted(same, 'patch')} in the place of another" if same else ""
            if not same and apart > _OFF_GRID:
                problem = f"patches {apart:.2g} of their side away from a common grid"
            if not problem:
                return np.asarray(cells, np.float64)
        raise SlideError(
            "the slide encoder needs positions",
            found=problem,
            expected="patches of one grid without overlap",
            todo="tile the slides without --overlap, or choose another slide encoder",
        )


class SlideVector(NamedTuple):
    """The output of a slide encoder."""

    value: Any
    """(W,) float32."""
    attention: Any = None
    """(N,) attention of each patch with a sum of 1; None if the network has none."""


class Weights:
    """Weights of a network by their published names. `shapes` are those that were asked for.

    Without `tensors`, all are 0. `names` are those of the file, for `has`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | None = None,
        names: Collection[str] = (),
        dtype: Any = tf.float32,
    ) -> None:
        self.tensors, self._names, self.dtype = tensors, tensors or names, dtype
        self.shapes: dict[str, tuple[int, ...]] = {}

    def __call__(self, name: str, *shape: int) -> Any:
        """Return a weight."""
        self.shapes[name] = shape
        return tf.zeros(shape) if self.tensors is None else self.tensors[name]

    def has(self, name: str) -> bool:
        """Return whether the file has a weight that only some versions of a network have."""
        return name in self._names

    def linear(self, x: Any, name: str, width: int, *, bias: bool = True) -> Any:
        """Return (..., width) of a linear layer, in the precision of the network."""
        kernel = tf.cast(self(f"{name}.weight", width, x.shape[-1]), self.dtype)
        y = tf.matmul(tf.cast(x, self.dtype), kernel, transpose_b=True)
        return y + tf.cast(self(f"{name}.bias", width), self.dtype) if bias else y

    def norm(self, x: Any, name: str, epsilon: float = 1e-5) -> Any:
        """Return a layer normalization in float32."""
        x = tf.cast(x, tf.float32)
        mean, variance = tf.nn.moments(x, axes=[-1], keepdims=True)
        scale, offset = (self(f"{name}.{part}", x.shape[-1]) for part in ("weight", "bias"))
        return (x - mean) * tf.math.rsqrt(variance + epsilon) * scale + offset


def attend(
    q: Any, k: Any, v: Any, bias: Callable[[slice, slice], Any] | None = None
) -> tuple[Any, Any]:
    """Attend in blocks: exact, without an array of all pairs.

    Args:
        q, k, v: (B, Q, D), (B, K, D) and (B, K, E); an item of B is a head, or a segment of one.
        bias: of the scores of a slice of queries and a slice of items, (items, queries, K).

    Returns:
        (B, Q, E), and the logarithm of the sum of the exponentials of the scores (B, Q) float32.
    """
    items, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    most = BLOCKS["GPU" if "GPU" in getattr(q, "device", "") else "CPU"]
    rows = min(queries, max(QUERIES, most // keys))
    batch = max(1, min(items, most // (rows * keys)))
    q = q / math.sqrt(q.shape[-1])

    def block(q: Any, k: Any, v: Any, extra: Any) -> tuple[Any, Any]:
        scores = tf.cast(tf.matmul(q, k, transpose_b=True), tf.float32) + extra
        highest = tf.reduce_max(scores, axis=-1, keepdims=True)
        shares = tf.exp(scores - highest)
        total = tf.reduce_sum(shares, axis=-1, keepdims=True)
        value = tf.matmul(tf.cast(shares, v.dtype), v) / tf.cast(total, v.dtype)
        return value, (highest + tf.math.log(total))[..., 0]

    results = []
    for begin in range(0, queries, rows):
        at, parts = slice(begin, min(begin + rows, queries)), []
        for first in range(0, items, batch):
            some = slice(first, min(first + batch, items))
            extra = tf.zeros((1, 1, 1)) if bias is None else bias(at, some)
            parts.append(block(q[some, at], k[some], v[some], extra))
        results.append([tf.concat(part, 0) for part in zip(*parts, strict=True)])
    value, norm = (tf.concat(part, 1) for part in zip(*results, strict=True))
    return value, norm


def split_heads(x: Any, heads: int) -> Any:
    """Return (H, T, D / H) for (T, D)."""
    return tf.transpose(tf.reshape(x, (x.shape[0], heads, x.shape[1] // heads)), (1, 0, 2))


def join_heads(x: Any) -> Any:
    """Return (T, D) for (H, T, D / H)."""
    return tf.reshape(tf.transpose(x, (1, 0, 2)), (x.shape[1], x.shape[0] * x.shape[2]))


def in_rows(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to the rows of (T, D), some at once: its inner layer may be several times as wide."""
    if x.shape[0] <= _ROWS:
        return function(x)
    parts = (x[begin : begin + _ROWS] for begin in range(0, x.shape[0], _ROWS))
    return tf.concat([function(part) for part in parts], 0)


def gelu(x: Any) -> Any:
    """Return the exact GELU."""
    return tf.nn.gelu(x, approximate=False)


def patch_share(attention: Any, first: int = 0) -> Any:
    """Return the (N,) mean attention of the patches, after `first` other tokens, of (H, T)."""
    patches = tf.reduce_mean(tf.cast(attention, tf.float32), axis=0)[first:]
    return patches / tf.reduce_sum(patches)
