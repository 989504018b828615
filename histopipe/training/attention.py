"""How much attention a bag model pays to each patch, as CSV files that heatmaps are made of."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.features.bag_batches import read_bag
from histopipe.features.bag_set import Bag
from histopipe.features.feature_file import read_coords
from histopipe.runs import folder as run_folder
from histopipe.system.files import appearing, path_within
from histopipe.system.progress import message
from histopipe.training.bag_model import BagModel

_PIECE = 32_768
_COLUMNS = ("slide", "x_l0", "y_l0", "size_l0", "attention")


def attention_of(model: BagModel, features: NDArray[np.floating]) -> NDArray[np.float64]:
    """(N,) shares of a bag's (N, D) patches, which add up to 1."""
    weights = [tf.convert_to_tensor(variable.value) for variable in model.patch_weights]
    pieces = np.split(features, range(_PIECE, len(features), _PIECE))
    found = [model.patches(weights, piece, np.arange(len(piece)), None)[1] for piece in pieces]
    scores = np.concatenate(found).astype(np.float64)
    shares = np.exp(scores - scores.max())
    return np.asarray(shares / shares.sum())


def write_attention(folder: Path, bags: Sequence[Bag], model: BagModel) -> None:
    """A file a bag in `attention/`: of each patch its slide, corner and side in level-0 pixels, and share.

    Corners are empty where a feature file has none, sides where it does not say.
    """
    for bag in bags:
        try:
            path = path_within(folder / run_folder.ATTENTION, f"{bag.id}.csv")
            attention = attention_of(model, read_bag(bag, bag.headers[0].dtype))
            rows = list(_rows(bag, attention))
        except DamagedStore as error:  # one that was skipped in training, too
            message(f"no attention of {bag.id}: {error}")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            appearing(path, hidden=True) as part,
            part.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.writer(file)
            writer.writerow(_COLUMNS)
            writer.writerows(rows)


def _rows(bag: Bag, attention: NDArray[np.float64]) -> Iterable[tuple[object, ...]]:
    shares = iter(attention.tolist())
    for slide, header in zip(bag.slides, bag.headers, strict=True):
        coords = read_coords(header)
        side = header.coords.get("patch_size_level0", "")
        corners = [("", "")] * header.rows if coords is None else coords.tolist()
        for (x, y), share in zip(corners, shares, strict=False):
            yield slide, x, y, side, f"{share:.9g}"
