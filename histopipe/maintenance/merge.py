"""Merge several stores of one spec into one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from histopipe.errors import NothingToDo, UsageError
from histopipe.maintenance.copy_slides import CopyResult, SlideToCopy, copy_slides, open_stores
from histopipe.store.catalog import read_catalog
from histopipe.store.record import SlideRecord, SlideState, describe_copies
from histopipe.store.store import Store
from histopipe.system.progress import Progress, default_progress
from histopipe.system.result import counted, some

_COMPARED = ("x_l0", "y_l0", "length")


def merge(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    allow_network: bool = False,
    untrusted: bool = False,
    progress: Progress | None = None,
) -> CopyResult:
    """Copy the slides of several stores into one. A missing store is created.

    All entries of a slide are copied, also those of a later version. Slides get new numbers, so that the `splits.json`
    of a run is valid only for the stores of that run. If several stores have a slide, it is copied from the first one.
    Slides that an ingest has not finished are skipped.

    Args:
        sources: stores, or folders of stores, `*.lmdb`.
        out: the store's folder. After an interruption, the same call continues.
        allow_network: allow it to be on a network filesystem.
        untrusted: verify the sources before LMDB opens them.
        progress: where to show progress.

    Raises:
        NothingToDo: there is no store.
        SpecMismatch: the stores have different specs.
        UsageError: slides with the same id differ.
        DamagedStore: a slide does not match its checksums.
        MachineShort: there is not enough free space.
    """
    out, progress = Path(out), progress or default_progress()
    with ExitStack() as stack:
        paths = find_stores([Path(source) for source in sources], out)
        stores = open_stores(paths, stack, untrusted=untrusted, progress=progress)
        existing: list[SlideToCopy] = []
        try:
            with Store(out) as before:
                chosen, notes = choose(stores, before)
                existing = [slide for slide in chosen if slide.store is before]
                chosen = [slide for slide in chosen if slide.store is not before]
        except NothingToDo:
            chosen, notes = choose(stores)
        total = sum(slide.record.stored_bytes for slide in chosen)
        bar = stack.enter_context(progress.bar("merge", unit="bytes", total=total))
        result = copy_slides(chosen, out, stores[0].spec, allow_network=allow_network, bar=bar)
    return replace(
        result,
        already=[*result.already, *(slide.record.id for slide in existing)],
        patches=result.patches + sum(slide.record.planned for slide in existing),
        notes=notes,
    )


def find_stores(sources: Sequence[Path], out: Path) -> list[Path]:
    """List the stores to merge, without duplicates and without `out`. For a folder, list the stores in it.

    Raises:
        NothingToDo: a path is neither a store nor a folder of stores.
        UsageError: `out` is one of the given stores.
    """
    paths: dict[Path, Path] = {}
    for source in sources:
        if (source / "data.mdb").exists():
            if source.resolve() == out.resolve():
                raise UsageError(f"{out} is one of the stores to merge", expected="another store")
            inside = [source]
        else:
            catalog = read_catalog(source)
            stores = (path.parent for path in source.glob("[!.]*.lmdb/data.mdb"))
            inside = sorted(stores) if catalog is None else catalog.parts
        if not inside:
            raise NothingToDo(
                f"{source} is not a store", expected="a store, or a folder of stores named *.lmdb"
            )
        paths |= {path.resolve(): path for path in inside if path.resolve() != out.resolve()}
    return list(paths.values())


def choose(
    stores: Sequence[Store], out: Store | None = None
) -> tuple[list[SlideToCopy], list[str]]:
    """Choose the store to copy each slide from, in the order of the stores. Slides in `out` stay.

    Returns the slides, and notes for the user.

    Raises:
        UsageError: slides with the same id differ.
    """
    chosen: dict[str, SlideToCopy] = {}
    twice: dict[tuple[Path, Path], list[str]] = defaultdict(list)
    notes: list[str] = []
    unequal: list[str] = []
    pending: list[tuple[str, Path]] = []
    for store in [*([out] if out else []), *stores]:
        for number, record in store.records.items():
            slide, first = SlideToCopy(store, number), chosen.get(record.id)
            if record.state is SlideState.PENDING:
                pending.append((record.id, store.path))
            elif first is None or first.record.state is SlideState.FAILED is not record.state:
                chosen[record.id] = slide
            elif record.state is SlideState.FAILED:
                continue
            elif _is_same(first, slide):
                twice[first.store.path, store.path].append(record.id)
                contradictions = _contradictions(first.record, record)
                if contradictions:
                    unequal.append(
                        f"{record.id}: {contradictions} in {first.store.path} and in {store.path}"
                    )
                elif _has_more(record, first.record):
                    notes.append(
                        f"{record.id}: its record in {store.path} has more fields than in "
                        f"{first.store.path}, but was not copied"
                    )
            else:
                unequal.append(f"{record.id} in {first.store.path} and in {store.path}")
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


def _contradictions(one: SlideRecord, other: SlideRecord) -> str:
    """List the labels, patients and sites in which two records differ."""
    texts = []
    for name in ("label", "patient", "site"):
        first, second = _given(one, name), _given(other, name)
        if None not in (first, second) and first != second:
            texts.append(f"{name} {first!r} and {second!r}")
    return ", ".join(texts)


def _has_more(one: SlideRecord, other: SlideRecord) -> bool:
    """Return whether a record has a label, patient, site or measurement that the other record does not have."""
    names = ("label", "patient", "site", "annotations", "quality")
    return any(_given(other, name) is None and _given(one, name) is not None for name in names)


def _given(record: SlideRecord, name: str) -> str | None:
    """Return a field of a record; None for a patient that equals the slide id, which is the default of ingest."""
    value: str | None = getattr(record, name)
    return None if name == "patient" and value == record.id else value


def _is_same(one: SlideToCopy, other: SlideToCopy) -> bool:
    """Return whether two stores have the same patches of the same scan. Their values are not read."""
    first, second = one.record, other.record
    names = ("quickhash", "tile_hash", "width", "height", "planned", "stored", "stored_bytes")
    if not first.hashes.agree(second.hashes) or any(
        getattr(first, name) != getattr(second, name) for name in names
    ):
        return False
    columns, other_columns = one.store.index(one.number), other.store.index(other.number)
    return all(np.array_equal(columns[name], other_columns[name]) for name in _COMPARED)
