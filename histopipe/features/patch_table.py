"""Tables of what the patches of a bag are worth to a slide model: attention, and contributions to its predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.features.bags import Bag
from histopipe.system.csv_files import write_table
from histopipe.system.files import path_within

CONTRIBUTION = "contribution_"
_COLUMNS = ("slide", "x_l0", "y_l0", "size_l0", "attention")


def write_patch_table(
    folder: Path,
    bag: Bag,
    names: Sequence[str],
    attention: NDArray[np.floating],
    contributions: NDArray[np.floating],
) -> None:
    """Write `BAG.csv`: slide, corner and side in level-0 pixels (empty if unknown), and the values of each patch.

    Attention is (N,), contributions are (N, K) for K `names`.

    Raises:
        DamagedStore: the coordinates cannot be read, or the path would be outside of the folder.
    """
    path = path_within(folder, f"{bag.id}.csv")
    rows = list(_rows(bag, attention, contributions))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(path, [*_COLUMNS, *(CONTRIBUTION + name for name in names)], rows)


def _rows(
    bag: Bag, attention: NDArray[np.floating], contributions: NDArray[np.floating]
) -> Iterable[tuple[object, ...]]:
    values = iter(zip(attention.tolist(), contributions.tolist(), strict=True))
    for slide, part in zip(bag.slides, bag.parts, strict=True):
        coords = part.corners()
        side = f"{part.side:g}" if part.side else ""
        corners = [("", "")] * part.rows if coords is None else coords.tolist()
        for (x, y), (share, parts) in zip(corners, values, strict=False):
            yield slide, x, y, side, f"{share:.9g}", *(f"{value:.6g}" for value in parts)
