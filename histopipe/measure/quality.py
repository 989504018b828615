"""Measure the patches of a store: focus, pen marks, folds and black areas, and the stain of slides.

The measures of quality are pure functions of pixels: algorithms `focus-1`, `pen-1` and `dark-1` (folds and black).
Colours are measured as optical densities, -log10((value + 1) / 256), on pixels of about 8 µm: pen lines are wider, and
JPEG noise and single nuclei are averaged out. Focus is measured at 1 µm per pixel, where nuclei have edges.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from histopipe.errors import DamagedStore, ExitCode, UsageError
from histopipe.geometry import Mpp
from histopipe.measure.patch_labels import PatchLabels
from histopipe.store.format import Columns, patch_key, value_crc
from histopipe.store.reading import JPEG_START, decode
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.output import (
    Progress,
    Result,
    counted,
    default_progress,
    exit_code_of,
    slide_failure,
)
from histopipe.system.worker_pool import TookTooLong, WorkerPool, count_usable_cores, map_in_pool
from histopipe.tiling.algorithms import coloured_ink


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


ALGORITHMS: Mapping[str, str] = {"focus": "focus-1", "pen": "pen-1", "dark": "dark-1"}
"""Algorithm of each column."""
COLOUR_MPP = Mpp(8.0)
FOCUS_MPP = Mpp(1.0)
_FOLD_DENSITY = 2.4
"""Least density of folds, as the sum of channels at 8 µm. A layer of stained tissue has 0.6 to 1.8; layers add up."""
_DENSITY: NDArray[np.float32] = -np.log10((np.arange(256) + 1) / 256).astype(np.float32)
_SCALES = (8, 4, 2)
"""Reductions by which libjpeg can decode."""


@dataclass(frozen=True, slots=True, repr=False)
class QualityResult(MeasureResult):
    """Result of `quality`.

    Attributes:
        done: medians of the columns of slides measured now, by id; a column without values has no median.
        patches: number of patches of slides measured now.
        damaged: number of patches that cannot be read or decoded; they have no values.
    """

    done: dict[str, dict[str, float]] = field(default_factory=dict)
    patches: int = 0
    damaged: int = 0

    def __str__(self) -> str:
        """Table of the medians, then totals."""
        return "\n".join(
            [
                *([f"{'slide':<40} {'focus':>8} {'pen':>6} {'dark':>6}"] if self.done else []),
                *(
                    f"{name:<40} {slide['focus']:>8.1f} {slide['pen']:>6.1%} {slide['dark']:>6.1%}"
                    for name, slide in sorted(self.done.items())
                    if slide.keys() >= ALGORITHMS.keys()
                ),
                f"{counted(len(self.done), 'slide')} measured, {len(self.same)} already measured, "
                f"{len(self.failed)} failed; {counted(self.patches, 'patch')}, {self.damaged} of them damaged",
            ]
        )


def quality(
    store: str | Path = "patches.lmdb",
    *,
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> QualityResult:
    """Measure focus, pen marks and folds of every patch, and add them to the store's index.

    `focus` is the variance of the Laplacian of luma at about 1 µm per pixel; 0 means no edges. `pen` is the share of
    the patch that is coloured ink, and `dark` the share that is folded or black, at about 8 µm per pixel. See
    `histopipe.measure.quality`.

    Args:
        store: the store's folder.
        force: also measure slides that were measured before.
        workers: number of processes; None means one per core.
        progress: where progress is shown; None chooses bars or lines.

    Raises:
        NothingToDo, DamagedStore, MachineShort: the store cannot be used.

    Example:
        >>> quality("patches.lmdb").patches  # doctest: +SKIP
        1204
    """
    with Store(Path(store)) as opened:
        complete, size = opened.complete, opened.patch_size
    result, measures, patches, damaged = QualityResult(), {}, 0, 0
    for number, record in complete.items():
        if record.quality == _method(*_reductions(record, size)) and not force:
            result.same.append(record.id)
        else:
            measures[number] = _measure_slide
    for record, slide_columns in measure_slides(
        Path(store),
        measures,
        result.failed,
        title="quality",
        progress=progress or default_progress(),
        seconds=24 * 3600.0,
        workers=workers,
    ):
        finite = {name: v[np.isfinite(v)] for name, v in slide_columns.columns.items()}
        result.done[record.id] = {
            name: float(np.median(values)) for name, values in finite.items() if len(values)
        }
        patches += record.stored
        damaged += record.stored - len(finite["focus"])
    return replace(result, patches=patches, damaged=damaged)


def _reductions(record: SlideRecord, side: int) -> tuple[int, int]:
    """Return the reductions of a slide's patches to measure focus and colour."""
    mpp = record.patch_mpp
    return reduction_to(FOCUS_MPP, mpp, side), reduction_to(COLOUR_MPP, mpp, side)


