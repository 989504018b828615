"""Pooling of bags, its gradients, and attention, in pieces: memory does not grow with the size of a bag.

Gradients need each piece a second time, with the pooled features of the first pass: a third more work than keeping all
activations, as is done for bags of one piece. Mean pooling is attention with equal scores. Only the poolings of `JOINT`
need all patches at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.training.bag_model import JOINT, BagModel, Patches, PooledBags
from histopipe.training.models import values_of

PIECE = 32_768
"""Patches computed at once: about 300 MB of activations. Larger pieces are not faster."""
_INSTANCES = 8
"""Patches with the most, and with the least attention, for CLAM's loss of single patches."""


class Pooled(NamedTuple):
    """The result of pooling a bag."""

    value: tf.Tensor
    """(W,) pooled hidden features, the input of the last layer."""
    norm: tf.Tensor | None = None
    """() logarithm of the sum of the exponentials of all attention scores, for poolings by a weighted sum."""
    best: tf.Tensor | None = None
    """(H,) int64 rows of the maximum of each hidden feature, for max pooling."""


def pool(
    model: BagModel,
    weights: Sequence[tf.Tensor],
    patches: Patches,
    size: tf.Tensor,
    seed: tf.Tensor | None = None,
) -> Pooled:
    """Pool a bag, `size` patches at once. `weights` are the values of `model.patch_weights`."""
    if model.pooling in JOINT:
        return Pooled(model.together(weights, patches, seed).pooled[0])
    zeros = tf.zeros((model.width,), model.sum_dtype)
    lowest = tf.constant(float("-inf"), model.sum_dtype)

    def weighted_sum(
        piece: tf.Tensor, rows: tf.Tensor, highest: Any, total: Any, value: Any
    ) -> Any:
        hidden, scores = model.patches(weights, piece, rows, seed)
        top = tf.maximum(highest, tf.reduce_max(scores))
        before, piece_weights = tf.exp(highest - top), tf.exp(scores - top)
        value = value * before + tf.linalg.matvec(hidden, piece_weights, transpose_a=True)
        return top, total * before + tf.reduce_sum(piece_weights), value

    def maximum(piece: tf.Tensor, rows: tf.Tensor, value: Any, best: Any) -> Any:
        hidden, _ = model.patches(weights, piece, rows, seed)
        highest = tf.reduce_max(hidden, axis=0)
        at = tf.gather(rows, tf.argmax(hidden, axis=0))
        return tf.maximum(value, highest), tf.where(highest > value, at, best)

    if model.pooling == "max":
        state = (zeros + lowest, tf.zeros((model.width,), tf.int64))
        value, best = _in_pieces(patches.features, size, maximum, state)
        return Pooled(value, best=best)
    highest, total, value = _in_pieces(
        patches.features, size, weighted_sum, (lowest, zeros[0], zeros)
    )
    return Pooled(value / total, norm=highest + tf.math.log(total))


