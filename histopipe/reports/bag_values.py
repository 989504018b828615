"""Patch values of slide models for heatmaps: attention, and contributions to a prediction."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.features.patch_table import CONTRIBUTION
from histopipe.inference.predictions_folder import PredictedSlide
from histopipe.reports.heatmap_values import PatchValues, ReadValues, bounds_of
from histopipe.runs import folder as run_folder
from histopipe.system.csv_files import read_columns, read_dicts
from histopipe.system.files import reading

Show = Literal["attention", "contribution"]
_ATTENTION = "attention"


def open_bag_values(
    folder: Path,
    described: Callable[[str], PredictedSlide],
    class_name: str | None,
    show: Show | None,
) -> tuple[Collection[str], ReadValues]:
    """Return the ids of slides with patch tables in a folder, and a function that reads the values of one slide.

    `described` returns size and scale of a slide. A class name selects the contribution to it.

    Raises:
        UsageError: the folder has no such values.
        DamagedStore: a table cannot be read.
    """
    paths = sorted((folder / run_folder.ATTENTION).rglob("*.csv"))
    if not paths:
        raise UsageError(f"{folder} has no attention", expected="a finished slide model")
    if show == _ATTENTION and class_name is not None:
        raise UsageError("--class", found="--show attention", expected="--show contribution")
    names = _contributions(paths[0])
    column = _ATTENTION
    if show == "contribution" or class_name is not None:
        prediction = class_name if class_name is not None else (names[-1] if names else "")
        if prediction not in names:
            raise UsageError(
                "--class" if class_name is not None else "--show contribution",
                found=repr(class_name) if class_name is not None else f"{folder} of an earlier version",
                expected=" or ".join(names) or "predictions that record contributions",
            )  # fmt: skip
        column = CONTRIBUTION + prediction
    tables: dict[str, NDArray[np.float64]] = {}
    for path in paths:
        tables |= read_patch_table(path, column)

    def read(name: str) -> PatchValues:
        x, y, value, side = tables[name].T
        slide = described(name)
        title, values, scale = f"contribution to {column.removeprefix(CONTRIBUTION)}", value, None
        if column == _ATTENTION:
            title, values = "attention, rank among the slide's patches", ranks(value)
        else:
            scale = float(np.abs(value).max()) or 1.0
            values = 0.5 + value / (2 * scale)
        return PatchValues(
            name, title, x.astype(np.int64), y.astype(np.int64), float(side[0]) or slide.size_l0,
            values.astype(np.float32), None, bounds_of(slide), slide.mpp, scale,
        )  # fmt: skip

    return tables, read


def ranks(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return (N,) ranks: the share of other values below each. Attention weights differ by orders of magnitude."""
    if len(values) < 2:
        return np.ones(len(values), np.float32)
    below = np.searchsorted(np.sort(values), values)
    return np.asarray(below / (len(values) - 1), np.float32)


def read_patch_table(path: Path, column: str = _ATTENTION) -> dict[str, NDArray[np.float64]]:
    """Return (N, 4) x, y, value and side of patches by slide, without patches with unknown positions.

    Raises:
        DamagedStore: the table cannot be read.
    """
    rows: dict[str, list[tuple[float, ...]]] = {}
    with reading(path):
        for row in read_dicts(path):
            if row["x_l0"]:
                corner = int(row["x_l0"]), int(row["y_l0"])
                values = float(row[column]), float(row["size_l0"] or 0)
                rows.setdefault(row["slide"], []).append((*corner, *values))
    return {slide: np.array(values, np.float64) for slide, values in rows.items()}


def _contributions(path: Path) -> list[str]:
    """Return the names of the predictions with contributions."""
    with reading(path):
        header = read_columns(path)
    return [name.removeprefix(CONTRIBUTION) for name in header if name.startswith(CONTRIBUTION)]
