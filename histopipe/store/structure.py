"""The trees of a store's file, walked from a meta page down: whether all pages are where they should be, each once.

It finds what `lmdb.verify` finds, to which the tests hold it, and is there beside it for two reasons. A million patches
take that 5 s, longer than reading them takes; and it says which page is damaged, but not which slides are lost by that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.store.data_file import NO_PAGE, DataFile, Meta, Tree
from histopipe.store.leaves import LeafCount, LeafRead, read_leaves
from histopipe.store.pages import BIG_DATA, SUB_DATABASE, BadPage, Place, children

FREE, MAIN, META_PAGES = "free pages", "databases", "meta pages"
"""The two trees that have no name of their own, and what is no tree."""

_FIRST_PAGE, _META_FLAG = 2, 0x08
_DEEPEST = 32
_INTEGER_KEYS = 0x08
_TREE_BYTES = 48
_NODES_AT_ONCE = 16_384
_LEAVES_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that LMDB's engine would not have written.

    Attributes:
        tree: name of the database.
        text: what it is.
        low, high: keys that may be lost by it, from `low` up to `high`; None for no end. Both None where it costs no key.
        key: the only one, where it is only one.
    """

    tree: str
    text: str
    low: bytes | None = None
    high: bytes | None = None
    key: bytes | None = None


@dataclass(slots=True)
class Found:
    """What a walk has come across of one tree."""

    branch_pages: int = 0
    leaf_pages: int = 0
    overflow_pages: int = 0
    entries: int = 0


