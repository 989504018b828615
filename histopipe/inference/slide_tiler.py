"""Tile slide files for `predict` and `embed` in worker processes, with the code of ingest but without storing the patches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.annotation_files import source_text
from histopipe.dataset.stain_fit import PATCHES, PIXELS_A_PATCH, fit_pixels
from histopipe.errors import DamagedStore, ScaleError, SlideError, SlideUnreadable, UsageError
from histopipe.geometry import Mpp
from histopipe.inference.options import BATCHES, PredictOptions
from histopipe.inference.slide_run import (
    Normalizer,
    PatchBatch,
    SlidePatches,
    SlideRun,
    SlideSource,
    slide_batches,
)
from histopipe.inference.stored_slides import (
    PatchRequirements,
    check_scale,
    read_current_labels,
    table_of_labels,
)
from histopipe.ingestion.options import IngestOptions, prepare
from histopipe.ingestion.patch_source import PatchFile, chunks, make_patches
from histopipe.ingestion.planning import plan_slides
from histopipe.ingestion.slide_job import SlideJob, SlidePlan
from histopipe.predictions.sources import FindComplete, PredictedSlide
from histopipe.slides.discovery import discover, show_links
from histopipe.slides.scale import MppSource, equal_scales
from histopipe.slides.slide_files import Fingerprint, SlideNames, file_sizes, fingerprint
from histopipe.slides.slide_formats import PatchReadingOptions
from histopipe.slides.staging import StagingArea, stage_folder
from histopipe.slides.tables import SlideLabel, read_mpps
from histopipe.splits.slide_table import SlideEntry
from histopipe.store.reading import decode
from histopipe.store.record import SlideRecord
from histopipe.system.arrays import aligned_empty
from histopipe.system.output import Progress
from histopipe.system.settings import declared_settings
from histopipe.system.shared_folders import ALL, Share
from histopipe.system.tensorflow import load_quietly
from histopipe.system.worker_pool import WorkerPool
from histopipe.tasks.choices import StainNorm
from histopipe.tiling.mask_files import identify_mask_file
from histopipe.tiling.plan import TilingPlan
from histopipe.tiling.spec import TilingSpec, recorded_tissue, resolved_tissue, spec_from_json

_SECONDS = 600.0
"""Time limit for a batch of patches: as long as for planning a slide."""


class TiledSlide(SlidePatches):
    """A planned slide file. `order` has the (N,) patch numbers in the order of the batches."""

    waits_for = "tiling"

    def __init__(self, files: FileSource, job: SlideJob, plan: SlidePlan) -> None:
        self.order = np.concatenate(
            [
                np.empty(0, np.int64),
                *(
                    [np.arange(len(plan.plan))]
                    if files.as_stored
                    else chunks(plan.plan, plan.recipe.route, files.spec.patch_size)
                ),
            ]
        )
        self.problems: list[str] = []
        """Reasons why patches could not be read."""
        super().__init__(
            job.record.with_label(job.label, job.patient),
            # Without patches, one empty batch to be reported.
            slide_batches(len(self.order), files.batch_size, files.rule) or [range(1)],
            rows=len(self.order),
            patch_size=files.spec.patch_size,
            overlap=files.spec.overlap,
            lost=self.problems,
        )
        self.files, self.job, self.plan = files, job, plan
        self._lock = threading.Lock()

    @property
    def origin(self) -> Mapping[str, Any]:  # noqa: D102
        return {"source": self.files.source_text(self.job, self.job.record)}

    @property
    def thumbnail(self) -> bytes:  # noqa: D102
        return self.plan.thumbnails["thumb"]

    def load(self, step: int) -> PatchBatch:  # noqa: D102
        places, side, plan = self.batch_rows[step], self.patch_size, self.plan.plan
        size, rows = len(places), self.order[places.start : places.stop]
        images = aligned_empty((size, side, side, 3))
        images[len(rows) :] = 0
        corners, valid = np.zeros((size, 2), np.int64), np.zeros(size, np.bool_)
        corners[: len(rows)] = np.stack([plan.x_l0[rows], plan.y_l0[rows]], axis=1)
        for i, value in enumerate(self._values(plan.take(rows)) if len(rows) else ()):
            valid[i] = self._decode(value, images[i])
        if len(self.problems) > self.files.options.max_unreadable * max(1, len(plan)):
            raise SlideUnreadable(
                f"{self.job.file.location}: at least {len(self.problems)} of {len(plan)} patches cannot be read, "
                f"first: {self.job.with_original_paths(self.problems[0])}"
            )
        if valid.any() and self.files.stain_norm != "none":
            with self._lock:  # several threads load batches, but the slide is fitted once
                normalize = self._normalizer
            images = normalize(images)
        return PatchBatch(images, corners, valid)

    def close(self) -> None:
        """Remove the local copy of the slide, if it was staged."""
        self.job.release(self.files.stage)

    def predicted(self) -> PredictedSlide:  # noqa: D102
        job = self.job
        if job.staged is None and job.has_changed():
            raise SlideUnreadable(f"{job.file.location} changed while it was being read")
        return super().predicted()

    def _values(self, plan: TilingPlan) -> Sequence[PatchFile]:
        """Encode patches in a worker, with an error for each patch that cannot be read."""
        return self.files.pool.submit_within(
            _SECONDS, make_patches, self.job.number, self.plan.recipe, plan
        ).result()

    def _decode(self, value: PatchFile, out: NDArray[np.uint8]) -> bool:
        """Decode a patch. If it cannot be read, make it black and record the reason."""
        try:
            if not isinstance(value, bytes):
                raise value
            decode(memoryview(value), out)
        except (SlideUnreadable, DamagedStore) as error:
            out[:] = 0
            self.problems.append(str(error))
            return False
        return True

    @cached_property
    def _normalizer(self) -> Normalizer:
        """Stain normalizer of the slide, fitted to a sample of its patches."""
        rows = np.unique(np.linspace(0, len(self.order) - 1, PATCHES).astype(np.int64))
        fit = fit_pixels(self._sample(rows), where=self.id)
        return cast(
            Normalizer,
            load_quietly("histopipe.dataset.transforms").slide_normalizer(
                fit, self.files.stain_norm
            ),
        )

    def _sample(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the (N, 3) pixels of some patches, without those that cannot be read."""
        image = aligned_empty((self.patch_size, self.patch_size, 3))
        samples = [np.empty((0, 3), np.uint8)]
        for value in self._values(self.plan.plan.take(rows)):
            # A patch that cannot be decoded is reported when it is predicted.
            with suppress(DamagedStore):
                if isinstance(value, bytes):
                    decode(memoryview(value), image)
                    pixels = image.reshape(-1, 3)
                    samples.append(pixels[:: max(1, len(pixels) // PIXELS_A_PATCH)].copy())
        return np.concatenate(samples)


class FileSource(SlideSource):
    """Slide files, tiled like those of an ingest in worker processes (one per core by default).

    Attributes:
        jobs, spec, options: the slides of this process, their tiling, and how they are read.
        batch_size, rule: number of patches per batch, and rule of `slide_batches`.
        stain_norm: stain normalization.
        as_stored: batches are those of a store with these patches, and slides without patches are left out, in `empty`.
            Else patches are in the order in which tiles are decoded once.
    """

    def __init__(
        self,
        jobs: Sequence[SlideJob],
        spec: TilingSpec,
        options: IngestOptions,
        *,
        batch_size: int,
        rule: str | None,
        stain_norm: StainNorm,
        misfit: Callable[[SlideRecord], str | None],
        as_stored: bool = False,
        share: Share = ALL,
    ) -> None:
        sizes = file_sizes(job.file for job in jobs)
        chosen = share.chosen(sizes)
        jobs = [job for job in jobs if job.id in chosen]
        self.work = {job.id: sizes[job.id] for job in jobs}
        self.jobs, self.spec, self.options = jobs, spec, options
        self.batch_size, self.rule, self.stain_norm = batch_size, rule, stain_norm
        self.as_stored, self.empty = as_stored, list[str]()
        self.settings, self.count, self._misfit = {"spec": spec.to_json()}, len(jobs), misfit
        for number, job in enumerate(jobs):
            job.number = number
        self.labels = {job.id: job.label for job in jobs if job.label is not None}
        stage = stage_folder(options.stage, (job.file for job in jobs))
        self.stage = None if stage is None else StagingArea(stage, options.stage_bytes)
        self.pool = WorkerPool(options.worker_count, prepare)

    def slides(  # noqa: D102
        self, run: SlideRun, complete: FindComplete
    ) -> Iterator[TiledSlide | None]:
        return self._planned(
            run.missing(self.jobs, lambda job: self._is_complete(job, complete)), run
        )

    def slide_table(self, predicted: Iterable[PredictedSlide]) -> list[SlideEntry]:  # noqa: D102
        names = [job.id for job in self.jobs]
        return table_of_labels(names, self.labels, predicted, self.empty)

    def close(self) -> None:  # noqa: D102
        self.pool.shutdown(cancel_futures=True)
        if self.stage is not None:
            self.stage.close()

    def _is_complete(self, job: SlideJob, complete: FindComplete) -> bool:
        """Return whether the file has been predicted at its current scale."""
        try:
            source = self.source_text(job, fingerprint(job.file))
        except (SlideError, OSError, UsageError):
            return False  # reported when it is planned
        predicted = complete(job.id, source)
        if predicted is None:
            return False
        # The header of a slide takes precedence over the default scale, but not over that of the CSV.
        mpp = job.mpp
        if mpp is None and predicted.mpp_source not in (MppSource.PROPERTIES, MppSource.OBJECTIVE):
            mpp = self.options.default_mpp
        return mpp is None or (predicted.mpp is not None and equal_scales(mpp, Mpp(predicted.mpp)))

    def source_text(self, job: SlideJob, file: Fingerprint | SlideRecord) -> str:
        """Return the text that identifies a slide file, and the files that choose its patches.

        Raises:
            SlideError, OSError, UsageError: such a file cannot be read.
        """
        texts = [f"file of {file.size_bytes} bytes, {file.mtime_ns}", file.etag]
        if job.mask is not None:
            texts.append(f"mask {identify_mask_file(job.mask)}")
        if job.annotations is not None and (self.spec.roi or self.spec.exclude):
            texts.append(f"outlines {source_text(job.annotations, self.options.rules)}")
        return ", ".join(filter(None, texts))

    def _planned(self, jobs: Sequence[SlideJob], run: SlideRun) -> Iterator[TiledSlide | None]:
        """Yield slides in order while the next ones are planned. Record in `run` the reason of each failure."""
        for planned in plan_slides(
            jobs,
            self.spec,
            self.options,
            self.pool,
            self.stage,
            in_order=True,
        ):
            if planned is None:
                yield None
            elif reason := planned.record.error or self._misfit(planned.record):
                run.fail(planned.id, reason)
                planned.release(self.stage)
            elif planned.plan is not None and self.as_stored and not len(planned.plan.plan):
                self.empty.append(planned.id)
                run.outlook.planned(planned.id, 0)
                run.count -= 1
                planned.release(self.stage)
            elif planned.plan is not None:
                yield TiledSlide(self, planned, planned.plan)


def source_of_files(
    paths: Sequence[Path | str],
    required: PatchRequirements,
    options: PredictOptions,
    progress: Progress,
    rule: str | None = BATCHES,
    *,
    targets: Sequence[str] = (),
    by_row: bool = False,
) -> FileSource:
    """Return slide files that are tiled like the training slides, in batches by a rule of `slide_batches`.

    `targets` as for `read_current_labels`. With `by_row`, patches are sorted by row, and the last ones reach the edges.

    Raises:
        UsageError: an option or a CSV file is wrong, or the tiling of the training is unknown.
        NothingToDo: there is no slide.
    """
    edge = {"edge": "shift"} if by_row else {}
    spec = spec_for_slides(required, {**options.tiling, **edge}, progress)
    files = discover(paths, images=options.images)
    show_links(files, progress)
    names = SlideNames(file.id for file in files)
    mpps: Mapping[str, Mpp] = (
        {}
        if options.mpp_csv is None
        else read_mpps(Path(options.mpp_csv), names, allow_extra=options.allow_extra_rows)
    )
    rows = read_current_labels(options, [file.id for file in files], targets)
    # A label that was removed from the file does not apply any more.
    labels = {} if rows is None else {f.id: rows.get(f.id, SlideLabel(None)) for f in files}
    return FileSource(
        [SlideJob(file, labels.get(file.id), mpps.get(file.id)) for file in files],
        spec,
        IngestOptions(
            **{name: getattr(options, name) for name in declared_settings(PatchReadingOptions)}
        ),
        batch_size=options.batch_size,
        rule=rule,
        stain_norm=required.stain_norm,
        misfit=partial(_misfit, required),
        as_stored=by_row,
        share=options.share,
    )


def _misfit(required: PatchRequirements, record: SlideRecord) -> str | None:
    """Return why the patches of a planned slide are not those of the training, if they are not."""
    if record.patch_mpp is None and required.patch_mpp is not None:
        return str(
            ScaleError(
                f"{record.id}: its scale is unknown",
                expected=f"{required.patch_mpp:g} µm per pixel, as in training",
                todo="name it with --default-mpp or --mpp-csv",
            )
        )
    try:
        check_scale(record, required)
    except ScaleError as error:
        return str(error)
    return None


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
