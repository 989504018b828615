"""Run the patches of slides through a network, slide by slide, and record which slides are done or failed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.sampling import replica_rows
from histopipe.errors import Interrupted, SlideError, UsageError
from histopipe.inference.options import BATCHES
from histopipe.ingestion.slide_job import SlideJob
from histopipe.predictions.sources import FindComplete, PredictedSlide
from histopipe.slides.tables import SlideLabel
from histopipe.splits.slide_table import SlideEntry
from histopipe.store.record import SlideRecord
from histopipe.system.files import Closing, read_record
from histopipe.system.forecast import PLANNING, Outlook, Stages, bottleneck, shares_of
from histopipe.system.output import Bar, Progress, Result, counted, slide_failure
from histopipe.system.shared_folders import ALL, Share
from histopipe.system.worker_pool import count_usable_cores, run_tasks

_STARTED_BATCHES = 2
"""Maximum number of batches on the device. With one batch, the device would wait for the host; more only take memory."""

Normalizer = Callable[..., NDArray[np.uint8]]
"""Normalizes the stain of (B, H, W, 3) uint8 images. Images from a store also need their (B,) keys."""
Results = tuple[NDArray[np.float32], NDArray[np.integer]]
"""(N, D) results of a network, and the (N, 2) top left corners of their patches in level-0 pixels."""


@dataclass(frozen=True, slots=True)
class PatchBatch:
    """A batch of patches of one slide."""

    images: NDArray[Any]
    """(B, H, W, 3) uint8 RGB; or (B, D) features in their place."""
    corners: NDArray[np.integer]
    """(B, 2) top left corners, level-0 pixels."""
    valid: NDArray[np.bool_]
    """(B,) False for padding and for patches that cannot be read."""


class SlidePatches(Closing, ABC):
    """The patches of one slide, in batches. No batch mixes slides, so results do not depend on other slides.

    Attributes:
        record: size, scale, label and patient of the slide.
        id: slide id.
        batch_rows, steps: rows of each batch, see `slide_batches`, and number of batches.
        rows: number of patches, with those that cannot be read.
        patch_size, overlap: side of the patches, and overlap of neighbours, in pixels.
        lost: the patches that could not be read so far.
        waits_for: what `load` waits for while it does not compute.
    """

    waits_for = "disk"

    def __init__(
        self,
        record: SlideRecord,
        batch_rows: Sequence[range],
        *,
        rows: int,
        patch_size: int,
        overlap: int,
        lost: Collection[object],
    ) -> None:
        self.record, self.id = record, record.id
        self.batch_rows, self.steps = batch_rows, len(batch_rows)
        self.rows, self.patch_size, self.overlap, self.lost = rows, patch_size, overlap, lost

    @property
    @abstractmethod
    def origin(self) -> Mapping[str, Any]:
        """Attributes of feature files that identify the patches."""

    @property
    def source(self) -> str:
        """Text that identifies the patches as the source of predictions."""
        return str(self.origin["source"])

    @property
    @abstractmethod
    def thumbnail(self) -> bytes | None:
        """Thumbnail as a JPEG file, if there is one."""

    @abstractmethod
    def load(self, step: int) -> PatchBatch:
        """Load a batch. Called from several threads.

        Raises:
            SlideError, DamagedStore: the slide cannot be used.
        """

    def close(self) -> None:
        """Free what the slide needs for loading, when all of its results have been used; by default nothing."""

    def predicted(self) -> PredictedSlide:
        """Describe the slide after its patches have been computed. Raise SlideUnreadable if the file has changed."""
        skipped = len(self.lost)
        return PredictedSlide.of(
            self.record, source=self.source, patches=self.rows - skipped, skipped=skipped
        )


class SlideSource(Closing, ABC):
    """The slides to be predicted. By default, nothing is annotated.

    Attributes:
        count: number of slides of this process.
        labels: current label and patient by slide id, of slides whose recorded ones may be out of date.
        settings: settings that affect the predictions, to be recorded.
        work: number of patches, or of bytes, of each slide of this process.
    """

    work: Mapping[str, float]

    count: int
    labels: Mapping[str, SlideLabel]
    settings: Mapping[str, Any] = {}

    @abstractmethod
    def slides(self, run: SlideRun, complete: FindComplete) -> Iterable[SlidePatches | None]:
        """Return the slides that are not complete yet. Record the others, and failures, in `run`.

        None means that the next slide can be read only when earlier ones are closed.
        """

    def current(self, slide: PredictedSlide) -> PredictedSlide:
        """Return a predicted slide with its current label and patient."""
        row = self.labels.get(slide.slide)
        return (
            slide
            if row is None
            else replace(slide, label=row.label, patient=row.patient or slide.patient)
        )

    @abstractmethod
    def slide_table(self, predicted: Iterable[PredictedSlide]) -> list[SlideEntry]:
        """Return all slides, and other slides that were predicted earlier, excluded if they have no patches."""

    def patch_labels(self, slide: str, classes: Sequence[str]) -> dict[tuple[int, int], int]:
        """Return the annotated class number of each patch of a slide, or -1, by its corner."""
        return {}

    def close(self) -> None:
        """End the workers, and remove local copies; by default, there are none."""


class Network(Protocol):
    """A network that computes D numbers per patch."""

    def prepare(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        """Convert (B, H, W, 3) uint8 RGB images to the input of the network. Called from several threads."""

    def start(self, inputs: NDArray[Any]) -> Any:
        """Start computing a batch. Pass the returned value to `finish`."""

    def finish(self, started: Any) -> NDArray[np.float32]:
        """Wait for the (B, D) results of a batch. More rows may follow, which are ignored."""

    @property
    def dimension(self) -> int:
        """Number of results per patch, D."""

    @property
    def batch_size(self) -> int:
        """Patches per batch, over all devices."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """All properties that affect the results, as JSON values."""


N = TypeVar("N", bound=SlidePatches | SlideJob)
_LoadedBatch = tuple[PatchBatch, NDArray[Any]]


def slide_batches(rows: int, most: int, rule: str | None = BATCHES) -> list[range]:
    """Return the rows of each batch of a slide; rows from `rows` on are padding.

    They depend on nothing but the slide's number of patches and the batch size, so that results do not depend on other
    slides. The last batch has the remaining patches only; with rule None, of folders of earlier versions, it is padded
    to `most` rows.
    """
    end = rows if rule else rows + most
    return [range(first, min(first + most, end)) for first in range(0, rows, most)]


def batch_rule(record: Path) -> str | None:
    """Return the rule of the batches of a folder from its record of settings, or of a new folder.

    Raises:
        DamagedStore: the record cannot be read.
        UsageError: a newer version wrote it.
    """
    settings = read_record(record)
    rule = BATCHES if settings is None else settings.get("batches")
    if rule not in (None, BATCHES):
        raise UsageError(
            f"{record}: batches", found=rule, expected=BATCHES, todo="update histopipe"
        )
    return rule


def device_rows(batch_size: int, devices: int) -> list[range]:
    """Return the rows of a batch that each device computes.

    Raises:
        UsageError: there are fewer rows than devices.
    """
    if batch_size < devices:
        raise UsageError(
            "--batch-size", found=batch_size, expected=f"{devices} or more: one per device"
        )
    return [replica_rows(batch_size, devices, number) for number in range(devices)]


@dataclass(frozen=True, kw_only=True, repr=False)
class SlideRunResult(Result):
    """Result of running slides through a network.

    Attributes:
        folder: folder with the files of each slide.
        done, kept: ids of the slides computed in this run, and in earlier runs.
        failed: reason by id, for slides that failed.
        patches, skipped: number of patches computed in this run, and of damaged patches left out.
        seconds: duration of this run.
        input_wait: seconds of this run spent waiting for patches.
        shares: share of each stage in the time of this run, the largest first; see `Stages`.
    """

    folder: Path
    done: tuple[str, ...]
    kept: tuple[str, ...]
    failed: Mapping[str, str]
    patches: int
    skipped: int
    seconds: float
    input_wait: float
    shares: Mapping[str, float]

    def summary(self, verb: str, patches: str, unit: str = "slide") -> str:
        """Return a summary as text, with the reason for each slide that failed."""
        waiting = self.input_wait / self.seconds if self.seconds else 0.0
        return "\n".join(
            [
                *([f"{counted(self.skipped, 'damaged patch')} left out"] if self.skipped else []),
                f"{counted(len(self.done), unit)} {verb}, {len(self.kept)} already done, {len(self.failed)} failed; "
                f"{self.patches:,} {patches} in {self.seconds:.0f} s, {waiting:.0%} waiting for input: {self.folder}",
                *([f"this was {bottleneck(self.shares)}"] if self.shares else []),
                *(f"failed: {name}: {reason}" for name, reason in sorted(self.failed.items())),
            ]
        )


_INPUT, _DEVICE = "input", "the device"


@dataclass(slots=True)
class SlideRun:
    """A run of slides through a network. Batches of the current and next slides are loaded in advance, in threads.

    `count` includes the slides that are already done. `outlook` is for the time left. With `share.join`, nothing is
    computed: `folder` has all results. The other fields are those of `SlideRunResult`.
    """

    network: Network
    title: str
    count: int
    progress: Progress
    folder: Path
    outlook: Outlook
    share: Share = ALL
    done: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    patches: int = 0
    skipped: int = 0
    seconds: float = 0.0
    _loading: Stages = field(default_factory=Stages)
    """Seconds of the threads that load batches."""
    _waits: Stages = field(default_factory=Stages)
    """Seconds for which this thread waits: for plans, for batches, and for the device."""
    _failures: dict[int, SlideError] = field(default_factory=dict)
    """Failures of slides whose results are being computed, by `id`: each is raised after the last batch of its slide."""
    _network_failed: bool = False

    def missing(self, slides: Iterable[N], is_complete: Callable[[N], bool]) -> list[N]:
        """Return the slides that are not complete, and record the others as kept."""
        missing, joined = [], self.share.joined(self.folder)
        for slide in slides:
            try:
                if is_complete(slide):
                    self.kept.append(slide.id)
                    self.outlook.left_out(slide.id)
                elif slide.id in joined:
                    self.fail(slide.id, joined[slide.id])
                else:
                    missing.append(slide)
            except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                self.fail(slide.id, slide_failure(error))
        return missing

    def run(
        self,
        slides: Iterable[SlidePatches | None],
        write: Callable[[SlidePatches, Iterator[Results]], tuple[int, int]],
        *,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute slides. `stop` is called first after Ctrl-C.

        None in place of a slide means that the next one needs the earlier slides to be closed. `write` writes the results
        of a slide, and returns the numbers of computed and skipped patches.

        Raises:
            Interrupted: by Ctrl-C or SIGTERM; completed slides are kept.
        """
        if self.kept:
            self.progress.message(f"already done: {counted(len(self.kept), 'slide')}")
        start = time.monotonic()
        pool = ThreadPoolExecutor(count_usable_cores(), "histopipe-load")
        with self.progress.bar(self.title, unit="patches", total=0) as bar:
            try:
                for slide, results in self._compute(
                    self._waits.pulled(slides, PLANNING), pool, bar
                ):
                    if self.share.join:
                        raise self.share.missing(self.folder, slide.id)
                    try:
                        patches, skipped = write(slide, results)
                    except Exception as error:  # `slide_failure` raises what concerns all slides
                        if self._network_failed:
                            raise
                        self.fail(slide.id, slide_failure(error))
                    else:
                        self.done.append(slide.id)
                        self.patches += patches
                        self.skipped += skipped
                        self._report(slide.id, counted(patches, "patch"))
            except KeyboardInterrupt:
                stop()  # before the shutdown, which waits for the batches being loaded
                raise Interrupted(
                    "interrupted",
                    found=f"{counted(len(self.done), 'slide')} done",
                    todo="run the same command again to continue",
                ) from None
            finally:
                self.seconds = time.monotonic() - start
                pool.shutdown(cancel_futures=True)

    def _compute(
        self, slides: Iterable[SlidePatches | None], pool: ThreadPoolExecutor, bar: Bar
    ) -> Iterator[tuple[SlidePatches, Iterator[Results]]]:
        """Yield each slide with an iterator over its results, which raises SlideError; results not consumed are dropped."""
        batches = (
            batch
            for slide in slides
            for batch in (
                [None] if slide is None else [(slide, step) for step in range(self._planned(slide))]
            )
        )
        # One batch per core is being loaded, and two are ready: the device never waits for one slow batch. The order is
        # that of the slides, so few slides are open at once.
        ahead = run_tasks(
            lambda batch: pool.submit(self._load, *batch),
            batches,
            limit=count_usable_cores() + 2,
        )
        loaded = ((slide, future) for (slide, _), future in filter(None, ahead))
        for slide, first in loaded:
            # Not `groupby`: it would ask for the next slide, which may wait until this one is closed.
            rest = (future for _, future in islice(loaded, slide.steps - 1))
            results = self._results(slide, chain([first], rest), bar)
            yield slide, results
            with suppress(SlideError):
                deque(results, maxlen=0)
            slide.close()

    def _planned(self, slide: SlidePatches) -> int:
        """Return the number of batches of a slide that are computed."""
        self.outlook.planned(slide.id, slide.rows)
        slide.steps = min(slide.steps, self.share.batches or slide.steps)
        return slide.steps

    def _load(self, slide: SlidePatches, step: int) -> _LoadedBatch | None:
        """Load a batch. Return None if a batch of its slide has failed."""
        if id(slide) in self._failures:
            return None
        try:
            with self._loading.reading(slide.waits_for):
                batch = slide.load(step)
        except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
            self._failures[id(slide)] = SlideError(slide_failure(error))
            return None
        with self._loading.of("preparation"):
            return batch, self.network.prepare(batch.images)

    def _results(
        self,
        slide: SlidePatches,
        futures: Iterable[Future[_LoadedBatch | None]],
        bar: Bar,
    ) -> Iterator[Results]:
        started: deque[tuple[PatchBatch, Any]] = deque()
        try:
            for future in futures:
                with self._waits.of(_INPUT):
                    loaded_batch = future.result()
                if loaded_batch is not None:
                    with self._waits.of(_DEVICE):
                        started.append((loaded_batch[0], self.network.start(loaded_batch[1])))
                if len(started) > _STARTED_BATCHES:
                    yield self._finish(slide, *started.popleft())
                    rows = len(started[-1][0].valid)  # of the batch that has just started
                    self._show(slide, bar, steady=rows == self.network.batch_size)
            while started:
                yield self._finish(slide, *started.popleft())
                self._show(slide, bar)
        except Exception:  # the batches of the next slides are not in step any more
            self._network_failed = True
            raise
        if id(slide) in self._failures:
            raise self._failures.pop(id(slide))

    def _finish(self, slide: SlidePatches, batch: PatchBatch, started: Any) -> Results:
        """Return the results of a batch. If one is not finite, its slide fails after its last batch."""
        with self._waits.of(_DEVICE):
            values = self.network.finish(started)[: len(batch.valid)][batch.valid]
        self.outlook.done += len(batch.valid)
        corners = batch.corners[batch.valid]
        wrong = np.argwhere(~np.isfinite(values))
        if len(wrong):
            self._failures[id(slide)] = SlideError(
                f"{slide.id}: a result of the network is not finite",
                found=f"{values[tuple(wrong[0])]:g} for the patch at x, y {corners[wrong[0, 0]].tolist()}",
                expected="a number",
                todo="check the weights of the network, or use --precision float32",
            )
        return values, corners

    def _show(self, slide: SlidePatches, bar: Bar, *, steady: bool = False) -> None:
        outlook = self.outlook
        outlook.advanced(slide.id, steady=steady)
        # Without this one.
        slides = self.count - len(self.done) - len(self.kept) - len(self.failed) - 1
        bar.update(outlook.done, outlook.total, outlook.seconds_left(max(0, slides)))

    def fail(self, slide: str, reason: str) -> None:
        """Record that a slide failed."""
        self.outlook.left_out(slide)
        self.failed[slide] = reason
        self._report(slide, f"failed: {reason}")

    def result(self, folder: Path | None = None) -> dict[str, Any]:
        """Return the fields of a `SlideRunResult`."""
        return {
            "folder": folder or self.folder,
            "done": tuple(self.done),
            "kept": tuple(self.kept),
            "failed": dict(self.failed),
            "patches": self.patches,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "input_wait": self.input_wait,
            "shares": self.shares,
        }

    @property
    def input_wait(self) -> float:
        """Seconds of this run spent waiting for patches."""
        return self._waits.seconds[_INPUT] + self._waits.seconds[PLANNING]

    @property
    def shares(self) -> dict[str, float]:
        """Share of each stage in the time of this run; empty if nothing was computed."""
        waits = self._waits.seconds
        seconds = {
            **self._loading.divided(waits[_INPUT]),
            PLANNING: waits[PLANNING],
            _DEVICE: waits[_DEVICE],
            "writing": max(0.0, self.seconds - sum(waits.values())),
        }
        return shares_of(seconds) if self.outlook.done else {}

    def _report(self, slide: str, text: str) -> None:
        ended = len(self.done) + len(self.failed) + len(self.kept)
        self.progress.message(f"{ended}/{self.count} {slide}: {text}")
