"""Attention of the patches of a bag, and what each contributes to the predictions of a slide model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.features.bags import Bag, read_bag, read_positions
from histopipe.predictions.tables import write_patch_values
from histopipe.system.output import message
from histopipe.training.bag_model import HIDDEN, JOINT, BagModel, Patches, PooledBags
from histopipe.training.bag_pooling import PIECE, pool
from histopipe.training.objective import Objective
from histopipe.training.train_step import values_of


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
    kernel = kernel[:HIDDEN]  # the other rows are of covariates
    count = len(patches.features)
    if model.pooling == "max":
        pooled = pool(model, weights, patches, tf.constant(PIECE))
        best = np.asarray(pooled.best)
        parts = np.zeros((count, model.outputs))
        np.add.at(parts, best, np.asarray(pooled.value, np.float64)[:, None] * kernel)
        return np.bincount(best, minlength=count) / len(best), parts
    all_scores, all_parts = [], []
    for begin in range(0, count, PIECE):
        piece = patches.features[begin : begin + PIECE]
        hidden, scores = model.patches(weights, piece, np.arange(len(piece)), None)
        all_scores.append(np.asarray(scores, np.float64))
        all_parts.append(np.asarray(hidden, np.float64) @ kernel)
    scores = np.concatenate(all_scores)
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    return shares, shares[:, None] * np.concatenate(all_parts)


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


def write_attention(
    folder: Path, bags: Sequence[Bag], model: BagModel, objective: Objective, names: Sequence[str]
) -> None:
    """Write the table of patch values of each bag. `names` are of the predictions."""
    for bag in bags:
        try:
            positions = read_positions(bag) if model.takes_positions else None
            patches = Patches(read_bag(bag, bag.dtype), positions)
            attention, parts = patch_values(model, patches)
            write_patch_values(
                folder, bag.id, bag.places(), names=names, attention=attention,
                contributions=objective.contributions(parts),
            )  # fmt: skip
        except DamagedStore as error:  # training skipped this bag, too
            message(f"cannot write attention of {bag.id}: {error}")
