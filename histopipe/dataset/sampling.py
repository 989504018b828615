"""The order of the samples in each epoch, and the samples of each step, computed without reading samples.

An order is a pure function from (epoch, position) to the number of a sample in its table. It needs constant memory. So
any step can be computed directly, and all workers and restarts get the same result.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.selection import SampleLocations, SampleRows, SampleTable, SlideValues
from histopipe.errors import UsageError
from histopipe.system.forecast import Stages
from histopipe.system.hashing import combine, permuted
from histopipe.system.output import counted
from histopipe.tasks.choices import Balance

Numbers = NDArray[np.int64]

_BLOCKS_AT_ONCE = 16
"""Blocks whose samples are mixed. They may be of as many slides, and are requested from the disk together."""
# A different number per purpose, so that no two draws use the same random numbers.
_GROUP_DRAW, _BLOCKS, _WINDOW, _ROTATION, _CAPPED_DRAW = 101, 102, 103, 104, 105


class Order:
    """Every sample once per epoch, in the order of the table, or with a seed in a new order in each epoch.

    Other orders derive from it.
    """

    window = 0
    """Number of positions to request from disk together; 0 for none."""

    def __init__(self, count: int, seed: int | None = None) -> None:
        self._count, self._seed, self._shuffled = count, seed or 0, seed is not None

    def __len__(self) -> int:
        return self._count

    def __call__(self, epoch: int, places: Numbers) -> Numbers:
        """Return the (N,) sample numbers at (N,) positions of an epoch, both from 0 to the length - 1."""
        if not self._shuffled:
            return places
        return permuted(places, self._count, combine(self._seed, epoch))

    def draws(self, table: SampleTable) -> NDArray[np.float64]:
        """Return the mean number of samples per epoch of each of the (S,) slides of its table."""
        return table.counts.astype(np.float64)


class BlockShuffled(Order):
    """Every sample once per epoch, in blocks of neighbours on disk, for hard disks and network filesystems.

    The samples form a ring. Each epoch cuts it into blocks at a random position, shuffles the blocks, and shuffles the
    samples within every 16 consecutive blocks.
    """

    def __init__(self, count: int, seed: int, block: int) -> None:
        super().__init__(count, seed)
        self._block = min(block, count)
        self.window = self._block * _BLOCKS_AT_ONCE

    def __call__(self, epoch: int, places: Numbers) -> Numbers:
        """Return sample numbers; see `Order`."""
        windows = places // self.window
        first = windows * self.window
        sizes = np.minimum(self.window, self._count - first)
        within = first + permuted(
            places - first, sizes, combine(self._seed, epoch, _WINDOW, windows)
        )
        blocks = self._count // self._block
        block, offset = np.divmod(within, self._block)
        whole = block < blocks  # the remaining samples come last
        block[whole] = permuted(block[whole], blocks, combine(self._seed, epoch, _BLOCKS))
        rotation = int(combine(self._seed, epoch, _ROTATION)) % self._count
        return (block * self._block + offset + rotation) % self._count


class Balanced(Order):
    """The same number of samples of every group (class, slide or patient) per epoch.

    An epoch is as long as the table, rounded up to a multiple of the number of groups. The samples of a group are drawn
    without repetition until all have been drawn, then in a new order. The next epoch continues where the last one
    stopped. So samples of small groups are repeated within an epoch, and each epoch draws different samples of large
    groups. With `max_per_slide`, each epoch starts again, with the samples of that epoch.

    `groups` (S,) are the numbers of the groups of the table's slides, from 0.
    """

    def __init__(self, table: SampleTable, groups: NDArray[np.int64], seed: int) -> None:
        self._sizes = np.bincount(groups, weights=table.counts).astype(np.int64)
        self._firsts = np.cumsum(self._sizes) - self._sizes
        self._groups, self._draws = groups, -(-len(table) // len(self._sizes))
        super().__init__(self._draws * len(self._sizes), seed)
        self._capped = table.capped
        slides = np.argsort(groups, kind="stable")
        counts = table.counts[slides]
        self._ends = np.cumsum(counts)
        # Added to a position among slides sorted by group, to get the sample number in the table.
        self._shifts = table.starts[slides] - (self._ends - counts)

    def draws(self, table: SampleTable) -> NDArray[np.float64]:
        """Return the mean number of samples per epoch of each slide; see `Order`."""
        return self._draws * table.counts / self._sizes[self._groups]

    def __call__(self, epoch: int, places: Numbers) -> Numbers:
        """Return sample numbers; see `Order`."""
        draw, group = np.divmod(
            permuted(places, len(self), combine(self._seed, epoch)), len(self._sizes)
        )
        sizes = self._sizes[group]
        # With `max_per_slide` the samples change with the epoch, so an epoch cannot continue the last one.
        before = 0 if self._capped else epoch * self._draws
        rounds, at = np.divmod(before + draw, sizes)
        salt = (_CAPPED_DRAW, epoch) if self._capped else (_GROUP_DRAW,)
        place = self._firsts[group] + permuted(at, sizes, combine(self._seed, *salt, group, rounds))
        return np.asarray(place + self._shifts[np.searchsorted(self._ends, place, side="right")])


def make_order(
    table: SampleTable,
    *,
    seed: int | None,
    balance: Balance = "none",
    shuffle_block: int | None = None,
) -> Order:
    """Return the order of a table's samples; a seed of None is the order of the table.

    Raises:
        UsageError: the settings contradict each other, or a slide has no label and `balance` is "class".
    """
    if seed is None and (balance != "none" or shuffle_block is not None):
        raise UsageError(
            "balance and shuffle_block require shuffling, and shuffle is off",
            todo="shuffle, with a seed, or omit balance and shuffle_block",
        )
    if balance != "none" and shuffle_block is not None:
        raise UsageError(
            f"balance={balance!r} draws from all slides and cannot be combined with shuffle_block",
            todo="use only one of the two",
        )
    if seed is not None and balance != "none":
        return Balanced(table, _groups(table.slides, balance), seed)
    if seed is not None and shuffle_block is not None:
        return BlockShuffled(len(table), seed, shuffle_block)
    return Order(len(table), seed)


def _groups(slides: Sequence[SampleRows], balance: Balance) -> NDArray[np.int64]:
    """Return the number of each slide's class, slide or patient, (S,), from 0."""
    unlabelled = sum(slide.label < 0 for slide in slides)
    if balance == "class" and unlabelled:
        raise UsageError(
            "balance='class'",
            found=f"{counted(unlabelled, 'slide')} without a label of the classes",
            todo="exclude them with labelled_only=True, or label them",
        )
    if balance == "slide":
        # `slides` has an item per class of a slide.
        number: dict[tuple[int, int], int] = {}
        return np.array([number.setdefault((s.store, s.slide), len(number)) for s in slides])
    names = [slide.label if balance == "class" else slide.patient for slide in slides]
    return np.unique(np.array(names), return_inverse=True)[1].astype(np.int64)


