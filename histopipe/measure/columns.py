"""Measure slides of a store in worker processes, and add the results to the slides' index."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import ExitCode, UsageError
from histopipe.measure.patch_labels import PatchLabels
from histopipe.store.record import SlideRecord
from histopipe.store.writer import StoreWriter
from histopipe.system.output import Progress, Result, exit_code_of, slide_failure
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


@dataclass(frozen=True, slots=True, repr=False)
class MeasureResult(Result):
    """Result of a command that measures the slides of a store.

    Attributes:
        done: slides measured now: their ids, or values by id.
        same: ids of slides measured before.
        failed: reasons of failed slides, by id.
    """

    done: Collection[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        """0 if no slide failed, 3 if some did, 4 if all did."""
        return exit_code_of(len(self.failed), len(self.done) + len(self.same))


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
            try:
                result = done.result()
                columns = dict(result.columns)
                if result.labels is not None:
                    classes = list(result.labels.counts())
                    columns["label"] = result.labels.numbered(writer.class_numbers(classes))
                writer.put_columns(slide, columns, crc=result.crc, **result.record_fields)
            except UsageError as error:
                failed[record.id] = str(error)
            except TookTooLong:
                failed[record.id] = f"not done after {seconds:.0f} s of work"
            except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                failed[record.id] = slide_failure(error)
            bar.advance()
            if record.id in failed:
                progress.message(f"{record.id}: failed: {failed[record.id]}")
            else:
                yield record, result


def _measure(store: Path, task: tuple[int, SlideMeasure]) -> SlideColumns:
    slide, measure = task
    return measure(store, slide)
