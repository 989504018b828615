"""Batches of a store's patches, as a stream takes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import Column
from histopipe.dataset.patch_batches import PatchBatches
from histopipe.inference.stream import Piece

COLUMNS: tuple[Column, ...] = ("x_l0", "y_l0")
"""What such batches must have."""

Normalise = Callable[[NDArray[np.uint8], NDArray[np.int64]], NDArray[np.uint8]]
"""What gives images of some keys one stain."""


def load_piece(batches: PatchBatches, normalise: Normalise | None, step: int) -> Piece:
    """A step's batch.

    Raises:
        DamagedStore: a patch is damaged, and is not to be skipped.
    """
    batch = batches.load(step)
    images = batch.image if normalise is None else normalise(batch.image, batch.key)
    corners = np.stack([batch.columns[name] for name in COLUMNS], axis=1)
    return Piece(images, corners, batch.weight > 0)
