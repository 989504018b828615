"""Batches of whole bags, without padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import OnError
from histopipe.dataset.sample_table import SampleTable, SlideValues
from histopipe.dataset.sampling import BatchSampler, Field, Order
from histopipe.errors import DamagedStore
from histopipe.features.bags import BagSet, joined_rows, read_bag, read_positions
from histopipe.system.hashing import combine, permuted

_DRAW = 301


class BagBatches(BatchSampler):
    """Batches of bags, in a given order.

    With `on_error="skip"`, a damaged bag gets weight 0. `most` limits the patches of a bag per epoch; 0 is no limit.
    Each epoch draws different patches, by `seed`. With `positions`, batches also have the positions of the patches.
    """

    # A bag may be a gigabyte, so only the next one is loaded in advance.
    parallel_calls: int | None = 1
    prefetch = 0
    read_ahead: int | None = 0

    def __init__(
        self,
        bags: BagSet,
        table: SampleTable,
        *,
        batch_size: int,
        order: Order,
        replicas: int = 1,
        on_error: OnError = "raise",
        most: int = 0,
        seed: int = 0,
        by_slide: Mapping[str, SlideValues] | None = None,
        positions: bool = False,
    ) -> None:
        super().__init__(
            table, batch_size=batch_size, order=order, replicas=replicas, by_slide=by_slide
        )
        self._bags, self._skip, self._most, self._seed = bags, on_error == "skip", most, seed
        self._positions = positions
        self.dtype = np.result_type(*(bag.dtype for bag in bags.bags.values()))
        self.fields = (
            Field("features", self.dtype, (bags.dimension,), ragged=True),
            Field("end", np.int64), Field("label", np.int32), Field("weight", np.float32),
            Field("key", np.int64), *self._slide_fields(),
            *([Field("position", np.float32, (2,), ragged=True)] if positions else []),
        )  # fmt: skip

    def values(self, step: int, replica: int) -> tuple[Any, ...]:
        """Return the fields of a replica's part of a step: (R, D) features, and for each bag its end row and so on.

        Raises:
            DamagedStore: a bag is damaged, and damaged bags are not skipped.
        """
        located, weights = self.locate(step, replica)
        keys = located.keys
        parts, positions = [], []
        for i, number in enumerate(located.slides.tolist()):
            rows = self._draw_rows(number, step // self.steps_per_epoch)
            features = self._read(number, rows, keys[i]) if weights[i] else None
            if features is None:
                # A bag of weight 0 is not read.
                weights[i], rows = 0, np.zeros(0, np.int64)
                features = np.zeros((1, self._bags.dimension), self.dtype)
            parts.append(features)
            if self._positions:
                positions.append(self._read_positions(number, rows, len(features)))
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        joined_positions = (joined_rows(positions),) if self._positions else ()
        slide_values = self._slide_values(located)
        return (
            joined_rows(parts),
            ends,
            located.labels,
            weights,
            keys,
            *slide_values,
            *joined_positions,
        )

    def _read(
        self, number: int, rows: NDArray[np.int64] | None, key: int
    ) -> NDArray[np.floating] | None:
        try:
            return read_bag(self._bags.bags[number], self.dtype, rows)
        except DamagedStore as error:
            if not self._skip:
                raise
            self._note_skipped(int(key), str(error))
            return None

    def _read_positions(
        self, number: int, rows: NDArray[np.int64] | None, count: int
    ) -> NDArray[np.float32]:
        """Return (count, 2) positions; zeros for a bag that is not read."""
        if rows is not None and not len(rows):
            return np.zeros((count, 2), np.float32)
        return read_positions(self._bags.bags[number], rows)

    def _draw_rows(self, number: int, epoch: int) -> NDArray[np.int64] | None:
        """Return the rows of a bag in an epoch, sorted; None for all."""
        size = self._bags.bags[number].rows
        if not 0 < self._most < size:
            return None
        # Consecutive epochs go through one permutation, so that the fewest epochs cover all rows.
        rounds, begin = divmod(epoch, -(-size // self._most))
        positions = (begin * self._most + np.arange(self._most)) % size
        return np.sort(permuted(positions, size, combine(self._seed, _DRAW, number, rounds)))
