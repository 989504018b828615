"""The samples of each step: a pure function of the step, computed without reading any sample."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.orders import Order
from histopipe.dataset.sample_table import SampleLocations, SampleTable
from histopipe.errors import UsageError

_log = logging.getLogger("histopipe")
_WARNINGS = 10


@dataclass(frozen=True, slots=True)
class Field:
    """A column of a batch: its name, and type and shape of a row; if `ragged`, a sample has any number of rows."""

    name: str
    dtype: Any
    shape: tuple[int, ...] = ()
    ragged: bool = False


class BatchSampler(ABC):
    """A table of samples in an order, divided into steps of `batch_size`, and each step into a part per replica.

    Raises:
        UsageError: a replica would have no sample.
    """

    fields: tuple[Field, ...]
    parallel_calls: int | None
    """Batches loaded at the same time; None for the number of cores."""
    prefetch: int
    """Steps kept ready."""
    read_ahead: int | None
    """See `ReadAhead`."""
    skipped: dict[int, str]
    """The reason by key of every sample that has been skipped so far."""

    def __init__(
        self, table: SampleTable, *, batch_size: int, order: Order, replicas: int = 1
    ) -> None:
        if batch_size < replicas:
            raise UsageError(
                "batch_size", found=batch_size, expected=f"{replicas} or more: one patch a replica"
            )
        self.table, self.order = table, order
        self.skipped = {}
        self._lock = threading.Lock()
        self.batch_size, self.replicas = batch_size, replicas
        self.steps_per_epoch = -(-len(order) // batch_size)

    def locate(
        self, step: int, replica: int | None = None
    ) -> tuple[SampleLocations, NDArray[np.float32]]:
        """Locate the samples of a replica's part of a step, counted over all epochs; of the whole step if it is None.

        Returns:
            The locations, and the weights (B,) float32: 0 for rows that only fill up the last batch of an epoch.
        """
        epoch, step = divmod(step, self.steps_per_epoch)
        place = step * self.batch_size + np.arange(self.batch_size)
        if replica is not None:
            rows = replica_rows(self.batch_size, self.replicas, replica)
            place = place[rows.start : rows.stop]
        real = place < len(self.order)
        # Rows of weight 0 hold real patches too, so that batch statistics stay meaningful.
        place %= len(self.order)
        return self.table.locate(self.order(epoch, place), epoch), real.astype(np.float32)

    def _note_skipped(self, key: int, problem: str) -> None:
        with self._lock:
            new = key not in self.skipped
            self.skipped[key] = problem
            count = len(self.skipped)
        if new and count <= _WARNINGS:
            _log.warning("skipped: %s", problem)
        if new and count == _WARNINGS:
            _log.warning("further skipped samples are counted, not logged")

    @abstractmethod
    def values(self, step: int, replica: int) -> tuple[Any, ...]:
        """Load the `fields` of a replica's part of a step."""

    def advise(self, steps: range, parts: Sequence[int]) -> int:
        """Request some parts of steps from the disk, without waiting, and return the number of bytes requested."""
        return 0


def replica_rows(batch_size: int, replicas: int, replica: int) -> range:
    """Return the rows of every batch that a replica has.

    All replicas together have exactly the batch. One more row, even of weight 0, would change the statistics of batch
    normalization, and N replicas would not equal one.
    """
    return range(replica * batch_size // replicas, (replica + 1) * batch_size // replicas)
