"""Measuring the patches of a store: focus, pen, folds and black, into its index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from histopipe.dataset.patch_batches import decode
from histopipe.errors import DamagedStore
from histopipe.measure.columns import Measured, measure_slides
from histopipe.store.format import patch_key, value_crc
from histopipe.store.store import Store
from histopipe.tiling.quality import (
    ALGORITHMS,
    COLOUR_MPP,
    FOCUS_MPP,
    dark_mask,
    focus_of,
    pen_mask,
    reduction_to,
)

COLUMNS = ("focus", "pen", "dark")

_SECONDS = 24 * 3600.0
_SCALES = (8, 4, 2)
"""Reductions that libjpeg decodes at."""
_JPEG_START = b"\xff\xd8"


@dataclass(slots=True)
class Quality:
    """What measuring came to.

    Attributes:
        done: medians of the columns by slide id, of those measured now; without what a slide has no patch to tell of.
        same: ids of slides measured before.
        failed: why, by id.
        patches: measured now.
        damaged: patches that could not be read or decoded; they have no measures.
    """

    done: dict[str, dict[str, float]] = field(default_factory=dict)
    same: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    patches: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class MeasureSlide:
    """A task: the columns of one slide."""

    def __call__(self, store: Path, slide: int) -> Measured:
        """As `Task`.

        Raises:
            DamagedStore: the slide's index is damaged. Damaged patches are passed over.
        """
        with Store(store) as opened:
            record, index = opened.records[slide], opened.index(slide)
            columns = {name: np.full(record.planned, np.nan, np.float32) for name in COLUMNS}
            focus = reduction_to(FOCUS_MPP, record.patch_mpp, opened.patch_size)
            colour = reduction_to(COLOUR_MPP, record.patch_mpp, opened.patch_size)
            crcs = index["crc"].tolist()
            with opened.reading() as reading:
                for row in np.flatnonzero(index["length"]).tolist():
                    value = reading.value(slide, row)
                    if value_crc(patch_key(slide, row), value) != crcs[row]:
                        continue
                    try:
                        found = _measures(value, opened.patch_size, focus, colour)
                    except DamagedStore:
                        continue
                    for name, measure in zip(COLUMNS, found, strict=True):
                        columns[name][row] = measure
        return Measured(index["crc"], dict(columns), {"quality": _text(focus, colour)})


def measure_quality(
    store: str | Path,
    *,
    force: bool = False,
    workers: int | None = None,
    told: Callable[[str, str], None] | None = None,
) -> Quality:
    """Measure every patch of a store, and keep that in its index; slides measured before are kept.

    `focus`: the variance of the Laplacian of luma at about 1 µm a pixel; 0 is without any edge. `pen`, `dark`: share of the patch that is
    coloured ink, and that is folded or black, at about 8 µm a pixel. See `histopipe.tiling.quality`.

    Args:
        store: its folder.
        force: measure slides anew that were measured before.
        workers: processes; one a core if not given.
        told: hears of each slide's id as it is done, and why if it failed.

    Raises:
        NothingToDo, DamagedStore, MachineShort: the store cannot be used.

    Example:
        >>> measure_quality("patches.lmdb").patches  # doctest: +SKIP
        1204
    """
    path = Path(store)
    with Store(path) as opened:
        complete, size = opened.complete, opened.patch_size
    result, tasks = Quality(), {}
    for number, record in complete.items():
        reductions = (reduction_to(m, record.patch_mpp, size) for m in (FOCUS_MPP, COLOUR_MPP))
        if record.quality == _text(*reductions) and not force:
            result.same.append(record.id)
        else:
            tasks[number] = MeasureSlide()

    def hear(slide: int, found: Measured | None, reason: str) -> None:
        record = complete[slide]
        if found is None:
            result.failed[record.id] = reason
        else:
            result.done[record.id] = _medians(found.columns)
            result.patches += record.stored
            measured = int(np.isfinite(found.columns["focus"]).sum())
            result.damaged += record.stored - measured
        if told is not None:
            told(record.id, reason)

    measure_slides(path, tasks, told=hear, seconds=_SECONDS, workers=workers)
    return result


def _text(focus: int, colour: int) -> str:
    """How a slide was measured, so that it can be seen whether it would come out as it is."""
    return ", ".join([*ALGORITHMS.values(), f"pixels of {focus} and {colour} across"])


def _medians(columns: dict[str, NDArray[Any]]) -> dict[str, float]:
    kept = {name: values[np.isfinite(values)] for name, values in columns.items()}
    return {name: float(np.median(values)) for name, values in kept.items() if len(values)}


def _measures(value: memoryview, side: int, focus: int, colour: int) -> tuple[float, float, float]:
    """Focus, pen and dark of a patch's file.

    Raises:
        DamagedStore: it cannot be decoded.
    """
    scale = next((s for s in _SCALES if focus % s == 0), 1) if value[:2] == _JPEG_START else 1
    fine = Image.fromarray(_decoded(value, side, scale)).reduce(focus // scale)
    coarse = np.asarray(fine.reduce(max(1, colour // focus)))
    grey = np.asarray(fine.convert("L"))
    return focus_of(grey), float(pen_mask(coarse).mean()), float(dark_mask(coarse).mean())


def _decoded(value: memoryview, side: int, scale: int) -> NDArray[np.uint8]:
    """(side / scale, side / scale, 3); libjpeg averages as it decodes."""
    if scale == 1:
        pixels = np.empty((side, side, 3), np.uint8)
        decode(value, pixels)
        return pixels
    small_side = -(-side // scale)
    try:
        size = simplejpeg.decode_jpeg_header(value, strict=False)[:2]
        # Looked at first: a file of a few kB may claim gigapixels.
        small: NDArray[np.uint8] | None = None
        if size == (side, side):
            small = simplejpeg.decode_jpeg(
                value, colorspace="RGB", min_height=small_side, min_width=small_side, strict=False
            )
    except ValueError as error:
        raise DamagedStore("it cannot be decoded", found=str(error)) from error
    if small is None or small.shape != (small_side, small_side, 3):
        raise DamagedStore("its size", found=size, expected=(side, side))
    return small
