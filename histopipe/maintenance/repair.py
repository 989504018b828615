"""Bringing back what is damaged in a store, from the slides; all that is sound stays as it is."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.annotations.rules import AnnotationRules
from histopipe.errors import ExitCode, UsageError
from histopipe.geometry import Mpp
from histopipe.ingest.outcome import Status
from histopipe.ingest.progress import Progress
from histopipe.ingest.request import IngestOptions, refuse_network
from histopipe.ingest.run import ingest
from histopipe.maintenance.compact import carry_files, in_place_of
from histopipe.maintenance.damage import PLACES, Columns, Damage, damage_of, place_of, wanted_files
from histopipe.maintenance.verify import Told, examined
from histopipe.slides.discovery import SlideFile
from histopipe.store.claims import Claims
from histopipe.store.data_file import DataFile
from histopipe.store.deletion import delete_entries
from histopipe.store.folder import open_for_change
from histopipe.store.format import INDEX_COLUMNS, META, SLIDES, slide_key, to_json
from histopipe.store.record import SlideRecord
from histopipe.store.salvage import salvage
from histopipe.store.store import Store
from histopipe.store.structure import Structure
from histopipe.store.transfer import Transfer
from histopipe.store.writer import StoreWriter

_MEASURED = ("covered", "label", "focus", "pen", "dark")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairOptions:
    """How slides are ingested again.

    Attributes:
        workers: processes; one a core if not given.
        annotations: files of outlines by slide id; without one a slide's patches keep the classes that they had.
        rules: how outlines become labels.
        allow_network: let the store lie on a network filesystem.
    """

    workers: int | None = None
    annotations: Mapping[str, Path] = field(default_factory=dict)
    rules: AnnotationRules = field(default_factory=AnnotationRules)
    allow_network: bool = False


@dataclass(slots=True)
class Repaired:
    """What was done.

    Attributes:
        findings: what was wrong.
        slides: ids of those that were ingested again.
        left: why, by id, of damaged slides that were not.
        notes: what a person should know.
    """

    store: str
    findings: int = 0
    slides: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        """Of the command."""
        return ExitCode.PARTLY if self.left else ExitCode.DONE


def repair(
    store: Path,
    slides: Sequence[SlideFile],
    options: RepairOptions,
    progress: Progress,
    told: Told = lambda *_: None,
) -> Repaired:
    """Look at a store, ingest the damaged slides again beside it, and put them in their places.

    A slide keeps its number, its label, and what was measured of its patches where they are cut as before. Nothing of a slide
    goes before what takes its place is there: one whose file is not given, or is another scan by now, stays as it is. One
    whose record is lost is hidden, as `lost-slide-NUMBER`, until its file is given. Interrupted, the same call goes on.

    Args:
        store: the store's folder; nobody may be writing it.
        slides: what `discover` found where the store's slides lie.
        options: how to ingest.
        progress: told what the ingest does.
        told: hears how far looking is.

    Raises:
        NothingToDo, UnknownVersion: there is no store, or not of this version.
        DamagedStore: what the store says of itself is lost.
        UsageError, MachineShort: the store cannot be written, or was written meanwhile.
    """
    if not options.allow_network:
        refuse_network(store)
    with examined(store, workers=options.workers, told=told) as looked:
        result = Repaired(str(store), len(looked.verified.findings))
        damage, records = damage_of(looked), looked.contents.records
    real = store.resolve()
    beside = real.with_name(f".repair-{real.name}")
    wanted = wanted_files(slides, damage, records)
    if wanted:
        result.left |= _ingest(wanted, beside, damage, options, progress)
    if damage.rewrite:
        with in_place_of(store) as part:
            _salvage(store, part, damage, records)
            done = _put_back(part, beside, damage, options, result)
            carry_files(store, part)
        result.notes.append(
            f"{store / 'data.mdb'} was written anew from all that can be read of it"
        )
    else:
        _mend(store, damage)
        done = _put_back(store, beside, damage, options, result)
    for number in damage.records.keys() - done:
        result.left.setdefault(damage.records[number].id, "its file is not among those given")
    shutil.rmtree(beside, ignore_errors=True)
    return result


def _ingest(
    slides: list[SlideFile],
    beside: Path,
    damage: Damage,
    options: RepairOptions,
    progress: Progress,
) -> dict[str, str]:
    """Ingest slides into a store of their own; why not, by id, those that cannot be."""
    if damage.spec is None:
        return {}
    # A user may have given the scales.
    mpps = {r.id: Mpp(r.mpp) for r in damage.records.values() if r.mpp}
    how = IngestOptions(
        workers=options.workers, annotations=options.annotations, rules=options.rules, mpps=mpps,
        retry_failed=True, allow_network=True,
    )  # fmt: skip
    report = ingest(slides, beside, damage.spec, how, progress)
    return {slide.id: slide.reason for slide in report.of(Status.FAILED)}


def _salvage(store: Path, part: Path, damage: Damage, records: Mapping[int, SlideRecord]) -> None:
    """Write all that can be read of a file into a new one, that of damaged slides too: it goes when they are back."""
    known = {**records, **{n: r for n, r in damage.records.items() if n not in records}}
    with DataFile(store / "data.mdb") as file:
        state = max((m for m in file.metas if m is not None), key=lambda meta: meta.transaction)
        if state.transaction != damage.transaction:
            raise UsageError(f"{store} was written meanwhile", todo="run the same command again")
        structure = Structure(file, state)
        structure.read_databases()
        salvage(structure, part, known, known.keys() - damage.strays, damage.next_number)


def _mend(store: Path, damage: Damage) -> None:
    """Delete what is no slide's, and hide slides whose records are lost, in a file that is whole."""
    environment = open_for_change(store)
    try:
        for number in sorted(damage.strays):
            delete_entries(environment, number)

        def work(transaction: Any) -> None:
            for database, key in damage.entries:
                held = environment.database(database.encode(), transaction)
                transaction.delete(bytes.fromhex(key), db=held)
            slides = environment.database(SLIDES, transaction)
            for number, record in damage.records.items():
                if not record.path:
                    transaction.put(slide_key(number), record.to_bytes(number), db=slides)
            meta = environment.database(META, transaction)
            transaction.put(b"next_number", to_json(damage.next_number), db=meta)

        environment.change(work)
    finally:
        environment.close()


