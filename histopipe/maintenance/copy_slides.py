"""Copy slides from one store into another, with everything that is stored of them, known to this version or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, MachineShort, SpecMismatch, UsageError
from histopipe.ingestion.ingest_slides import refuse_network
from histopipe.maintenance.verify import check_untrusted
from histopipe.store.claims import Claims
from histopipe.store.format import (
    DATABASES,
    STAINS,
    THUMBNAILS,
    patch_key,
    seal,
    slide_key,
    stored_size,
    unseal,
    value_crc,
)
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.filesystems import free_bytes
from histopipe.system.progress import Bar, Progress
from histopipe.system.result import Result
from histopipe.tiling.spec import differences

_SPARE = 1.02
"""Trees and free pages take a little besides the values."""
_CHUNK_ROWS, _CHUNK_BYTES = 4096, 32 << 20
"""Of patches that are held in memory and written by one transaction."""


@dataclass(frozen=True, slots=True)
class StoredSlide:
    """A slide to copy: its store, and its number there."""

    store: Store
    number: int

    @property
    def record(self) -> SlideRecord:
        """The slide's record."""
        return self.store.records[self.number]

    def __str__(self) -> str:
        return f"{self.store.path}, slide {self.record.id}"


@dataclass(frozen=True, slots=True, repr=False)
class CopyResult(Result):
    """What was copied into a store.

    Attributes:
        store: path of the store.
        slides: ids of slides that were copied now.
        already: ids of slides that were there before.
        patches: of both.
        notes: what the user should know.
    """

    store: str
    slides: list[str] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    patches: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        already = f", {len(self.already)} were there" if self.already else ""
        return f"{self.store}: {len(self.slides)} slides copied{already}; {self.patches:,} patches"


def open_stores(
    paths: Sequence[Path], stack: ExitStack, *, untrusted: bool, progress: Progress
) -> list[Store]:
    """Open stores of one spec, to be closed by the stack. Untrusted ones are verified before.

    Raises:
        SpecMismatch: the stores have different specs.
    """
    if untrusted:
        for path in paths:
            check_untrusted(path, progress=progress)
    stores = [stack.enter_context(Store(path)) for path in paths]
    first = stores[0]
    for other in stores[1:]:
        if other.spec != first.spec:
            texts = "; ".join(differences(other.spec, first.spec))
            texts = texts.replace("in the store", f"in {other.path}")
            raise SpecMismatch(
                f"{other.path} was made with other settings than {first.path}",
                found=texts.replace("asked for", f"in {first.path}"),
                expected="equal settings",
            )
    return stores


def copy_slides(
    slides: Sequence[StoredSlide],
    out: Path,
    spec: Mapping[str, Any],
    *,
    allow_network: bool,
    bar: Bar,
) -> CopyResult:
    """Copy complete and failed slides of different ids into a store, which is made if missing. Slides that it has stay.

    Each slide appears by one transaction. After an interruption, the same call continues. `bar` is advanced by bytes of values.

    Raises:
        SpecMismatch, UsageError: the store has another spec or is something else, or another process works on a slide.
        DamagedStore: a slide is not what was written; those before it are copied.
        MachineShort: there is not enough free space.
    """
    if not allow_network:
        refuse_network(out)
    copied, already = [], []
    if not (out / "data.mdb").exists():
        _check_room(slides, out, set(), 0)  # before anything is made
    with StoreWriter(out, spec) as writer, Claims(out) as claims:
        there = {r.id for r in writer.records().values() if r.state is SlideState.COMPLETE}
        _check_room(slides, out, there, writer.reusable_bytes())
        records = [slide.record for slide in slides]
        pending = [
            SlideRecord(id=r.id, path=r.path, resolved_path=r.resolved_path) for r in records
        ]
        numbers = writer.register(pending)
        for slide in slides:
            record, number = slide.record, numbers[slide.record.id]
            if not claims.take(number):
                raise UsageError(
                    f"another process is at slide {record.id} of {out}", todo="wait for it"
                )
            before = writer.record(number)
            if before.state is SlideState.COMPLETE:
                already.append(record.id)
                bar.advance(record.stored_bytes)
            else:
                writer.restart(number, before)  # an interrupted copy may have left patches
                if record.state is SlideState.FAILED:
                    writer.update(number, record)
                else:
                    _copy_slide(slide, writer, number, bar)
                copied.append(record.id)
            claims.release(number)
        for store in {id(slide.store): slide.store for slide in slides}.values():
            writer.add_meta(store.further_meta())
    return CopyResult(str(out), copied, already, sum(slide.record.planned for slide in slides))