def _method(focus: int, colour: int) -> str:
    """Return the measuring method, as stored in the slide's record. If it changes, the slide is measured again."""
    return ", ".join([*ALGORITHMS.values(), f"pixels of {focus} and {colour} across"])


def _measure_slide(store: Path, slide: int) -> SlideColumns:
    """Measure the patches of a slide; damaged ones get no values. This is a `SlideMeasure`."""
    with Store(store) as opened:
        record, index = opened.records[slide], opened.index(slide)
        values = np.full((len(ALGORITHMS), record.planned), np.nan, np.float32)
        focus, colour = _reductions(record, opened.patch_size)
        for row, value in intact_values(opened, slide, index):
            with suppress(DamagedStore):
                values[:, row] = _measures(value, opened.patch_size, focus, colour)
    return SlideColumns(
        index["crc"],
        dict(zip(ALGORITHMS, values, strict=True)),
        {"quality": _method(focus, colour)},
    )


def intact_values(store: Store, slide: int, index: Columns) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and the file of each patch of a slide that matches its checksum in the index."""
    with store.reading() as reading:
        for row in np.flatnonzero(index["length"]).tolist():
            value = reading.value(slide, row)
            if value_crc(patch_key(slide, row), value) == index["crc"][row]:
                yield row, value


def _measures(value: memoryview, side: int, focus: int, colour: int) -> tuple[float, float, float]:
    """Return focus, pen and dark of an encoded patch."""
    scale = next((s for s in _SCALES if focus % s == 0), 1) if value[:2] == JPEG_START else 1
    fine = Image.fromarray(_decoded(value, side, scale)).reduce(focus // scale)
    coarse = np.asarray(fine.reduce(max(1, colour // focus)))
    return (
        focus_of(np.asarray(fine.convert("L"))),
        float(pen_mask(coarse).mean()),
        float(dark_mask(coarse).mean()),
    )


def _decoded(value: memoryview, side: int, scale: int) -> NDArray[np.uint8]:
    """Return (side / scale, side / scale, 3) pixels; libjpeg averages as it decodes."""
    if scale == 1:
        pixels = np.empty((side, side, 3), np.uint8)
        decode(value, pixels)
        return pixels
    small_side = -(-side // scale)
    try:
        size = simplejpeg.decode_jpeg_header(value, strict=False)[:2]
        # Check the size first: a file of a few kB may claim gigapixels.
        if size == (side, side):
            small: NDArray[np.uint8] = simplejpeg.decode_jpeg(
                value, colorspace="RGB", min_height=small_side, min_width=small_side, strict=False
            )
            if small.shape == (small_side, small_side, 3):
                return small
    except ValueError as error:
        raise DamagedStore("it cannot be decoded", found=str(error)) from error
    raise DamagedStore("its size", found=size, expected=(side, side))


def pen_mask(rgb: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Find blue, green and red felt-tip ink, (H, W) bool, in (H, W, 3) uint8 of about 8 µm per pixel.

    A large area of bright blood may be detected as red ink. `dark_mask` finds black ink.
    """
    if not rgb.size:
        return np.zeros(rgb.shape[:2], np.bool_)
    if len(rgb) > 64:  # parts that fit into the processor's cache take half of the time or less
        return np.concatenate([pen_mask(rgb[top : top + 64]) for top in range(0, len(rgb), 64)])
    return coloured_ink(np.asarray(cv2.LUT(rgb, _DENSITY), np.float32))


def dark_mask(rgb: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Find folds and black (ink, edges of coverslips, unscanned areas); input and output as for `pen_mask`."""
    return np.asarray(_DENSITY[rgb].sum(axis=2) > _FOLD_DENSITY)


def focus_of(grey: NDArray[Any]) -> float:
    """Return the variance of the Laplacian of (H, W) luma, 0 to 255, at about 1 µm per pixel; at least 3 by 3 pixels.

    Source:
        J. L. Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy", ICPR 2000.
    """
    laplacian = cv2.Laplacian(grey.astype(np.float32), cv2.CV_32F)
    return float(laplacian[1:-1, 1:-1].var())  # without the border, where it needs pixels outside


def reduction_to(target_mpp: Mpp, mpp: float | None, side: int) -> int:
    """Return the whole number by which to reduce an image to about the wanted scale; 1 if its scale is unknown.

    The reduced image keeps a side of at least four pixels.
    """
    return 1 if mpp is None else max(1, min(round(target_mpp / mpp), side // 4))