def _put_back(
    target: Path, beside: Path, damage: Damage, options: RepairOptions, result: Repaired
) -> set[int]:
    """Put slides that were ingested anew in their old places; the numbers of these."""
    done: set[int] = set()
    if damage.spec is None or not (beside / "data.mdb").exists():
        return done
    with (
        Store(beside) as made,
        StoreWriter(target, damage.spec) as writer,
        Claims(target) as claims,
    ):
        now = writer.records()
        for number, record in made.complete.items():
            place = place_of(record, made.index(number), damage)
            if place is None or place in done:
                continue  # of an earlier repair, or never in the store
            before = damage.records[place]
            if before.content not in (None, record.content):
                result.left[record.id] = f"{record.path} is another scan by now"
            elif now.get(place) != before or not claims.take(place):
                result.left[record.id] = "it was changed meanwhile"
            else:
                _replace(Transfer(made, writer), number, place, damage, options)
                done.add(place)
                result.slides.append(record.id)
                if not before.path:
                    result.notes.append(
                        f"the record of {record.id} was lost: give its label again (histopipe ingest --labels)"
                    )
    return done


def _replace(
    transfer: Transfer, number: int, place: int, damage: Damage, options: RepairOptions
) -> None:
    """Put a slide that was ingested anew in its old place, with what a person has said of it."""
    made, before = transfer.source.records[number], damage.records[place]
    keep = _measured(damage.columns.get(place), transfer.source.index(number))
    if made.id in options.annotations:
        keep = {name: column for name, column in keep.items() if name not in ("label", "covered")}
    said = ["patient", "label", "site", "mpp_source"] if before.path else []
    if before.path and "label" in keep:
        said += ["annotations", "annotation_notes", "patch_labels"]
    if before.path and "focus" in keep:
        said += ["quality"]
    notes = list(made.notes)
    if before.annotations is not None and made.annotations is None and "label" not in keep:
        notes.append("the classes of its patches are gone: `histopipe annotate` gives them anew")
    record = dataclasses.replace(
        made, notes=notes, unknown=before.unknown, **{name: getattr(before, name) for name in said}
    )
    transfer.target.restart(place, before)
    transfer.copy(number, place, record=record, columns=keep)


def _measured(old: Columns | None, new: Columns) -> Columns:
    """What was measured of patches or decided over them, if they are cut as before; a later version's columns too."""
    if old is None or not all(np.array_equal(old[name], new[name]) for name in PLACES):
        return {}
    return {name: c for name, c in old.items() if name in _MEASURED or name not in INDEX_COLUMNS}
