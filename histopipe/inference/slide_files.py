"""Slides that are read as they are predicted: planned and cut by the same code, and the same worker processes, as an ingest."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import StainNorm
from histopipe.dataset.patch_batches import aligned_empty, decode
from histopipe.dataset.stain_fit import PATCHES, PIXELS_A_PATCH, fit_pixels
from histopipe.errors import DamagedStore, SlideError, SlideUnreadable
from histopipe.geometry import Mpp
from histopipe.inference.slide_info import SlideFacts
from histopipe.inference.stream import Piece
from histopipe.ingest.chunks import Chunk, chunk_of, chunks
from histopipe.ingest.decisions import PendingSlide
from histopipe.ingest.options import IngestOptions, SlideInput
from histopipe.ingest.planning import PlannedSlide, SlideFailure, plan_slide
from histopipe.ingest.records import labelled, new_record
from histopipe.ingest.storing import make_patches, prepare
from histopipe.slides.discovery import SlideFile
from histopipe.slides.identity import fingerprint
from histopipe.slides.tables import SlideLabel
from histopipe.store.record import SlideRecord
from histopipe.system.files import Closing
from histopipe.system.tensorflow import load_quietly
from histopipe.system.worker_pool import WorkerDied, WorkerPool
from histopipe.tiling.spec import TilingSpec

_SECONDS = 600.0
"""What a plan, or a batch of patches, may take."""

Normalise = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]


@dataclass(slots=True)
class OpenedSlide:
    """A planned slide, as `SlidePatches`."""

    facts: SlideFacts
    pending: PendingSlide
    planned: PlannedSlide
    source: SlideFiles
    order: NDArray[np.int64]
    lost: list[str] = field(default_factory=list)
    _normalise: Normalise | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def thumbnail(self) -> bytes:
        """A JPEG of the slide."""
        return self.planned.thumbnails["thumb"]

    @property
    def steps(self) -> int:
        """Batches; one that is empty for a slide without patches, so that it is told of."""
        return max(1, -(-len(self.order) // self.source.batch_size))

    def load(self, step: int) -> Piece:
        """As `SlidePatches`.

        Raises:
            SlideUnreadable: too much of the slide cannot be read.
        """
        size, side = self.source.batch_size, self.source.spec.patch_size
        rows = self.order[step * size : (step + 1) * size]
        images = aligned_empty((size, side, side, 3))
        images[len(rows) :] = 0
        corners, real = np.zeros((size, 2), np.int64), np.zeros(size, np.bool_)
        plan = self.planned.plan
        corners[: len(rows)] = np.stack([plan.x_l0[rows], plan.y_l0[rows]], axis=1)
        for i, value in enumerate(self._values(chunk_of(plan, rows)) if len(rows) else ()):
            real[i] = self._decoded(value, images[i])
        if len(self.lost) > self.source.max_unreadable * max(1, len(plan)):
            raise SlideUnreadable(
                f"{self.pending.slide.file.path}: at least {len(self.lost)} of {len(plan)} patches cannot be read, "
                f"first: {self.lost[0]}"
            )
        if real.any() and self.source.stain_norm != "none":
            images = self._normaliser()(images)
        return Piece(images, corners, real)

    def drawn(self, classes: Sequence[str]) -> dict[tuple[int, int], int]:
        """Nothing is drawn on it."""
        return {}

    def ended(self) -> SlideFacts:
        """The facts, once all is predicted.

        Raises:
            SlideUnreadable: the file is no longer what was planned.
        """
        if fingerprint(self.pending.slide.file) != self.planned.fingerprint:
            raise SlideUnreadable(f"{self.pending.slide.file.path} changed while it was being read")
        count = len(self.order) - len(self.lost)
        return replace(self.facts, patches=count, skipped=len(self.lost))

    def _values(self, chunk: Chunk) -> Sequence[bytes | str]:
        """The patches' files, or why one cannot be read, by a worker."""
        source, plan = self.source, self.planned
        try:
            done: Future[Sequence[bytes | str]] = source.pool.submit_within(
                _SECONDS,
                make_patches,
                self.pending.number,
                plan.recipe,
                chunk,
            )
            return done.result()
        except WorkerDied as error:
            raise SlideUnreadable(
                f"{self.pending.slide.file.path}: the process that read it died ({error})",
                todo="the file is probably damaged in a way that crashes its decoder, or memory ran out",
            ) from error

    def _decoded(self, value: bytes | str, out: NDArray[np.uint8]) -> bool:
        problem = value if isinstance(value, str) else None
        if isinstance(value, bytes):
            try:
                decode(memoryview(value), out)
            except DamagedStore as error:
                problem = str(error)
        if problem is not None:
            out[:] = 0
            with self._lock:
                self.lost.append(problem)
        return problem is None

    def _normaliser(self) -> Normalise:
        """What gives the slide's patches the reference's stain, by a sample of them."""
        with self._lock:
            if self._normalise is None:
                rows = np.unique(np.linspace(0, len(self.order) - 1, PATCHES).astype(np.int64))
                fit = fit_pixels(self._sample(rows), where=self.facts.slide)
                stain = load_quietly("histopipe.inference.stain")
                self._normalise = stain.one_slide_normaliser(fit, self.source.stain_norm)
            return self._normalise

    def _sample(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        side = self.source.spec.patch_size
        picture, found = aligned_empty((side, side, 3)), [np.empty((0, 3), np.uint8)]
        for value in self._values(chunk_of(self.planned.plan, rows)):
            if isinstance(value, bytes):
                decode(memoryview(value), picture)
                pixels = picture.reshape(-1, 3)
                found.append(pixels[:: max(1, len(pixels) // PIXELS_A_PATCH)].copy())
        return np.concatenate(found)


class SlideFiles(Closing):
    """Plans slides ahead of their predictions, and has their patches made.

    Args:
        spec: how they are tiled: as the patches of the training were.
        batch_size: patches at once.
        stain_norm: what their stain is made to be.
        max_unreadable: share of a slide's patches, 0 to 1, that may be lost to damage.
        default_mpp, mpps: scales of slides that do not say theirs, by id.
        labels: label and patient by slide id.
        check: raises a SlideError for a planned slide that is not to be predicted.
        workers: processes; one a core if not given.
    """

    def __init__(
        self,
        spec: TilingSpec,
        *,
        batch_size: int,
        stain_norm: StainNorm,
        max_unreadable: float = 0.01,
        default_mpp: Mpp | None = None,
        mpps: Mapping[str, Mpp] | None = None,
        labels: Mapping[str, SlideLabel] | None = None,
        check: Callable[[SlideRecord], None] = lambda _: None,
        workers: int | None = None,
    ) -> None:
        self.spec, self.batch_size, self.stain_norm = spec, batch_size, stain_norm
        self.max_unreadable = max_unreadable
        self.options = IngestOptions(default_mpp=default_mpp)
        self._check = check
        self._mpps, self._labels = mpps or {}, labels or {}
        self._ahead = 1 + (workers or len(os.sched_getaffinity(0)))
        self.pool = WorkerPool(workers or len(os.sched_getaffinity(0)), prepare)

    def planned(
        self, slides: Sequence[SlideFile], failed: Callable[[str, str], None]
    ) -> Iterator[OpenedSlide]:
        """Slides as they are planned, in order; `failed` hears the id of each that cannot be, and why."""
        waiting, running = deque(enumerate(slides)), deque[tuple[PendingSlide, Future[Any]]]()
        while waiting or running:
            while waiting and len(running) < self._ahead:
                number, slide = waiting.popleft()
                pending = self._pending(number, slide)
                future = self.pool.submit_within(
                    _SECONDS, plan_slide, pending.slide, pending.record, self.spec, self.options
                )
                running.append((pending, future))
            pending, future = running.popleft()
            try:
                found: PlannedSlide | SlideFailure = future.result()
            except WorkerDied as error:
                failed(
                    pending.slide.id,
                    f"{pending.slide.file.path}: the process that planned it died ({error})",
                )
                continue
            try:
                yield self._opened(pending, found)
            except SlideError as error:
                failed(pending.slide.id, str(error))

    def close(self) -> None:
        """End the workers."""
        self.pool.shutdown(cancel_futures=True)

    def _pending(self, number: int, slide: SlideFile) -> PendingSlide:
        label = self._labels.get(slide.id)
        given = SlideInput(slide, label, self._mpps.get(slide.id))
        return PendingSlide(number, given, labelled(new_record(slide), label))

    def _opened(self, pending: PendingSlide, planned: PlannedSlide | SlideFailure) -> OpenedSlide:
        if isinstance(planned, SlideFailure):
            raise SlideError(planned.reason)
        self._check(planned.record)
        parts = [
            c.rows for c in chunks(planned.plan, planned.recipe.route.name, self.spec.patch_size)
        ]
        order = np.concatenate(parts) if parts else np.empty(0, np.int64)
        before = planned.fingerprint
        source = source_of(before.size_bytes, before.mtime_ns)
        facts = SlideFacts.of(planned.record, source=source)
        return OpenedSlide(facts, pending, planned, self, order)


def source_of(size_bytes: int, mtime_ns: int) -> str:
    """A slide file, as facts name it."""
    return f"file of {size_bytes} bytes, {mtime_ns}"
