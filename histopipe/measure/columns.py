"""Measure slides of a store in worker processes, and add the results to the slides' index."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.patch_labels import PatchLabels
from histopipe.errors import DamagedStore, ExitCode, HistopipeError, SlideError, UsageError
from histopipe.store.columns import ColumnWriter
from histopipe.system.worker_pool import TookTooLong, WorkerDied, WorkerPool

_TASKS_PER_WORKER = 4
"""Bounds the results that wait in memory to be written."""


@dataclass(frozen=True, slots=True)
class SlideColumns:
    """What was measured of a slide.

    Attributes:
        crc: (N,) of the patches that were measured.
        columns: of the index, (N,) each.
        facts: fields of the slide's record.
        labels: classes of its patches, which become the column `label`; None keeps that column.
    """

    crc: NDArray[np.integer]
    columns: dict[str, NDArray[Any]]
    facts: dict[str, Any] = field(default_factory=dict)
    labels: PatchLabels | None = None


@dataclass(frozen=True, slots=True)
class MeasuredSlide:
    """Result of one slide.

    Attributes:
        number: its number in the store.
        columns: what was measured; None if it failed.
        reason: why it failed; empty otherwise.
    """

    number: int
    columns: SlideColumns | None
    reason: str = ""


class SlideMeasure(Protocol):
    """Measures a slide in a worker process; picklable."""

    def __call__(self, store: Path, slide: int) -> SlideColumns:
        """Measure a slide of a store, given by its number."""


def measure_slides(
    store: Path, measures: Mapping[int, SlideMeasure], *, seconds: float, workers: int | None = None
) -> Iterator[MeasuredSlide]:
    """Measure slides and add the results to the store, slide by slide. An interruption keeps what is added.

    Args:
        store: the store's folder. No `Store` of it may be open in this process.
        measures: how to measure each slide, by its number.
        seconds: time limit per slide.
        workers: number of processes; one per core if not given.

    Yields:
        Each slide as soon as it is in the store, or has failed.

    Raises:
        NothingToDo, DamagedStore, UsageError, MachineShort: the store cannot be written.
    """
    count = min(workers or len(os.sched_getaffinity(0)), max(1, len(measures)))
    with ColumnWriter(store) as writer:
        pool = WorkerPool(count)
        try:
            waiting = iter(measures.items())
            running: dict[Future[SlideColumns], int] = {}
            while True:
                for slide, measure in waiting:
                    running[pool.submit_within(seconds, measure, store, slide)] = slide
                    if len(running) >= _TASKS_PER_WORKER * count:
                        break
                if not running:
                    return
                done = next(as_completed(running))
                yield _stored(writer, running.pop(done), done, seconds)
        finally:
            pool.shutdown(cancel_futures=True)


def exit_code_of(failed: int, others: int) -> ExitCode:
    """Return the exit code of a command that measured slides.

    Args:
        failed: number of slides that failed.
        others: number of slides that have results.
    """
    if not failed:
        return ExitCode.DONE
    return ExitCode.PARTLY if others else ExitCode.NOTHING


def _stored(
    writer: ColumnWriter, slide: int, future: Future[SlideColumns], seconds: float
) -> MeasuredSlide:
    """Add the result of a slide to the store."""
    try:
        found = future.result()
        columns = dict(found.columns)
        if found.labels is not None:
            numbers = writer.class_numbers(list(found.labels.counts()))
            columns["label"] = found.labels.numbered(numbers)
        writer.put(slide, columns, crc=found.crc, **found.facts)
    except (SlideError, UsageError, DamagedStore) as error:
        return MeasuredSlide(slide, None, str(error))
    except TookTooLong:
        return MeasuredSlide(slide, None, f"not done after {seconds:.0f} s of work")
    except WorkerDied as error:
        return MeasuredSlide(
            slide, None, f"the worker process died ({error}); memory ran out, or a file crashes its reader"
        )  # fmt: skip
    except HistopipeError:
        raise  # of the store or the machine, not of the slide
    except Exception as error:  # noqa: BLE001 - an unexpected error of one slide must not end the run
        return MeasuredSlide(
            slide, None, f"{type(error).__name__}: {error}; please report this error of histopipe"
        )
    return MeasuredSlide(slide, found)
