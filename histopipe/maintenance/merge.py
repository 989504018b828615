"""Several stores of one spec into one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from histopipe.errors import NothingToDo, UsageError
from histopipe.ingest.records import duplicates
from histopipe.maintenance.copying import Copied, Part, Told, copy_slides, same_spec
from histopipe.maintenance.finding import some
from histopipe.store.catalog import read_catalog
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.store import Store

_PLACES = ("x_l0", "y_l0", "length")


def merge(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    allow_network: bool = False,
    told: Told = lambda *_: None,
) -> Copied:
    """Copy the slides of several stores into one, which is made if missing and added to if there.

    Slides keep everything that is stored of them, what a later version has added too, but get numbers of their own: a run's
    `splits.json` is of the stores that it was made with. Of a slide that several stores have, the first one's is taken. What
    a stopped ingest has left half done is left out.

    Args:
        sources: stores, or folders of stores, `*.lmdb`.
        out: the store's folder. Called again after an interruption, it goes on.
        allow_network: let it lie on a network filesystem.
        told: hears how far it is.

    Raises:
        NothingToDo: there is no store.
        SpecMismatch: the stores' patches were not made in one way.
        UsageError: slides of one id are not the same.
        DamagedStore: a slide is not what was written.
        MachineShort: there is no room.
    """
    out = Path(out)
    with ExitStack() as stack:
        paths = find_stores([Path(source) for source in sources], out)
        stores = [stack.enter_context(Store(path)) for path in paths]
        spec = same_spec(stores)
        there: list[str] = []
        before_patches = 0
        try:
            with Store(out) as before:
                chosen, notes = choose(stores, before)
                there = [part.record.id for part in chosen if part.store is before]
                before_patches = sum(p.record.planned for p in chosen if p.store is before)
                chosen = [part for part in chosen if part.store is not before]
        except NothingToDo:
            chosen, notes = choose(stores)
        result = copy_slides(chosen, out, spec, allow_network=allow_network, told=told)
        result.patches += before_patches
    result.already += there
    result.notes += notes
    return result


def find_stores(sources: Sequence[Path], out: Path) -> list[Path]:
    """The stores that are meant, each once: given by name, or all of a folder but the one that is to be made.

    Raises:
        NothingToDo: a path is no store, and no folder of stores.
        UsageError: the store to be made is one of them.
    """
    found: dict[Path, Path] = {}
    for source in sources:
        catalog = read_catalog(source)
        inside = (
            sorted(path.parent for path in source.glob("[!.]*.lmdb/data.mdb"))
            if catalog is None
            else catalog.parts
        )
        if (source / "data.mdb").exists():
            if source.resolve() == out.resolve():
                raise UsageError(f"{out} is one of the stores that are to be merged into it")
            inside = [source]
        if not inside:
            raise NothingToDo(
                f"{source} is no store", expected="a store, or a folder of stores called *.lmdb"
            )
        found |= {path.resolve(): path for path in inside if path.resolve() != out.resolve()}
    return list(found.values())


def choose(stores: Sequence[Store], out: Store | None = None) -> tuple[list[Part], list[str]]:
    """Which store gives each slide, in the order of the stores, and what a person should know of that.

    Args:
        stores: to be merged.
        out: what they are merged into, if it is there; its slides stay.

    Raises:
        UsageError: slides of one id are not the same.
    """
    chosen: dict[str, Part] = {}
    twice: dict[tuple[Path, Path], list[str]] = defaultdict(list)
    notes: list[str] = []
    unequal: list[str] = []
    pending: list[tuple[str, Path]] = []
    for store in [*([out] if out else []), *stores]:
        for number, record in store.records.items():
            part, first = Part(store, number), chosen.get(record.id)
            if record.state is SlideState.PENDING:
                pending.append((record.id, store.path))
            elif first is None or first.record.state is SlideState.FAILED is not record.state:
                chosen[record.id] = part
            elif record.state is SlideState.FAILED:
                continue
            elif is_same(first, part):
                twice[first.store.path, store.path].append(record.id)
                says = _contradictions(first.record, record)
                if says:
                    unequal.append(f"{record.id}: {says} of {first.store.path} and of {store.path}")
                elif _says_more(record, first.record):
                    notes.append(
                        f"{record.id}: what {store.path} says of it beyond {first.store.path} is left out"
                    )
            else:
                unequal.append(f"{record.id} of {first.store.path} and of {store.path}")
    if unequal:
        raise UsageError(
            "slides of one id are not the same", found=some(unequal),
            todo="take one of each out of its store first (`histopipe remove`)",
        )  # fmt: skip
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
    return list(chosen.values()), notes + duplicates(part.record for part in chosen.values())


def _contradictions(one: SlideRecord, other: SlideRecord) -> str:
    """What a person has said of a slide differently."""
    said = [(fact, _said(one, fact), _said(other, fact)) for fact in ("label", "patient", "site")]
    return ", ".join(
        f"{fact} {here!r} and {there!r}"
        for fact, here, there in said
        if None not in (here, there) and here != there
    )


def _says_more(one: SlideRecord, other: SlideRecord) -> bool:
    """Whether something was said of a slide, or measured, that another record of it lacks."""
    facts = ("label", "patient", "site", "annotations", "quality")
    return any(_said(other, fact) is None and _said(one, fact) is not None for fact in facts)


def _said(record: SlideRecord, fact: str) -> str | None:
    """A fact of a slide; where nobody has said the patient, that is the slide's id."""
    value: str | None = getattr(record, fact)
    return None if fact == "patient" and value == record.id else value


def is_same(one: Part, other: Part) -> bool:
    """Whether two stores have the same patches of the same scan; their values are not looked at."""
    here, there = one.record, other.record
    facts = ("content", "width", "height", "planned", "stored", "stored_bytes")
    if any(getattr(here, fact) != getattr(there, fact) for fact in facts):
        return False
    columns, others = one.store.index(one.number), other.store.index(other.number)
    return all(np.array_equal(columns[name], others[name]) for name in _PLACES)
