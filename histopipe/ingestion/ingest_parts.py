"""Parts of an ingest, done by several processes on one machine or many, and the folder of their stores.

A process fills stores on a local disk, and publishes each into the folder: it copies the store and renames the copy. LMDB
cannot write on a network filesystem. `join` writes the catalog, by which readers take the folder as one data set. A
slide that is complete in any store of the folder is not ingested again, in any division. If a process is killed, the
next one on its machine publishes the complete slides that it has left.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from histopipe.errors import DamagedStore, NothingToDo, UsageError, reported_as, strerror
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
    ingest_slides,
    sort_slides,
    write_labels,
)
from histopipe.ingestion.options import IngestOptions, IngestPartOptions
from histopipe.ingestion.slide_job import SlideJob
from histopipe.slides.slide_files import file_sizes
from histopipe.slides.tables import SlideLabel
from histopipe.store.record import SlideRecord, SlideState, describe_copies
from histopipe.store.store import Catalog, Store, read_catalog
from histopipe.store.writer import StoreWriter, check_spec
from histopipe.system.files import (
    atomic_write,
    flush_to_disk,
    full_disk_error,
    is_full_disk,
    make_folder,
    network_filesystem,
)
from histopipe.system.folders import FolderKind, folder_kind
from histopipe.system.grouping import grouped
from histopipe.system.locks import locked, locked_alone
from histopipe.system.output import LogProgress, Progress
from histopipe.system.shared_folders import PARTS, Share
from histopipe.tiling.spec import TilingSpec

_DONE = "done"
"""Name, in the record of a part that has ended, of what it did with each slide: the seconds of the slide, and the times of
the part's begin and end; None if the slide was complete before."""


_SPEC = "tiling.json"
"""Settings of the tiling, which must be the same for all parts."""
_NEVER = datetime.min.replace(tzinfo=UTC)


class _PartSlide(NamedTuple):
    """A slide in a store of the folder, the time of the store and its name."""

    created: datetime
    part: str
    record: SlideRecord


def _choose(slides: Sequence[_PartSlide]) -> _PartSlide:
    """Return one of the entries of a slide: the newest complete one, unless its file was replaced and has failed since."""
    newest = max(slides, key=lambda entry: (entry.created, entry.part))
    best = max(
        slides,
        key=lambda entry: (entry.record.state is SlideState.COMPLETE, entry.created, entry.part),
    )
    failed, complete = newest.record, best.record
    # Of a file that could not be opened at all, for example without its disk, the size is unknown.
    is_replaced = failed.size_bytes and (failed.size_bytes, failed.mtime_ns) != (
        complete.size_bytes,
        complete.mtime_ns,
    )
    return newest if is_replaced else best


def is_folder_of_parts(folder: Path) -> bool:
    """Return whether a folder has a catalog of stores, or records of parts."""
    return folder_kind(folder) is FolderKind.PARTS or any((folder / PARTS).glob("*-of-*"))


