"""Merge several stores of one spec into one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from histopipe.errors import NothingToDo, UsageError
from histopipe.ingestion.records import duplicates
from histopipe.maintenance.copy_slides import CopyResult, StoredSlide, copy_slides, open_stores
from histopipe.maintenance.findings import some
from histopipe.store.catalog import read_catalog
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.store import Store
from histopipe.system.progress import Progress, default_progress

_PLACES = ("x_l0", "y_l0", "length")


def merge(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    allow_network: bool = False,
    untrusted: bool = False,
    progress: Progress | None = None,
) -> CopyResult:
    """Copy the slides of several stores into one, which is made if missing.

    Slides keep everything that is stored of them, also what a later version has added, but get new numbers: a run's
    `splits.json` belongs to the stores that the run began with. Of a slide that several stores have, the first one's is
    taken. Slides that an ingest has not finished are left out.

    Args:
        sources: stores, or folders of stores, `*.lmdb`.
        out: the store's folder. After an interruption, the same call continues.
        allow_network: allow it to be on a network filesystem.
        untrusted: verify the sources before LMDB opens them.
        progress: where to show progress.

    Raises:
        NothingToDo: there is no store.
        SpecMismatch: the stores have different specs.
        UsageError: slides of one id are not the same.
        DamagedStore: a slide is not what was written.
        MachineShort: there is not enough free space.
    """
    out, progress = Path(out), progress or default_progress()
    with ExitStack() as stack:
        paths = find_stores([Path(source) for source in sources], out)
        stores = open_stores(paths, stack, untrusted=untrusted, progress=progress)
        there: list[StoredSlide] = []
        try:
            with Store(out) as before:
                chosen, notes = choose(stores, before)
                there = [slide for slide in chosen if slide.store is before]
                chosen = [slide for slide in chosen if slide.store is not before]
        except NothingToDo:
            chosen, notes = choose(stores)
        total = sum(slide.record.stored_bytes for slide in chosen)
        bar = stack.enter_context(progress.bar("merge", unit="bytes", total=total))
        result = copy_slides(chosen, out, stores[0].spec, allow_network=allow_network, bar=bar)
    return replace(
        result,
        already=[*result.already, *(slide.record.id for slide in there)],
        patches=result.patches + sum(slide.record.planned for slide in there),
        notes=notes,
    )


def find_stores(sources: Sequence[Path], out: Path) -> list[Path]:
    """List the stores to merge, each once: those given, and all in a folder except `out`.

    Raises:
        NothingToDo: a path is no store, and no folder of stores.
        UsageError: `out` is one of the given stores.
    """
    found: dict[Path, Path] = {}
    for source in sources:
        if (source / "data.mdb").exists():
            if source.resolve() == out.resolve():
                raise UsageError(f"{out} is one of the stores that are to be merged into it")
            inside = [source]
        else:
            catalog = read_catalog(source)
            stores = (path.parent for path in source.glob("[!.]*.lmdb/data.mdb"))
            inside = sorted(stores) if catalog is None else catalog.parts
        if not inside:
            raise NothingToDo(
                f"{source} is no store", expected="a store, or a folder of stores called *.lmdb"
            )
        found |= {path.resolve(): path for path in inside if path.resolve() != out.resolve()}
    return list(found.values())


def choose(
    stores: Sequence[Store], out: Store | None = None
) -> tuple[list[StoredSlide], list[str]]:
    """Choose the store that each slide is copied from, in the order of the stores. Slides that are in `out` stay.

    Returns the slides, and notes for the user.

    Raises:
        UsageError: slides of one id are not the same.
    """
    chosen: dict[str, StoredSlide] = {}
    twice: dict[tuple[Path, Path], list[str]] = defaultdict(list)
    notes: list[str] = []
    unequal: list[str] = []
    pending: list[tuple[str, Path]] = []
    for store in [*([out] if out else []), *stores]:
        for number, record in store.records.items():
            slide, first = StoredSlide(store, number), chosen.get(record.id)
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
                        f"{record.id}: {contradictions} of {first.store.path} and of {store.path}"
                    )
                elif _has_more(record, first.record):
                    notes.append(
                        f"{record.id}: {store.path} records more of it than {first.store.path}; left out"
                    )
            else:
                unequal.append(f"{record.id} of {first.store.path} and of {store.path}")
    if unequal:
        raise UsageError(
            "slides of one id are not the same",
            found=some(unequal),
            todo="take one of each out of its store first (`histopipe remove`)",
        )
    notes += [
        f"{name} of {path} is not done yet: left out"
        for name, path in pending
        if name not in chosen
    ]
    notes += [
        f"{len(ids)} slides are in {one} and in {other}, of which the first is taken: {some(ids)}"
        for (one, other), ids in twice.items()
        if out is None or one != out.path  # copied by an earlier call, most likely
    ]
    return list(chosen.values()), notes + duplicates(slide.record for slide in chosen.values())


def _contradictions(one: SlideRecord, other: SlideRecord) -> str:
    """Labels, patients and sites in which two records differ."""
    texts = []
    for fact in ("label", "patient", "site"):
        here, there = _given(one, fact), _given(other, fact)
        if None not in (here, there) and here != there:
            texts.append(f"{fact} {here!r} and {there!r}")
    return ", ".join(texts)


def _has_more(one: SlideRecord, other: SlideRecord) -> bool:
    """Whether a record has a label, patient, site or measurement that another record of the slide lacks."""
    facts = ("label", "patient", "site", "annotations", "quality")
    return any(_given(other, fact) is None and _given(one, fact) is not None for fact in facts)


def _given(record: SlideRecord, fact: str) -> str | None:
    """A field of a record; None for a patient who is only the slide's id, which ingest records by default."""
    value: str | None = getattr(record, fact)
    return None if fact == "patient" and value == record.id else value


def _is_same(one: StoredSlide, other: StoredSlide) -> bool:
    """Whether two stores have the same patches of the same scan; their values are not read."""
    here, there = one.record, other.record
    facts = ("content", "width", "height", "planned", "stored", "stored_bytes")
    if any(getattr(here, fact) != getattr(there, fact) for fact in facts):
        return False
    columns, others = one.store.index(one.number), other.store.index(other.number)
    return all(np.array_equal(columns[name], others[name]) for name in _PLACES)
