"""Merge several stores of one spec, or some of their slides, into one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, MachineShort, NothingToDo, UsageError
from histopipe.ingestion.ingest_slides import refuse_network
from histopipe.maintenance.options import MergeOptions
from histopipe.maintenance.verify import check_untrusted
from histopipe.slides.slide_files import SlideNames
from histopipe.slides.tables import read_slide_list
from histopipe.store.claims import Claims
from histopipe.store.environment import no_store
from histopipe.store.format import (
    DATABASES,
    SLIDE_KEY_BYTES,
    STAINS,
    THUMBNAILS,
    Columns,
    patch_key,
    seal,
    slide_key,
    stored_size,
    unseal,
    value_crc,
)
from histopipe.store.record import SlideRecord, SlideState, describe_copies
from histopipe.store.store import Store, read_catalog
from histopipe.store.writer import StoreWriter
from histopipe.system.files import free_bytes
from histopipe.system.folders import DATA, FolderKind, folder_kind
from histopipe.system.output import Bar, Progress, Result, counted, default_progress, some
from histopipe.system.settings import declared_settings, make_settings, takes
from histopipe.system.shared_folders import PARTS
from histopipe.tasks.choices import EVALUATED, SUBSETS, Subset
from histopipe.tiling.spec import differences

_SPARE = 1.02
"""Factor for trees and free pages, in addition to the values."""
_CHUNK_ROWS, _CHUNK_BYTES = 4096, 32 << 20
"""Maximum patches, and their bytes, in memory and in one transaction."""


@dataclass(frozen=True, slots=True)
class SlideToCopy:
    """A slide to copy: its store, and its number in this store."""

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
    """Result of copying slides into a store.

    Attributes:
        store: path of the store.
        slides: ids of the copied slides.
        already: ids of slides that were already in the store.
        patches: number of patches of both.
        notes: notes for the user.
    """

    store: str
    slides: list[str] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    patches: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        already = f", {len(self.already)} already in the store" if self.already else ""
        return f"{self.store}: {counted(len(self.slides), 'slide')} copied{already}; {counted(self.patches, 'patch')}"


def open_stores(
    paths: Sequence[Path], stack: ExitStack, *, untrusted: bool, progress: Progress
) -> list[Store]:
    """Open stores of one spec, which the stack closes. Untrusted stores are verified first.

    Raises:
        UsageError: the stores have different specs.
    """
    if not paths:
        raise UsageError("no store given")
    if untrusted:
        for path in paths:
            check_untrusted(path, progress=progress)
    stores = [stack.enter_context(Store(path)) for path in paths]
    first, *rest = stores
    for other in rest:
        if other.spec != first.spec:
            raise UsageError(
                f"{other.path} was created with other settings than {first.path}",
                found="; ".join(
                    differences(other.spec, first.spec, (f"in {other.path}", f"in {first.path}"))
                ),
                expected="equal settings",
            )
    return stores


def copy_slides(
    slides: Sequence[SlideToCopy],
    out: Path,
    spec: Mapping[str, Any],
    *,
    allow_network: bool,
    bar: Bar,
) -> list[str]:
    """Copy complete and failed slides with different ids into a store. Slides in it stay. A missing store is created.

    Each slide becomes visible by one transaction. After an interruption, the same call continues. `bar` counts bytes.
    Return the ids of copied slides, without those that another process has completed.

    Raises:
        UsageError: the store has another spec, `out` is not a store, or another process uses a slide.
        DamagedStore: a slide does not match its checksums; those before it are copied.
        MachineShort: there is not enough free space.
    """
    if not allow_network:
        refuse_network(out)
    copied = []
    records = [slide.record for slide in slides]
    if folder_kind(out) is not FolderKind.STORE:
        _check_space(records, out, 0)  # before the store is created
    with StoreWriter(out, spec) as writer, Claims(out) as claims:
        _check_space(records, out, writer.reusable_bytes())
        numbers = writer.register(
            [SlideRecord(id=r.id, path=r.path, resolved_path=r.resolved_path) for r in records]
        )
        for slide, record in zip(slides, records, strict=True):
            number = numbers[record.id]
            if not claims.take(number):
                raise UsageError(
                    f"slide {record.id} of {out} is in use by another process",
                    todo="wait until that process has finished",
                )
            before = writer.record(number)
            if before.state is not SlideState.COMPLETE:
                writer.restart(number, before)  # an interrupted copy may have left patches
                if record.state is SlideState.FAILED:
                    writer.update(number, record)
                else:
                    _copy_slide(slide, writer, number, bar)
                copied.append(record.id)
            claims.release(number)
        for store in {id(slide.store): slide.store for slide in slides}.values():
            writer.add_meta(store.further_meta())
    return copied


def _check_space(records: Sequence[SlideRecord], out: Path, reusable: int) -> None:
    """Check that there is enough disk space, before slides are copied."""
    size = sum(
        int(stored_size(record.stored_bytes / record.planned)) * record.planned
        for record in records
        if record.planned
    )
    free = free_bytes(out) + reusable
    if free < size * _SPARE:
        raise MachineShort(
            f"not enough disk space in {out} for {counted(len(records), 'slide')}",
            found=f"{free >> 20} MB free",
            expected=f"about {int(size * _SPARE) >> 20} MB",
            todo="free disk space, or choose another --out",
        )


def _copy_slide(slide: SlideToCopy, target: StoreWriter, number: int, bar: Bar) -> None:
    """Copy a complete slide to a pending one of the target. It stays pending if a value does not match its checksum."""
    index = dict(slide.store.index(slide.number))
    crcs = np.zeros(len(index["crc"]), np.uint32)
    for rows in _chunks(index["length"]):
        slide.store.advise([(slide.number, row) for row in rows])
        values = _values(slide, rows, index)
        crcs[rows] = target.put_patches(number, rows, values)
        bar.advance(sum(map(len, values)))
    index["crc"] = crcs  # the checksums include the new keys
    index["label"] = _renumbered(index["label"], slide.store.classes, target)
    target.complete(
        number, slide.record, index, _thumbnails(slide), further=dict(_other_entries(slide, number))
    )


def _values(slide: SlideToCopy, rows: Sequence[int], index: Columns) -> list[bytes]:
    length, crc = index["length"][rows].tolist(), index["crc"][rows].tolist()
    with slide.store.reading() as reading:
        values = [bytes(reading.value(slide.number, row)) for row in rows]
    for row, value, size, checksum in zip(rows, values, length, crc, strict=True):
        if len(value) != size or (
            size and value_crc(patch_key(slide.number, row), value) != checksum
        ):
            raise DamagedStore(
                f"{slide}: patch {row} does not match its checksum",
                todo="run `histopipe verify`, then `histopipe repair`",
            )
    return values


def _thumbnails(slide: SlideToCopy) -> dict[str, bytes]:
    """Return the pictures of a slide by name."""
    pictures = {}
    for key, value in slide.store.entries(THUMBNAILS, slide.number):
        name, crc = key[SLIDE_KEY_BYTES:].decode(), value_crc(key, value)
        if slide.record.thumbnail_crc.get(name, crc) != crc:
            raise DamagedStore(f"{slide}: picture {name!r} does not match its checksum")
        pictures[name] = value
    return pictures


def _other_entries(slide: SlideToCopy, number: int) -> Iterator[tuple[tuple[bytes, bytes], bytes]]:
    """Yield the stain fit and the entries of later versions, by database and key with the new slide number."""
    for key, value in slide.store.entries(STAINS, slide.number):
        new_key, stain = slide_key(number), unseal(key, value, where=f"{slide}: stain")
        yield (STAINS, new_key), seal(new_key, stain)
    for database in slide.store.databases - set(DATABASES):
        for key, value in slide.store.entries(database, slide.number):
            yield (database, slide_key(number) + key[SLIDE_KEY_BYTES:]), value


def _renumbered(
    labels: NDArray[np.int32], classes: Sequence[str], target: StoreWriter
) -> NDArray[np.int32]:
    """Convert labels to class numbers of the target, -1 for none. Missing classes are added to the target."""
    used = np.unique(labels[labels >= 0]).tolist()
    numbers = target.class_numbers([classes[number] for number in used])
    renumbered = labels.copy()
    for old in used:
        renumbered[labels == old] = numbers[classes[old]]
    return renumbered


def _chunks(lengths: NDArray[np.integer]) -> list[list[int]]:
    """Return the rows of each transaction."""
    rows = np.arange(len(lengths))
    # Both terms only grow: rows with an equal sum are few enough, and their values small enough.
    parts = rows // _CHUNK_ROWS + np.cumsum(lengths, dtype=np.int64) // _CHUNK_BYTES
    return [part.tolist() for part in np.split(rows, np.flatnonzero(np.diff(parts)) + 1)]


@takes(declared_settings(MergeOptions))
def merge(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    untrusted: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> CopyResult:
    """Copy the slides of several stores, or some of them, into one. A missing store is created.

    All entries of a slide are copied, also those of a later version. Slides get new numbers, so that the `splits.json`
    of a run is valid only for the stores of that run. If several stores have a slide, it is copied from the first one.
    Slides that an ingest has not finished are skipped.

    Args:
        sources: stores, or folders of stores, `*.lmdb`.
        out: the store's folder. After an interruption, the same call continues.
        untrusted: verify the sources before LMDB opens them.
        progress: where to show progress.
        settings: options by name, as in docs/reference/settings.md and as the flags of `histopipe merge`.

    Raises:
        NothingToDo: there is no store.
        UsageError: the stores have different specs.
        UsageError: slides with the same id differ, or the list of slides cannot be used.
        DamagedStore: a slide does not match its checksums.
        MachineShort: there is not enough free space.
    """
    options = make_settings(MergeOptions, settings)
    out, progress, subset = Path(out), progress or default_progress(), options.subset
    slides = None if options.slides is None else Path(options.slides)
    if slides is None and subset is not None:
        raise UsageError("--subset", found=subset, expected="--slides with the slides.csv of a run")
    listed = None if slides is None else _read_list(slides, subset)
    with ExitStack() as stack:
        stores = open_stores(
            find_stores(list(map(Path, sources)), out),
            stack,
            untrusted=untrusted,
            progress=progress,
        )
        ids = None if listed is None else _find_listed(listed, stores, slides)
        try:
            with Store(out) as before:
                if subset is not None and ids is not None:
                    _refuse_others(before, ids, subset)
                chosen, notes = choose(stores, before, ids)
                records = [slide.record for slide in chosen]
                chosen = [slide for slide in chosen if slide.store is not before]
        except NothingToDo:
            chosen, notes = choose(stores, None, ids)
            records = [slide.record for slide in chosen]
        total = sum(slide.record.stored_bytes for slide in chosen)
        with progress.bar("merge", unit="bytes", total=total) as bar:
            copied = copy_slides(
                chosen, out, stores[0].spec, allow_network=options.allow_network, bar=bar
            )
    new = set(copied)
    already = [record.id for record in records if record.id not in new]
    return CopyResult(str(out), copied, already, sum(r.planned for r in records), notes)


def _read_list(path: Path, subset: Subset | None) -> list[str]:
    """Return the slides in a list; if it is the table of slides of a run, those in a subset, which may be the only one.

    Raises:
        UsageError: the subset is missing or wrong, or patches of one slide are in several subsets.
        NothingToDo: the list has no slides.
    """
    rows = read_slide_list(path)
    if not rows:
        raise NothingToDo(f"{path} has no slides")
    is_of_run = {*EVALUATED} <= rows[0].cells.keys()  # columns of numbers of patches
    of_slide = {
        row.slide: [name for name in SUBSETS if is_of_run and row.cells.get(name, "0") != "0"]
        for row in rows
    }
    divided = [slide for slide, names in of_slide.items() if len(names) > 1]
    if divided:
        raise UsageError(
            f"{path} has slides with patches in several subsets",
            found=some(divided),
            expected="one subset per slide: a split by patient, site or slide",
        )
    subsets = list(dict.fromkeys(name for names in of_slide.values() for name in names))
    if subset not in subsets and (subset is not None or len(subsets) > 1):
        raise UsageError(
            f"--subset for {path}",
            found=subset or "none",
            expected=" or ".join(subsets) or "--slides with the slides.csv of a run",
        )
    chosen = [subset] if subset else subsets
    return [slide for slide, names in of_slide.items() if names == chosen]


def _find_listed(listed: Sequence[str], stores: Sequence[Store], path: object) -> set[str]:
    """Return the ids of the listed slides. Raise a UsageError if a slide is in none of the stores."""
    names = SlideNames(record.id for store in stores for record in store.records.values())
    ids = {slide: names.find(slide, where=str(path)) for slide in listed}
    unknown = [slide for slide, name in ids.items() if name is None]
    if unknown:
        raise UsageError(
            f"{path} has slides that are in none of the stores",
            found=some(unknown),
            expected=f"ids of slides, such as {names.nearest(unknown[0])}",
        )
    return {name for name in ids.values() if name is not None}


def _refuse_others(store: Store, ids: Collection[str], subset: Subset) -> None:
    """Refuse to add slides to the store of another subset or split, since a slide would be in two subsets."""
    other_ids = [record.id for record in store.slides if record.id not in ids]
    if other_ids:
        raise UsageError(
            f"{store.path} contains slides of another subset or split",
            found=some(other_ids),
            expected=f"slides of subset {subset}, or no store",
            todo="choose another --out",
        )


def find_stores(sources: Sequence[Path], out: Path) -> list[Path]:
    """List the stores to merge, without duplicates and without `out`. For a folder, list the stores in it.

    Raises:
        NothingToDo: a path is neither a store nor a folder of stores.
        UsageError: `out` is one of the given stores.
    """
    paths: dict[Path, Path] = {}
    for source in sources:
        if folder_kind(source) is FolderKind.STORE:
            if source.resolve() == out.resolve():
                raise UsageError(f"{out} is one of the stores to merge", expected="another store")
            inside = [source]
        else:
            catalog = read_catalog(source)
            if catalog is None and any((source / PARTS).glob("*-of-*")):
                raise no_store(source)  # parts that are not joined
            stores = (path.parent for path in source.glob(f"[!.]*.lmdb/{DATA}"))
            inside = sorted(stores) if catalog is None else catalog.parts
        if not inside:
            raise NothingToDo(
                f"{source} is not a store", expected="a store, or a folder of stores named *.lmdb"
            )
        paths |= {path.resolve(): path for path in inside if path.resolve() != out.resolve()}
    return list(paths.values())


def choose(
    stores: Sequence[Store], out: Store | None, ids: Collection[str] | None
) -> tuple[list[SlideToCopy], list[str]]:
    """Choose the store to copy each slide from, in the order of the stores: of all slides, or of those in `ids`.

    Slides in `out` stay.

    Returns the slides, and notes for the user.

    Raises:
        UsageError: slides with the same id differ.
    """
    chosen: dict[str, SlideToCopy] = {}
    twice: dict[tuple[Path, Path], list[str]] = defaultdict(list)
    notes, unequal, pending = [], [], []
    for store in [*([out] if out else []), *stores]:
        for number, record in store.records.items():
            if ids is not None and record.id not in ids:
                continue
            slide, first = SlideToCopy(store, number), chosen.get(record.id)
            if record.state is SlideState.PENDING:
                pending.append((record.id, store.path))
            elif first is None or first.record.state is SlideState.FAILED is not record.state:
                chosen[record.id] = slide
            elif record.state is SlideState.FAILED:
                continue
            elif not _is_same(first, slide):
                unequal.append(f"{record.id} in {first.store.path} and in {store.path}")
            else:
                twice[first.store.path, store.path].append(record.id)
                values, first_values = _values_of_users(record), _values_of_users(first.record)
                contradictions = [
                    f"{name} {first_values[name]!r} and {values[name]!r}"
                    for name in ("label", "patient", "site")
                    if name in first_values
                    and name in values
                    and first_values[name] != values[name]
                ]
                if contradictions:
                    unequal.append(
                        f"{record.id}: {', '.join(contradictions)} in {first.store.path} and in {store.path}"
                    )
                elif values.keys() - first_values.keys():
                    notes.append(
                        f"{record.id}: its record in {store.path} has more fields than in "
                        f"{first.store.path}, but was not copied"
                    )
    if unequal:
        raise UsageError(
            "slides with the same id differ",
            found=some(unequal),
            todo="remove one of each from its store with `histopipe remove`",
        )
    notes += [
        f"{name} of {path} is not complete: skipped" for name, path in pending if name not in chosen
    ]
    notes += [
        f"{counted(len(ids), 'slide')} in both {one} and {other}, copied from the first: {some(ids)}"
        for (one, other), ids in twice.items()
        if out is None or one != out.path  # usually copied by an earlier call
    ]
    return list(chosen.values()), notes + describe_copies(slide.record for slide in chosen.values())


def _values_of_users(record: SlideRecord) -> dict[str, str]:
    """Return label, patient, site and sources of labels and measurements, without those that are not set.

    A patient that equals the slide id is the default of ingest, and counts as not set.
    """
    names = ("label", "patient", "site", "annotations", "quality")
    values = {name: getattr(record, name) for name in names}
    return {n: v for n, v in values.items() if v is not None and (n, v) != ("patient", record.id)}


def _is_same(one: SlideToCopy, other: SlideToCopy) -> bool:
    """Return whether two stores have the same patches of the same scan. Their values are not read."""
    fields = attrgetter(
        "quickhash", "tile_hash", "width", "height", "planned", "stored", "stored_bytes"
    )
    first, second = one.record, other.record
    if not first.hashes.agree(second.hashes) or fields(first) != fields(second):
        return False
    columns, other_columns = one.store.index(one.number), other.store.index(other.number)
    return all(
        np.array_equal(columns[name], other_columns[name]) for name in ("x_l0", "y_l0", "length")
    )
