"""In which order the epochs of a dataset go through its patches.

An order is a pure function from (epoch, place) to a patch's number in its table, in memory that does not grow with the
patches. That is what makes any step reachable at once, and workers and restarts agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import Balance, check_choice
from histopipe.dataset.permutation import permuted
from histopipe.dataset.sample_table import SampleRows, SampleTable
from histopipe.errors import UsageError
from histopipe.system.hashing import combine

Numbers = NDArray[np.int64]

_BLOCKS_AT_ONCE = 16
# Each use of a seed has a number of its own, so that no two draws are the same by accident.
_GROUP_DRAW, _BLOCKS, _WINDOW, _ROTATION, _CAPPED_DRAW = 101, 102, 103, 104, 105


class Order(Protocol):
    """Which patch stands where in an epoch."""

    window: int
    """Places that are best fetched from disk together; 0 for no such thing."""

    def __len__(self) -> int:
        """Places in an epoch."""

    def __call__(self, epoch: int, places: Numbers) -> Numbers:
        """The patches' numbers in the table at places from 0 to below the length."""


class Sequential:
    """The table's own order, every epoch."""

    window = 0

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __call__(self, epoch: int, places: Numbers) -> Numbers:
        """As `Order`."""
        return places


class Shuffled:
    """Every patch once an epoch, in an order of its own for each epoch.

    Example:
        >>> order = Shuffled(10, seed=1)
        >>> order(0, np.arange(10)).tolist()
        [7, 8, 9, 1, 0, 3, 5, 6, 4, 2]
    """

    window = 0

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed

    def __len__(self) -> int:
        return self._count

    def __call__(self, epoch: int, places: Numbers) -> Numbers:
        """As `Order`."""
        return permuted(places, self._count, combine(self._seed, epoch))


class BlockShuffled:
    """Every patch once an epoch, read in blocks of neighbours: for hard disks and network filesystems.

    The patches lie in a ring, cut into blocks at a place that is drawn anew for every epoch. Blocks are shuffled, and
    patches are shuffled within each 16 blocks that follow one another.

    Args:
        count: patches.
        seed: decides the order.
        block: patches of a block, neighbours on disk.
    """

    def __init__(self, count: int, seed: int, block: int) -> None:
        if block < 1:
            raise UsageError("shuffle_block", found=block, expected="1 patch or more")
        self._count, self._seed, self._block = count, seed, min(block, count)
        self.window = self._block * _BLOCKS_AT_ONCE

    def __len__(self) -> int:
        return self._count

    def __call__(self, epoch: int, places: Numbers) -> Numbers:
        """As `Order`."""
        windows = places // self.window
        first = windows * self.window
        sizes = np.minimum(self.window, self._count - first)
        keys = combine(self._seed, epoch, _WINDOW, windows)
        within = first + permuted(places - first, sizes, keys)
        blocks = self._count // self._block
        block, offset = np.divmod(within, self._block)
        whole = block < blocks  # what is left over comes last
        block[whole] = permuted(block[whole], blocks, combine(self._seed, epoch, _BLOCKS))
        rotation = int(combine(self._seed, epoch, _ROTATION)) % self._count
        return (block * self._block + offset + rotation) % self._count


class Balanced:
    """The same number of patches of every group (class, slide or patient) in an epoch.

    An epoch is as long as the table, rounded up to a whole number for each group. Each group is gone through whole, in a
    new order every time around, and an epoch goes on in it where the one before stopped: small groups come up several times
    an epoch, of large ones each epoch shows another part, and no patch of a group comes up twice before all have come up once.
    With a cap on slides each epoch begins anew, and goes by this rule through the patches that the cap has drawn for it.

    Args:
        table: the patches.
        groups: (S,) number of each of the table's slides' group, from 0.
        seed: decides the order.
    """

    window = 0

    def __init__(self, table: SampleTable, groups: NDArray[np.int64], seed: int) -> None:
        self._seed, self._capped = seed, table.capped
        self._slides = np.argsort(groups, kind="stable")
        counts = table.counts[self._slides]
        self._ends = np.cumsum(counts)
        # What turns a place among slides sorted by group into one of the table.
        self._shifts = table.starts[self._slides] - (self._ends - counts)
        self._sizes = np.bincount(groups, weights=table.counts).astype(np.int64)
        self._firsts = np.cumsum(self._sizes) - self._sizes
        self._draws = -(-len(table) // len(self._sizes))

    def __len__(self) -> int:
        return self._draws * len(self._sizes)

    def __call__(self, epoch: int, places: Numbers) -> Numbers:
        """As `Order`."""
        mixed = permuted(places, len(self), combine(self._seed, epoch))
        draw, group = np.divmod(mixed, len(self._sizes))
        sizes = self._sizes[group]
        # What a cap draws changes with the epoch, so nothing can go on from one to the next.
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
    """The order that a dataset is read in.

    Args:
        table: the patches.
        seed: decides the order; None reads in the table's.
        balance: what is to come up equally often.
        shuffle_block: shuffle blocks of so many neighbours instead of single patches.

    Raises:
        UsageError: settings that do not go together, or a slide without a label in a balance of classes.
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
    """(S,) each slide's group, numbered from 0."""
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
