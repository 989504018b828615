"""Bringing back what is damaged in a store, from the slides; all that is sound stays as it is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from histopipe.annotations.rules import AnnotationRules
from histopipe.errors import DamagedStore, ExitCode, NothingToDo, UsageError
from histopipe.geometry import Mpp
from histopipe.ingest.checks import refuse_network
from histopipe.ingest.ingest_slides import ingest_slides
from histopipe.ingest.options import IngestOptions, SlideInput
from histopipe.maintenance.compact import carry_files, in_place_of
from histopipe.maintenance.damage import Damage, damage_of
from histopipe.maintenance.finding import Kind
from histopipe.maintenance.mend import mend, rewrite
from histopipe.maintenance.put_back import PutBack
from histopipe.maintenance.verify import Told, examined, verify
from histopipe.slides.discovery import SlideFile
from histopipe.store.store import Store
from histopipe.system.locks import lock_if_free
from histopipe.system.progress import Progress
from histopipe.tiling.spec import TilingSpec

_LEAST_UNREADABLE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairOptions:
    """How slides are ingested again.

    Attributes:
        full: decode every patch, too, and bring back slides with some that cannot be.
        workers: processes; one a core if not given.
        annotations: files of outlines by slide id; without one a slide's patches keep the classes that they had.
        rules: how outlines become labels.
        allow_network: let the store lie on a network filesystem.
    """

    full: bool = False
    workers: int | None = None
    annotations: Mapping[str, Path] = field(default_factory=dict)
    rules: AnnotationRules = field(default_factory=AnnotationRules)
    allow_network: bool = False


@dataclass(slots=True)
class Repaired:
    """What was done.

    Attributes:
        findings: how much was wrong.
        slides: ids of those that were ingested again.
        left: why, by id, of damaged slides that were not.
        notes: what a person should know.
        remaining: what is still wrong, of other slides than those left.
    """

    store: str
    findings: int = 0
    slides: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    remaining: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        """Of the command."""
        if self.remaining:
            return ExitCode.DAMAGED
        return ExitCode.PARTLY if self.left else ExitCode.DONE


def repair(
    store: Path,
    slides: Sequence[SlideFile],
    options: RepairOptions,
    progress: Progress,
    told: Told = lambda *_: None,
) -> Repaired:
    """Look at a store, ingest the damaged slides again beside it, put them in their places, and look again.

    A slide keeps its number, its label, its stains, and what was measured of its patches where they are cut as before. Nothing
    of a slide goes before what takes its place is there: one whose file is not given, or is another scan by now, stays as it
    is. One whose record is lost is known by its patches; until its file is given it is hidden, as `lost-slide-NUMBER`.
    Interrupted, the same call goes on.

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
    real = store.resolve()
    beside = real.with_name(f".repair-{real.name}")
    begun = _begun(beside)
    with examined(store, full=options.full, workers=options.workers, told=told) as looked:
        result = Repaired(str(store), len(looked.verified.findings))
        damage, records = damage_of(looked, begun), looked.contents.records
    fits = sum(finding.kind is Kind.STAIN for finding in looked.verified.findings)
    if fits:
        result.notes.append(
            f"how {fits} slides are stained was lost: `histopipe stains` fits it anew"
        )
    if not (result.findings or damage.records or damage.lost):
        return result
    wanted = damage.wanted(slides, records)
    with _kept(beside):
        result.left |= _ingest(wanted, beside, damage, options, progress)
        if damage.rewrite:
            with in_place_of(store) as part:
                rewrite(store, part, damage, records)
                returned = PutBack(part, beside, damage)
                returned.run()
                carry_files(store, part)
            result.notes.append(
                f"{store / 'data.mdb'} was written anew from all that can be read of it"
            )
        else:
            mend(store, damage)
            returned = PutBack(store, beside, damage)
            returned.run()
    result.slides = list(returned.done.values())
    result.notes += returned.notes
    _tell_left(result, real, damage, returned, slides)
    found = verify(real, full=options.full, workers=options.workers, told=told).findings
    result.remaining = [
        f"{f.slide + ': ' if f.slide else ''}{f.what}" for f in found if f.slide not in result.left
    ]
    return result


def _begun(beside: Path) -> set[str]:
    """Ids of the slides that an earlier repair, which was interrupted, has ingested."""
    try:
        with Store(beside) as made:
            return {record.id for record in made.complete.values()}
    except (NothingToDo, DamagedStore):
        return set()


@contextmanager
def _kept(beside: Path) -> Iterator[None]:
    """The folder beside the store, this process's alone; it goes at the end, and stays after an interruption.

    Raises:
        UsageError: another repair is at work, or it cannot be made.
    """
    try:
        beside.mkdir(exist_ok=True)
        folder = os.open(beside, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"{beside} cannot be made", found=error.strerror) from error
    try:
        if not lock_if_free(folder):
            raise UsageError("another repair of the store is at work", todo="wait until it is done")
        yield
        shutil.rmtree(beside, ignore_errors=True)
    finally:
        os.close(folder)


def _ingest(
    slides: list[SlideFile],
    beside: Path,
    damage: Damage,
    options: RepairOptions,
    progress: Progress,
) -> dict[str, str]:
    """Ingest slides into a store of their own; why not, by id, those damaged ones that cannot be."""
    spec = damage.spec
    if spec is None or not slides:
        return {}
    _clear(beside, spec)
    # A user may have given the scales.
    mpps = {r.id: Mpp(r.mpp) for r in damage.records.values() if r.mpp}
    inputs = [
        SlideInput(s, mpp=mpps.get(s.id), annotations=options.annotations.get(s.id)) for s in slides
    ]
    how = IngestOptions(
        workers=options.workers, rules=replace(options.rules, roi=spec.roi), retry_failed=True, allow_network=True, allow_mixed_mpp=True,
        max_unreadable=max(_LEAST_UNREADABLE, damage.max_unreadable),
    )  # fmt: skip
    report = ingest_slides(inputs, beside, spec, how, progress=progress)
    damaged = {record.id for record in damage.records.values()}
    return {name: reason for name, reason in report.failed.items() if name in damaged}


def _clear(beside: Path, spec: TilingSpec) -> None:
    """Empty the folder of what an earlier repair has left there, if it is of no use."""
    try:
        with Store(beside) as made:
            if made.spec == spec.to_json():
                return
    except NothingToDo:
        return
    except DamagedStore:
        pass  # it is only a copy
    for path in beside.iterdir():
        path.unlink()


def _tell_left(
    result: Repaired,
    store: Path,
    damage: Damage,
    returned: PutBack,
    slides: Sequence[SlideFile],
) -> None:
    """Why damaged slides are not back."""
    result.left |= returned.left
    given = {slide.id for slide in slides}
    for number in damage.records.keys() - returned.done.keys():
        name = damage.records[number].id
        why = "it was not ingested again" if name in given else "its file is not among those given"
        result.left.setdefault(name, why)
    lost = [lost for number, lost in damage.lost.items() if number not in returned.done]
    for slide in lost:
        other = returned.twins.get(slide.number)
        why = (
            f"it is in the store as {other}, too: `histopipe remove` {slide.record.id}"
            if other
            else "its file is not among those given"
        )
        result.left[slide.record.id] = why
    if lost or damage.some_are_gone:
        with Store(store) as opened:
            known = {record.resolved_path for record in opened.slides}
        missing = [s.id for s in slides if os.path.realpath(s.path) not in known]
        for name in missing:
            result.left.setdefault(
                name, "it is not in the store, or nothing shows where: `histopipe ingest` adds it"
            )
