"""How each slide is stained, as measured once and kept in the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.store.format import slide_key, unseal

ALGORITHM = "stain-1"

_SHAPES = {
    "reinhard_mean": (3,),
    "reinhard_std": (3,),
    "macenko_stains": (2, 3),
    "macenko_maximum": (2,),
}


@dataclass(frozen=True, slots=True)
class StainFit:
    """A stain as two methods describe it, measured on so many pixels of tissue; float32.

    Attributes:
        reinhard_mean, reinhard_std: (3,) in lαβ, logarithms to base 10.
        macenko_stains: (2, 3) optical densities of haematoxylin and eosin, of length 1.
        macenko_maximum: (2,) 99th percentile of the amount of each.
    """

    pixels: int
    reinhard_mean: NDArray[np.float32]
    reinhard_std: NDArray[np.float32]
    macenko_stains: NDArray[np.float32]
    macenko_maximum: NDArray[np.float32]

    def to_json(self) -> dict[str, Any]:
        """Return it as it is stored."""
        arrays = {name: getattr(self, name).tolist() for name in _SHAPES}
        return {"algorithm": ALGORITHM, "pixels": self.pixels, **arrays}

    @classmethod
    def from_json(cls, value: object, *, where: str) -> Self:
        """Read what `to_json` returned; raises DamagedStore if it is something else."""
        entries = value if isinstance(value, dict) else {}
        try:
            arrays = {name: np.array(entries[name], np.float32) for name in _SHAPES}
            fit = cls(pixels=int(entries["pixels"]), **arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedStore(f"{where} is no stain fit", found=repr(error)[:120]) from error
        for name, shape in _SHAPES.items():
            if arrays[name].shape != shape or not np.isfinite(arrays[name]).all():
                raise DamagedStore(
                    f"{where}: {name}", found=entries[name], expected=f"{shape} finite numbers"
                )
        return fit


def read_fits(entries: Mapping[int, bytes], *, where: str) -> dict[int, StainFit]:
    """Return the fits by slide number, of those that this version's algorithm made."""
    fits = {}
    for number, entry in entries.items():
        here = f"{where}, slide {number}"
        value = unseal(slide_key(number), entry, where=f"{here}: stain")
        if value.get("algorithm") == ALGORITHM:
            fits[number] = StainFit.from_json(value, where=here)
    return fits