_log = logging.getLogger("histopipe")
_WARNINGS = 10
"""Number of skipped samples that are logged: a damaged store may have thousands."""


@dataclass(frozen=True, slots=True)
class Field:
    """Column of a batch: name, and type and shape of a row. If `ragged`, a sample has any number of rows."""

    name: str
    dtype: Any
    shape: tuple[int, ...] = ()
    ragged: bool = False


class BatchSampler(ABC):
    """Samples of a table in an order, divided into steps of `batch_size`; each step has a part per replica.

    `by_slide` are further fields with a row per slide, by name, such as "target".

    Raises:
        UsageError: a replica would have no sample.
    """

    fields: tuple[Field, ...]
    parallel_calls: int | None = None
    """Number of batches loaded in parallel; None for `default_calls`."""
    prefetch = 2
    """Number of steps to load in advance: enough for one slow read; a batch takes megabytes of memory."""
    read_ahead: int | None = None
    """See `ReadAhead`."""

    def __init__(
        self,
        table: SampleTable,
        *,
        batch_size: int,
        order: Order,
        replicas: int = 1,
        by_slide: Mapping[str, SlideValues] | None = None,
    ) -> None:
        if batch_size < replicas:
            raise UsageError(
                "batch_size",
                found=batch_size,
                expected=f"{replicas} or more: one patch per replica",
            )
        self.table, self.order, self.by_slide = table, order, by_slide or {}
        self.skipped: dict[int, str] = {}
        """Reason by key of each sample that was skipped so far."""
        self.stages = Stages()
        """Seconds of the threads that load batches."""
        self._lock = threading.Lock()
        self.batch_size, self.replicas = batch_size, replicas
        self.steps_per_epoch = -(-len(order) // batch_size)

    def locate(
        self, step: int, replica: int | None = None
    ) -> tuple[SampleLocations, NDArray[np.float32]]:
        """Locate the samples of a step, counted over all epochs: the part of `replica`, or all if it is None.

        Returns:
            The locations, and the weights (B,) float32: 0 for padding in the last batch of an epoch.
        """
        epoch, step = divmod(step, self.steps_per_epoch)
        rows = (
            range(self.batch_size)
            if replica is None
            else replica_rows(self.batch_size, self.replicas, replica)
        )
        return self.at(step * self.batch_size + np.arange(rows.start, rows.stop), epoch)

    def at(self, places: Numbers, epoch: int = 0) -> tuple[SampleLocations, NDArray[np.float32]]:
        """Locate the samples at places of an epoch. Places after its end are padding: their weight is 0."""
        # The padding consists of real patches, so that batch statistics stay meaningful.
        numbers = self.order(epoch, places % len(self.order))
        return self.table.locate(numbers, epoch), (places < len(self.order)).astype(np.float32)

    def _slide_fields(self) -> list[Field]:
        """Return the fields with a row per slide."""
        return [
            Field(name, np.float32, (len(next(iter(values.values()))),))
            for name, values in self.by_slide.items()
        ]

    def _note_skipped(self, key: int, problem: str) -> None:
        with self._lock:
            before = len(self.skipped)
            self.skipped[key] = problem
            count = len(self.skipped)
        if before < count <= _WARNINGS:
            _log.warning("skipped: %s", problem)
        if before < count == _WARNINGS:
            _log.warning("further skipped samples are counted, not logged")

    @abstractmethod
    def load(self, step: int, replica: int = 0) -> dict[str, NDArray[Any]]:
        """Load a replica's part of a step, counted over all epochs: an array for each of the `fields`, by name."""

    def advise(self, steps: range, parts: Sequence[int]) -> int:
        """Request some parts of steps from the disk, without waiting, and return the number of bytes requested."""
        return 0


def replica_rows(batch_size: int, replicas: int, replica: int) -> range:
    """Return the rows of every batch that belong to a replica.

    All replicas together have exactly the rows of the batch. An additional row, even of weight 0, would change the
    statistics of batch normalization, so that N replicas would differ from one.
    """
    return range(replica * batch_size // replicas, (replica + 1) * batch_size // replicas)
