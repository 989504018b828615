"""Measure stains: fits for normalization, and amounts of haematoxylin, and of eosin or DAB, in patches.

Amounts are measured by colour deconvolution. Optical densities are -log10(value / white), with values of at least 1 and
the colour of the slide's glass as white. Amounts are the factors of unit vectors of the stains. Negative amounts are 0.
Only stained pixels are measured: those whose densities in the three channels add up to 0.06.

Source:
    A. C. Ruifrok and D. A. Johnston, "Quantification of histochemical staining by color deconvolution" (2001). Vectors as
    in scikit-image: `hed_from_rgb` for H&E, `hdx_from_rgb` (haematoxylin and DAB) for immunohistochemistry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.stain_fit import TooLittleTissue, fit_slide
from histopipe.errors import DamagedStore, UsageError
from histopipe.measure.quality import MeasureResult, SlideColumns, intact_values, measure_slides
from histopipe.store.format import STAIN_COLUMNS, STAIN_TABLE
from histopipe.store.reading import decode, decode_picture
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.grouping import grouped
from histopipe.system.output import Progress, aligned, counted, default_progress, some
from histopipe.system.table_files import write_dicts
from histopipe.tiling.algorithms import find_glass

Stain = Literal["he", "ihc"]
Vectors = Literal["ruifrok", "fitted"]
_SECOND = {"he": "eosin", "ihc": "dab"}
_HED = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
_HD = np.array([[0.650, 0.704, 0.286], [0.268, 0.570, 0.776]])
_STAINED = 0.06
_PINK, _LEAST_PINK = 0.6, 0.15
"""Density of red relative to green, below which a pixel is pink, and least share of such pixels in H&E: slides of H&E have
0.46 to 1, immunohistochemistry at most 0.01."""


@dataclass(frozen=True, slots=True, repr=False)
class StainsResult(MeasureResult):
    """Result of `stains`: `done` has the ids of slides fitted or measured now, `same` those that were before.

    `amounts` has the row of each slide in the table of amounts.
    """

    done: list[str] = field(default_factory=list)
    amounts: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Table of the amounts, then the number of slides."""
        texts = {
            name: [
                f"{row['pixels']:,}",
                *("" if row[n] is None else f"{row[n]:.3f}" for n in STAIN_COLUMNS[1:]),
            ]
            for name, row in self.amounts.items()
        }
        return "\n".join(
            [
                *aligned(
                    [
                        ["slide", "pixels", *STAIN_COLUMNS[1:]],
                        *([n, *row] for n, row in texts.items()),
                    ]
                )
                * bool(texts),
                f"{counted(len(self.done), 'slide')} measured, {len(self.failed)} failed",
            ]
        )


