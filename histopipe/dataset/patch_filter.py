"""Filter of patches by the columns of the index: tissue, focus, pen and dark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchFilter:
    """Bounds for the columns of a store's index. The defaults leave out nothing.

    Attributes:
        min_tissue: minimum share of tissue, 0 to 1.
        min_focus: minimum focus, as measured by `histopipe quality`.
        exclude_pen: maximum share of pen ink, 0 to 1.
        exclude_dark: maximum share of folds and black, 0 to 1.

    Raises:
        UsageError: a bound is out of range.
    """

    min_tissue: float = 0.0
    min_focus: float = 0.0
    exclude_pen: float = 1.0
    exclude_dark: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, most = getattr(self, field.name), inf if field.name == "min_focus" else 1.0
            if (
                not isinstance(value, int | float)
                or isinstance(value, bool)
                or not 0 <= value <= most
                or value == inf
            ):
                raise UsageError(
                    f"--{field.name.replace('_', '-')}", found=repr(value),
                    expected=f"from 0 to {most:g}" if most < inf else "0 or more",
                )  # fmt: skip

    @property
    def active(self) -> bool:
        """Whether it leaves anything out."""
        return self != PatchFilter()

    def fit(self, index: Mapping[str, NDArray[Any]], *, where: str) -> NDArray[np.bool_]:
        """Return which patches of a slide are within the bounds, (N,) bool.

        Args:
            index: columns of the slide.
            where: the slide, for messages.

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