def pool_at_once(
    model: BagModel, weights: Sequence[tf.Tensor], patches: Patches, seed: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return (W,) pooled features, (N, H) hidden features and (N,) scores of a bag; all of them have gradients."""
    if model.pooling in JOINT:
        pooled = model.together(weights, patches, seed).pooled[0]
        return pooled, pooled, pooled  # no pooling of all patches has a loss of single ones
    hidden, scores = model.patches(
        weights, patches.features, tf.range(tf.shape(patches.features, tf.int64)[0]), seed
    )
    if model.pooling == "max":
        return tf.reduce_max(hidden, axis=0), hidden, scores
    return tf.linalg.matvec(hidden, tf.nn.softmax(scores), transpose_a=True), hidden, scores


def patch_gradients(  # noqa: PLR0917 - a pure function: all inputs are arguments
    model: BagModel,
    weights: Sequence[tf.Tensor],
    patches: Patches,
    size: tf.Tensor,
    seed: tf.Tensor | None,
    pooled: Pooled,
    outer: tf.Tensor,
) -> list[tf.Tensor]:
    """Return the gradients of a loss for `weights`. (W,) `outer` is its gradient for `pooled.value`."""
    if pooled.norm is None:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            # Only patches with the maximum of a feature contribute.
            chosen = tf.gather(patches.features, pooled.best)
            value = tf.linalg.diag_part(model.patches(weights, chosen, pooled.best, seed)[0])
            loss = tf.tensordot(value, outer, 1)
        return gradients_of(tape, loss, weights)
    common = tf.tensordot(pooled.value, outer, 1)

    def add_gradients(piece: tf.Tensor, rows: tf.Tensor, *sums: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            hidden, scores = model.patches(weights, piece, rows, seed)
            along = tf.linalg.matvec(hidden, outer)
            shares = tf.stop_gradient(tf.exp(scores - pooled.norm))
            # The softmax's gradient depends on the difference between a patch and the pooled features.
            loss = tf.reduce_sum(shares * (along + tf.stop_gradient(along - common) * scores))
        return [a + b for a, b in zip(sums, gradients_of(tape, loss, weights), strict=True)]

    return list(
        _in_pieces(patches.features, size, add_gradients, list(map(tf.zeros_like, weights)))
    )


def instance_gradients(  # noqa: PLR0917 - a pure function: all inputs are arguments
    model: BagModel,
    weights: Sequence[tf.Tensor],
    patches: Patches,
    size: tf.Tensor,
    seed: tf.Tensor | None,
    label: tf.Tensor,
    slope: tf.Tensor,
) -> list[tf.Tensor]:
    """Return the gradients of `instance_loss` for `weights`."""

    def add_scores(piece: tf.Tensor, rows: tf.Tensor, all_scores: Any) -> Any:
        _, scores = model.patches(weights, piece, rows, seed)
        return (tf.tensor_scatter_nd_update(all_scores, rows[:, None], scores),)

    count = tf.shape(patches.features)[0]
    (scores,) = _in_pieces(
        patches.features, size, add_scores, (tf.zeros(count[None], model.sum_dtype),)
    )
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = instance_loss(
            model,
            weights,
            scores,
            lambda rows: model.patches(weights, tf.gather(patches.features, rows), rows, seed)[0],
            label,
            slope,
        )
    return gradients_of(tape, loss, weights)


def instance_loss(  # noqa: PLR0917 - a pure function: all inputs are arguments
    model: BagModel,
    weights: Sequence[tf.Tensor],
    scores: tf.Tensor,
    hidden_of: Callable[[tf.Tensor], tf.Tensor],
    label: tf.Tensor,
    slope: tf.Tensor,
) -> tf.Tensor:
    """Return CLAM's loss of single patches, multiplied by () `slope`, from their (N,) scores.

    The patches with the most attention are positive for the classifier of the bag's class () `label`, those with the
    least are negative. `hidden_of` returns the hidden features of patches. The choice of the patches has no gradient. A
    bag of one patch has no such loss.
    """
    count = tf.shape(scores)[0]
    some = tf.minimum(_INSTANCES, count // 2)
    order = tf.argsort(scores, direction="DESCENDING", stable=True)
    rows = tf.cast(tf.concat([order[:some], order[count - some :]], axis=0), tf.int64)
    truth = tf.cast(tf.range(2 * some) < some, tf.int32)
    logits = model.instances(weights, hidden_of(rows))[:, label]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(truth, logits)
    return tf.math.divide_no_nan(
        tf.reduce_sum(losses) * tf.cast(slope, losses.dtype), tf.cast(2 * some, losses.dtype)
    )


def gradients_of(
    tape: tf.GradientTape, loss: tf.Tensor, weights: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return the gradients of a loss for `weights`, 0 where it does not depend on them."""
    return cast(
        list[tf.Tensor],
        tape.gradient(loss, list(weights), unconnected_gradients=tf.UnconnectedGradients.ZERO),
    )


def _in_pieces(
    features: tf.Tensor, size: tf.Tensor, step: Callable[..., Any], state: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor]:
    """Apply a function of (piece, its rows, *state) to the pieces of a bag in sequence: memory holds one piece."""
    size = tf.cast(size, tf.int64)
    count = tf.shape(features, tf.int64)[0]

    def body(start: tf.Tensor, *state: tf.Tensor) -> Any:
        stop = tf.minimum(start + size, count)
        return (stop, *step(features[start:stop], tf.range(start, stop), *state))

    _, *state = tf.while_loop(
        lambda start, *_: start < count,
        body,
        (tf.zeros((), tf.int64), *state),
        parallel_iterations=1,
    )
    return state


def patch_values(
    model: BagModel, patches: Patches
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what the N patches of a bag are worth to a model.

    Returns:
        (N,) attention with a sum of 1; with max pooling, the share of the features that are the patch's. And (N, C) parts
        of the last layer's values, whose sum is these values less bias and covariates.
    """
    weights = values_of(model.patch_weights)
    kernel = np.asarray(values_of(model.last_weights)[0], np.float64)
    if model.pooling in JOINT:
        return _joint_values(model.together(weights, patches, None), kernel)
    kernel = kernel[: model.width]  # the other rows are of covariates
    count = len(patches.features)
    if model.pooling == "max":
        pooled = pool(model, weights, patches, tf.constant(PIECE))
        best = np.asarray(pooled.best)
        parts = np.zeros((count, model.outputs))
        np.add.at(parts, best, np.asarray(pooled.value, np.float64)[:, None] * kernel)
        return np.bincount(best, minlength=count) / len(best), parts
    pieces = []
    for begin in range(0, count, PIECE):
        piece = patches.features[begin : begin + PIECE]
        hidden, scores = model.patches(weights, piece, np.arange(len(piece)), None)
        pieces.append((np.asarray(scores, np.float64), np.asarray(hidden, np.float64) @ kernel))
    scores, parts = map(np.concatenate, zip(*pieces, strict=True))
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    return shares, shares[:, None] * parts


def _joint_values(
    bag: PooledBags, kernel: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    shares, values = (np.asarray(each[0], np.float64) for each in (bag.shares, bag.values))
    width, parts = values.shape[1], np.zeros((len(values), kernel.shape[1]))
    # The rows of the kernel are those of the features by the first share, then by the second, and so on.
    for number, share in enumerate(shares.T):
        parts += share[:, None] * (values @ kernel[number * width : (number + 1) * width])
    if bag.scores is not None:
        scores, outputs = np.asarray(bag.scores[0], np.float64), np.arange(kernel.shape[1])
        best = scores.argmax(axis=0)
        parts[best, outputs] += scores[best, outputs]
        parts /= 2
    return shares.mean(axis=1), parts
