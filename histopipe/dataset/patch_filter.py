"""Filter of patches by the columns of the index: tissue, focus, pen and dark."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchFilter:
    """Bounds for the columns of a store's index: shares of tissue, pen, and folds and black; focus as measured.

    The defaults leave out nothing.

    Raises:
        UsageError: a bound is out of range.
    """

    min_tissue: float = 0.0
    min_focus: float = 0.0
    exclude_pen: float = 1.0
    exclude_dark: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            most = sys.float_info.max if name == "min_focus" else 1
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= most:
                expected = "0 or more" if name == "min_focus" else "from 0 to 1"
                raise UsageError(
                    f"--{name.replace('_', '-')}", found=repr(value), expected=expected
                )

    @property
    def active(self) -> bool:
        """Whether it leaves anything out."""
        return self != PatchFilter()

    def fit(self, index: Mapping[str, NDArray[Any]], *, where: str) -> NDArray[np.bool_]:
        """Return which patches of a slide are within the bounds, (N,) bool, from its columns; messages name `where`.

        Raises:
            UsageError: a column with a bound has not been measured.
        """
        kept = np.ones(len(index["crc"]), np.bool_)
        for column, bound, off, command in (
            ("tissue", self.min_tissue, 0.0, "ingest it with --tissue otsu"),
            ("focus", self.min_focus, 0.0, "run `histopipe quality` on the store"),
            ("pen", self.exclude_pen, 1.0, "run `histopipe quality` on the store"),
            ("dark", self.exclude_dark, 1.0, "run `histopipe quality` on the store"),
        ):
            if bound == off:
                continue
            values = index.get(column)
            readable = index["length"] > 0
            if values is None or (np.isnan(values).all() and readable.any()):
                raise UsageError(f"{where}: {column} has not been measured", todo=command)
            # NaN, of a damaged patch, is within no bound.
            kept &= (values >= bound) if off == 0 else (values <= bound)
        return kept