@dataclass(slots=True)
class Structure:
    """One state of a file.

    Attributes:
        file, meta: the file and the state.
        trees: of the databases, by name.
        faults: found so far.
    """

    file: DataFile
    meta: Meta
    trees: dict[str, Tree] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    _found: dict[str, Found] = field(default_factory=dict)
    _extents: list[NDArray[np.int64]] = field(default_factory=list)
    _branches: set[int] = field(default_factory=set)

    def read_databases(self) -> None:
        """Look up the databases; first of all."""
        if self.meta.main.flags or self.meta.main.padding:
            self._fault(MAIN, f"flags {self.meta.main.flags:#x}, {self.meta.main.padding:#x}")
        for key, value, flags in self.small(MAIN, self.meta.main):
            name = key.decode("ascii", "backslashreplace")
            if flags != SUB_DATABASE or len(value) != _TREE_BYTES:
                self._fault(MAIN, f"{name!r} is no database")
                continue
            tree = Tree.parse(value)
            if tree.flags or tree.padding:
                self._fault(
                    name, f"flags {tree.flags:#x}, {tree.padding:#x}: a store's databases have none"
                )
                continue
            self.trees[name] = tree

    def small(
        self, name: str, tree: Tree, *, integer_keys: bool = False
    ) -> Iterator[tuple[bytes, bytes, int]]:
        """Keys, values and flags of a tree, one by one, roughly in the order that they lie in."""
        for read in self.reads(name, tree, integer_keys=integer_keys):
            for node, value in read.values(self.file, self.teller(name, read)):
                yield read.nodes.key(node), bytes(value), int(read.nodes.flags[node])

    def reads(self, name: str, tree: Tree, *, integer_keys: bool = False) -> Iterator[LeafRead]:
        """The leaf pages of a tree, some at a time, counted."""
        for places in self.leaves(name, tree, integer_keys=integer_keys):
            read = read_leaves(self.file, places, integer_keys=integer_keys, databases=name == MAIN)
            self.count(name, read.count)
            yield read

    def leaves(self, name: str, tree: Tree, *, integer_keys: bool = False) -> Iterator[list[Place]]:
        """Where a tree's leaf pages are, in the order of their keys; some at a time, for whoever reads them to `count`."""
        self._found[name] = Found()
        if tree.root == NO_PAGE:
            if tree.depth:
                self._fault(name, f"depth {tree.depth}, without a page")
            return
        if not 1 <= tree.depth <= _DEEPEST:
            self._fault(name, f"depth {tree.depth}", b"")
            return
        dense = _NODES_AT_ONCE * tree.leaf_pages // max(1, tree.entries)
        at_once = max(1, min(dense, _LEAVES_AT_ONCE))
        some: list[Place] = []
        for place in self._walk(name, tree, integer_keys):
            some.append(place)
            if len(some) == at_once:
                yield some
                some = []
        if some:
            yield some

    def count(self, name: str, count: LeafCount) -> None:
        """Take in what was found on leaf pages."""
        found = self._found[name]
        found.leaf_pages += count.leaf_pages
        found.overflow_pages += count.overflow_pages
        found.entries += count.entries
        self._extents.append(count.extents)
        for place, text in count.problems:
            self._fault(name, f"page {place.page}: {text}", place.low, place.high)

    def look_through(self, name: str, tree: Tree) -> None:
        """Walk a tree whose values are of no interest."""
        for read in self.reads(name, tree):
            read.check_values(self.file, self.teller(name, read))

    def finish(self) -> None:
        """Hold what was found against what LMDB has written down; last of all, when every tree has been walked."""
        free = self.read_free_lists()
        for name, tree in {FREE: self.meta.free, MAIN: self.meta.main, **self.trees}.items():
            self.check_counts(name, tree)
        self._check_cover(free)

    def check_counts(self, name: str, tree: Tree) -> None:
        """Hold one tree's pages and entries against what is written down of it."""
        if any(fault.tree == name and fault.low is not None for fault in self.faults):
            return  # what is under a damaged page is not found, of course
        found = self._found[name]
        for what in ("branch_pages", "leaf_pages", "overflow_pages", "entries"):
            seen, told = getattr(found, what), getattr(tree, what)
            if seen != told:
                self._fault(name, f"{seen} {what.replace('_', ' ')}, where {told} are written down")

    def _walk(self, name: str, tree: Tree, integer_keys: bool) -> Iterator[Place]:
        """The leaf pages under a root."""
        stack = [(Place(tree.root, b"", None), 1)]
        while stack:
            place, depth = stack.pop()
            if not _FIRST_PAGE <= place.page <= self.meta.last_page:
                self._lost(name, place, "is not a page of the file")
            elif depth == tree.depth:
                yield place
            elif place.page in self._branches:
                self._lost(name, place, "is in the tree twice")
            else:
                self._branches.add(place.page)
                self._extents.append(np.array([[place.page, 1]], np.int64))
                self._found[name].branch_pages += 1
                try:
                    under = children(
                        self.file.pages(np.array([place.page]))[0], place, integer_keys=integer_keys
                    )
                except BadPage as error:
                    self._lost(name, place, str(error))
                else:
                    stack += [(child, depth + 1) for child in reversed(under)]

    def read_free_lists(self) -> NDArray[np.int64]:
        """Numbers of the pages that are free."""
        if self.meta.free.flags != _INTEGER_KEYS:
            self._fault(FREE, f"flags {self.meta.free.flags:#x}")
        found = [np.empty(0, np.int64)]
        for key, value, flags in self.small(FREE, self.meta.free, integer_keys=True):
            if flags & ~BIG_DATA:
                self._fault(FREE, f"an entry with flags {flags:#x}")
            found.append(self._free_pages(key, value))
        return np.concatenate(found)

    def _free_pages(self, key: bytes, value: bytes) -> NDArray[np.int64]:
        """The pages that a transaction has left free: a count, then their numbers, falling."""
        transaction = int.from_bytes(key, "big")
        numbers = np.frombuffer(value[: len(value) // 8 * 8], "<u8")
        if not 1 <= transaction <= self.meta.transaction:
            self._fault(FREE, f"of transaction {transaction}, after the last one")
        if len(value) % 8 or not len(numbers) or int(numbers[0]) != len(numbers) - 1:
            self._fault(FREE, f"the list of transaction {transaction} is not as long as it says")
            return np.empty(0, np.int64)
        pages = numbers[1:]
        inside = (pages >= _FIRST_PAGE) & (pages <= self.meta.last_page)
        if not inside.all() or (pages[1:] >= pages[:-1]).any():
            self._fault(FREE, f"the list of transaction {transaction} is out of order")
        return np.sort(pages[inside].astype(np.int64))

    def _check_cover(self, free: NDArray[np.int64]) -> None:
        """Every page is used once or free once."""
        single = np.stack([free, np.ones_like(free)], axis=1)
        extents = np.concatenate([np.empty((0, 2), np.int64), *self._extents, single])
        extents = extents[np.argsort(extents[:, 0], kind="stable")]
        first, end = extents[:, 0], np.maximum.accumulate(extents.sum(axis=1))
        before = np.append(_FIRST_PAGE, end[:-1])
        twice = np.flatnonzero(first < before)
        if len(twice):
            self._fault(FREE, f"page {first[twice[0]]} is used or listed twice", b"")
        nowhere = int(np.maximum(first - before, 0).sum())
        nowhere += max(0, self.meta.last_page + 1 - int(end[-1] if len(end) else _FIRST_PAGE))
        lost = any(fault.low is not None for fault in self.faults)
        if nowhere and not lost:  # what is under a damaged page is not found, of course
            self._fault(FREE, f"{nowhere} pages are neither used nor free")

    def lost_value(self, name: str, key: bytes, text: str) -> None:
        """Take in that a value's pages are not its own."""
        self.faults.append(Fault(name, f"{text} (key {key.hex()})", key, key + b"\0", key))

    def teller(self, name: str, read: LeafRead) -> Callable[[int, str], None]:
        """What takes in which values of a read cannot be reached."""
        return lambda node, text: self.lost_value(name, read.nodes.key(node), text)

    def _lost(self, name: str, place: Place, text: str) -> None:
        self._fault(name, f"page {place.page}: {text}", place.low, place.high)

    def _fault(
        self, tree: str, text: str, low: bytes | None = None, high: bytes | None = None
    ) -> None:
        self.faults.append(Fault(tree, text, low, high))


def meta_faults(file: DataFile) -> list[Fault]:
    """What is wrong with the two meta pages.

    Returns:
        Also of the state before the newest, which LMDB falls back to: its own two trees, without what the databases hold.
    """
    faults = [
        Fault(META_PAGES, f"meta page {page}: {text}")
        for page, meta in enumerate(file.metas)
        for text in _wrong_in_meta(file, page, meta)
    ]
    first, second = file.metas
    if first is None or second is None:
        return faults
    older, newer = sorted((first, second), key=lambda meta: meta.transaction)
    if newer.transaction - older.transaction != (1 if newer.transaction else 0):
        faults.append(
            Fault(META_PAGES, f"transactions {first.transaction} and {second.transaction} do not follow each other")
        )  # fmt: skip
    before = Structure(file, older)
    before.read_databases()
    before.read_free_lists()
    before.check_counts(FREE, older.free)
    before.check_counts(MAIN, older.main)
    page = file.metas.index(older)
    return faults + [
        Fault(META_PAGES, f"meta page {page}, {f.tree}: {f.text}") for f in before.faults
    ]


def _wrong_in_meta(file: DataFile, page: int, meta: Meta | None) -> Iterator[str]:
    if meta is None:
        yield "it is none"
        return
    if meta.number != page or meta.flags != _META_FLAG:
        yield f"it says that it is page {meta.number}, of kind {meta.flags:#x}"
    if meta.address or meta.map_size < (meta.last_page + 1) * meta.page_size:
        yield f"a map of {meta.map_size} bytes at {meta.address:#x}"
    if meta.transaction and meta.transaction % 2 != page:
        yield f"transaction {meta.transaction}, which belongs on the other one"
    if meta.last_page < 1 or (meta.last_page + 1) * meta.page_size > file.length:
        yield f"last page {meta.last_page}, of a file of {file.length // meta.page_size}"


def structure_faults(data: Path) -> list[Fault]:
    """All that is wrong with the pages of a file; values are not looked at."""
    with DataFile(data) as file:
        metas = [meta for meta in file.metas if meta is not None]
        structure = Structure(file, max(metas, key=lambda meta: meta.transaction))
        structure.faults += meta_faults(file)
        structure.read_databases()
        for name, tree in structure.trees.items():
            structure.look_through(name, tree)
        structure.finish()
        return structure.faults
