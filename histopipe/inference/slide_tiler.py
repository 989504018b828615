"""Tile slide files by the code of ingest, in worker processes, without storing the patches."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import StainNorm
from histopipe.dataset.patch_batches import aligned_empty, decode
from histopipe.dataset.stain_fit import PATCHES, PIXELS_A_PATCH, fit_pixels
from histopipe.errors import DamagedStore, SlideError, SlideUnreadable
from histopipe.geometry import Mpp
from histopipe.inference.predictions_folder import PredictedSlide
from histopipe.inference.slide_run import PatchBatch
from histopipe.ingestion.options import IngestOptions, SlideInput
from histopipe.ingestion.patch_source import Chunk, chunk_of, chunks
from histopipe.ingestion.planning import PlannedSlide, SlideFailure, plan_slide
from histopipe.ingestion.records import PendingSlide, labelled, new_record
from histopipe.ingestion.storing import make_patches, prepare
from histopipe.slides.discovery import Fingerprint, SlideFile, fingerprint
from histopipe.slides.tables import SlideLabel
from histopipe.store.record import SlideRecord
from histopipe.system.files import Closing
from histopipe.system.tensorflow import load_quietly
from histopipe.system.worker_pool import WorkerDied, WorkerPool
from histopipe.tiling.spec import TilingSpec

_SECONDS = 600.0
"""Time limit for a plan, or for a batch of patches."""

_Normalizer = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]


@dataclass(slots=True)
class TiledSlide:
    """A planned slide file; its patches are `SlidePatches`."""

    tiler: SlideTiler
    pending: PendingSlide
    planned: PlannedSlide
    order: NDArray[np.int64]
    """(N,) patch numbers, in the order in which ingest makes them."""
    lost: list[str] = field(default_factory=list)
    """Why patches could not be read."""
    _normalize: _Normalizer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def id(self) -> str:
        """Slide id."""
        return self.pending.slide.id

    @property
    def thumbnail(self) -> bytes:
        """Thumbnail as a JPEG file."""
        return self.planned.thumbnails["thumb"]

    @property
    def steps(self) -> int:
        """Number of batches; an empty one for a slide without patches, so that the slide is reported."""
        return max(1, -(-len(self.order) // self.tiler.batch_size))

    def load(self, step: int) -> PatchBatch:
        """Load a batch; see `SlidePatches`."""
        size, side = self.tiler.batch_size, self.tiler.spec.patch_size
        rows = self.order[step * size : (step + 1) * size]
        images = aligned_empty((size, side, side, 3))
        images[len(rows) :] = 0
        corners, valid = np.zeros((size, 2), np.int64), np.zeros(size, np.bool_)
        plan = self.planned.plan
        corners[: len(rows)] = np.stack([plan.x_l0[rows], plan.y_l0[rows]], axis=1)
        for i, value in enumerate(self._values(chunk_of(plan, rows)) if len(rows) else ()):
            valid[i] = self._decode(value, images[i])
        if len(self.lost) > self.tiler.max_unreadable * max(1, len(plan)):
            raise SlideUnreadable(
                f"{self.pending.slide.file.path}: at least {len(self.lost)} of {len(plan)} patches cannot be read, "
                f"first: {self.lost[0]}"
            )
        if valid.any() and self.tiler.stain_norm != "none":
            images = self._normalizer()(images)
        return PatchBatch(images, corners, valid)

    def predicted(self) -> PredictedSlide:
        """Describe the slide after its patches have been predicted, if the file has not changed since it was planned."""
        if fingerprint(self.pending.slide.file) != self.planned.fingerprint:
            raise SlideUnreadable(f"{self.pending.slide.file.path} changed while it was being read")
        lost = len(self.lost)
        return PredictedSlide.of(
            self.planned.record, source=file_source(self.planned.fingerprint),
            patches=len(self.order) - lost, skipped=lost,
        )  # fmt: skip

    def _values(self, chunk: Chunk) -> Sequence[bytes | str]:
        """Encode patches in a worker; a text is the reason why a patch cannot be read."""
        tiler, planned = self.tiler, self.planned
        try:
            done: Future[Sequence[bytes | str]] = tiler.pool.submit_within(
                _SECONDS, make_patches, self.pending.number, planned.recipe, chunk
            )
            return done.result()
        except WorkerDied as error:
            raise SlideUnreadable(
                f"{self.pending.slide.file.path}: the worker process that read it died ({error})",
                todo="probably the file is damaged and crashes its decoder, or memory ran out",
            ) from error

    def _decode(self, value: bytes | str, out: NDArray[np.uint8]) -> bool:
        """Decode a patch; one that cannot be read is black, and noted as lost."""
        if isinstance(value, str):
            problem = value
        else:
            try:
                decode(memoryview(value), out)
            except DamagedStore as error:
                problem = str(error)
            else:
                return True
        out[:] = 0
        with self._lock:
            self.lost.append(problem)
        return False

    def _normalizer(self) -> _Normalizer:
        """Return the stain normalizer of the slide, fitted to a sample of its patches."""
        with self._lock:
            if self._normalize is None:
                rows = np.unique(np.linspace(0, len(self.order) - 1, PATCHES).astype(np.int64))
                fit = fit_pixels(self._sample(rows), where=self.id)
                module = load_quietly("histopipe.inference.stain_normalization")
                self._normalize = module.slide_normalizer(fit, self.tiler.stain_norm)
            return self._normalize

    def _sample(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """(N, 3) pixels of some patches."""
        side = self.tiler.spec.patch_size
        image, found = aligned_empty((side, side, 3)), [np.empty((0, 3), np.uint8)]
        for value in self._values(chunk_of(self.planned.plan, rows)):
            if isinstance(value, bytes):
                decode(memoryview(value), image)
                pixels = image.reshape(-1, 3)
                found.append(pixels[:: max(1, len(pixels) // PIXELS_A_PATCH)].copy())
        return np.concatenate(found)


class SlideTiler(Closing):
    """Plan slides ahead in worker processes, one per core by default, and make their patches there.

    Args:
        default_mpp, mpps: scale of slides whose files have none: of all, and by id.
        max_unreadable: share of a slide's patches, 0 to 1.
        check: raises a SlideError for a planned slide that must not be predicted.
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
        count = workers or len(os.sched_getaffinity(0))
        self._ahead = 1 + count
        self.pool = WorkerPool(count, prepare)

    def slides(
        self, files: Sequence[SlideFile], fail: Callable[[str, str], None]
    ) -> Iterator[TiledSlide]:
        """Yield slides in order as they are planned; `fail` is called with id and reason of each that fails."""
        waiting, running = deque(enumerate(files)), deque[tuple[PendingSlide, Future[Any]]]()
        while waiting or running:
            while waiting and len(running) < self._ahead:
                pending = self._pending(*waiting.popleft())
                future = self.pool.submit_within(
                    _SECONDS, plan_slide, pending.slide, pending.record, self.spec, self.options
                )
                running.append((pending, future))
            pending, future = running.popleft()
            try:
                slide = self._tiled(pending, future)
            except SlideError as error:
                fail(pending.slide.id, str(error))
            else:
                yield slide

    def close(self) -> None:
        """End the workers."""
        self.pool.shutdown(cancel_futures=True)

    def _pending(self, number: int, slide: SlideFile) -> PendingSlide:
        label = self._labels.get(slide.id)
        given = SlideInput(slide, label, self._mpps.get(slide.id))
        return PendingSlide(number, given, labelled(new_record(slide), label))

    def _tiled(
        self, pending: PendingSlide, future: Future[PlannedSlide | SlideFailure]
    ) -> TiledSlide:
        try:
            planned = future.result()
        except WorkerDied as error:
            path = pending.slide.file.path
            raise SlideUnreadable(
                f"{path}: the worker process that planned it died ({error})"
            ) from error
        if isinstance(planned, SlideFailure):
            raise SlideError(planned.reason)
        self._check(planned.record)
        route = planned.recipe.route.name
        parts = [c.rows for c in chunks(planned.plan, route, self.spec.patch_size)]
        order = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return TiledSlide(self, pending, planned, order)


def file_source(file: Fingerprint) -> str:
    """Return the text that identifies a slide file as the source of predictions."""
    return f"file of {file.size_bytes} bytes, {file.mtime_ns}"
