"""Slides of several stores into one: what merging and splitting have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.errors import MachineShort, SpecMismatch, UsageError
from histopipe.ingest.checks import refuse_network
from histopipe.store.claims import Claims
from histopipe.store.format import stored_size
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.store import Store
from histopipe.store.transfer import Transfer
from histopipe.store.writer import StoreWriter
from histopipe.system.filesystems import free_bytes
from histopipe.tiling.spec import differences

_SPARE = 1.02
"""Trees and free pages take a little beside the values."""

Told = Callable[[int, int], None]
"""Called with the bytes of values that have been copied, and with all that will be."""


@dataclass(frozen=True, slots=True)
class Part:
    """A slide to be copied: of which store, and its number there."""

    store: Store
    number: int

    @property
    def record(self) -> SlideRecord:
        """The slide's."""
        return self.store.records[self.number]


@dataclass(slots=True)
class Copied:
    """What was copied into a store.

    Attributes:
        slides: ids of those copied now.
        already: of those that were there.
        patches: of both.
        notes: what a person should know.
    """

    store: str
    slides: list[str] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    patches: int = 0
    notes: list[str] = field(default_factory=list)


def same_spec(stores: Sequence[Store]) -> dict[str, Any]:
    """How the patches of all stores were made.

    Raises:
        SpecMismatch: not in one way.
    """
    first = stores[0]
    for other in stores[1:]:
        if other.spec != first.spec:
            raise SpecMismatch(
                f"{other.path} was made with other settings than {first.path}",
                found="; ".join(
                    text.replace("in the store", f"in {other.path}").replace("asked for", f"in {first.path}")
                    for text in differences(other.spec, first.spec)
                ),
                expected="one way of making patches",
            )  # fmt: skip
    return dict(first.spec)


def copy_slides(
    parts: Sequence[Part], out: Path, spec: dict[str, Any], *, allow_network: bool, told: Told
) -> Copied:
    """Copy complete and failed slides into a store, which is made if missing; those that it has already stay.

    Slide by slide as an ingest does, so that what was complete stays if this is interrupted, and doing it again goes on.

    Args:
        parts: of different ids; a slide that the store has already is the same one.
        out: the store's folder.
        spec: of all of them.
        allow_network: let the store lie on a network filesystem.
        told: hears how far it is.

    Raises:
        SpecMismatch, UsageError: the store is one of another spec or of something else, or another process is at a slide.
        DamagedStore: a slide is not what was written; those before it are there.
        MachineShort: there is no room.
    """
    if not allow_network:
        refuse_network(out)
    result = Copied(str(out))
    sizes = [part.record.stored_bytes for part in parts]
    done, total = 0, sum(sizes)

    def copied(count: int) -> None:
        nonlocal done
        done += count
        told(done, total)

    if not (out / "data.mdb").exists():
        _check_room(parts, out, set(), 0)  # before anything is made
    with StoreWriter(out, spec) as writer:
        there = {r.id for r in writer.records().values() if r.state is SlideState.COMPLETE}
        _check_room(parts, out, there, writer.reusable_bytes())
        with Claims(out) as claims:
            numbers = writer.register([_pending(part.record) for part in parts])
            for part, size in zip(parts, sizes, strict=True):
                record, number = part.record, numbers[part.record.id]
                if not claims.take(number):
                    raise UsageError(
                        f"another process is at slide {record.id} of {out}", todo="wait for it"
                    )
                before = writer.record(number)
                if before.state is SlideState.COMPLETE:
                    result.already.append(record.id)
                    copied(size)
                elif record.state is SlideState.FAILED:
                    writer.restart(number, before)  # a killed copy may have left patches
                    writer.update(number, record)
                    result.slides.append(record.id)
                else:
                    writer.restart(number, before)
                    Transfer(part.store, writer).copy(part.number, number, copied)
                    result.slides.append(record.id)
                claims.release(number)
                result.patches += record.planned
            for store in {id(part.store): part.store for part in parts}.values():
                Transfer(store, writer).copy_meta()
    return result


def _pending(record: SlideRecord) -> SlideRecord:
    return SlideRecord(id=record.id, path=record.path, resolved_path=record.resolved_path)


def _check_room(parts: Sequence[Part], out: Path, there: set[str], reusable: int) -> None:
    """Refuse what the disk cannot hold, before anything is copied."""
    size = sum(
        int(stored_size(np.array([part.record.stored_bytes / part.record.planned]))[0])
        * part.record.planned
        for part in parts
        if part.record.planned and part.record.id not in there
    )
    disk = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = free_bytes(disk) + reusable
    if free < size * _SPARE:
        raise MachineShort(
            f"the disk that holds {out} has no room for {len(parts)} slides",
            found=f"{free >> 20} MB free",
            expected=f"about {int(size * _SPARE) >> 20} MB",
            todo="make room, or choose another --out",
        )
