"""Measuring slides of a store by worker processes, and putting what they find into its index."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.patch_labels import PatchLabels
from histopipe.errors import DamagedStore, HistopipeError, SlideError, UsageError
from histopipe.store.columns import ColumnWriter
from histopipe.system.worker_pool import TookTooLong, WorkerDied, WorkerPool

_AT_ONCE = 4
"""Slides given out for each worker: results wait in memory until they are put."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found of a slide.

    Attributes:
        crc: (N,) of the patches it was found of.
        columns: of the index, (N,) each.
        facts: fields of the slide's record.
        labels: classes of its patches, which become the column `label`; None leaves that as it is.
    """

    crc: NDArray[np.integer]
    columns: dict[str, NDArray[Any]]
    facts: dict[str, Any] = field(default_factory=dict)
    labels: PatchLabels | None = None


class Task(Protocol):
    """What a worker does with a slide; picklable."""

    def __call__(self, store: Path, slide: int) -> Measured:
        """Measure a slide of a store."""


Told = Callable[[int, Measured | None, str], None]
"""Called with each slide's number, what was found, and if that is None why."""


def measure_slides(
    store: Path,
    tasks: Mapping[int, Task],
    *,
    told: Told,
    seconds: float,
    workers: int | None = None,
    prepare: Callable[[], None] | None = None,
) -> None:
    """Measure slides and put what is found into the store, slide by slide; what is in stays if this is interrupted.

    Args:
        store: the store's folder. No `Store` of it may be open in this process.
        tasks: what to do, by slide number.
        told: hears of each slide.
        seconds: that a slide may take.
        workers: processes; one a core if not given.
        prepare: called in each of these first.

    Raises:
        NothingToDo, DamagedStore, UsageError, MachineShort: the store cannot be written.
    """
    count = min(workers or len(os.sched_getaffinity(0)), max(1, len(tasks)))
    with ColumnWriter(store) as writer:
        pool = WorkerPool(count, prepare)
        try:
            waiting = iter(tasks.items())
            running: dict[Future[Measured], int] = {}
            while True:
                for slide, task in waiting:
                    running[pool.submit_within(seconds, task, store, slide)] = slide
                    if len(running) >= _AT_ONCE * count:
                        break
                if not running:
                    return
                done = next(as_completed(running))
                slide = running.pop(done)
                try:
                    found = done.result()
                    _put(writer, slide, found)
                except (SlideError, UsageError, DamagedStore) as error:
                    told(slide, None, str(error))
                except WorkerDied as error:
                    told(slide, None, _what_happened(error, seconds))
                except HistopipeError:
                    raise  # the store or the machine, not the slide
                except Exception as error:  # noqa: BLE001 - one slide that nobody thought of must not end the others
                    told(
                        slide,
                        None,
                        f"{type(error).__name__}: {error}; please report this error of histopipe",
                    )
                else:
                    told(slide, found, "")
        finally:
            pool.shutdown(cancel_futures=True)


def _put(writer: ColumnWriter, slide: int, found: Measured) -> None:
    columns = dict(found.columns)
    if found.labels is not None:
        numbers = writer.class_numbers(list(found.labels.counts()))
        columns["label"] = found.labels.numbered(numbers)
    writer.put(slide, columns, crc=found.crc, **found.facts)


def _what_happened(error: WorkerDied, seconds: float) -> str:
    if isinstance(error, TookTooLong):
        return f"not done after {seconds:.0f} s of work"
    return f"the process that worked on it died ({error}); memory ran out, or a file crashes its reader"
