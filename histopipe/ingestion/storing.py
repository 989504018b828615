"""Make and store chunks of patches in worker processes, by functions with picklable arguments.

Pixels are never sent between processes: a worker makes a chunk in memory, then writes it in one short LMDB transaction.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.ingestion.patch_source import Chunk, PatchRecipe, PatchSource
from histopipe.store.writer import StoreWriter
from histopipe.tiling.spec import TilingSpec

_SOURCES_KEPT = 2
"""Number of sources that a worker keeps open, since chunks of two slides may alternate. Each has at most one OpenSlide
handle with a cache of 32 MB, and 48 MB of decoded tiles."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """Numbers, lengths in bytes and checksums of the patches of a chunk, (N,) each, and the worker time in seconds.

    The length of an unreadable patch is 0. `problem` is the reason for the first unreadable patch.
    """

    rows: NDArray[np.int64]
    length: NDArray[np.uint32]
    crc: NDArray[np.uint32]
    problem: str | None
    seconds: float


def prepare() -> None:
    """Import the modules of the first tasks, while the main process finds the slides."""
    for name in ("histopipe.ingestion.planning", "histopipe.slides.tiles.tiff"):
        importlib.import_module(name)
    cv2.setNumThreads(1)  # each worker has one core


def store_chunk(store: Path, number: int, recipe: PatchRecipe, chunk: Chunk) -> ChunkResult:
    """Make and store the readable patches of a chunk; `number` is the number of the slide in the store."""
    started = time.monotonic()
    writer = _writer(store, recipe.spec)
    values = _source(store, number, recipe).values(chunk)
    order = np.argsort(chunk.rows)  # LMDB fills its pages if keys are written in order
    rows, values = chunk.rows[order], [values[position] for position in order.tolist()]
    stored = [value if isinstance(value, bytes) else None for value in values]
    crc = writer.put_patches(number, rows.tolist(), stored)
    problems = [str(value) for value in values if not isinstance(value, bytes)]
    return ChunkResult(
        rows=rows,
        length=np.array([len(value or b"") for value in stored], np.uint32),
        crc=crc,
        problem=problems[0] if problems else None,
        seconds=time.monotonic() - started,
    )


def make_patches(number: int, recipe: PatchRecipe, chunk: Chunk) -> list[bytes | str]:
    """Return the image files of a chunk's patches, or the reason if unreadable; `number` is any number of the slide."""
    values = _source(None, number, recipe).values(chunk)
    return [value if isinstance(value, bytes) else str(value) for value in values]


def close_all() -> None:
    """Close all sources and writers that this process keeps open. Needed if tasks run in the caller's process."""
    while _sources:
        _sources.popitem()[1].close()
    while _writers:
        _writers.popitem()[1].close()


_sources: dict[tuple[Path | None, int], PatchSource] = {}


def _source(store: Path | None, number: int, recipe: PatchRecipe) -> PatchSource:
    key = store, number
    if key not in _sources:
        while len(_sources) >= _SOURCES_KEPT:
            _sources.pop(next(iter(_sources))).close()
        _sources[key] = PatchSource(recipe)
    return _sources[key]


_writers: dict[tuple[Path, TilingSpec], StoreWriter] = {}


def _writer(store: Path, spec: TilingSpec) -> StoreWriter:
    if (store, spec) not in _writers:
        close_all()
        _writers[store, spec] = StoreWriter(store, spec)
    return _writers[store, spec]
