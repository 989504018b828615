"""What a worker process does with a planned slide: make a chunk of its patches and store them.

Plain functions of picklable values, so that any executor can run them. Pixels never travel between processes: a chunk is
made in memory, then put under LMDB's own lock for the milliseconds that takes.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import numpy as np

from histopipe.ingest.chunks import Chunk
from histopipe.ingest.job import ChunkResult, Settings, SlideJob
from histopipe.ingest.route import RouteChoice
from histopipe.ingest.source import PatchSource
from histopipe.store.writer import StoreWriter
from histopipe.tiling.level import LevelChoice
from histopipe.tiling.mask import load_algorithms
from histopipe.tiling.spec import TilingSpec

_SOURCES_KEPT = 2
"""A worker makes a slide's chunks one after another; a second source spares opening where two slides take turns. Each
holds at most one OpenSlide handle, whose cache is 32 MB, and 48 MB of decoded tiles."""


def prepare() -> None:
    """Import, while the first slides are looked up, what planning would import late."""
    importlib.import_module("histopipe.slides.tiles.tiff")

    load_algorithms()


def store_chunk(
    settings: Settings, job: SlideJob, choice: LevelChoice, route: RouteChoice, chunk: Chunk
) -> ChunkResult:
    """Make and store some patches of a slide, whatever cells of it cannot be read."""
    started = time.monotonic()
    writer = _writer(settings.store, settings.spec)
    values = _source(settings, job, choice, route).values(chunk)
    order = np.argsort(chunk.rows)  # in the order of keys, LMDB fills its pages
    rows, values = chunk.rows[order], [values[place] for place in order.tolist()]
    stored = [value if isinstance(value, bytes) else None for value in values]
    crc = writer.put_patches(job.number, rows.tolist(), stored)
    problems = [str(value) for value in values if not isinstance(value, bytes)]
    return ChunkResult(
        rows=rows,
        length=np.array([len(value or b"") for value in stored], np.uint32),
        crc=crc,
        problem=problems[0] if problems else None,
        seconds=time.monotonic() - started,
    )


def make_patches(
    settings: Settings, job: SlideJob, choice: LevelChoice, route: RouteChoice, chunk: Chunk
) -> list[bytes | str]:
    """The files of some patches of a slide, as they would be stored; why not, for those that cannot be read."""
    values = _source(settings, job, choice, route).values(chunk)
    return [value if isinstance(value, bytes) else str(value) for value in values]


def close_all() -> None:
    """Close what this process keeps open between chunks: for workers that outlive a run, as threads do."""
    while _sources:
        _sources.popitem()[1].close()
    while _writers:
        _writers.popitem()[1].close()


_sources: dict[tuple[Path, int], PatchSource] = {}


def _source(
    settings: Settings, job: SlideJob, choice: LevelChoice, route: RouteChoice
) -> PatchSource:
    key = settings.store, job.number
    if key not in _sources:
        while len(_sources) >= _SOURCES_KEPT:
            _sources.pop(next(iter(_sources))).close()
        _sources[key] = PatchSource(job.slide.path, choice, route, settings.spec)
    return _sources[key]


_writers: dict[tuple[Path, TilingSpec], StoreWriter] = {}


def _writer(store: Path, spec: TilingSpec) -> StoreWriter:
    if (store, spec) not in _writers:
        close_all()
        _writers[store, spec] = StoreWriter(store, spec)
    return _writers[store, spec]
