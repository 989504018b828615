"""Measure slides of a store in worker processes, and add the results to the slides' index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.regions import PatchLabels
from histopipe.errors import UsageError
from histopipe.store.record import SlideRecord
from histopipe.store.writer import StoreWriter
from histopipe.system.output import Progress, slide_failure
from histopipe.system.worker_pool import TookTooLong, WorkerPool, count_usable_cores, map_in_pool


@dataclass(frozen=True, slots=True)
class SlideColumns:
    """Measurements of a slide whose N patches have these CRCs: (N,) columns, and fields of its record (`record_fields`).

    `labels` become the column `label`; None keeps this column unchanged.
    """

    crc: NDArray[np.integer]
    columns: dict[str, NDArray[Any]]
    record_fields: dict[str, Any] = field(default_factory=dict)
    labels: PatchLabels | None = None


SlideMeasure = Callable[[Path, int], SlideColumns]
"""Function that measures a slide, given its store and number, in a worker process. It must be picklable."""


def measure_slides(
    store: Path,
    measures: Mapping[int, SlideMeasure],
    failed: dict[str, str],
    *,
    title: str,
    progress: Progress,
    seconds: float,
    workers: int | None = None,
) -> Iterator[tuple[SlideRecord, SlideColumns]]:
    """Measure slides by number, and add the results to the store slide by slide. An interruption keeps added results.

    The store must not be open as `Store` in this process. `seconds` limits each slide. `workers=None`: one per core.
    The reasons of slides that fail are shown, and added to `failed` by slide id. `title` is that of the bar.

    Yields:
        The earlier record of each slide, and its measurements once they are stored.

    Raises:
        NothingToDo, DamagedStore, UsageError, MachineShort: the store cannot be written.
    """
    count = min(workers or count_usable_cores(), max(1, len(measures)))
    with (
        progress.bar(title, unit="slides", total=len(measures)) as bar,
        StoreWriter(store) as writer,
        WorkerPool(count) as pool,
    ):
        for (slide, _), done in map_in_pool(
            pool,
            partial(_measure, store),
            measures.items(),
            seconds=seconds,
            in_order=False,
            limit=4 * count,  # so many results wait in memory to be written
        ):
            record = writer.record(slide)
            outcome = _stored(writer, slide, done, seconds)
            bar.advance()
            if isinstance(outcome, SlideColumns):
                yield record, outcome
            else:
                failed[record.id] = outcome
                progress.message(f"{record.id}: failed: {outcome}")


def _measure(store: Path, task: tuple[int, SlideMeasure]) -> SlideColumns:
    slide, measure = task
    return measure(store, slide)


def _stored(
    writer: StoreWriter, slide: int, future: Future[SlideColumns], seconds: float
) -> SlideColumns | str:
    """Add the result of a slide to the store, and return it, or the reason of its failure."""
    try:
        slide_columns = future.result()
        columns = dict(slide_columns.columns)
        if slide_columns.labels is not None:
            numbers = writer.class_numbers(list(slide_columns.labels.counts()))
            columns["label"] = slide_columns.labels.numbered(numbers)
        writer.put_columns(slide, columns, crc=slide_columns.crc, **slide_columns.record_fields)
    except UsageError as error:
        return str(error)
    except TookTooLong:
        return f"not done after {seconds:.0f} s of work"
    except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
        return slide_failure(error)
    return slide_columns
