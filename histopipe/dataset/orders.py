"""Orders of the samples in the epochs of a dataset.

An order is a pure function from (epoch, position) to the number of a sample in its table, in memory that does not grow
with the samples. So any step can be computed directly, and workers and restarts agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import Balance, check_choice
from histopipe.dataset.permutation import permuted
from histopipe.dataset.sample_table import SampleRows, SampleTable
from histopipe.errors import UsageError
from histopipe.system.hashing import combine

Numbers = NDArray[np.int64]

_BLOCKS_AT_ONCE = 16
# Every draw has another number, so that no two draws use the same random numbers.
_GROUP_DRAW, _BLOCKS, _WINDOW, _ROTATION, _CAPPED_DRAW = 101, 102, 103, 104, 105


class Order(ABC):
    """An order of the samples in each epoch."""

    window = 0
    """Number of positions that are best read from disk together; 0 for none."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self._count, self._seed = count, seed

    def __len__(self) -> int:
        return self._count

    @abstractmethod
    def __call__(self, epoch: int, places: Numbers) -> Numbers:
        """Return the (N,) sample numbers at (N,) positions of an epoch, both from 0 to the length - 1."""


class Sequential(Order):
    """The order of the table, in every epoch."""

    def __call__(self, epoch: int, places: Numbers) -> Numbers:
        """Return sample numbers; see `Order`."""
        return places


class Shuffled(Order):
    """Every sample once per epoch, in another order in each epoch."""

    def __call__(self, epoch: int, places: Numbers) -> Numbers:
        """Return sample numbers; see `Order`."""
        return permuted(places, self._count, combine(self._seed, epoch))


class BlockShuffled(Order):
    """Every sample once per epoch, read in blocks of neighbours on disk: for hard disks and network filesystems.

    The samples form a ring, which is cut into blocks at a position drawn for each epoch. Blocks are shuffled, and samples
    are shuffled within every 16 consecutive blocks.
    """

    def __init__(self, count: int, seed: int, block: int) -> None:
        if block < 1:
            raise UsageError("shuffle_block", found=block, expected="1 patch or more")
        super().__init__(count, seed)
        self._block = min(block, count)
        self.window = self._block * _BLOCKS_AT_ONCE

    def __call__(self, epoch: int, places: Numbers) -> Numbers:
        """Return sample numbers; see `Order`."""
        windows = places // self.window
        first = windows * self.window
        sizes = np.minimum(self.window, self._count - first)
        keys = combine(self._seed, epoch, _WINDOW, windows)
        within = first + permuted(places - first, sizes, keys)
        blocks = self._count // self._block
        block, offset = np.divmod(within, self._block)
        whole = block < blocks  # the remaining samples come last
        block[whole] = permuted(block[whole], blocks, combine(self._seed, epoch, _BLOCKS))
        rotation = int(combine(self._seed, epoch, _ROTATION)) % self._count
        return (block * self._block + offset + rotation) % self._count


class Balanced(Order):
    """The same number of samples of every group (class, slide or patient) per epoch.

    An epoch is as long as the table, rounded up to a multiple of the number of groups. The samples of a group are drawn
    without repetition until all have been drawn, then in a new order; the next epoch continues where this one stopped.
    So small groups are repeated within an epoch, and of large ones each epoch shows another part. With `max_per_slide`,
    each epoch starts again, with the samples that were drawn for it.

    `groups` (S,) are the numbers of the groups of the table's slides, from 0.
    """

    def __init__(self, table: SampleTable, groups: NDArray[np.int64], seed: int) -> None:
        self._sizes = np.bincount(groups, weights=table.counts).astype(np.int64)
        self._firsts = np.cumsum(self._sizes) - self._sizes
        self._draws = -(-len(table) // len(self._sizes))
        super().__init__(self._draws * len(self._sizes), seed)
        self._capped = table.capped
        slides = np.argsort(groups, kind="stable")
        counts = table.counts[slides]
        self._ends = np.cumsum(counts)
        # Converts a position among slides sorted by group into a sample number of the table.
        self._shifts = table.starts[slides] - (self._ends - counts)

    def __call__(self, epoch: int, places: Numbers) -> Numbers:
        """Return sample numbers; see `Order`."""
        mixed = permuted(places, len(self), combine(self._seed, epoch))
        draw, group = np.divmod(mixed, len(self._sizes))
        sizes = self._sizes[group]
        # With `max_per_slide` the samples change with the epoch, so an epoch cannot continue the last one.
        before = 0 if self._capped else epoch * self._draws
        rounds, at = np.divmod(before + draw, sizes)
        salt = (_CAPPED_DRAW, epoch) if self._capped else (_GROUP_DRAW,)
        keys = combine(self._seed, *salt, group, rounds)
        place = self._firsts[group] + permuted(at, sizes, keys)
        shift = self._shifts[np.searchsorted(self._ends, place, side="right")]
        return np.asarray(place + shift)


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
    check_choice(Balance, balance=balance)
    if seed is None and (balance != "none" or shuffle_block is not None):
        raise UsageError(
            "balance and shuffle_block are ways of shuffling, and shuffle is off",
            todo="shuffle, with a seed, or leave them out",
        )
    if balance != "none" and shuffle_block is not None:
        raise UsageError(
            f"balance={balance!r} draws from all slides at once and shuffle_block reads neighbours",
            todo="take one of them",
        )
    if seed is None:
        return Sequential(len(table))
    if balance != "none":
        return Balanced(table, _groups(table.slides, balance), seed)
    if shuffle_block is not None:
        return BlockShuffled(len(table), seed, shuffle_block)
    return Shuffled(len(table), seed)


def _groups(slides: Sequence[SampleRows], balance: Balance) -> NDArray[np.int64]:
    """Return the number of each slide's class, slide or patient, (S,), from 0."""
    unlabelled = sum(slide.label < 0 for slide in slides)
    if balance == "class" and unlabelled:
        raise UsageError(
            "balance='class'", found=f"{unlabelled} slides without a label of the classes",
            todo="leave them out (labelled_only=True), or label them",
        )  # fmt: skip
    if balance == "slide":
        # A slide may come once for each of its classes.
        number: dict[tuple[int, int], int] = {}
        return np.array([number.setdefault((s.store, s.slide), len(number)) for s in slides])
    names = [slide.label if balance == "class" else slide.patient for slide in slides]
    return np.unique(np.array(names), return_inverse=True)[1].astype(np.int64)
