"""Ingest on a cluster: submit slides, assign each ingested slide to one part, and write the catalog.

A slide is complete when the catalog names its part. The catalog is written after the part is published. If a worker,
the scheduler or this process is lost, the same command publishes the parts on the workers' disks and ingests the rest.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from histopipe._version import __version__
from histopipe.errors import UsageError
from histopipe.ingestion.dask_cluster import (
    ClusterSettings,
    DaskCluster,
    connected,
    run_slide,
)
from histopipe.ingestion.ingest_report import (
    LOG,
    SUMMARY,
    IngestProgress,
    IngestReport,
    SlideOutcome,
    SlideStatus,
)
from histopipe.ingestion.ingest_slides import (
    annotate_skipped,
    check_ingest,
    sort_slides,
    write_labels,
)
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.slide_job import SlideJob
from histopipe.slides.slide_files import file_sizes
from histopipe.slides.tables import SlideLabel
from histopipe.store.catalog import Catalog, read_catalog
from histopipe.store.record import SlideRecord, SlideState, describe_copies
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter, check_spec
from histopipe.system.files import network_filesystem
from histopipe.system.folders import FolderKind, folder_kind
from histopipe.system.forecast import shares_of
from histopipe.system.grouping import grouped
from histopipe.system.locks import locked_alone
from histopipe.system.output import LogProgress, Progress
from histopipe.system.worker_pool import WorkerDied
from histopipe.tiling.spec import TilingSpec

_PATIENCE_SECONDS = 10.0
"""Time in seconds without workers after which a message is shown."""
_SLIDES_PER_WORKER = 2
"""Number of slides submitted per worker: one running, and one waiting. More would be assigned to workers that end early,
as Slurm jobs do at their time limit, and would all have to be submitted again."""
_ROUNDS = 3
"""Maximum number of times that a slide is submitted, if its part is lost before it is published."""


def ingest_on_cluster(
    jobs: Sequence[SlideJob],
    out: Path,
    spec: TilingSpec,
    options: IngestOptions,
    *,
    cluster: str,
    scratch: Path,
    part_bytes: int,
    progress: Progress,
) -> IngestReport:
    """Tile slides into a folder of parts on the workers of a cluster; see `ingest`, `connected` and `ClusterSettings`.

    Raises:
        UsageError: `out` is a store or used by another run, a worker cannot find the files, or scales would be mixed.
        MachineShort: the scheduler is lost, or a worker's disk or memory ran out. Complete slides are kept.
        UsageError: the parts in the folder have another spec.
    """
    started = time.monotonic()
    out = Path(os.path.realpath(out))
    jobs = [_absolute(job) for job in jobs]
    check_ingest(jobs, out, spec, replace(options, allow_network=True))
    with parts_locked(out), connected(cluster) as workers:
        catalog = read_catalog(out) or Catalog(out)
        catalog.write()
        with (
            LogProgress(out / LOG) as log,
            IngestProgress(file_sizes(job.file for job in jobs), progress, log) as events,
        ):
            log.message(f"histopipe {__version__}, {spec}, {options}, {cluster}")
            # The scales of all slides are checked above. A worker could check one slide only.
            options = replace(
                options,
                allow_mixed_mpp=True,
                tissue_network=options.tissue_network and options.tissue_network.absolute(),
            )
            folder = scratch.absolute() / f"histopipe-{catalog.uuid}"
            settings = ClusterSettings(out, folder, spec, options, part_bytes)
            run = _ClusterIngest(workers, catalog, settings, events)
            run.ingest(jobs)
            outcomes = sorted(events.outcomes.values(), key=lambda outcome: outcome.id)
            warnings = describe_copies(run.records.values())
            report = IngestReport(
                str(out),
                time.monotonic() - started,
                outcomes,
                warnings,
                shares_of(events.stages.seconds),
            )
            report = run.annotate_skipped(report, jobs)
            for text in [*warnings, *report.summary_lines()]:
                log.message(text)
    report.write_csv(out / SUMMARY, progress)
    return report


def parts_locked(out: Path) -> AbstractContextManager[None]:
    """Lock the folder of parts for this process, until the result is closed. The folder is created if missing.

    Raises:
        UsageError: it is a store, another run has locked it, or it cannot be created.
    """
    if folder_kind(out) is FolderKind.STORE or out.suffix == ".lmdb":
        raise UsageError(
            f"{out} is a store, or has the name of one",
            expected="with --cluster: a folder for parts",
            todo="choose another --out; `histopipe merge` merges the parts into one store",
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be created", found=error.strerror) from error
    return locked_alone(out, f"another run is ingesting into {out}", "wait until it ends")


def _absolute(job: SlideJob) -> SlideJob:
    """Return the job with absolute paths, which do not depend on the working folder of a worker."""
    file = job.file
    if not file.remote:
        file = replace(
            file,
            path=file.path.absolute(),
            files=tuple(path.absolute() for path in file.files),
        )
    return replace(
        job,
        file=file,
        annotations=job.annotations and job.annotations.absolute(),
        mask=job.mask and job.mask.absolute(),
    )


@dataclass(slots=True)
class _ClusterIngest:
    """One run. `records` are the records, by slide id, in the parts that the catalog names.

    `_ingested` has the part in which a worker has ingested a slide of this round; "" if it failed without a part.
    `_suspected` are slides that were lost once with a worker.
    """

    cluster: DaskCluster
    catalog: Catalog
    settings: ClusterSettings
    progress: IngestProgress
    records: dict[str, SlideRecord] = field(default_factory=dict)
    _ingested: dict[str, str] = field(default_factory=dict)
    _suspected: set[str] = field(default_factory=set)

    def ingest(self, jobs: Sequence[SlideJob]) -> None:
        """Ingest slides. `progress` has their outcomes."""
        self._publish_parts()
        records = dict(enumerate(self.records.values()))
        missing, relabelled = sort_slides(jobs, records, self.settings.options, self.progress)
        self._relabel(relabelled)
        for _ in range(_ROUNDS):
            if not missing:
                break
            try:
                self._ingest_all(missing)
            except KeyboardInterrupt:
                self.progress.message(
                    "interrupted: publishing complete slides; interrupt again to stop immediately"
                )
                self._publish_parts()
                raise
            self._publish_parts()
            missing = [job for job in missing if not self._settle(job)]
        for job in missing:
            job.fail(
                f"{job.file.location}: the workers that ingested it were lost with their disks; "
                "run the same command again"
            )
            self.progress.finished(SlideOutcome.of(job.record))

    def annotate_skipped(self, report: IngestReport, jobs: Sequence[SlideJob]) -> IngestReport:
        """Label the patches of slides that an earlier run ingested, where their annotations have changed."""
        skipped = {slide.id for slide in report.of(SlideStatus.SKIPPED)} & self.records.keys()
        annotated = {job.id: job for job in jobs if job.annotations and job.id in skipped}
        for part, slides in self._parts_to_change(annotated, "annotations").items():
            report = annotate_skipped(
                report,
                [annotated[slide] for slide in slides],
                self.catalog.folder / part,
                self.settings.options,
            )
        return report

    def _settle(self, job: SlideJob) -> bool:
        """Return whether the outcome of a slide is final: the catalog names its part, or it failed without a part."""
        if self._ingested.pop(job.id, None) in ("", self.catalog.slides.get(job.id, "")):
            return True
        record = self.records.get(job.id)
        if record is None or job.again or record.state is not SlideState.COMPLETE:
            return False
        # The result was lost, but not the part.
        self.progress.finished(SlideOutcome.of(record))
        return True

    def _ingest_all(self, jobs: Sequence[SlideJob]) -> None:
        """Submit slides until each has a result from a worker."""
        waiting = deque(jobs)
        running: dict[Any, SlideJob] = {}
        last_seen = time.monotonic()
        try:
            while waiting or running:
                workers = self.cluster.workers()
                if workers:
                    last_seen = time.monotonic()
                elif time.monotonic() - last_seen > _PATIENCE_SECONDS:
                    self.progress.message("the cluster has no workers: waiting for one")
                    last_seen = float("inf")
                while waiting and len(running) < _SLIDES_PER_WORKER * len(workers):
                    job = waiting.popleft()
                    # Label, patient and site may come from an earlier run: send them to the worker.
                    job.label = SlideLabel(job.record.label, job.record.patient, job.record.site)
                    running[self.cluster.submit(run_slide, self.settings, job)] = job
                for future in self.cluster.wait(running):
                    job = running.pop(future)
                    if not self._receive(job, future):
                        waiting.append(job)
                self._show_events()
        finally:
            for future in running:
                future.cancel()

    def _receive(self, job: SlideJob, future: Any) -> bool:
        """Receive the result of a slide; return False if it was lost."""
        try:
            ingested = self.cluster.result(future)
        except WorkerDied as error:
            # Dask also reports slides that only waited on a worker that died. These are submitted again.
            if job.id not in self._suspected:
                self._suspected.add(job.id)
                return False
            job.fail(f"{job.file.location}: every worker that ingested it died: {error}")
            ingested = SlideOutcome.of(job.record), ""
        if ingested is None:
            return False
        outcome, self._ingested[job.id] = ingested
        self._show_events()
        self.progress.finished(outcome)
        return True

    def _show_events(self) -> None:
        """Show the events that workers have sent."""
        while not self.cluster.events.empty():
            event, *arguments = self.cluster.events.get()
            getattr(self.progress, event)(*arguments)

    def _publish_parts(self) -> None:
        """Make all workers publish their parts, and write the part of each slide into the catalog."""
        self.cluster.publish_parts(self.settings)
        candidates: dict[str, list[tuple[str, SlideRecord]]] = defaultdict(list)
        for path in sorted(self.catalog.folder.glob("part-*.lmdb")):
            with Store(path, hidden=True) as part:
                check_spec(part.spec, self.settings.spec.to_json(), path)
                for record in part.slides:
                    if record.state is not SlideState.PENDING:
                        candidates[record.id].append((path.name, record))
        chosen = {name: max(candidates[name], key=self._rank) for name in sorted(candidates)}
        self.records = {name: record for name, (_, record) in chosen.items()}
        self.catalog.slides = {name: part for name, (part, _) in chosen.items()}
        self.catalog.write()

    def _rank(self, entry: tuple[str, SlideRecord]) -> tuple[bool, bool, bool]:
        """Return the rank of a part with a slide: that of this run, else a complete slide, else that of the catalog."""
        part, record = entry
        return (
            part == self._ingested.get(record.id),
            record.state is SlideState.COMPLETE,
            part == self.catalog.slides.get(record.id),
        )

    def _relabel(self, records: Sequence[SlideRecord]) -> None:
        """Write the labels, patients and sites that have changed."""
        changed = {record.id: record for record in records}
        for part, slides in self._parts_to_change(
            changed, f"labels of {', '.join(changed)}"
        ).items():
            with StoreWriter(self.catalog.folder / part, self.settings.spec) as writer:
                for text in write_labels(writer, [changed[slide] for slide in slides]):
                    self.progress.message(f"changed: {text}")

    def _parts_to_change(self, slides: Collection[str], what: str) -> dict[str, list[str]]:
        """Return slides by the part to be changed. If the parts cannot be changed, show a message, and return none."""
        parts = grouped(slides, self.catalog.slides.__getitem__)
        if not parts or not network_filesystem(self.catalog.folder):
            return parts
        self.progress.message(
            f"{what}: not changed, because {self.catalog.folder} is on a network filesystem, where stores cannot be written: "
            "merge the parts with `histopipe merge`, then ingest into the merged store"
        )
        return {}
