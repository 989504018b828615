"""Which items each step of a pass has: a pure function of the step, known without reading any of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.orders import Order
from histopipe.dataset.sample_table import SampleLocations, SampleTable
from histopipe.errors import UsageError


class BatchSampler:
    """A table of items in an order, cut into steps and these into a part for each replica.

    Args:
        table: the items.
        batch_size: items a step, over all replicas.
        order: in which order.
        replicas: parts that each step is given out in.

    Raises:
        UsageError: a replica would have none.
    """

    def __init__(
        self, table: SampleTable, *, batch_size: int, order: Order, replicas: int = 1
    ) -> None:
        if batch_size < replicas:
            raise UsageError(
                "batch_size", found=batch_size, expected=f"{replicas} or more: one patch a replica"
            )
        self.table, self.order = table, order
        self.batch_size, self.replicas = batch_size, replicas
        self.steps_per_epoch = -(-len(order) // batch_size)

    def rows(self, replica: int) -> range:
        """Which rows of every batch are a replica's."""
        return replica_rows(self.batch_size, self.replicas, replica)

    def locate(
        self, step: int, replica: int | None = None
    ) -> tuple[SampleLocations, NDArray[np.float32]]:
        """Which items a step has, or a replica's part of it, and their weights (B,), without reading any.

        Args:
            step: counted from the first step of the first epoch; epochs follow one another.
            replica: which part of it; all if not given.
        """
        epoch, step = divmod(step, self.steps_per_epoch)
        rows = range(self.batch_size) if replica is None else self.rows(replica)
        place = step * self.batch_size + np.arange(rows.start, rows.stop)
        real = place < len(self.order)
        # The order goes on into rows of weight 0: real pixels keep batch statistics sane.
        place %= len(self.order)
        return self.table.locate(self.order(epoch, place), epoch), real.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Field:
    """A column of a batch.

    Attributes:
        name: of the column.
        dtype: of its values.
        shape: behind the rows.
        ragged: whether it has rows of its own number, and not one an item.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...] = ()
    ragged: bool = False


class BatchLoader(Protocol):
    """Batches that can be loaded, as `BatchFeed` serves them."""

    fields: tuple[Field, ...]
    parallel_calls: int | None
    """Batches loaded at once; None for one a core."""
    prefetch: int
    """Steps kept ready."""
    read_ahead: int | None
    """See `ReadAhead`."""
    replicas: int
    batch_size: int
    steps_per_epoch: int
    order: Order

    def rows(self, replica: int) -> range:
        """As `BatchSampler.rows`."""

    def values(self, step: int, replica: int) -> tuple[Any, ...]:
        """The fields of a step's part."""

    def advise(self, steps: range, parts: Any) -> int:
        """Ask the disk for what steps need; the bytes asked for."""


def replica_rows(batch_size: int, replicas: int, replica: int) -> range:
    """Which rows of every batch are a replica's.

    Together they are exactly the batch: a row more, even one of weight 0, would show in the statistics of batch
    normalisation, and N replicas would not equal one.
    """
    return range(replica * batch_size // replicas, (replica + 1) * batch_size // replicas)
