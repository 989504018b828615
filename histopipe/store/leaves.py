"""Leaf pages of a database and the values on them, read without LMDB."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from histopipe.store.data_file import HEADER, DataFile
from histopipe.store.pages import (
    Nodes,
    Place,
    Problem,
    leaf_nodes,
    overflow_pages,
    wrong_overflow,
)

_RUN_PAGES = 2048
"""Pages read at once: 8 MB are enough for a disk to be at its best."""
_GAP_PAGES = 16


@dataclass(frozen=True, slots=True)
class LeafCount:
    """What some leaf pages, and the values that lie outside of them, make of the file.

    Attributes:
        extents: (E, 2) int64, first page and number of the pages that they lie on.
        leaf_pages, overflow_pages, entries: how many.
        problems: pages that cannot be trusted.
    """

    extents: NDArray[np.int64]
    leaf_pages: int
    overflow_pages: int
    entries: int
    problems: list[Problem]


@dataclass(frozen=True, slots=True)
class LeafRead:
    """What some leaf pages hold.

    Attributes:
        nodes: in the order of their keys.
        count: of their pages.
    """

    nodes: Nodes
    count: LeafCount
    _pages: NDArray[np.uint8] = field(repr=False)

    def place(self, node: int) -> bytes | tuple[int, int]:
        """A node's value if it lies among the keys, else its first page and its length, bytes."""
        start, size = int(self.nodes.places[node]), int(self.nodes.sizes[node])
        if start < 0:
            return int(self.nodes.first_pages[node]), size
        return self._pages.reshape(-1)[start : start + size].tobytes()

    def check_values(self, file: DataFile, told: Callable[[int, str], None]) -> None:
        """Whether the pages of values that lie on pages of their own are these values', without reading the values."""
        big = np.flatnonzero(self.nodes.first_pages >= 0)
        first = self.nodes.first_pages[big]
        pages = overflow_pages(self.nodes.sizes[big], file.page_size)
        headers = file.pages(first)[:, :HEADER]
        wrong = wrong_overflow(headers, first, pages) | (
            first + pages > file.length // file.page_size
        )
        for node, page in zip(big[wrong].tolist(), first[wrong].tolist(), strict=True):
            told(node, f"page {page} is not its value's")

    def values(
        self, file: DataFile, told: Callable[[int, str], None]
    ) -> Iterator[tuple[int, memoryview]]:
        """Each node's number and value, in the order that they lie in the file; a view that ends with the next one.

        Args:
            file: that the leaves were read from.
            told: called with each node whose pages are not its own, and what is wrong.
        """
        nodes, inline = self.nodes, self._pages.reshape(-1).data
        for node in np.flatnonzero(self.nodes.places >= 0).tolist():
            start = int(nodes.places[node])
            yield node, inline[start : start + int(nodes.sizes[node])]
        big = np.flatnonzero(nodes.first_pages >= 0)
        first = nodes.first_pages[big]
        pages = overflow_pages(nodes.sizes[big], file.page_size)
        most = file.length // file.page_size
        if pages.sum() > most:  # one page for many values: reading them all would never end
            for node in big.tolist():
                told(node, "its pages are other values', too")
            return
        outside = (first < 2) | (first + pages > most)
        for node in big[outside].tolist():
            told(
                node,
                f"its value would lie on page {nodes.first_pages[node]}, beyond the end of the file",
            )
        order = np.flatnonzero(~outside)
        order = order[np.argsort(first[order], kind="stable")]
        big, first, pages = big[order], first[order], pages[order]
        runs = _runs(first.tolist(), pages.tolist())
        for run, following in zip_longest(runs, runs[1:]):
            if following is not None:  # the disk works on it meanwhile
                file.read_ahead(int(first[following.start]), int(first[following.stop - 1]))
            yield from self._values_of_run(file, big[run], first[run], pages[run], told)

    def _values_of_run(
        self,
        file: DataFile,
        which: NDArray[np.int64],
        first: NDArray[np.int64],
        pages: NDArray[np.int64],
        told: Callable[[int, str], None],
    ) -> Iterator[tuple[int, memoryview]]:
        """Values that lie close together."""
        base = int(first[0])
        block = file.read(base, int((first + pages).max()) - base)
        starts = (first - base) * file.page_size
        wrong = wrong_overflow(block[starts[:, None] + np.arange(HEADER)], first, pages)
        view = block.data
        sizes = self.nodes.sizes[which].tolist()
        places = (starts + HEADER).tolist()
        for node, bad, start, size in zip(
            which.tolist(), wrong.tolist(), places, sizes, strict=True
        ):
            if bad:
                told(node, f"page {(start - HEADER) // file.page_size + base} is not its value's")
            else:
                yield node, view[start : start + size]


def read_leaves(
    file: DataFile,
    places: Sequence[Place],
    *,
    integer_keys: bool = False,
    databases: bool = False,
) -> LeafRead:
    """Read leaf pages; values on pages of their own are left for `values`."""
    numbers = np.array([place.page for place in places], np.int64)
    pages = file.pages(numbers)
    nodes, problems = leaf_nodes(pages, places, integer_keys=integer_keys, databases=databases)
    big = nodes.first_pages >= 0
    own = np.stack(
        [nodes.first_pages[big], overflow_pages(nodes.sizes[big], file.page_size)], axis=1
    )
    leaves = np.stack([numbers, np.ones_like(numbers)], axis=1)
    extents = joined(np.concatenate([leaves, own]))
    count = LeafCount(extents, len(places), int(own[:, 1].sum()), len(nodes), problems)
    return LeafRead(nodes, count, pages)


def joined(extents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Extents in rising order; those that touch are one, those that overlap are left so that it can be told."""
    if not len(extents):
        return extents
    extents = extents[np.argsort(extents[:, 0], kind="stable")]
    first, end = extents[:, 0], extents.sum(axis=1)
    starts = np.flatnonzero(np.append(True, first[1:] != end[:-1]))
    counts = np.add.reduceat(extents[:, 1], starts)
    return np.stack([first[starts], counts], axis=1)


def _runs(first: list[int], pages: list[int]) -> list[slice]:
    """Neighbours that are worth one read each, of rising first pages."""
    runs, begin = [], 0
    for place in range(1, len(first)):
        gap = first[place] - (first[place - 1] + pages[place - 1])
        if gap > _GAP_PAGES or first[place] + pages[place] - first[begin] > _RUN_PAGES:
            runs.append(slice(begin, place))
            begin = place
    return [*runs, slice(begin, len(first))] if first else []
