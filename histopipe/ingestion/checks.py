"""Checks before an ingest: where the store is, and whether its patches would be of one scale."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from histopipe.errors import SlideError, UsageError
from histopipe.geometry import Mpp, same_scale
from histopipe.ingestion.options import IngestOptions, SlideInput
from histopipe.slides.scale import resolve_mpp
from histopipe.slides.slide import Slide
from histopipe.store.record import SlideState
from histopipe.store.store import recorded
from histopipe.system.filesystems import network_filesystem
from histopipe.system.worker_pool import WorkerDied, WorkerPool
from histopipe.tiling.level import choose_level
from histopipe.tiling.spec import TilingSpec

_OPENING_SECONDS = 120.0


def check_ingest(
    slides: Sequence[SlideInput], store: Path, spec: TilingSpec, options: IngestOptions
) -> None:
    """Refuse an ingest that cannot be right, before anything is written.

    Raises:
        UsageError: the store would be on a network filesystem, or `--level` would mix scales.
    """
    if not options.allow_network:
        refuse_network(store)
    if spec.level is not None and not options.allow_mixed_mpp:
        _refuse_mixed_scales(slides, store, spec, options)


def refuse_network(store: Path) -> None:
    """Refuse to write a store where LMDB cannot keep it consistent.

    Raises:
        UsageError: the path is on a network filesystem.
    """
    kind = network_filesystem(store)
    if kind is not None:
        raise UsageError(
            f"the store {store} would be on a network filesystem",
            found=kind,
            expected="a local disk: LMDB's locks and maps do not work between machines",
            todo="write to a local disk and copy the finished store, or pass --allow-network at your own risk",
        )


def scale_at_level(slide: SlideInput, spec: TilingSpec, default_mpp: Mpp | None) -> Mpp | None:
    """Return the scale of a slide's patches; a task for a worker process.

    Raises:
        SlideError: the slide cannot be opened, or its scale is unknown.
    """
    with Slide(slide.file.path) as opened:
        scale = resolve_mpp(slide.id, opened.info, from_csv=slide.mpp, default=default_mpp)
        return choose_level(slide.id, opened.info.levels, scale.mpp, spec).mpp


def _refuse_mixed_scales(
    slides: Sequence[SlideInput], store: Path, spec: TilingSpec, options: IngestOptions
) -> None:
    scales = {
        record.id: Mpp(record.patch_mpp)
        for record in recorded(store).values()
        if record.state is SlideState.COMPLETE and record.patch_mpp
    }
    scales |= _scales_at_level(slides, spec, options)
    if not scales:
        return
    finest, coarsest = min(scales, key=scales.__getitem__), max(scales, key=scales.__getitem__)
    if not same_scale(scales[finest], scales[coarsest]):
        raise UsageError(
            f"--level {spec.level} would mix scales",
            found=f"{scales[finest]:g} mpp ({finest}) and {scales[coarsest]:g} mpp ({coarsest})",
            expected="at most 2 % difference",
            todo="use --mpp or --mag, or pass --allow-mixed-mpp",
        )


def _scales_at_level(
    slides: Sequence[SlideInput], spec: TilingSpec, options: IngestOptions
) -> dict[str, Mpp]:
    """Return the scale of each slide that has one. Workers open the slides: a bad file may crash or hang its decoder."""
    pool = WorkerPool(options.worker_count)
    try:
        futures = {
            slide.id: pool.submit_within(
                _OPENING_SECONDS, scale_at_level, slide, spec, options.default_mpp
            )
            for slide in slides
        }
        scales = {name: _scale_or_none(future) for name, future in futures.items()}
    finally:
        pool.shutdown(cancel_futures=True)
    return {name: scale for name, scale in scales.items() if scale is not None}


def _scale_or_none(future: Future[Mpp | None]) -> Mpp | None:
    try:
        return future.result()
    except (SlideError, WorkerDied):
        return None  # the ingest reports the reason
