"""Which patches a dataset has: whole slides or chosen rows of them, laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import NothingToDo, UsageError
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store

UNLABELLED = -1
MAX_STORES = 127


@dataclass(frozen=True, slots=True)
class SlideRows:
    """One slide's part in a dataset.

    Attributes:
        store: the store's place in the list of stores.
        slide: its number there.
        rows: (N,) chosen rows; None takes all of `count`.
        count: how many patches it brings.
        label: class number, `UNLABELLED` for none.
    """

    store: int
    slide: int
    count: int
    label: int
    rows: NDArray[np.int64] | None = None


class PatchTable:
    """All patches of a dataset, numbered through. Its memory is a row a slide, not a row a patch.

    Raises:
        NothingToDo: there is no patch.
    """

    def __init__(self, slides: Sequence[SlideRows]) -> None:
        self.slides = [slide for slide in slides if slide.count]
        counts = np.array([slide.count for slide in self.slides], np.int64)
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._stores = np.array([slide.store for slide in self.slides], np.int64)
        self._numbers = np.array([slide.slide for slide in self.slides], np.int64)
        self._labels = np.array([slide.label for slide in self.slides], np.int32)
        if not self.slides:
            raise NothingToDo(
                "no patch to read", todo="see `histopipe info` for what the store holds"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(
        self, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Where patches are: store, slide number, row, and their label; (N,) each."""
        place = np.searchsorted(self._ends, numbers, side="right")
        rows = numbers - self._starts[place]
        for i in np.unique(place):
            chosen = self.slides[i].rows
            if chosen is not None:
                here = place == i
                rows[here] = chosen[rows[here]]
        return self._stores[place], self._numbers[place], rows, self._labels[place]


def pack_keys(
    stores: NDArray[np.int64], slides: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """A dataset's keys: store << 56 | slide << 32 | row."""
    return (stores << 56) | (slides << 32) | rows


def unpack_keys(
    keys: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Store, slide number and row of each key."""
    return keys >> 56, (keys >> 32) & 0xFFFFFF, keys & 0xFFFFFFFF


def class_names(records: Sequence[SlideRecord]) -> list[str]:
    """The classes of labelled slides, sorted; a class's number is its place."""
    return sorted({record.label for record in records if record.label})


def readable_rows(store: Store, slide: int) -> NDArray[np.int64] | None:
    """Rows that hold a patch, or None if all do. Only a slide with damage has its index read for that."""
    if not store.records[slide].unreadable:
        return None
    return np.flatnonzero(store.index(slide)["length"]).astype(np.int64)


def whole_table(
    stores: Sequence[Store], classes: Sequence[str], *, labelled_only: bool
) -> PatchTable:
    """Every patch of every complete slide, labelled by slide.

    Raises:
        UsageError: there are more stores than a key can tell apart.
        NothingToDo: there is no patch.
    """
    if len(stores) > MAX_STORES:
        raise UsageError(
            "stores in one dataset", found=len(stores), expected=f"at most {MAX_STORES}"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    return PatchTable(
        [
            SlideRows(
                ordinal, slide, record.stored,
                numbers.get(record.label or "", UNLABELLED), readable_rows(store, slide),
            )
            for ordinal, store in enumerate(stores)
            for slide, record in store.complete.items()
            if (record.label in numbers or not labelled_only) and record.stored
        ]
    )  # fmt: skip