def _check_room(slides: Sequence[StoredSlide], out: Path, there: set[str], reusable: int) -> None:
    """Refuse what the disk cannot hold, before anything is copied."""
    size = 0
    for record in (slide.record for slide in slides):
        if record.planned and record.id not in there:
            average = np.array([record.stored_bytes / record.planned])
            size += int(stored_size(average)[0]) * record.planned
    disk = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = free_bytes(disk) + reusable
    if free < size * _SPARE:
        raise MachineShort(
            f"the disk that holds {out} has no room for {len(slides)} slides",
            found=f"{free >> 20} MB free",
            expected=f"about {int(size * _SPARE) >> 20} MB",
            todo="make room, or choose another --out",
        )


def _copy_slide(slide: StoredSlide, target: StoreWriter, number: int, bar: Bar) -> None:
    """Copy a complete slide to a pending one of the target, which stays pending if a value is not what was written."""
    index = dict(slide.store.index(slide.number))
    made = np.zeros(len(index["crc"]), np.uint32)
    for rows in _chunks(index["length"]):
        slide.store.advise([(slide.number, row) for row in rows])
        values = _values(slide, rows, index)
        made[rows] = target.put_patches(number, rows, values)
        bar.advance(sum(map(len, values)))
    index["crc"] = made  # bound to the new keys
    index["label"] = _renumbered(index["label"], slide.store.classes, target)
    target.complete(
        number, slide.record, index, _thumbnails(slide), dict(_other_entries(slide, number))
    )


def _values(slide: StoredSlide, rows: Sequence[int], index: dict[str, NDArray[Any]]) -> list[bytes]:
    length, crc = index["length"][rows].tolist(), index["crc"][rows].tolist()
    with slide.store.reading() as reading:
        values = [bytes(reading.value(slide.number, row)) for row in rows]
    for row, value, size, checksum in zip(rows, values, length, crc, strict=True):
        key = patch_key(slide.number, row)
        if len(value) != size or (size and value_crc(key, value) != checksum):
            raise DamagedStore(
                f"{slide}: patch {row} is not what was written",
                todo="see `histopipe verify` and `histopipe repair`",
            )
    return values


def _thumbnails(slide: StoredSlide) -> dict[str, bytes]:
    """A slide's pictures by name."""
    pictures, known = {}, slide.record.thumbnail_crc
    for key, value in slide.store.entries(THUMBNAILS, slide.number):
        name, crc = key[len(slide_key(slide.number)) :].decode(), value_crc(key, value)
        if known.get(name, crc) != crc:
            raise DamagedStore(f"{slide}: picture {name!r} is not what was written")
        pictures[name] = value
    return pictures


def _other_entries(slide: StoredSlide, number: int) -> Iterator[tuple[tuple[bytes, bytes], bytes]]:
    """The stain fit, and what a later version stores of a slide, by database and key under its new number."""
    for key, value in slide.store.entries(STAINS, slide.number):
        stain = unseal(key, value, where=f"{slide}: stain")
        yield (STAINS, slide_key(number)), seal(slide_key(number), stain)
    for database in slide.store.databases - set(DATABASES):
        for key, value in slide.store.entries(database, slide.number):
            yield (database, slide_key(number) + key[4:]), value


def _renumbered(
    labels: NDArray[np.int32], classes: Sequence[str], target: StoreWriter
) -> NDArray[np.int32]:
    """Class numbers of the target, -1 for none. Classes that it lacks are added to it."""
    used = np.unique(labels[labels >= 0]).tolist()
    numbers = target.class_numbers([classes[number] for number in used])
    made = labels.copy()
    for old in used:
        made[labels == old] = numbers[classes[old]]
    return made


def _chunks(lengths: NDArray[np.integer]) -> Iterator[list[int]]:
    """Rows that are copied at once."""
    rows: list[int] = []
    size = 0
    for row, length in enumerate(lengths.tolist()):
        if rows and (len(rows) == _CHUNK_ROWS or size + length > _CHUNK_BYTES):
            yield rows
            rows, size = [], 0
        rows.append(row)
        size += length
    if rows:
        yield rows
