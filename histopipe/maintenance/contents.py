"""What a store says of itself and its slides, each entry held against its schema and its checksum."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, UnknownVersion
from histopipe.maintenance.finding import Finding, Kind, some
from histopipe.maintenance.values import Values
from histopipe.store.format import (
    DATABASES,
    INDEX,
    MAX_SLIDE_NUMBER,
    META,
    SLIDES,
    STAINS,
    THUMBNAILS,
    decode_index,
    from_json,
    slide_key,
    slide_number,
)
from histopipe.store.meta import check_format, entry, read_classes, read_spec
from histopipe.store.pages import BIG_DATA, overflow_pages
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.stains import read_fits
from histopipe.store.structure import FREE, MAIN, META_PAGES, Fault, Structure

_NUMBER = 4
"""Bytes of a slide's number, which every key but those of `meta` begins with."""
_OPTIONAL = {STAINS}


@dataclass(frozen=True, slots=True)
class LoosePatches:
    """Patches of a slide whose record is lost: what can still be known of it. M patches.

    Attributes:
        rows, lengths: (M,) int64 numbers of the patches, and bytes of their values.
        crc: (M,) uint32, bound to their keys.
    """

    rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    crc: NDArray[np.uint32]


class Contents:
    """All of a store but its patches.

    Attributes:
        records: by slide number, of those that can be read.
        unreadable: numbers of the slides whose records cannot be, with the id that seems to be theirs.
        classes: of patches.
        next_number: that a new slide gets.
        spec: how patches are made; None if the store does not say.
        findings: what is wrong.
        loose: patches by number of slides whose records are lost, once all have been looked at.
    """

    def __init__(self, store: Path, structure: Structure) -> None:
        self.store, self._structure = store, structure
        self.records: dict[int, SlideRecord] = {}
        self.unreadable: dict[int, str | None] = {}
        self.classes: list[str] = []
        self.spec: Mapping[str, Any] | None = None
        self.findings: list[Finding] = []
        self.next_number = 0
        self.loose: dict[int, LoosePatches] = {}
        self._sorted: list[int] = []
        self._index: dict[int, bytes | tuple[int, int]] = {}
        self._pictures: dict[int, set[str]] = defaultdict(set)

    def read(self) -> None:
        """Read it; the structure's databases are known."""
        for database in DATABASES:
            if database.decode() not in self._structure.trees and database not in _OPTIONAL:
                self.add(Kind.FORMAT, f"the database {database.decode()!r} is missing")
        self._read_meta()
        self._read_records()
        self._read_index_places()
        self._read_stains()

    @property
    def complete(self) -> dict[int, SlideRecord]:
        """Records of the slides that readers see."""
        return {n: r for n, r in self.records.items() if r.state is SlideState.COMPLETE}

    @property
    def lost(self) -> dict[int, str | None]:
        """Numbers of slides whose records are lost, with the name that seems to have been theirs.

        Of those that have neither a record nor an index there are patches, under a number that was given out.
        """
        nameless = self._index.keys() | {n for n in self.loose if n < self.next_number}
        hidden = {n for n, record in self.records.items() if is_placeholder(record)}
        return self.unreadable | dict.fromkeys(nameless - self.records.keys() | hidden)

    def is_lost(self, slide: int) -> bool:
        """Whether a slide's record is, so that its patches are all that tells which slide it was."""
        return slide not in self.records or is_placeholder(self.records[slide])

    def columns(self, slide: int) -> dict[str, NDArray[Any]] | None:
        """A slide's index; None if it is missing.

        Raises:
            DamagedStore: it is not what was written.
        """
        if slide not in self._index:
            return None
        place = self._index[slide]
        if not isinstance(place, bytes):
            file, (page, size) = self._structure.file, place
            pages = int(overflow_pages(np.array([size]), file.page_size)[0])
            place = file.read(page, pages)[16 : 16 + size].tobytes()
        return decode_index(slide_key(slide), place, where="index")

    def add(
        self,
        kind: Kind,
        what: str,
        slide: int | None = None,
        entry: tuple[bytes, bytes] | None = None,
    ) -> None:
        """Take in that something is wrong, with a slide if its number is given, or only with an entry."""
        self.findings.append(self._finding(kind, what, slide, entry))

    def structural(self, faults: Sequence[Fault]) -> Iterator[Finding]:
        """Faults of the file, with the slides that they cost."""
        single: dict[tuple[str, int | None], list[Fault]] = defaultdict(list)
        for fault in faults:
            slides = list(self._under(fault))
            if fault.key is not None:
                single[fault.tree, slides[0] if slides else None].append(fault)
                continue
            for slide in slides:
                yield self._finding(Kind.STRUCTURE, f"{fault.tree}: {fault.text}", slide)
            if not slides:
                yield self._finding(Kind.STRUCTURE, f"{fault.tree}: {fault.text}", None)
        for (tree, of_slide), lost in single.items():
            count = f"{len(lost)} values: " if len(lost) > 1 else ""
            what = f"{tree}: {count}{some(fault.text for fault in lost)}"
            yield self._finding(Kind.STRUCTURE, what, of_slide)

    def _finding(
        self, kind: Kind, what: str, slide: int | None, entry: tuple[bytes, bytes] | None = None
    ) -> Finding:
        record = self.records.get(slide) if slide is not None else None
        written = (entry[0].decode(), entry[1].hex()) if entry else None
        return Finding(kind, what, record.id if record else None, slide, written)

    def _under(self, fault: Fault) -> Iterator[int]:
        """Known slides whose keys may be lost by a fault."""
        if fault.low is None or fault.tree in (FREE, MAIN, META_PAGES, META.decode()):
            return
        numbers = self._numbers()
        first = int.from_bytes(fault.low[:_NUMBER].ljust(_NUMBER, b"\0"), "big")
        for slide in numbers[bisect_left(numbers, first) :]:
            if fault.high is not None and slide_key(slide) >= fault.high:
                break
            yield slide

    def _numbers(self) -> list[int]:
        """Numbers of the known slides, rising; once all are."""
        if len(self._sorted) != len(self.records) + len(self.unreadable):
            self._sorted = sorted(self.records.keys() | self.unreadable.keys())
        return self._sorted

    def _entries(self, database: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of a database that is there."""
        name = database.decode()
        if name in self._structure.trees:
            for key, value, flags in self._structure.small(name, self._structure.trees[name]):
                if flags & ~BIG_DATA:
                    self.add(Kind.STRUCTURE, f"{name}: the entry {key.hex()} has flags {flags:#x}")
                else:
                    yield key, value

    def _read_meta(self) -> None:
        stored = dict(self._entries(META))
        with self._told(Kind.FORMAT):
            check_format(stored.get, self.store)
        for name in ("uuid", "created", "histopipe_version"):
            with self._told(Kind.FORMAT):
                entry(stored.get, name, str, self.store)
        with self._told(Kind.FORMAT):
            self.spec = read_spec(stored.get, self.store)
        with self._told(Kind.FORMAT):
            self.classes = read_classes(stored.get, self.store)
        with self._told(Kind.FORMAT):
            self.next_number = entry(stored.get, "next_number", int, self.store)
        if not 0 <= self.next_number <= MAX_SLIDE_NUMBER + 1:
            self.add(Kind.COUNT, f"meta 'next_number' is {self.next_number}")
            self.next_number = 0

    def _read_records(self) -> None:
        for key, value in self._entries(SLIDES):
            if len(key) != _NUMBER:
                self.add(Kind.ORPHAN, f"slides: a key {key.hex()}", entry=(SLIDES, key))
                continue
            number = slide_number(key)
            try:
                self.records[number] = SlideRecord.from_bytes(number, value, where="its record")
            except DamagedStore as error:
                self.unreadable[number] = _probable_id(value)
                self.add(Kind.RECORD, str(error), number)
        self.records = dict(sorted(self.records.items()))
        last = max(self.records.keys() | self.unreadable.keys(), default=-1)
        if last >= self.next_number:
            self.add(
                Kind.COUNT, f"meta 'next_number' is {self.next_number}, after slide number {last}"
            )
        names = Counter(record.id for record in self.records.values())
        for name in (name for name, count in names.items() if count > 1):
            self.add(Kind.RECORD, f"{names[name]} slides are called {name!r}")

    def _read_index_places(self) -> None:
        """Where each slide's index lies: all of them together may be larger than memory."""
        name = INDEX.decode()
        if name not in self._structure.trees:
            return
        for read in self._structure.reads(name, self._structure.trees[name]):
            read.check_values(self._structure.file, self._structure.teller(name, read))
            nodes = read.nodes
            for node in range(len(nodes)):
                key = nodes.key(node)
                if len(key) == _NUMBER:
                    self._index[slide_number(key)] = read.place(node)
                self._belongs(INDEX, key, key[_NUMBER:] == b"")

    def take_pictures(self, values: Values) -> None:
        """Thumbnails and masks as they are in the file."""
        broken = dict(values.no_images)
        for node, crc in enumerate(values.crc.tolist()):
            key = values.keys[node, : values.key_lengths[node]].tobytes()
            kind = key[_NUMBER:].decode("utf-8", "replace")
            if not self._belongs(THUMBNAILS, key, bool(kind)):
                continue
            slide = slide_number(key[:_NUMBER])
            self._pictures[slide].add(kind)
            record = self.records.get(slide)
            if record and record.thumbnail_crc.get(kind, crc) != crc:
                self.add(Kind.THUMBNAIL, f"its picture {kind!r} is not what was written", slide)
            elif key in broken:
                self.add(Kind.THUMBNAIL, f"its picture {kind!r}: {broken[key]}", slide)

    def miss_pictures(self) -> None:
        """Tell which are not there, once all have been taken."""
        for slide, record in self.complete.items():
            for kind in sorted(record.thumbnail_crc.keys() - self._pictures[slide]):
                self.add(Kind.HOLE, f"its picture {kind!r} is missing", slide)

    def _read_stains(self) -> None:
        for key, value in self._entries(STAINS):
            if not self._belongs(STAINS, key, key[_NUMBER:] == b""):
                continue
            slide = slide_number(key)
            try:
                read_fits({slide: value}, where="its stains")
            except DamagedStore as error:
                self.add(Kind.STAIN, str(error), slide, (STAINS, key))

    def _belongs(self, database: bytes, key: bytes, usual: bool) -> bool:
        """Whether a key is some slide's; one that an ingest has not finished may have left anything."""
        name = database.decode()
        if len(key) < _NUMBER or not usual:
            self.add(Kind.ORPHAN, f"{name}: a key {key.hex()}", entry=(database, key))
            return False
        slide = slide_number(key[:_NUMBER])
        if self.is_orphan(slide):
            what = f"{name}: an entry of slide number {slide}, {self.why_orphan(slide)}"
            self.add(Kind.ORPHAN, what, slide, (database, key))
            return False
        return True

    def is_orphan(self, slide: int) -> bool:
        """Whether nothing may be stored of a slide: it is not known, or failed."""
        if slide in self.unreadable:
            return False
        return slide not in self.records or self.records[slide].state is SlideState.FAILED

    def why_orphan(self, slide: int) -> str:
        """In words."""
        return "which failed" if slide in self.records else "which has no record"

    @contextmanager
    def _told(self, kind: Kind) -> Iterator[None]:
        """Take in what is damaged; a version that is not known here is no damage."""
        try:
            yield
        except UnknownVersion:
            raise
        except DamagedStore as error:
            self.add(kind, str(error).removeprefix(f"{self.store}, "))


def is_placeholder(record: SlideRecord) -> bool:
    """Whether a record stands for one that is lost: it hides what is stored of the slide, and names no file."""
    return record.state is SlideState.PENDING and not record.path


def _probable_id(record: bytes) -> str | None:
    """The id that stands in a record which is not what was written."""
    try:
        name = from_json(record, where="record")["id"]
    except (DamagedStore, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None
