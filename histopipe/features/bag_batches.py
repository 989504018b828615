"""Batches of bags: whole bags, concatenated without padding."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.batch_sampler import BatchSampler, Field
from histopipe.dataset.options import OnError
from histopipe.dataset.orders import Order
from histopipe.dataset.permutation import permuted
from histopipe.dataset.sample_table import SampleTable
from histopipe.errors import DamagedStore
from histopipe.features.bag_set import Bag, BagSet
from histopipe.features.feature_file import read_features
from histopipe.system.hashing import combine

_DRAW = 301


class BagBatches(BatchSampler):
    """Batches of bags, in a given order.

    With `on_error="skip"`, a damaged bag gets weight 0. If `most` is not 0, an epoch has at most so many patches of a bag,
    others in each epoch, drawn by `seed`.
    """

    # A bag may have a gigabyte: only the next one is read ahead.
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
    ) -> None:
        super().__init__(table, batch_size=batch_size, order=order, replicas=replicas)
        self._bags, self._skip, self._most, self._seed = bags, on_error == "skip", most, seed
        self.dtype = np.result_type(*(h.dtype for bag in bags.bags.values() for h in bag.headers))
        self.fields = (
            Field("features", self.dtype, (bags.dimension,), ragged=True),
            Field("end", np.int64), Field("label", np.int32), Field("weight", np.float32),
            Field("key", np.int64),
        )  # fmt: skip

    def values(self, step: int, replica: int) -> tuple[Any, ...]:
        """Return (R, D) features of all bags of a replica's part of a step; and for each bag its end row, label, weight and key.

        Raises:
            DamagedStore: a bag is damaged, and is not to be skipped.
        """
        located, weights = self.locate(step, replica)
        keys = located.keys
        parts = []
        for i, number in enumerate(located.slides.tolist()):
            found = (
                self._read(number, step // self.steps_per_epoch, keys[i]) if weights[i] else None
            )
            if found is None:
                # A bag of weight 0 need not be read.
                weights[i], found = 0, np.zeros((1, self._bags.dimension), self.dtype)
            parts.append(found)
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return _joined(parts), ends, located.labels, weights, keys

    def _read(self, number: int, epoch: int, key: int) -> NDArray[np.floating] | None:
        try:
            return read_bag(self._bags.bags[number], self.dtype, self._drawn(number, epoch))
        except DamagedStore as error:
            if not self._skip:
                raise
            self._note_skipped(int(key), str(error))
            return None

    def _drawn(self, number: int, epoch: int) -> NDArray[np.int64] | None:
        """Return the rows of a bag in an epoch, sorted; None for all."""
        size = self._bags.bags[number].rows
        if not 0 < self._most < size:
            return None
        # Consecutive epochs go through one permutation, so that all rows occur within as few epochs as possible.
        rounds, begin = divmod(epoch, -(-size // self._most))
        places = (begin * self._most + np.arange(self._most)) % size
        return np.sort(permuted(places, size, combine(self._seed, _DRAW, number, rounds)))


def read_bag(
    bag: Bag, dtype: np.dtype[Any], rows: NDArray[np.int64] | None = None
) -> NDArray[np.floating]:
    """Return the (R, D) features of (R,) sorted rows of a bag, or of all of them.

    Raises:
        DamagedStore: a file is damaged.
    """
    begins = np.cumsum([0, *(header.rows for header in bag.headers)])
    parts = []
    for header, begin, end in zip(bag.headers, begins, begins[1:], strict=False):
        own = None if rows is None else rows[(rows >= begin) & (rows < end)] - begin
        parts.append(read_features(header, own).astype(dtype, copy=False))
    return _joined(parts)


def _joined(parts: list[NDArray[np.floating]]) -> NDArray[np.floating]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)  # one part needs no copy
