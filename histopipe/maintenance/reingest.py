"""Ingest damaged slides of a store again, in their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from histopipe.errors import SlideError
from histopipe.geometry import Mpp
from histopipe.ingestion.ingest_slides import ingest_slides
from histopipe.ingestion.options import IngestOptions, SlideInput
from histopipe.ingestion.records import resolved, with_recorded_ids
from histopipe.maintenance.set_aside import restore, set_aside, set_aside_slides
from histopipe.maintenance.verify import Examination
from histopipe.maintenance.worker_tasks import results_of
from histopipe.slides.discovery import SlideFile, tile_hash
from histopipe.slides.slide import Slide
from histopipe.store.claims import Claims
from histopipe.store.environment import Environment
from histopipe.store.folder import open_for_change
from histopipe.store.meta import read_records
from histopipe.store.record import SlideRecord, SlideState
from histopipe.system.files import storable
from histopipe.system.progress import Progress
from histopipe.system.worker_pool import WorkerDied, WorkerPool
from histopipe.tiling.spec import spec_of_store

_LEAST_UNREADABLE = 0.01
_OPENING_SECONDS = 120.0


@dataclass(slots=True)
class Reingestion:
    """Ingests the damaged slides of a store again, by an ordinary ingest. The store's file must be sound.

    Attributes:
        annotations: files of outlines by slide id.
        done: ids of slides that are complete again, by number.
        left: reasons by id, of slides that are not.
        notes: what the user should know.
    """

    store: Path
    found: Examination
    given: Sequence[SlideFile]
    options: IngestOptions
    annotations: Mapping[str, Path]
    progress: Progress
    done: dict[int, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Ingest what can be ingested, and return to the slides what was set aside of them.

        Raises:
            SpecMismatch: this version cannot make the patches of the store.
        """
        hit = {f.number for f in self.found.result.findings if f.entry is None}
        records = self.found.records.items()
        damaged = {n: r for n, r in records if n in hit and r.state is SlideState.COMPLETE}
        with open_for_change(self.store) as environment:
            now = self._restore(environment)
            begun = {number: now[number] for number in set_aside_slides(environment)}
            if damaged or begun:
                self._ingest(environment, damaged, begun)

    def _restore(self, environment: Environment) -> dict[int, SlideRecord]:
        """Return to complete slides what was set aside, and forget what was of removed ones. Returns all records."""
        with environment.read() as transaction:
            records = read_records(transaction, environment.databases, self.store)
        for number in set_aside_slides(environment):
            record = records.get(number)
            if record is not None and record.state is not SlideState.COMPLETE:
                continue
            note = restore(environment, number)
            self.notes += [note] if note else []
            if record is not None:
                self.done[number] = record.id
        return records

    def _ingest(
        self,
        environment: Environment,
        damaged: Mapping[int, SlideRecord],
        begun: Mapping[int, SlideRecord],
    ) -> None:
        """Ingest damaged slides, and those that an interrupted repair has set aside."""
        wanted = [*{**damaged, **begun}.values()]
        spec = spec_of_store(self.found.store.spec or {})
        files = self._files(wanted)
        for number, record in damaged.items():
            file = files.get(record.id)
            if file is not None and not self._set_aside(environment, number, record, file):
                self.left[record.id] = "it was changed meanwhile"
                del files[record.id]
        if files:
            shares = [r.unreadable / r.planned for r in damaged.values() if r.planned]
            options = replace(
                self.options,
                rules=replace(self.options.rules, roi=spec.roi),
                max_unreadable=max([_LEAST_UNREADABLE, *shares]),
            )
            mpps = {r.id: Mpp(r.mpp) for r in wanted if r.mpp}
            slides = [
                SlideInput(file, mpp=mpps.get(name), annotations=self.annotations.get(name))
                for name, file in files.items()
            ]
            report = ingest_slides(slides, self.store, spec, options, progress=self.progress)
            self.left |= report.failed
        self._restore(environment)

    def _files(self, wanted: Sequence[SlideRecord]) -> dict[str, SlideFile]:
        """The files of slides by id, where they are given and of the same scan."""
        given = {slide.id: slide for slide in with_recorded_ids(self.given, self.found.records)}
        ids = [record.id for record in wanted]
        missing = "its file is not among those given"
        self.left |= {name: missing for name in ids if name not in given}
        files = {name: given[name] for name in ids if name in given}
        scans = {record.id: record.content for record in wanted}
        pool = WorkerPool(self.options.worker_count)
        try:
            tasks = [[slide] for slide in files.values()]
            for (slide,), content in results_of(pool, _OPENING_SECONDS, _content, tasks):
                if isinstance(content, WorkerDied | SlideError):
                    self.left[slide.id] = f"its file cannot be opened: {content}"
                elif scans[slide.id] not in (None, content):
                    self.left[slide.id] = f"{slide.path} is another scan by now"
                else:
                    continue
                del files[slide.id]
        finally:
            pool.shutdown(cancel_futures=True)
        return files

    def _set_aside(
        self, environment: Environment, number: int, record: SlideRecord, file: SlideFile
    ) -> bool:
        pending = replace(
            record,
            state=SlideState.PENDING,
            path=storable(str(file.path)),
            resolved_path=resolved(file.path),
            annotations=None,  # else the ingest would note that its classes are gone
        )
        with Claims(self.store) as claims:
            return claims.take(number) and set_aside(environment, number, record, pending)


def _content(slides: list[SlideFile]) -> str | SlideError | None:
    """What copies of one scan have in common, of a slide; None where there is nothing of that kind."""
    (slide,) = slides
    try:
        with Slide(slide.path) as opened:
            return opened.info.quickhash or tile_hash(slide.path)
    except SlideError as error:
        return error
