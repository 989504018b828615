"""Tile slide files for `predict` in worker processes, with the code of ingest but without storing the patches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.patch_batches import aligned_empty, decode
from histopipe.dataset.stain_fit import PATCHES, PIXELS_A_PATCH, fit_pixels
from histopipe.errors import DamagedStore, SlideError, SlideUnreadable, UsageError
from histopipe.geometry import Mpp
from histopipe.inference.options import PredictOptions
from histopipe.inference.slide_run import (
    Normalizer,
    PatchBatch,
    SlidePatches,
    SlideRun,
    SlideSource,
    slide_batches,
)
from histopipe.inference.stored_slides import PatchRequirements, check_scale
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.patch_source import Chunk, chunk_of, chunks, make_patches
from histopipe.ingestion.planning import plan_slide, prepare
from histopipe.ingestion.slide_job import SlideJob, SlidePlan
from histopipe.predictions.sources import FindComplete, PredictedSlide
from histopipe.slides.discovery import discover, show_links
from histopipe.slides.scale import MppSource, equal_scales
from histopipe.slides.slide_files import Fingerprint, SlideFile, fingerprint
from histopipe.slides.staging import StagedSlide, StagingArea, stage_folder, staged
from histopipe.slides.tables import SlideLabel, SlideNames, read_mpps
from histopipe.splits.slide_table import SlideEntry
from histopipe.store.record import SlideRecord
from histopipe.system.output import Progress, slide_failure
from histopipe.system.tensorflow import load_quietly
from histopipe.system.worker_pool import WorkerPool, run_tasks
from histopipe.tiling.spec import TilingSpec, recorded_tissue, resolved_tissue, spec_from_json

_SECONDS = 600.0
"""Time limit for planning a slide, or for a batch of patches."""


class TiledSlide(SlidePatches):
    """A planned slide file. `order` holds the (N,) patch numbers in the order of ingest."""

    def __init__(
        self, files: FileSource, job: SlideJob, planned: SlidePlan, order: NDArray[np.int64]
    ) -> None:
        options = files.options
        batch_rows = slide_batches(len(order), options.batch_size, options.batch_rule)
        self.problems: list[str] = []
        """Reasons why patches could not be read."""
        super().__init__(
            planned.record,
            batch_rows or [range(1)],  # without patches, one empty batch to be reported
            rows=len(order),
            patch_size=files.spec.patch_size,
            overlap=files.spec.overlap,
            lost=self.problems,
        )
        self.files, self.job, self.planned, self.order = files, job, planned, order
        self._normalize: Normalizer | None = None
        self._lock = threading.Lock()

    @property
    def source(self) -> str:  # noqa: D102
        return _source_text(self.planned.fingerprint)

    @property
    def origin(self) -> Mapping[str, Any]:  # noqa: D102
        return {"source": self.source}

    @property
    def thumbnail(self) -> bytes:  # noqa: D102
        return self.planned.thumbnails["thumb"]

    def load(self, step: int) -> PatchBatch:  # noqa: D102
        places, side = self.batch_rows[step], self.patch_size
        size, rows = len(places), self.order[places.start : places.stop]
        images = aligned_empty((size, side, side, 3))
        images[len(rows) :] = 0
        corners, valid = np.zeros((size, 2), np.int64), np.zeros(size, np.bool_)
        plan = self.planned.plan
        corners[: len(rows)] = np.stack([plan.x_l0[rows], plan.y_l0[rows]], axis=1)
        for i, value in enumerate(self._values(chunk_of(plan, rows)) if len(rows) else ()):
            valid[i] = self._decode(value, images[i])
        if len(self.problems) > self.files.options.max_unreadable * max(1, len(plan)):
            job = self.job
            raise SlideUnreadable(
                f"{job.file.location}: at least {len(self.problems)} of {len(plan)} patches cannot be read, "
                f"first: {job.with_original_paths(self.problems[0])}"
            )
        if valid.any() and self.files.required.stain_norm != "none":
            images = self._normalizer()(images)
        return PatchBatch(images, corners, valid)

    def close(self) -> None:
        """Remove the local copy of the slide, if it was staged."""
        self.files.release(self.job)

    def predicted(self) -> PredictedSlide:  # noqa: D102
        job = self.job
        if job.staged is None and fingerprint(job.file) != self.planned.fingerprint:
            raise SlideUnreadable(f"{job.file.location} changed while it was being read")
        return super().predicted()

    def _values(self, chunk: Chunk) -> Sequence[bytes | str]:
        """Encode patches in a worker. A str is the reason why a patch cannot be read."""
        return self.files.pool.submit_within(
            _SECONDS, make_patches, self.job.number, self.planned.recipe, chunk
        ).result()

    def _decode(self, value: bytes | str, out: NDArray[np.uint8]) -> bool:
        """Decode a patch. If it cannot be read, make it black and record the reason."""
        problem = value if isinstance(value, str) else ""
        if isinstance(value, bytes):
            try:
                decode(memoryview(value), out)
            except DamagedStore as error:
                problem = str(error)
        if problem:
            out[:] = 0
            with self._lock:
                self.problems.append(problem)
        return not problem

    def _normalizer(self) -> Normalizer:
        """Return the stain normalizer of the slide, fitted to a sample of its patches."""
        with self._lock:
            if self._normalize is None:
                rows = np.unique(np.linspace(0, len(self.order) - 1, PATCHES).astype(np.int64))
                fit = fit_pixels(self._sample(rows), where=self.id)
                module = load_quietly("histopipe.dataset.stain_normalization")
                self._normalize = module.slide_normalizer(fit, self.files.required.stain_norm)
            return self._normalize

    def _sample(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the (N, 3) pixels of some patches."""
        image, samples = (
            aligned_empty((self.patch_size, self.patch_size, 3)),
            [np.empty((0, 3), np.uint8)],
        )
        for value in self._values(chunk_of(self.planned.plan, rows)):
            if isinstance(value, bytes):
                with suppress(
                    DamagedStore
                ):  # an undecodable patch is reported when it is predicted
                    decode(memoryview(value), image)
                    pixels = image.reshape(-1, 3)
                    samples.append(pixels[:: max(1, len(pixels) // PIXELS_A_PATCH)].copy())
        return np.concatenate(samples)


class FileSource(SlideSource):
    """Slide files, tiled like the training slides in worker processes (one per core by default).

    Raises:
        UsageError: an option or a CSV file is wrong, or the tiling of the training is unknown.
        NothingToDo: there is no slide.
    """

    def __init__(
        self,
        paths: Sequence[Path | str],
        required: PatchRequirements,
        options: PredictOptions,
        progress: Progress,
    ) -> None:
        self.required, self.options = required, options
        self._ingest = IngestOptions(default_mpp=options.default_mpp, workers=options.workers)
        self.spec = spec_for_slides(required, options.tiling, progress)
        self.settings = {"spec": self.spec.to_json()}
        self._files = discover(paths, images=options.images)
        show_links(self._files, progress)
        self.count = len(self._files)
        ids = [slide.id for slide in self._files]
        self._mpps: Mapping[str, Mpp] = (
            {}
            if options.mpp_csv is None
            else read_mpps(
                Path(options.mpp_csv), SlideNames(ids), allow_extra=options.allow_extra_rows
            )
        )
        self._ids, self._labels = frozenset(ids), options.read_labels(ids) or {}
        parent = stage_folder(options.stage, self._files)
        self._stage = None if parent is None else StagingArea(parent, options.stage_bytes)
        self.pool = WorkerPool(self._ingest.worker_count, prepare)

    def slides(  # noqa: D102
        self, run: SlideRun, complete: FindComplete
    ) -> Iterator[TiledSlide | None]:
        return self._planned(
            run.missing(self._files, lambda slide: self._is_complete(slide, complete)), run.fail
        )

    def current(self, slide: PredictedSlide) -> PredictedSlide:  # noqa: D102
        row = self._labels.get(slide.slide)
        if row is None:
            # A label that was removed from the file does not apply any more.
            named = self.options.labels is not None and slide.slide in self._ids
            return replace(slide, label=None) if named else slide
        return replace(slide, label=row.label, patient=row.patient or slide.patient)

    def slide_table(self, predicted: Iterable[PredictedSlide]) -> list[SlideEntry]:  # noqa: D102
        by_name, slides = {slide.slide: slide for slide in predicted}, []
        for name in dict.fromkeys([*(file.id for file in self._files), *by_name]):
            slide, row = by_name.get(name), self._labels.get(name, SlideLabel(None))
            label = row.label or (slide and slide.label) or ""
            slides.append(
                SlideEntry(
                    slide=name,
                    patient=row.patient or (slide and slide.patient) or name,
                    site=row.site or "",
                    label=label,
                    label_source="labels file" if label else "",
                    measured={}
                    if slide is None or slide.mpp is None
                    else {"mpp": f"{slide.mpp:.4g}"},
                    cells=dict(row.cells),
                )
            )
        return slides

    def close(self) -> None:  # noqa: D102
        self.pool.shutdown(cancel_futures=True)
        if self._stage is not None:
            self._stage.close()

    def release(self, job: SlideJob) -> None:
        """Remove the local copy of a slide, if it was staged."""
        if job.staged is not None and self._stage is not None:
            self._stage.release(job.staged.folder)

    def _is_complete(self, slide: SlideFile, complete: FindComplete) -> bool:
        """Return whether the file has been predicted at its current scale."""
        try:
            source = _source_text(fingerprint(slide))
        except SlideError:
            return False  # reported when it is planned
        predicted = complete(slide.id, source)
        if predicted is None:
            return False
        # The header of a slide takes precedence over the default scale, but not over that of the CSV.
        mpp = self._mpps.get(slide.id)
        if mpp is None and predicted.mpp_source not in (MppSource.PROPERTIES, MppSource.OBJECTIVE):
            mpp = self._ingest.default_mpp
        return mpp is None or (predicted.mpp is not None and equal_scales(mpp, Mpp(predicted.mpp)))

    def _planned(
        self, files: Sequence[SlideFile], fail: Callable[[str, str], None]
    ) -> Iterator[TiledSlide | None]:
        """Yield slides in order while the next ones are planned. Call `fail` with the id and reason of each failure."""

        def staged_slides() -> Iterator[SlideJob | None]:
            for item in staged(self._stage, enumerate(files), lambda numbered: numbered[1]):
                if item is None:
                    yield None
                    continue
                (number, file), copy = item
                if isinstance(copy, SlideError):
                    fail(file.id, str(copy))
                else:
                    yield self._job(number, file, copy)

        def plan(job: SlideJob) -> Future[SlidePlan | SlideRecord]:
            return self.pool.submit_within(_SECONDS, plan_slide, job, self.spec, self._ingest)

        for task in run_tasks(plan, staged_slides(), limit=self._ingest.worker_count + 1):
            if task is None:
                yield None
                continue
            job, future = task
            try:
                slide = self._tiled(job, future)
            except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                fail(job.id, job.with_original_paths(slide_failure(error)))
                self.release(job)
            else:
                yield slide

    def _job(self, number: int, slide: SlideFile, copy: StagedSlide | None) -> SlideJob:
        label, mpp = self._labels.get(slide.id), self._mpps.get(slide.id)
        job = SlideJob(slide, label, mpp, staged=copy, number=number)
        job.record = job.record.with_label(label)
        return job

    def _tiled(self, job: SlideJob, future: Future[SlidePlan | SlideRecord]) -> TiledSlide:
        planned, required = future.result(), self.required
        if isinstance(planned, SlideRecord):
            raise SlideError(planned.error or "")
        if planned.record.patch_mpp is None and required.patch_mpp is not None:
            raise SlideError(
                f"{job.id}: its scale is unknown",
                expected=f"{required.patch_mpp:g} µm per pixel, as in training",
                todo="name it with --default-mpp or --mpp-csv",
            )
        check_scale(planned.record, required)
        parts = chunks(planned.plan, planned.recipe.route, self.spec.patch_size)
        order = np.concatenate([np.empty(0, np.int64), *(chunk.rows for chunk in parts)])
        return TiledSlide(self, job, planned, order)


def spec_for_slides(
    required: PatchRequirements, tiling: Mapping[str, Any], progress: Progress
) -> TilingSpec:
    """Return the tiling of the training, without the parts that do not apply to other slides.

    Raises:
        UsageError: the tiling of the training is unknown.
    """
    spec = required.spec
    if spec is None:
        raise UsageError(
            f"{required.owner} does not record the tiling of its patches, and its store is missing",
            todo="ingest the slides with the settings of the training, and predict the store",
        )
    tiling, algorithms = dict(tiling), spec.get("algorithms")
    all_tissue = "all patches with tissue are predicted"
    if isinstance(algorithms, Mapping) and algorithms.get("grid") == "imported-1":
        progress.message(f"the training patches were chosen by another tool: {all_tissue}")
        tiling.setdefault("tissue", "otsu")
    if spec.get("roi") is not None:
        progress.message(f"the training patches were in the region {spec['roi']!r}: {all_tissue}")
    if recorded_tissue(spec) == "masks" or spec.get("exclude"):
        progress.message(f"the tissue of the training was in files of masks: {all_tissue}")
        tiling.setdefault("tissue", spec.get("tissue_fallback", "otsu"))
    elif recorded_tissue(spec) == "model":
        progress.message("the tissue of the training was found by a network: --tissue otsu is used")
        tiling.setdefault("tissue", "otsu")
    if "tissue" in tiling:
        tiling["tissue"] = resolved_tissue(tiling["tissue"], spec)
    return spec_from_json(spec, **tiling)


def _source_text(file: Fingerprint) -> str:
    """Return the text that identifies a slide file as the source of predictions."""
    return f"file of {file.size_bytes} bytes, {file.mtime_ns}" + (
        f", {file.etag}" if file.etag else ""
    )
