"""What lies on the pages of LMDB's trees, checked while it is looked at: pure functions on arrays of pages.

Whatever a page claims is held against the page's bounds before it is followed, so that a hostile file gives findings and
nothing else.

Source:
    LMDB 0.9, mdb.c: struct MDB_page and MDB_node. A page is a header, then 2-byte places of its nodes in the order of their
    keys, and the nodes, without gaps, up to its end. A node is 2 × 16 bits of size, 16 of flags, 16 of the key's length, the
    key and the data. On a branch the size and the flags are the child's page; its first key is not looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from histopipe.store.data_file import HEADER

BRANCH, LEAF, OVERFLOW = 0x01, 0x02, 0x04
BIG_DATA, SUB_DATABASE = 0x01, 0x02

_PAGE = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_LONGEST_KEY = 511


class Place(NamedTuple):
    """A page and which keys may be under it: `low` and up to but not `high`; None for no end."""

    page: int
    low: bytes
    high: bytes | None


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of leaf pages, in the order of the pages and keys. N nodes; a damaged page has none.

    Attributes:
        keys: (N, W) uint8, W being the longest one's length; shorter ones end in zeros.
        key_lengths: (N,) int64.
        flags, sizes: (N,) int64; sizes are the values', bytes.
        places: (N,) int64: where a value begins among the pages' bytes; -1 of one on pages of its own.
        first_pages: (N,) int64: first page of a value on pages of its own; -1 of others.
    """

    keys: NDArray[np.uint8]
    key_lengths: NDArray[np.int64]
    flags: NDArray[np.int64]
    sizes: NDArray[np.int64]
    places: NDArray[np.int64]
    first_pages: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, node: int) -> bytes:
        """One node's key."""
        return self.keys[node, : self.key_lengths[node]].tobytes()


Problem = tuple[Place, str]
"""A page that cannot be trusted, and what is wrong with it."""


class BadPage(ValueError):
    """A page is not what it should be; the message says why."""


def children(page: NDArray[np.uint8], place: Place, *, integer_keys: bool = False) -> list[Place]:
    """The pages under a branch page, in the order of their keys; `integer_keys` as in `leaf_nodes`.

    Raises:
        BadPage: it is none, or damaged.
    """
    data = page.tobytes()
    number, _, flags, lower, upper = _PAGE.unpack_from(data)
    if number != place.page or flags != BRANCH:
        raise BadPage(_not_as_said(number, flags))
    count = (lower - HEADER) >> 1
    if lower % 2 or not HEADER < lower <= upper <= len(data):
        raise BadPage(f"bounds {lower} and {upper} of its nodes")
    found: list[Place] = []
    low, used = place.low, 0
    for node, start in enumerate(struct.unpack_from(f"<{count}H", data, HEADER)):
        if start < upper or start + _NODE.size > len(data):
            raise BadPage(f"node {node} lies outside of it")
        first, second, third, length = _NODE.unpack_from(data, start)
        end = start + _NODE.size + length
        if end > len(data) or length > _LONGEST_KEY:
            raise BadPage(f"the key of node {node} lies outside of it")
        used += _NODE.size + length + length % 2
        if node:
            key = data[start + _NODE.size : end]
            key = key[::-1] if integer_keys else key
            if key <= low or (place.high is not None and key >= place.high):
                raise BadPage(f"the key of node {node} is out of order")
            found[-1] = Place(found[-1].page, low, key)
            low = key
        found.append(Place(first | second << 16 | third << 32, low, place.high))
    if used != len(data) - upper:
        raise BadPage(f"nodes of {used} bytes in {len(data) - upper}")
    return found


