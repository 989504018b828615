"""What a repair has to do, decided before anything is changed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.ingest.decide import with_recorded_ids
from histopipe.ingest.request import resolved
from histopipe.maintenance.finding import Kind, some
from histopipe.maintenance.verify import Examined
from histopipe.slides.discovery import SlideFile
from histopipe.store.record import SlideRecord, SlideState
from histopipe.tiling.spec import TilingSpec, spec_of_store

Columns = dict[str, NDArray[Any]]

PLACES = ("x_l0", "y_l0")
"""Columns that say where patches are cut."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What has to be done.

    Attributes:
        records: of damaged slides by number; a placeholder for one that is lost.
        columns: of their indices, where these are what was written.
        strays: numbers under which something is stored that is no slide's, or a failed one's.
        entries: database and key of single entries that should not be there.
        next_number: what the next slide's number must be at least.
        rewrite: whether the file itself has to be written anew.
        transaction: that made the state which was looked at.
        spec: how slides are ingested again; None if none is.
    """

    records: dict[int, SlideRecord]
    columns: dict[int, Columns]
    strays: set[int]
    entries: list[tuple[str, str]]
    next_number: int
    rewrite: bool
    transaction: int
    spec: TilingSpec | None


def damage_of(looked: Examined) -> Damage:
    """What is to be done of what was found.

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
    states = {number: record.state for number, record in contents.records.items()}
    failed = {number for number, state in states.items() if state is SlideState.FAILED}
    pending = {number for number, state in states.items() if state is SlideState.PENDING}
    lost = dict.fromkeys(contents.nameless) | contents.unreadable
    records = {
        number: contents.records[number] for number in hit & states.keys() - failed | pending
    }
    records |= {number: _placeholder(number, name) for number, name in lost.items()}
    columns = {}
    for number in records:
        with contextlib.suppress(DamagedStore):
            held = contents.columns(number)
            if held is not None:
                columns[number] = {name: column.copy() for name, column in held.items()}
    return Damage(
        records=dict(sorted(records.items())),
        columns=columns,
        strays=hit - states.keys() - lost.keys() | hit & failed,
        entries=[f.entry for f in findings if f.entry is not None],
        next_number=max([contents.next_number, *(n + 1 for n in states.keys() | lost.keys())]),
        rewrite=looked.verified.is_structural,
        transaction=looked.structure.meta.transaction,
        spec=spec_of_store(contents.spec or {}) if records else None,
    )


def _placeholder(number: int, name: str | None) -> SlideRecord:
    """What stands for a slide whose record is lost: nobody sees it, and its entries stay."""
    return SlideRecord(id=name or _nameless(number), path="", resolved_path="(lost)")


def _nameless(number: int) -> str:
    return f"lost-slide-{number}"


def wanted_files(
    slides: Sequence[SlideFile], damage: Damage, records: Mapping[int, SlideRecord]
) -> list[SlideFile]:
    """The files of damaged slides; where a name is lost, all that the store does not know."""
    damaged = {record.id for record in damage.records.values()}
    known = {record.id for record in records.values()}
    nameless = any(record.id == _nameless(n) for n, record in damage.records.items())
    named = with_recorded_ids(slides, records, resolved)
    return [s for s in named if s.id in damaged or (nameless and s.id not in known)]


def place_of(record: SlideRecord, index: Columns, damage: Damage) -> int | None:
    """The number that a slide had: by its name, or where that is lost by its patches."""
    for number, before in damage.records.items():
        if before.id == record.id:
            return number
    for number, before in damage.records.items():
        old = damage.columns.get(number)
        if before.id == _nameless(number) and old is not None and _same_patches(old, index):
            return number
    return None


def _same_patches(old: Columns, new: Columns) -> bool:
    return all(np.array_equal(old[name], new[name]) for name in (*PLACES, "length"))
