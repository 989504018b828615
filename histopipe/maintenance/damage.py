"""What a repair has to do, decided before anything is changed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.ingest.records import with_recorded_ids
from histopipe.maintenance.contents import Contents, LoosePatches, is_placeholder
from histopipe.maintenance.finding import Kind, some
from histopipe.maintenance.verify import Examined
from histopipe.slides.discovery import SlideFile
from histopipe.store.format import SLIDES, patch_key, value_crc
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.store import Store
from histopipe.store.structure import MAIN
from histopipe.tiling.spec import TilingSpec, spec_of_store

Columns = dict[str, NDArray[Any]]

PLACES = ("x_l0", "y_l0")
"""Columns that say where patches are cut."""
_SAMPLED = 16


@dataclass(frozen=True, slots=True)
class Lost:
    """A slide whose record is lost: what tells which one it was.

    Attributes:
        name: what seems to be its id, of a record that is not what was written.
        columns: of its index, if that is what was written.
        loose: its patches, if there are any.
    """

    number: int
    name: str | None
    columns: Columns | None
    loose: LoosePatches | None

    @property
    def record(self) -> SlideRecord:
        """What stands for it: nobody sees the slide, and its entries stay."""
        return SlideRecord(id=f"lost-slide-{self.number}", path="", resolved_path="(lost)")

    @property
    def is_known_by_name_only(self) -> bool:
        """Whether all else is lost, too."""
        return self.columns is None and self.loose is None

    def has_patches_of(self, store: Store, number: int) -> bool:
        """Whether a slide of a store has the patches that this one had: their places and lengths, or their values."""
        index = store.index(number)
        if self.columns is not None:
            columns = self.columns
            return all(np.array_equal(columns[n], index[n]) for n in (*PLACES, "length"))
        if self.loose is None or self.loose.rows.max() >= len(index["length"]):
            return False
        if not np.array_equal(index["length"][self.loose.rows], self.loose.lengths):
            return False
        # Some of them may be damaged, but not most.
        sample = np.linspace(0, len(self.loose.rows) - 1, _SAMPLED).astype(np.int64)
        rows, crc = self.loose.rows[sample].tolist(), self.loose.crc[sample].tolist()
        with store.reading() as reading:
            values = [bytes(reading.value(number, row)) for row in rows]
        same = [
            (value_crc(patch_key(self.number, row), value) if value else 0) == checksum
            for row, value, checksum in zip(rows, values, crc, strict=True)
        ]
        return 2 * same.count(True) > len(same)


@dataclass(frozen=True, slots=True)
class Damage:
    """What has to be done.

    Attributes:
        records: of damaged slides by number.
        lost: slides by number whose records are lost.
        strays: numbers under which something is stored that is no slide's, or a failed one's.
        entries: database and key of single entries that should not be there.
        next_number: what the next slide's number must be at least.
        rewrite: whether the file itself has to be written anew.
        some_are_gone: whether slides may be lost of which nothing is left.
        transaction: that made the state which was looked at.
        spec: how slides are ingested again; None if none is.
    """

    records: dict[int, SlideRecord]
    lost: dict[int, Lost]
    strays: set[int]
    entries: list[tuple[str, str]]
    next_number: int
    rewrite: bool
    some_are_gone: bool
    transaction: int
    spec: TilingSpec | None

    @property
    def max_unreadable(self) -> float:
        """The largest share of unreadable patches that a damaged slide had: what its ingest has allowed."""
        return max(
            (r.unreadable / r.planned for r in self.records.values() if r.planned), default=0
        )

    def wanted(
        self, slides: Sequence[SlideFile], records: Mapping[int, SlideRecord]
    ) -> list[SlideFile]:
        """The files of damaged slides; if records are lost, all that the store does not know."""
        if not self.records and not self.lost:
            return []
        damaged = {record.id for record in self.records.values()}
        known = {record.id for record in records.values()}
        named = with_recorded_ids(slides, records)
        return [s for s in named if s.id in damaged or (self.lost and s.id not in known)]

    def place_of(self, store: Store, number: int) -> int | None:
        """The number that a slide which was ingested again had: by its name, or where that is lost by its patches."""
        name = store.records[number].id
        for place, before in self.records.items():
            if before.id == name:
                return place
        same = [lost for lost in self.lost.values() if lost.has_patches_of(store, number)]
        only = [lost for lost in self.lost.values() if lost.is_known_by_name_only]
        named = [lost for lost in same + only if lost.name == name]
        return next((lost.number for lost in named + same), None)


def damage_of(looked: Examined, begun: Collection[str]) -> Damage:
    """What is to be done of what was found.

    Args:
        looked: the store.
        begun: ids of slides that an earlier repair has ingested again, and may have begun to put back.

    Raises:
        DamagedStore: what the store says of itself is lost.
        SpecMismatch: its slides cannot be ingested again by this version.
    """
    contents, findings = looked.contents, looked.verified.findings
    beyond = [f for f in findings if f.kind is Kind.FORMAT]
    if beyond:
        raise DamagedStore(
            f"what {contents.store} says of itself is lost", found=some(f.what for f in beyond),
            todo="take it from a backup, or ingest into a new store",
        )  # fmt: skip
    hit = {f.number for f in findings if f.number is not None and f.entry is None}
    known = {n: r for n, r in contents.records.items() if not is_placeholder(r)}
    failed = {n for n, record in known.items() if record.state is SlideState.FAILED}
    halves = {n for n, r in known.items() if r.state is SlideState.PENDING and r.id in begun}
    records = {n: known[n] for n in sorted(hit & known.keys() - failed | halves)}
    lost = {n: _lost(contents, n, name) for n, name in sorted(contents.lost.items())}
    trees = {fault.tree for fault in looked.structure.faults if fault.low is not None}
    return Damage(
        records=records,
        lost=lost,
        strays=hit - known.keys() - lost.keys() | hit & failed,
        entries=[f.entry for f in findings if f.entry is not None and f.number not in lost],
        next_number=max([contents.next_number, *(n + 1 for n in known.keys() | lost.keys())]),
        rewrite=looked.verified.is_structural,
        some_are_gone=bool(trees & {SLIDES.decode(), MAIN}),
        transaction=looked.structure.meta.transaction,
        spec=spec_of_store(contents.spec or {}) if records or lost else None,
    )


def _lost(contents: Contents, number: int, name: str | None) -> Lost:
    columns = None
    with contextlib.suppress(DamagedStore):
        held = contents.columns(number)
        columns = held and {name: column.copy() for name, column in held.items()}
    return Lost(number, name, columns, contents.loose.get(number))
