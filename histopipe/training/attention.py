"""Attention of the patches of a bag, and what each contributes to the predictions of a slide model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.features.bags import Bag, read_bag, read_positions
from histopipe.predictions.tables import write_patch_values
from histopipe.system.output import message
from histopipe.training.bag_model import JOINT, BagModel, Patches
from histopipe.training.bag_pooling import PIECE, pool
from histopipe.training.objective import Objective
from histopipe.training.train_step import values_of


class PatchContributions(NamedTuple):
    """What the patches of a bag are worth to a model."""

    attention: NDArray[np.float64]
    """(N,) shares with a sum of 1. With max pooling, the share of the features that are the patch's."""
    parts: NDArray[np.float64]
    """(N, C) parts of the last layer's values. Their sum is these values less bias and covariates."""


def patch_values(model: BagModel, patches: Patches) -> PatchContributions:
    """Return attention and parts of the patches of a bag."""
    weights = values_of(model.patch_weights)
    kernel = np.asarray(values_of(model.last_weights)[0], np.float64)
    if model.pooling in JOINT:
        return _together(model, weights, patches, kernel)
    kernel = kernel[: model.hidden_width]  # the other rows are of covariates
    count = len(patches.features)
    if model.pooling == "max":
        pooled = pool(model, weights, patches, tf.constant(PIECE))
        best = np.asarray(pooled.best)
        parts = np.zeros((count, model.outputs))
        np.add.at(parts, best, np.asarray(pooled.value, np.float64)[:, None] * kernel)
        return PatchContributions(np.bincount(best, minlength=count) / len(best), parts)
    all_scores, all_parts = [], []
    for begin in range(0, count, PIECE):
        piece = patches.features[begin : begin + PIECE]
        hidden, scores = model.patches(weights, piece, np.arange(len(piece)), None)
        all_scores.append(np.asarray(scores, np.float64))
        all_parts.append(np.asarray(hidden, np.float64) @ kernel)
    scores = np.concatenate(all_scores)
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    return PatchContributions(shares, shares[:, None] * np.concatenate(all_parts))


def _together(
    model: BagModel, weights: Sequence[tf.Tensor], patches: Patches, kernel: NDArray[np.float64]
) -> PatchContributions:
    pooled = model.together(weights, patches, None)
    shares = np.asarray(pooled.shares[0], np.float64)
    values = np.asarray(pooled.values[0], np.float64)
    if model.pooling != "dsmil":
        return PatchContributions(shares[:, 0], shares * (values @ kernel[: values.shape[1]]))
    # The rows of the kernel are those of the first output's features, then those of the second, and so on.
    width, scores = values.shape[1], np.asarray(pooled.scores[0], np.float64)
    parts = np.zeros((len(values), model.outputs))
    for number in range(model.outputs):
        output_kernel = kernel[number * width : (number + 1) * width]
        parts += shares[:, number, None] * (values @ output_kernel)
        best = scores[:, number].argmax()
        parts[best, number] += scores[best, number]
    return PatchContributions(shares.mean(axis=1), parts / 2)


def write_attention(
    folder: Path, bags: Sequence[Bag], model: BagModel, objective: Objective, names: Sequence[str]
) -> None:
    """Write the table of patch values of each bag. `names` are of the predictions."""
    for bag in bags:
        try:
            values = patch_values(model, _read_patches(bag, model))
            contributions = objective.contributions(values.parts)
            write_patch_values(
                folder, bag.id, bag.places(), names=names, attention=values.attention, contributions=contributions,
            )  # fmt: skip
        except DamagedStore as error:  # training skipped this bag, too
            message(f"cannot write attention of {bag.id}: {error}")


def _read_patches(bag: Bag, model: BagModel) -> Patches:
    """Return the patches of a bag, with positions if the model takes them."""
    features = read_bag(bag, bag.dtype)
    return Patches(features, read_positions(bag) if model.takes_positions else None)
