"""One ingest on a cluster: gives slides out, credits each to one part, and writes the catalog.

What is complete is what the catalog says, and that is written once a part is where all are. Whoever is lost on the way, a worker,
the scheduler or this process: the same command publishes what is left on the workers' disks, and goes on with the rest.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from histopipe._version import __version__
from histopipe.cluster.connect import Cluster, WorkersDied, connected
from histopipe.cluster.part import Depot
from histopipe.cluster.work import Done, Order, absolute, options_of, publish
from histopipe.errors import UsageError
from histopipe.ingest.job import SlideJob
from histopipe.ingest.outcome import IngestReport, SlideOutcome, Status, failed_outcome, outcome_of
from histopipe.ingest.progress import Both, Progress, logged
from histopipe.ingest.request import IngestOptions, check_request, duplicates, sort_out
from histopipe.ingest.run import labelled_too
from histopipe.ingest.summary import LOG, SUMMARY, leave_csv, summary_lines
from histopipe.slides.discovery import SlideFile
from histopipe.store.catalog import Catalog, read_catalog
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter, check_spec
from histopipe.system.filesystems import network_filesystem
from histopipe.system.locks import lock_if_free
from histopipe.tiling.spec import TilingSpec

_PATIENCE = 10.0
"""Seconds without workers before that is told."""
_AHEAD = 2
"""Slides given out for each worker: one that it is at, and one that waits."""
_PAUSE = 0.1
_ROUNDS = 3
"""Times that slides are given out whose part was lost before it was published."""


def ingest_on_cluster(
    slides: Sequence[SlideFile],
    out: Path,
    spec: TilingSpec,
    options: IngestOptions,
    progress: Progress,
    *,
    cluster: str,
    scratch: Path,
    part_bytes: int,
) -> IngestReport:
    """Tile slides into a folder of parts, by the workers of a cluster.

    Args:
        slides: what `discover` found; every machine sees them, and `out`, under the same paths.
        out: the folder of parts, made if missing.
        spec, options, progress: as for `ingest`.
        cluster: as for `connected`.
        scratch: on each machine a folder on a local disk.
        part_bytes: a part that is larger is published, and another begun.

    Returns:
        What became of every slide asked for.

    Raises:
        UsageError: it is a store, or another run is at it; or the machines do not see the same; or scales would be mixed.
        MachineShort: no scheduler, or it was lost; a worker's disk or memory ran out. What was complete stays.
        SpecMismatch: the folder's parts were made with other settings.
    """
    started = time.monotonic()
    out = Path(os.path.realpath(out))
    slides = [absolute(slide) for slide in slides]
    check_request(slides, out, spec, replace(options, allow_network=True))
    with _kept(out), connected(cluster) as workers:
        catalog = read_catalog(out) or Catalog(out)
        catalog.write()
        with logged(out / LOG) as log:
            log.said(f"histopipe {__version__}, {spec}, {options}, {cluster}")
            order = Order(Depot(out, scratch.absolute(), catalog.uuid), spec, part_bytes)
            run = _Run(workers, catalog, order, options, Both(log, progress))
            outcomes = run.ingest(slides)
            warnings = duplicates(record for _, record in run.parts.values())
            report = IngestReport(str(out), time.monotonic() - started, outcomes, warnings)
            report = run.labelled(report)
            for text in [*warnings, *summary_lines(report)]:
                log.said(text)
    leave_csv(report, out / SUMMARY, progress)
    return report


@contextmanager
def _kept(out: Path) -> Iterator[None]:
    """The folder of parts, made if missing, given out by this process alone."""
    if (out / "data.mdb").exists() or out.suffix == ".lmdb":
        raise UsageError(
            f"{out} is a store, or is named as one", expected="with --cluster: a folder for parts",
            todo="pass another --out; `histopipe merge` makes one store of it",
        )  # fmt: skip
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"{out} cannot be made", found=error.strerror) from error
    try:
        if not lock_if_free(folder):
            raise UsageError(f"another run gives out slides for {out}", todo="wait for it")
        yield
    finally:
        os.close(folder)


@dataclass(slots=True)
class _Run:
    """One run.

    Attributes:
        parts: by slide id the part that the catalog names, and the record there.
    """

    cluster: Cluster
    catalog: Catalog
    order: Order
    options: IngestOptions
    progress: Progress
    parts: dict[str, tuple[str, SlideRecord]] = field(default_factory=dict)
    _done: dict[str, Done] = field(default_factory=dict)
    _outcomes: dict[str, SlideOutcome] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _suspect: set[str] = field(default_factory=set)
    _left: dict[str, int] = field(default_factory=dict)

    def ingest(self, slides: Sequence[SlideFile]) -> list[SlideOutcome]:
        """What became of each slide, in the order of their ids."""
        self._gather()
        known = dict(enumerate(record for _, record in self.parts.values()))
        numbers = {record.id: number for number, record in known.items()}
        new = [slide.id for slide in slides if slide.id not in numbers]
        numbers |= {name: len(known) + place for place, name in enumerate(new)}
        todo = sort_out(slides, known, numbers, self.options)
        self._relabel(todo.relabelled)
        self.progress.begin(len(slides))
        for outcome in todo.outcomes:
            self._finished(outcome)
        jobs = {job.slide.id: job for job in todo.jobs}
        for _ in range(_ROUNDS):
            missing = [job for name, job in jobs.items() if name not in self._outcomes]
            if not missing:
                break
            try:
                self._give_out(missing)
            except KeyboardInterrupt:
                self.progress.said(
                    "stopped: what is complete is published first; once more ends at once"
                )
                self._gather()
                raise
            self._gather()
            for job in missing:
                self._settle(job)
        for name, job in jobs.items():
            if name not in self._outcomes:
                lost = "the workers that ingested it were lost, with their disks; run the same command again"
                self._finished(failed_outcome(job.record, f"{job.slide.path}: {lost}"))
        return sorted(self._outcomes.values(), key=lambda outcome: outcome.id)

    def _settle(self, job: SlideJob) -> None:
        """Take a slide's outcome as final if the catalog has it, or if it never came to anything."""
        done = self._done.pop(job.slide.id, None)
        held = self.parts.get(job.slide.id)
        if done is not None and (not done.part or (held and held[0] == done.part)):
            self._outcomes[job.slide.id] = done.outcome
        elif held is not None and not job.again and held[1].state is SlideState.COMPLETE:
            self._outcomes[job.slide.id] = outcome_of(held[1], Status.COMPLETE)

    def _give_out(self, jobs: Sequence[SlideJob]) -> None:
        """Have slides ingested, each until some worker has answered."""
        waiting = deque(jobs)
        running: dict[Any, SlideJob] = {}
        since = time.monotonic()
        try:
            while waiting or running:
                workers = self.cluster.workers()
                if workers:
                    since = time.monotonic()
                elif time.monotonic() - since > _PATIENCE:
                    self.progress.said("no worker is there: waiting for one")
                    since = float("inf")
                while waiting and len(running) < _AHEAD * len(workers):
                    job = waiting.popleft()
                    options = options_of(self.options, job)
                    running[self.cluster.give(self.order, job.slide, options)] = job
                for future in self.cluster.wait(running) if running else ():
                    if not self._take_in(running[future], future):
                        waiting.append(running[future])
                    del running[future]
                if not running:
                    time.sleep(_PAUSE)
                self._tell()
        finally:
            for future in running:
                future.cancel()

    def _take_in(self, job: SlideJob, future: Any) -> bool:
        """Take in what came of a slide; False if that was lost."""
        try:
            done = self.cluster.result(future)
        except WorkersDied as error:
            # A slide that only waited where another one killed workers is blamed, too: it gets another try.
            if job.slide.id not in self._suspect:
                self._suspect.add(job.slide.id)
                return False
            reason = f"{job.slide.path}: every worker that ingested it died: {error}"
            done = Done(failed_outcome(job.record, reason), "")
        if done is None:
            return False
        self._done[job.slide.id] = done
        self._tell()
        if job.slide.id not in self._told:
            self._told.add(job.slide.id)
            self.progress.finished(done.outcome)
        return True

    def _tell(self) -> None:
        """Pass on what workers have told; a slide that is done twice is told once."""
        for event in self.cluster.events():
            slide = event.get("slide", "")
            if event["what"] == "said":
                self.progress.said(event["text"])
            elif slide in self._told:
                continue
            elif event["what"] == "planned" and slide not in self._left:
                self._left[slide] = event["patches"]
                self.progress.planned(slide, event["patches"])
            elif event["what"] == "advanced":
                some = min(event["patches"], self._left.get(slide, 0))
                self._left[slide] = self._left.get(slide, 0) - some
                self.progress.advanced(slide, some)

    def _gather(self) -> None:
        """Have all parts published, and write down which slide is where."""
        self.cluster.everywhere(publish, self.order)
        found: dict[str, list[tuple[str, SlideRecord]]] = defaultdict(list)
        for path in sorted(self.catalog.folder.glob("part-*.lmdb")):
            with Store(path, hidden=True) as part:
                check_spec(part.spec, self.order.spec.to_json(), path)
                for record in part.slides:
                    if record.state is not SlideState.PENDING:
                        found[record.id].append((path.name, record))
        self.parts = {name: self._chosen(name, held) for name, held in found.items()}
        self.catalog.slides = {name: part for name, (part, _) in sorted(self.parts.items())}
        self.catalog.write()

    def _chosen(self, slide: str, held: list[tuple[str, SlideRecord]]) -> tuple[str, SlideRecord]:
        """The part that counts: this run's; else the one that did; else one where the slide is complete."""
        done = self._done.get(slide)
        complete = [it for it in held if it[1].state is SlideState.COMPLETE]
        for wanted in (done.part if done else None, self.catalog.slides.get(slide)):
            for part, record in held:
                if part == wanted and (
                    done is not None or not complete or record.state is SlideState.COMPLETE
                ):
                    return part, record
        return (complete or held)[0]

    def labelled(self, report: IngestReport) -> IngestReport:
        """Label the slides that an earlier run has ingested, where their annotations are others now."""
        of_part: dict[str, dict[str, Path]] = defaultdict(dict)
        for slide in report.of(Status.SKIPPED):
            if slide.id in self.options.annotations and slide.id in self.parts:
                part, _ = self.parts[slide.id]
                of_part[part][slide.id] = self.options.annotations[slide.id]
        for part, files in of_part.items():
            if self._may_change(part, "annotations"):
                options = replace(self.options, annotations=files)
                report = labelled_too(report, self.catalog.folder / part, options)
        return report

    def _relabel(self, records: dict[int, SlideRecord]) -> None:
        """Give slides that are there the labels that they have now."""
        for record in records.values():
            part, before = self.parts[record.id]
            if not self._may_change(part, f"labels of {record.id}"):
                continue
            with StoreWriter(self.catalog.folder / part, self.order.spec) as writer:
                numbers = {held.id: number for number, held in writer.records().items()}
                facts = {name: getattr(record, name) for name in ("label", "patient", "site")}
                writer.change(numbers[record.id], **facts)
            self.parts[record.id] = part, replace(before, **facts)

    def _may_change(self, part: str, what: str) -> bool:
        """Whether a part is where stores may be changed; else that is told."""
        path = self.catalog.folder / part
        if not network_filesystem(path):
            return True
        self.progress.said(
            f"{what}: left as they are, for {path} is on a network filesystem, where no store is changed: "
            "`histopipe merge` first, then ingest into that"
        )
        return False

    def _finished(self, outcome: SlideOutcome) -> None:
        self._outcomes[outcome.id] = outcome
        self._told.add(outcome.id)
        self.progress.finished(outcome)