@dataclass(frozen=True, slots=True)
class IngestParts:
    """The folder of parts `out`, and how this process fills it.

    `scratch` is a folder on a local disk. A store of about `part_bytes` bytes of slides is published, and the next begins.
    """

    out: Path
    share: Share
    scratch: Path
    part_bytes: float
    progress: Progress

    @classmethod
    def open(cls, out: Path, options: IngestPartOptions, progress: Progress) -> IngestParts:
        """Publish what a process of this machine has left for a folder of parts.

        Raises:
            UsageError: it is a store or another folder, or cannot be written.
        """
        if folder_kind(out) is FolderKind.STORE or out.suffix == ".lmdb":
            raise UsageError(
                f"{out} is a store, or has the name of one",
                expected="with --part, --join or --cluster: a folder for parts",
                todo="choose another --out; `histopipe merge` merges the parts into one store",
            )
        out = Path(os.path.realpath(out))
        share = options.share if options.part or options.join else Share(1, 1)
        digest = hashlib.sha256(os.fsencode(out)).hexdigest()[:16]
        local = Path(options.scratch or tempfile.gettempdir()).absolute()
        if not local.parent.is_dir():  # a disk that is not mounted
            raise UsageError(
                "--scratch", found=f"no folder {local.parent}", expected="a local disk"
            )
        scratch = local / f"histopipe-{digest}"
        parts = cls(out, share, scratch, options.part_gb * 1e9, progress)
        contents = [path.name for path in out.iterdir()] if out.is_dir() else []
        if contents and not is_folder_of_parts(out) and not any(out.glob("part-*.lmdb")):
            raise UsageError(
                f"{out} is no folder of parts, and not empty",
                found=", ".join(sorted(contents)[:3]),
                expected="a folder of parts, an empty folder, or a new path",
                todo="choose another --out",
            )
        if contents:
            parts._publish()
        return parts

    def stored(self, spec: TilingSpec | None = None) -> dict[str, _PartSlide]:
        """Return where each slide of the folder is stored: see `_choose`.

        Raises:
            UsageError: a store has another spec.
        """
        candidates = defaultdict[str, list[_PartSlide]](list)
        for path in sorted(self.out.glob("part-*.lmdb")):
            with Store(path, hidden=True) as part:
                if spec is not None:
                    check_spec(part.spec, spec.to_json(), path)
                for record in part.slides:
                    if record.state is not SlideState.PENDING:
                        stored = _PartSlide(datetime.fromisoformat(part.created), path.name, record)
                        candidates[record.id].append(stored)
        return {name: _choose(candidates[name]) for name in sorted(candidates)}

    def ingest(
        self, jobs: Sequence[SlideJob], spec: TilingSpec, options: IngestOptions
    ) -> IngestReport:
        """Ingest the slides of this process that are not complete in the folder; `jobs` are those of all processes.

        Raises:
            UsageError: the folder has another spec, scales would be mixed, or a folder cannot be written.
            MachineShort: disk or memory ran out; complete slides are kept.
        """
        started, began = time.monotonic(), time.time()
        make_folder(self.share.folder(self.out), of=self.out)  # before hours of work
        stored = self.stored(spec)
        self.share.record(self.out / _SPEC, spec.to_json(), ignored=(), contents="stores")
        records = {name: entry.record for name, entry in stored.items()}
        after = max((entry.created for entry in stored.values()), default=_NEVER)
        check_ingest(jobs, self.out, spec, replace(options, allow_network=True))
        options = replace(options, allow_mixed_mpp=True)  # the scales of all slides are checked
        sizes = file_sizes(job.file for job in jobs)
        chosen = {*self.share.chosen(sizes)}
        mine = [job for job in jobs if job.id in chosen]
        with IngestProgress(dict.fromkeys(chosen, 0), Progress()) as events:
            pending, _ = sort_slides(mine, dict(enumerate(records.values())), options, events)
        outcomes, reports = events.outcomes, list[IngestReport]()
        for job in pending:  # label, patient and site may be those of an earlier ingest
            job.label = SlideLabel(job.record.label, job.record.patient, job.record.site)
        for group in self._groups(pending, sizes):
            with self._filling() as store:
                check_ingest(group, store, spec, options)  # before the writer creates the store
                with StoreWriter(store, spec, after=after) as writer:
                    reports.append(
                        ingest_slides(
                            group, store, spec, options, progress=self.progress, writer=writer
                        )
                    )
            outcomes |= {slide.id: slide for slide in reports[-1].slides}
        new = {slide.id for report in reports for slide in report.of(SlideStatus.COMPLETE)}
        done = {
            n: (outcomes[n].seconds, began, time.time()) if n in new else None for n in outcomes
        }
        self.share.end(self.out, {}, **{_DONE: done})
        return IngestReport(
            str(self.out),
            time.monotonic() - started,
            [outcomes[name] for name in sorted(outcomes)],
            [warning for report in reports for warning in report.warnings],
            reports[0].shares if len(reports) == 1 else {},
        )

    def join(
        self, jobs: Sequence[SlideJob], spec: TilingSpec, options: IngestOptions
    ) -> IngestReport:
        """Write the catalog of the folder, and labels and annotations that have changed since the parts were ingested.

        Raises:
            UsageError: a slide is not done, stores have other specs, or another process joins the parts.
        """
        started = time.monotonic()
        done = {n: how for n, how in Share(join=True).joined(self.out, _DONE).items() if how}
        options = replace(options, force=False, retry_failed=False)
        sizes = file_sizes(job.file for job in jobs)
        in_use = f"another process is joining the parts of {self.out}"
        with (
            locked_alone(self.out, in_use, "wait until it ends"),
            LogProgress(self.out / LOG) as log,
            IngestProgress(sizes, Progress(), log) as events,
        ):
            stored = self.stored(spec)
            records = {name: entry.record for name, entry in stored.items()}
            not_complete, changed = sort_slides(
                jobs, dict(enumerate(records.values())), options, events
            )
            for job in not_complete:
                if job.id not in records:
                    raise self.share.missing(self.out, job.id)
                events.finished(SlideOutcome.of(records[job.id]))
            catalog = read_catalog(self.out) or Catalog(self.out)
            catalog.slides = {name: entry.part for name, entry in stored.items()}
            catalog.write()
            self._relabel({record.id: record for record in changed}, catalog, spec)
            slides = [slide for _, slide in sorted(events.outcomes.items())]
            report = IngestReport(
                str(self.out), time.monotonic() - started, slides, describe_copies(records.values())
            )
            report = _with_times(self._annotate(report, jobs, catalog, options), done)
            for text in [*report.warnings, *report.summary_lines()]:
                log.message(text)
        report.write_csv(self.out / SUMMARY, self.progress)
        return report

    def _groups(
        self, jobs: Sequence[SlideJob], sizes: Mapping[str, int]
    ) -> Iterator[list[SlideJob]]:
        """Divide slides into groups of about `part_bytes`."""
        group, total = list[SlideJob](), 0
        for job in jobs:
            group.append(job)
            total += sizes[job.id]
            if total >= self.part_bytes:
                yield group
                group, total = [], 0
        if group:
            yield group

    @contextmanager
    def _filling(self) -> Iterator[Path]:
        """Return the path of a new store in a folder of scratch. At the end of the block, publish its complete slides."""
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
        folder = self.scratch / f"part-{host}-{uuid.uuid4().hex[:8]}"
        hidden = folder.with_name(f".{folder.name}")  # not visible before it is locked
        with ExitStack() as stack:
            with reported_as(
                UsageError,
                f"the scratch folder {self.scratch.parent} cannot be written on {socket.gethostname()}",
                OSError,
                reason=strerror,
                todo="choose another folder with --scratch",
            ):
                hidden.mkdir(parents=True)
                stack.enter_context(locked(hidden))
                hidden.rename(folder)
            try:
                yield folder / f"{folder.name}.lmdb"
            except KeyboardInterrupt:
                self.progress.message(
                    "interrupted: publishing complete slides; interrupt again to stop immediately"
                )
                raise
            finally:
                self._publish_folder(folder)

    def _publish(self) -> None:
        """Publish the stores that processes of this machine have left."""
        for folder in sorted(self.scratch.glob("part-*/")):
            # Another process of this machine may publish it at the same time.
            with suppress(FileNotFoundError):
                if folder.stat().st_uid != os.getuid():
                    continue
                with locked(folder) as free:
                    try:
                        if free:
                            self._publish_folder(folder)
                    except DamagedStore as error:
                        self.progress.message(f"warning: {folder} is left, since {error}")

    def _publish_folder(self, folder: Path) -> None:
        """Move the store of a folder into the folder of parts if it has slides, and remove its folder."""
        store = folder / f"{folder.name}.lmdb"
        target, slides = self.out / store.name, []
        # If its process was killed at the start, it is no valid store.
        with suppress(NothingToDo), Store(store, hidden=True) as part:
            slides = [r for r in part.slides if r.state is not SlideState.PENDING]
        # The target exists if a process was killed after it had moved the store.
        if slides and not target.exists():
            _move(store, target)
        shutil.rmtree(folder)
        with suppress(OSError):  # other stores are in it
            folder.parent.rmdir()

    def _relabel(
        self, records: Mapping[str, SlideRecord], catalog: Catalog, spec: TilingSpec
    ) -> None:
        """Write the labels, patients and sites that have changed."""
        for part, slides in self._parts_to_change(
            records, f"labels of {', '.join(records)}", catalog
        ):
            with StoreWriter(self.out / part, spec) as writer:
                for text in write_labels(
                    writer, [records[slide] for slide in slides], writer.records()
                ):
                    self.progress.message(f"changed: {text}")

    def _annotate(
        self,
        report: IngestReport,
        jobs: Sequence[SlideJob],
        catalog: Catalog,
        options: IngestOptions,
    ) -> IngestReport:
        """Label the patches of slides whose annotations have changed since they were ingested."""
        complete = {slide.id for slide in report.of(SlideStatus.SKIPPED)}
        annotated = {job.id: job for job in jobs if job.annotations and job.id in complete}
        for part, slides in self._parts_to_change(annotated, "annotations", catalog):
            report = annotate_skipped(
                report, [annotated[slide] for slide in slides], self.out / part, options
            )
        return report

    def _parts_to_change(
        self, slides: Mapping[str, object], what: str, catalog: Catalog
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield the slides of each store to be changed; none, with a message, where stores cannot be written."""
        parts = grouped(slides, catalog.slides.__getitem__)
        if parts and network_filesystem(self.out):
            self.progress.message(
                f"{what}: not changed, because {self.out} is on a network filesystem, where stores cannot be written: "
                "merge the parts with `histopipe merge`, then ingest into the merged store"
            )
        else:
            yield from parts.items()


def _with_times(
    report: IngestReport, done: Mapping[str, tuple[float, float, float]]
) -> IngestReport:
    """Return the report of parts with the slides that they have ingested, and the time from their begin to their end."""
    times = [done[slide.id][1:] for slide in report.slides if slide.id in done]
    seconds = max(end for _, end in times) - min(begin for begin, _ in times) if times else 0.0
    slides = [
        replace(slide, status=SlideStatus.COMPLETE, seconds=done[slide.id][0])
        if slide.status is SlideStatus.SKIPPED and slide.id in done
        else slide
        for slide in report.slides
    ]
    return replace(report, slides=slides, seconds=seconds or report.seconds)


def _move(store: Path, target: Path) -> None:
    """Move a store that no process writes to. The target appears when it is complete.

    Raises:
        MachineShort: the disk is full.
    """
    try:
        with atomic_write(target) as part:
            shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
            shutil.copytree(
                store, part, ignore=shutil.ignore_patterns("lock.mdb", "ingest.lock", SUMMARY)
            )
            for path in (*part.iterdir(), part):
                flush_to_disk(path)
    except OSError as error:
        if is_full_disk(error):
            raise full_disk_error(error, target.parent, "run the same command again") from error
        raise UsageError(
            f"{target} cannot be written from {socket.gethostname()}",
            found=error.strerror,
            todo="make the folder of parts writable on every machine",
        ) from error