def stain_matrix(vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the matrix that converts optical densities to amounts, (3, 3), of two or three stain vectors, (2 or 3, 3).

    A third vector is that of what neither stain explains: at right angles to both.
    """
    if len(vectors) == 2:
        vectors = np.vstack([vectors, np.cross(*vectors)])
    return np.linalg.inv(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def densities_of(pixels: NDArray[np.uint8], white: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return the optical densities of pixels (N, 3) uint8 RGB, (N, 3); `white` is the colour of the glass, (3,)."""
    table = -np.log10(np.maximum(np.arange(256), 1)[:, None] / white).astype(np.float32)
    # NumPy takes several times as long, here and below.
    return np.asarray(cv2.LUT(pixels[None], table[None])[0], np.float32)


def measure_pixels(
    pixels: NDArray[np.uint8], matrix: NDArray[np.float64], white: NDArray[np.floating]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the amounts of stains in pixels (N, 3) uint8 RGB, (N, 3), and which pixels are stained, (N,).

    `matrix` is from `stain_matrix`, `white` the colour of the glass, (3,).
    """
    density = densities_of(pixels, white)[None]
    totals = cv2.transform(density, np.ones((1, 3)))[0]
    return np.maximum(cv2.transform(density, matrix.T)[0], 0), np.asarray(totals >= _STAINED)


def white_point(thumbnail: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the colour of the glass on a thumbnail, (3,); white if there is none."""
    glass = find_glass(cv2.pyrDown(thumbnail).astype(np.uint8))
    return np.full(3, 255.0) if glass is None else glass


def _thumbnail(store: Store, slide: int) -> NDArray[np.uint8]:
    """Return the thumbnail of a slide; one white pixel if it has none."""
    value, where = store.thumbnail(slide), f"{store.path}, thumbnail of slide {slide}"
    return np.full((1, 1, 3), 255, np.uint8) if value is None else decode_picture(value, where)


def find_stains(store: Store) -> dict[int, Stain]:
    """Return the stain of each complete slide, from the thumbnail: H&E, or immunohistochemistry with DAB.

    Pink pixels absorb green far more than red, as eosin does, and brown ones blue most, as DAB does. Haematoxylin is
    neither. Cores of a file have one stain: some of them may have no DAB.
    """
    stains: dict[int, Stain] = {}
    for numbers in grouped(store.complete, lambda n: store.complete[n].resolved_path).values():
        sums = np.zeros(3)  # densities of pink, of brown, and of all pixels
        for thumbnail in (_thumbnail(store, n) for n in numbers):
            density = densities_of(thumbnail.reshape(-1, 3), white_point(thumbnail))
            red, green, blue = density[density.sum(axis=1) >= _STAINED].T
            total = red + green + blue
            sums += [
                total[(red < _PINK * green) & (blue <= green)].sum(),
                total[blue > green].sum(),
                total.sum(),
            ]
        is_he = sums[0] > max(sums[1], _LEAST_PINK * sums[2]) or not sums[2]
        stains |= dict.fromkeys(numbers, "he" if is_he else "ihc")
    return stains


def measure_amounts(
    store: Path,
    *,
    stain: Stain | None,
    vectors: Vectors,
    positive: float,
    force: bool,
    progress: Progress,
) -> StainsResult:
    """Measure the amounts of stains in all patches, and write the table of slides; see `stains`."""
    if not 0 < positive < math.inf:
        raise UsageError("--positive", found=positive, expected="an optical density above 0")
    result, measures = StainsResult(), {}
    with Store(store) as opened:
        stains = dict.fromkeys(opened.complete, stain) if stain else find_stains(opened)
        for number, record in opened.complete.items():
            method = f"stain-amounts-1, {stains[number]}, {vectors}, positive {positive:g}"
            if (record.stain_amounts or "").startswith(f"{method}, white") and not force:
                result.same.append(record.id)
            else:
                measures[number] = partial(
                    _measure_slide,
                    stain=stains[number],
                    vectors=vectors,
                    positive=positive,
                    method=method,
                )
    for record, _ in measure_slides(
        store, measures, result.failed, title="stains", progress=progress, seconds=24 * 3600.0
    ):
        result.done.append(record.id)
    with Store(store) as opened:
        for number, record in opened.complete.items():
            if record.stain_amounts:
                result.amounts[record.id] = _of_slide(opened, number, record)
        ihc = [opened.records[n].id for n, kind in stains.items() if kind == "ihc"]
    if 0 < len(ihc) < len(stains):
        progress.message(
            f"warning: the store has H&E and immunohistochemistry ({some(ihc, 3)}): --stain sets one for all"
        )
    write_dicts(
        store / STAIN_TABLE, [{"slide": name, **row} for name, row in result.amounts.items()]
    )
    return result


def _measure_slide(
    store: Path, slide: int, *, stain: Stain, vectors: Vectors, positive: float, method: str
) -> SlideColumns:
    """Measure the patches of a slide. This is a `SlideMeasure`."""
    with Store(store) as opened:
        index, side = opened.index(slide), opened.patch_size
        white = white_point(_thumbnail(opened, slide))
        matrix = stain_matrix(
            fit_slide(opened, slide).macenko_stains
            if vectors == "fitted"
            else _HED
            if stain == "he"
            else _HD
        )
        values = {name: np.full(len(index["crc"]), np.nan, np.float32) for name in STAIN_COLUMNS}
        pixels = np.empty((side, side, 3), np.uint8)
        for row, value in intact_values(opened, slide, index):
            with suppress(DamagedStore):
                decode(value, pixels)
                amounts, stained = measure_pixels(pixels.reshape(-1, 3), matrix, white)
                values["stained"][row] = stained.mean()
                if stained.any():
                    first, second, *_ = cv2.mean(amounts[None], stained[None].view(np.uint8))
                    values["haematoxylin"][row], values[_SECOND[stain]][row] = first, second
                    values["positive"][row] = (
                        np.mean(amounts[stained, 1] >= positive) if stain == "ihc" else np.nan
                    )
    text = f"{method}, white {' '.join(f'{v:.0f}' for v in white)}"
    return SlideColumns(index["crc"], dict(values), {"stain_amounts": text})


def _of_slide(store: Store, slide: int, record: SlideRecord) -> Mapping[str, Any]:
    """Return the row of a slide: its pixels measured, and the means over these pixels."""
    index = store.index(slide)
    pixels = np.nan_to_num(index["stained"].astype(np.float64)) * store.patch_size**2
    row: dict[str, Any] = {"method": record.stain_amounts, "pixels": round(pixels.sum())}
    for name in STAIN_COLUMNS[1:]:
        measured = np.isfinite(index[name]) & (pixels > 0)
        mean = (
            np.average(index[name][measured], weights=pixels[measured]) if measured.any() else None
        )
        row[name] = mean if mean is None else round(float(mean), 4)
    return row


def stains(
    store: str | Path = "patches.lmdb",
    *,
    amounts: bool = False,
    stain: Literal["auto", "he", "ihc"] = "auto",
    vectors: Literal["ruifrok", "fitted"] = "ruifrok",
    positive: float = 0.2,
    force: bool = False,
    progress: Progress | None = None,
) -> StainsResult:
    """Fit the stain of every complete slide on 64 of its patches, and add the fits to the store.

    There are two fits: mean and deviation in lαβ (Reinhard et al. 2001), and stain vectors (Macenko et al. 2009). The
    patches are not changed. `train(stain_norm=...)` and `load_dataset(stain_norm=...)` use the fits.

    With `amounts`, it measures instead the optical densities of haematoxylin, and of eosin or DAB, and the share of pixels
    that are positive for DAB, of each patch as columns of the index, and of each slide in the table `stains.csv` of the
    store. See `histopipe.measure.staining`.

    Args:
        store: the store's folder.
        amounts: measure amounts.
        stain: of amounts: H&E, or immunohistochemistry with DAB; "auto" finds it on the thumbnail of each slide.
        vectors: of amounts: colours of the stains: those of Ruifrok, or fitted to each slide (Macenko).
        positive: of amounts: least optical density of DAB of a positive pixel.
        force: also fit slides that already have a fit.
        progress: where progress is shown; None chooses bars or lines.

    Raises:
        UsageError: `positive` is no density.
        NothingToDo, DamagedStore, MachineShort: the store cannot be used.

    Example:
        >>> stains("patches.lmdb").failed  # doctest: +SKIP
        {}
    """
    if amounts:
        return measure_amounts(
            Path(store),
            stain=None if stain == "auto" else stain,
            vectors=vectors,
            positive=positive,
            force=force,
            progress=progress or default_progress(),
        )
    path, display, result = Path(store), progress or default_progress(), StainsResult()
    Store(path).close()  # fails if the store cannot be read, before anything is written
    with StoreWriter(path) as writer, Store(path) as opened:
        fitted = set() if force else set(opened.stains())
        with_patches = {n: record.id for n, record in opened.complete.items() if record.stored}
        result.same.extend(name for n, name in with_patches.items() if n in fitted)
        todo = {n: name for n, name in with_patches.items() if n not in fitted}
        with display.bar("stains", unit="slides", total=len(todo)) as bar:
            for number, name in todo.items():
                try:
                    writer.put_stain(number, fit_slide(opened, number))
                    result.done.append(name)
                except (TooLittleTissue, DamagedStore) as error:
                    result.failed[name] = str(error)
                    display.message(f"stain not measured: {error}")
                bar.advance()
    return result