def leaf_nodes(
    pages: NDArray[np.uint8],
    places: Sequence[Place],
    *,
    integer_keys: bool = False,
    databases: bool = False,
) -> tuple[Nodes, list[Problem]]:
    """The nodes of leaf pages.

    Args:
        pages: (P, page size) uint8.
        places: of each.
        integer_keys: keys are native integers of 8 bytes, as in the tree of free pages; they are given big-endian.
        databases: values may be databases.
    """
    count, size = pages.shape
    problems: dict[int, str] = {}
    flat = pages.reshape(-1)
    words = flat.view("<u2")
    numbers = pages[:, :8].copy().view("<u8")[:, 0]
    header = pages[:, 8:HEADER].copy().view("<u2").astype(np.int64)
    flags, lower, upper = header[:, 1], header[:, 2], header[:, 3]
    expected = np.array([place.page for place in places], np.uint64)
    for row in np.flatnonzero((numbers != expected) | (flags != LEAF)).tolist():
        problems[row] = _not_as_said(int(numbers[row]), int(flags[row]))
    bounded = (lower >= HEADER) & (lower % 2 == 0) & (lower <= upper) & (upper <= size)
    for row in np.flatnonzero(~bounded).tolist():
        problems.setdefault(row, f"bounds {lower[row]} and {upper[row]} of its nodes")
    sound = np.ones(count, bool)
    sound[list(problems)] = False

    nodes_on = np.where(sound, (lower - HEADER) // 2, 0)
    page_of = np.repeat(np.arange(count), nodes_on)
    slot = np.arange(len(page_of)) - np.repeat(np.cumsum(nodes_on) - nodes_on, nodes_on)
    starts = words[(page_of * size + HEADER) // 2 + slot].astype(np.int64)
    inside = (starts % 2 == 0) & (starts >= upper[page_of]) & (starts + _NODE.size <= size)
    _mark(problems, page_of[~inside], "a node lies outside of it")
    page_of, starts = page_of[inside], starts[inside]

    at = page_of * size + starts
    fields = words[at[:, None] // 2 + np.arange(4)].astype(np.int64)
    sizes, node_flags, lengths = fields[:, 0] | fields[:, 1] << 16, fields[:, 2], fields[:, 3]
    strange = node_flags & ~(BIG_DATA | (SUB_DATABASE if databases else 0))
    _mark(problems, page_of[strange != 0], "a node with flags that a store's have not")
    held = np.where(node_flags & BIG_DATA, 8, sizes)
    ends = starts + _NODE.size + lengths + held
    inside = (ends <= size) & (lengths >= 1) & (lengths <= _LONGEST_KEY)
    _mark(problems, page_of[~inside], "a value or its key lies outside of it")
    used = np.bincount(
        page_of[inside], _even(_NODE.size + lengths + held)[inside].astype(float), count
    )
    for row in np.flatnonzero(used != np.where(sound, size - upper, used)).tolist():
        problems.setdefault(row, f"nodes of {used[row]:.0f} bytes in {size - upper[row]}")

    keys = _bytes_at(flat, at + _NODE.size, lengths, min(int(lengths.max(initial=0)), _LONGEST_KEY))
    if integer_keys:
        _mark(problems, page_of[lengths != 8], "a key is not of 8 bytes")
        keys = keys[:, ::-1]
    rising = _rising(keys, lengths)
    neighbours = page_of[1:] == page_of[:-1]
    _mark(problems, page_of[1:][~rising & neighbours], "its keys are out of order")
    first = np.flatnonzero(np.diff(page_of, prepend=-1))
    last = np.append(first[1:], len(page_of))[: len(first)] - 1
    for row, begin, end in zip(page_of[first].tolist(), first.tolist(), last.tolist(), strict=True):
        low, high = keys[begin, : lengths[begin]].tobytes(), keys[end, : lengths[end]].tobytes()
        place = places[row]
        if low < place.low or (place.high is not None and high >= place.high):
            problems.setdefault(row, "its keys belong elsewhere")

    keep = ~np.isin(page_of, list(problems))
    big = (node_flags & BIG_DATA).astype(bool)
    data = at + _NODE.size + lengths
    eight = _bytes_at(flat, data, np.where(big & keep, 8, 0), 8).copy().view("<u8")[:, 0]
    nodes = Nodes(
        keys[keep],
        lengths[keep],
        node_flags[keep],
        sizes[keep],
        np.where(big, -1, data)[keep],
        np.where(big, np.minimum(eight, 1 << 62).astype(np.int64), -1)[keep],
    )
    return nodes, [(places[row], text) for row, text in sorted(problems.items())]


def overflow_pages(sizes: NDArray[np.int64], page_size: int) -> NDArray[np.int64]:
    """How many pages values of these sizes have to themselves."""
    return (HEADER - 1 + sizes) // page_size + 1


def wrong_overflow(
    headers: NDArray[np.uint8], first_pages: NDArray[np.int64], pages: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which values' own pages do not say that they are these.

    Args:
        headers: (N, 16) uint8, of the first page of each.
        first_pages, pages: (N,) what they should say.
    """
    numbers = headers[:, :8].copy().view("<u8")[:, 0]
    flags = headers[:, 10:12].copy().view("<u2")[:, 0]
    counts = headers[:, 12:16].copy().view("<u4")[:, 0]
    wrong: NDArray[np.bool_] = (
        (numbers != first_pages.astype(np.uint64)) | (flags != OVERFLOW) | (counts != pages)
    )
    return wrong


def _not_as_said(number: int, flags: int) -> str:
    return f"it says that it is page {number}, of kind {flags:#x}"


def _mark(problems: dict[int, str], rows: NDArray[np.int64], text: str) -> None:
    for row in np.unique(rows).tolist():
        problems.setdefault(row, text)


def _bytes_at(
    flat: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64], width: int
) -> NDArray[np.uint8]:
    """Bytes from each start, (N, width) uint8, zeros beyond each length. None is read outside of `flat`."""
    columns = np.arange(width)
    within = columns < lengths[:, None]
    found = flat[np.where(within, np.minimum(starts[:, None] + columns, len(flat) - 1), 0)]
    found[~within] = 0
    return found


def _rising(keys: NDArray[np.uint8], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(N - 1,) whether each key is greater than the one before it, as bytes are compared."""
    before, after = keys[:-1], keys[1:]
    if keys.shape[1] == 0:
        return np.zeros(len(before), bool)
    differs = before != after
    first = differs.argmax(axis=1)
    row = np.arange(len(before))
    longer: NDArray[np.bool_] = lengths[1:] > lengths[:-1]
    # Beyond a key's end are zeros: where those differ the other key is longer, and greater.
    greater: NDArray[np.bool_] = np.where(
        differs.any(axis=1), after[row, first] > before[row, first], longer
    )
    return greater


def _even(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return lengths + lengths % 2
