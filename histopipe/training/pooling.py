"""A bag's patches pooled a piece at a time, forwards and backwards, so that memory does not grow with the bag.

Backwards, each piece is computed once more, and its share in the gradient is known from what pooling it gave: a third more work
than keeping everything, for the memory that one piece takes. Mean pooling is attention with equal scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from histopipe.training.bag_model import BagModel


class Pooled(NamedTuple):
    """A bag pooled.

    Attributes:
        value: (H,) pooled hidden features.
        norm: () logarithm of the sum of the exponentials of all attention scores.
        best: (H,) int64 rows of each hidden feature's largest value, for max pooling.
    """

    value: tf.Tensor
    norm: tf.Tensor
    best: tf.Tensor


def pool(
    model: BagModel,
    weights: Sequence[tf.Tensor],
    features: tf.Tensor,
    size: tf.Tensor,
    seed: tf.Tensor | None = None,
) -> Pooled:
    """Pool a bag.

    Args:
        model: whose patches they are.
        weights: values of its `patch_weights`.
        features: (N, D) of any float type.
        size: patches to compute at once.
        seed: as for `BagModel.patches`.
    """
    width = (model.hidden_width,)
    zeros = tf.zeros(width, model.sum_dtype)
    lowest = tf.constant(float("-inf"), model.sum_dtype)

    def share(piece: tf.Tensor, rows: tf.Tensor, highest: Any, total: Any, value: Any) -> Any:
        hidden, scores = model.patches(weights, piece, rows, seed)
        top = tf.maximum(highest, tf.reduce_max(scores))
        before, own = tf.exp(highest - top), tf.exp(scores - top)
        value = value * before + tf.linalg.matvec(hidden, own, transpose_a=True)
        return top, total * before + tf.reduce_sum(own), value

    def largest(piece: tf.Tensor, rows: tf.Tensor, value: Any, best: Any) -> Any:
        hidden, _ = model.patches(weights, piece, rows, seed)
        found = tf.reduce_max(hidden, axis=0)
        at = tf.gather(rows, tf.argmax(hidden, axis=0))
        return tf.maximum(value, found), tf.where(found > value, at, best)

    nowhere = tf.zeros(width, tf.int64)
    if model.pooling == "max":
        value, best = _in_pieces(features, size, largest, (zeros + lowest, nowhere))
        return Pooled(value, lowest, best)
    highest, total, value = _in_pieces(features, size, share, (lowest, zeros[0], zeros))
    return Pooled(value / total, highest + tf.math.log(total), nowhere)


def patch_gradients(  # noqa: PLR0917 - a pure function of all it depends on
    model: BagModel,
    weights: Sequence[tf.Tensor],
    features: tf.Tensor,
    size: tf.Tensor,
    seed: tf.Tensor | None,
    pooled: Pooled,
    outer: tf.Tensor,
) -> list[tf.Tensor]:
    """Gradients of a loss by `weights`.

    Args:
        model, weights, features, size, seed: as for `pool`.
        pooled: what that gave.
        outer: (H,) the loss's gradient by `pooled.value`.
    """
    common = tf.tensordot(pooled.value, outer, 1)

    def by_share(piece: tf.Tensor, rows: tf.Tensor, *sums: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            hidden, scores = model.patches(weights, piece, rows, seed)
            along = tf.linalg.matvec(hidden, outer)
            shares = tf.stop_gradient(tf.exp(scores - pooled.norm))
            # The gradient of a softmax: a share grows with how far its patch lies beyond the pooled one.
            loss = tf.reduce_sum(shares * (along + tf.stop_gradient(along - common) * scores))
        return [a + b for a, b in zip(sums, _gradients(tape, loss, weights), strict=True)]

    if model.pooling == "max":
        # Only the patches that were largest in something have a part in it.
        with tf.GradientTape() as tape:
            tape.watch(weights)
            chosen = tf.gather(features, pooled.best)
            hidden, _ = model.patches(weights, chosen, pooled.best, seed)
            loss = tf.tensordot(tf.linalg.diag_part(hidden), outer, 1)
        return _gradients(tape, loss, weights)
    return list(_in_pieces(features, size, by_share, [tf.zeros_like(w) for w in weights]))


def _gradients(
    tape: tf.GradientTape, loss: tf.Tensor, weights: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    found: list[tf.Tensor] = tape.gradient(
        loss, list(weights), unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return found


def _in_pieces(
    features: tf.Tensor, size: tf.Tensor, step: Callable[..., Any], state: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor]:
    """Fold a function of (piece, its rows, *state) over a bag; one piece at a time, or memory would be theirs all."""
    size = tf.cast(size, tf.int64)
    count = tf.shape(features, tf.int64)[0]

    def body(start: tf.Tensor, *state: tf.Tensor) -> Any:
        stop = tf.minimum(start + size, count)
        return (stop, *step(features[start:stop], tf.range(start, stop), *state))

    begin = tf.zeros((), tf.int64)
    found = tf.while_loop(
        lambda start, *_: start < count, body, (begin, *state), parallel_iterations=1
    )
    return tuple(found[1:])
