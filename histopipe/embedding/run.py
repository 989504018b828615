"""An embedding under way: slide by slide, with batches loaded ahead."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.batches import Batch, Batches, Column, OnError
from histopipe.dataset.kinds import StainNorm
from histopipe.dataset.sampling import Sequential
from histopipe.dataset.splits import patches_crc
from histopipe.dataset.table import PatchTable, SlideRows
from histopipe.embedding.encoder import Encoder
from histopipe.embedding.facts import coords_facts, slide_facts
from histopipe.embedding.result import EmbedResult
from histopipe.errors import DamagedStore, Interrupted, UsageError
from histopipe.features.feature_file import Precision, is_ours, read_header, writing
from histopipe.features.folder import feature_path
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.training.progress import EpochProgress, say
from histopipe.training.quiet import load_quietly

_BEHIND = 2
"""Batches that may still be on the device: to fetch them at once would make it wait for the host."""
_COLUMNS: tuple[Column, ...] = ("x_l0", "y_l0")


@dataclass(slots=True)
class _Slide:
    """A slide to embed."""

    rows: SlideRows
    record: SlideRecord
    batches: Batches
    failure: str | None = None


_Loaded = tuple[Batch, NDArray[Any]]
"""A batch, and its pixels as the encoder takes them."""


@dataclass(slots=True)
class _Count:
    """What has been done."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    patches: int = 0
    skipped: int = 0
    seconds: float = 0.0
    input_wait: float = 0.0


class Embedding:
    """An embedding under way.

    A slide's batches hold its patches alone, so that its features depend on nothing else, and are the same whichever slides
    were done before.

    Args:
        stores: where the patches are.
        encoder: what they go through.
        folder: where the files go.
        precision, batch_size, stain_norm, on_error: see `embed`.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        encoder: Encoder,
        folder: Path,
        *,
        precision: Precision,
        batch_size: int,
        stain_norm: StainNorm,
        on_error: OnError,
    ) -> None:
        self._stores, self._encoder, self._folder = stores, encoder, folder
        self._precision: Precision = precision
        self._batch_size, self._on_error = batch_size, on_error
        self._normalise = None
        if stain_norm != "none":
            normaliser = load_quietly("histopipe.embedding.stain")
            self._normalise = normaliser.numpy_normaliser(stores, stain_norm)

    def run(self, slides: Sequence[SlideRows]) -> EmbedResult:
        """Embed slides that are not there yet.

        Raises:
            HistopipeError: as `embed`.
        """
        missing = [self._slide(rows) for rows in slides if not self._is_there(rows)]
        kept = {self._record(rows).id for rows in slides} - {slide.record.id for slide in missing}
        if kept:
            say(f"{len(kept)} slides are there already")
        count, steps = _Count(), sum(slide.batches.steps_per_epoch for slide in missing)
        with (
            closing(EpochProgress("embedding", steps)) as progress,
            ThreadPoolExecutor(len(os.sched_getaffinity(0)), "histopipe-load") as pool,
        ):
            loaded, began = self._loaded(missing, pool), time.monotonic()
            try:
                for number, slide in enumerate(missing, 1):
                    name, told = slide.record.id, f"{number}/{len(missing)}"
                    try:
                        self._embed(slide, loaded, count, progress)
                    except DamagedStore as error:
                        count.failed[name] = str(error)
                        say(f"{told} {name}: failed: {error}")
                    else:
                        count.done.append(name)
                        say(f"{told} {name}: {len(slide.batches.table):,} patches")
                    count.seconds = time.monotonic() - began
            except KeyboardInterrupt:
                raise Interrupted(
                    "interrupted", found=f"{len(count.done)} of {len(missing)} slides done",
                    todo="the same command goes on with the others",
                ) from None  # fmt: skip
        return EmbedResult(
            self._folder, self._encoder.dimension, tuple(count.done), tuple(sorted(kept)),
            count.failed, count.patches, count.skipped, count.seconds, count.input_wait,
        )  # fmt: skip

    def _slide(self, rows: SlideRows) -> _Slide:
        table = PatchTable([rows])
        batches = Batches(
            self._stores, table, batch_size=self._batch_size, order=Sequential(len(table)),
            on_error=self._on_error, columns=_COLUMNS,
        )  # fmt: skip
        return _Slide(rows, self._record(rows), batches)

    def _record(self, rows: SlideRows) -> SlideRecord:
        return self._stores[rows.store].records[rows.slide]

    def _is_there(self, rows: SlideRows) -> bool:
        """Whether the features of exactly these patches are there."""
        path = feature_path(self._folder, self._record(rows).id)
        if not path.exists():
            return False
        try:
            header = read_header(path)
        except DamagedStore as error:
            say(f"{error}")
            return False
        if not is_ours(header):
            raise UsageError(f"{path} was made by another tool", todo="choose another --out")
        if int(header.facts["patches_crc"]) != patches_crc(self._stores[rows.store], rows.slide):
            say(f"{path}: the store holds other patches of this slide now; made again")
            path.unlink()  # it would pass for theirs
            return False
        return self._on_error == "skip" or not header.facts["skipped"]

    def _loaded(
        self, slides: Sequence[_Slide], pool: ThreadPoolExecutor
    ) -> Iterator[_Loaded | None]:
        """The batches of all slides in turn, ready for the encoder, some of them ahead of what is asked for."""
        jobs = ((slide, step) for slide in slides for step in range(slide.batches.steps_per_epoch))
        ahead: deque[Future[Any]] = deque()
        for slide, step in jobs:
            ahead.append(pool.submit(self._load, slide, step))
            if len(ahead) > len(os.sched_getaffinity(0)) + 1:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _load(self, slide: _Slide, step: int) -> _Loaded | None:
        """A batch; None once one of its slide has failed."""
        if slide.failure is not None:
            return None
        try:
            batch = slide.batches.load(step)
        except DamagedStore as error:
            slide.failure = str(error)
            return None
        images = batch.image
        if self._normalise is not None:
            images = self._normalise(images, batch.key)
        return batch, self._encoder.prepared(images)

    def _embed(
        self,
        slide: _Slide,
        loaded: Iterator[_Loaded | None],
        count: _Count,
        progress: EpochProgress,
    ) -> None:
        """A slide's features into its file.

        Raises:
            DamagedStore: a patch is damaged, and is not to be skipped.
        """
        path = feature_path(self._folder, slide.record.id)
        behind: deque[tuple[Batch, Any]] = deque()
        rows, dimension = len(slide.batches.table), self._encoder.dimension
        with writing(path, rows, dimension, self._precision) as writer:

            def fetch(most: int) -> None:
                while len(behind) > most:
                    batch, started = behind.popleft()
                    real = batch.weight > 0
                    corners = np.stack([batch.columns[name] for name in _COLUMNS], axis=1)
                    writer.append(self._encoder.features(started)[real], corners[real])

            for _ in range(slide.batches.steps_per_epoch):
                before = time.monotonic()
                found = next(loaded)
                count.input_wait += time.monotonic() - before
                if found is not None:
                    behind.append((found[0], self._encoder.start(found[1])))
                fetch(_BEHIND)
                progress.advance()
            fetch(0)
            if slide.failure is not None:
                raise DamagedStore(slide.failure)
            store = self._stores[slide.rows.store]
            facts = slide_facts(store, slide.rows.slide) | {
                "encoder": self._encoder.facts["encoder"],
                "skipped": len(slide.batches.skipped),
            }
            writer.finish(facts, coords_facts(slide.record, store))
        count.patches += rows - len(slide.batches.skipped)
        count.skipped += len(slide.batches.skipped)
