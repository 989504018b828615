"""Tables of what the patches of a bag are worth to a slide model: attention, and contributions to its predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.system.csv_files import read_columns, read_dicts, write_table
from histopipe.system.files import path_within, reading

FOLDER = "attention"
"""Folder with the table of each bag, in a run or a folder of predictions."""
ATTENTION = "attention"
"""Column of the attention."""
CONTRIBUTION = "contribution_"
"""Prefix of the columns of contributions."""
_PLACE = ("slide", "x_l0", "y_l0", "size_l0")

Place = tuple[str, object, object, str]
"""Slide, corner and side of a patch in level-0 pixels; empty texts where unknown."""


def write_patch_values(
    folder: Path,
    bag: str,
    places: Iterable[Place],
    *,
    names: Sequence[str],
    attention: NDArray[np.floating],
    contributions: NDArray[np.floating],
) -> None:
    """Write `attention/BAG.csv` in a folder, with the place and the values of each patch.

    Attention is (N,), contributions are (N, K) for K `names`.

    Raises:
        DamagedStore: the path would be outside of the folder.
    """
    path = path_within(folder / FOLDER, f"{bag}.csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    header = [*_PLACE, ATTENTION, *(CONTRIBUTION + name for name in names)]
    values = zip(places, attention.tolist(), contributions.tolist(), strict=True)
    rows = (
        (*place, f"{share:.9g}", *(f"{value:.6g}" for value in parts))
        for place, share, parts in values
    )
    write_table(path, header, rows)


def patch_value_files(folder: Path) -> list[Path]:
    """Return the tables of patch values in a folder, sorted."""
    return sorted((folder / FOLDER).rglob("*.csv"))


def read_contributions(path: Path) -> list[str]:
    """Return the names of the predictions with contributions in a table."""
    with reading(path):
        columns = read_columns(path)
    return [name.removeprefix(CONTRIBUTION) for name in columns if name.startswith(CONTRIBUTION)]


def read_patch_values(
    paths: Iterable[Path], column: str = ATTENTION
) -> dict[str, NDArray[np.float64]]:
    """Return (N, 4) x, y, value and side of patches by slide, without patches with unknown positions.

    Raises:
        DamagedStore: a table cannot be read.
    """
    tables: dict[str, NDArray[np.float64]] = {}
    for path in paths:
        rows: dict[str, list[tuple[float, ...]]] = {}
        with reading(path):
            for row in read_dicts(path):
                if row["x_l0"]:
                    corner = int(row["x_l0"]), int(row["y_l0"])
                    values = float(row[column]), float(row["size_l0"] or 0)
                    rows.setdefault(row["slide"], []).append((*corner, *values))
        tables |= {slide: np.array(values, np.float64) for slide, values in rows.items()}
    return tables


def ranks_of(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return (N,) ranks: the share of other values below each. Attention weights differ by orders of magnitude."""
    if len(values) < 2:
        return np.ones(len(values), np.float32)
    below = np.searchsorted(np.sort(values), values)
    return np.asarray(below / (len(values) - 1), np.float32)
