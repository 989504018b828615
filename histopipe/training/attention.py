"""Attention of the patches of a bag, and what each contributes to the predictions of a slide model."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.features.bags import Bag, read_bag, read_positions
from histopipe.runs import folder as run_folder
from histopipe.system.files import appearing, path_within
from histopipe.system.progress import message
from histopipe.training.bag_model import JOINT, BagModel, Patches
from histopipe.training.bag_pooling import PIECE, pool
from histopipe.training.objective import Objective
from histopipe.training.train_step import values_of

_COLUMNS = ("slide", "x_l0", "y_l0", "size_l0", "attention")


class PatchValues(NamedTuple):
    """What the patches of a bag are worth to a model."""

    attention: NDArray[np.float64]
    """(N,) shares with a sum of 1. With max pooling, the share of the features that are the patch's."""
    parts: NDArray[np.float64]
    """(N, C) parts of the last layer's values. Their sum is these values less bias and covariates."""


def patch_values(model: BagModel, patches: Patches) -> PatchValues:
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
        return PatchValues(np.bincount(best, minlength=count) / len(best), parts)
    all_scores, all_parts = [], []
    for begin in range(0, count, PIECE):
        piece = patches.features[begin : begin + PIECE]
        hidden, scores = model.patches(weights, piece, np.arange(len(piece)), None)
        all_scores.append(np.asarray(scores, np.float64))
        all_parts.append(np.asarray(hidden, np.float64) @ kernel)
    scores = np.concatenate(all_scores)
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    return PatchValues(shares, shares[:, None] * np.concatenate(all_parts))


def _together(
    model: BagModel, weights: Sequence[tf.Tensor], patches: Patches, kernel: NDArray[np.float64]
) -> PatchValues:
    found = model.together(weights, patches, None)
    shares = np.asarray(found.shares[0], np.float64)
    values = np.asarray(found.values[0], np.float64)
    if model.pooling != "dsmil":
        return PatchValues(shares[:, 0], shares * (values @ kernel[: values.shape[1]]))
    # The rows of the kernel are those of the first output's features, then those of the second, and so on.
    width, scores = values.shape[1], np.asarray(found.scores[0], np.float64)
    parts = np.zeros((len(values), model.outputs))
    for number in range(model.outputs):
        own = kernel[number * width : (number + 1) * width]
        parts += shares[:, number, None] * (values @ own)
        best = scores[:, number].argmax()
        parts[best, number] += scores[best, number]
    return PatchValues(shares.mean(axis=1), parts / 2)


def columns(names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a table of patch values. `names` are of the predictions."""
    return (*_COLUMNS, *(f"contribution_{name}" for name in names))


def write_attention(
    folder: Path, bags: Sequence[Bag], model: BagModel, objective: Objective, names: Sequence[str]
) -> None:
    """Write a file per bag: slide, corner and side in level-0 pixels (empty if unknown), and values of each patch."""
    for bag in bags:
        try:
            path = path_within(folder / run_folder.ATTENTION, f"{bag.id}.csv")
            found = patch_values(model, read_patches(bag, model))
            rows = list(_rows(bag, found, objective))
        except DamagedStore as error:  # training skipped this bag, too
            message(f"cannot write attention of {bag.id}: {error}")
            continue
        write_rows(path, names, rows)


def read_patches(bag: Bag, model: BagModel) -> Patches:
    """Return the patches of a bag, with positions if the model takes them."""
    features = read_bag(bag, bag.dtype)
    return Patches(features, read_positions(bag) if model.takes_positions else None)


def write_rows(path: Path, names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table of patch values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        appearing(path, hidden=True) as part,
        part.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(columns(names))
        writer.writerows(rows)


def _rows(bag: Bag, found: PatchValues, objective: Objective) -> Iterable[tuple[object, ...]]:
    contributions = objective.contributions(found.parts).tolist()
    values = iter(zip(found.attention.tolist(), contributions, strict=True))
    for slide, part in zip(bag.slides, bag.parts, strict=True):
        found_corners = part.corners()
        side = f"{part.side:g}" if part.side else ""
        corners = [("", "")] * part.rows if found_corners is None else found_corners.tolist()
        for (x, y), (share, parts) in zip(corners, values, strict=False):
            yield slide, x, y, side, f"{share:.9g}", *(f"{part:.6g}" for part in parts)
