"""How each slide is stained, as fitted once and kept in the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.store.folder import open_for_change
from histopipe.store.format import STAINS, seal, slide_key, unseal
from histopipe.system.files import Closing

ALGORITHM = "stain-1"

_SHAPES = {
    "reinhard_mean": (3,),
    "reinhard_std": (3,),
    "macenko_stains": (2, 3),
    "macenko_maximum": (2,),
}


@dataclass(frozen=True, slots=True)
class StainFit:
    """A stain as two methods describe it; float32.

    Attributes:
        pixels: of tissue that it was measured on.
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
        """As it is stored."""
        arrays = {name: getattr(self, name).tolist() for name in _SHAPES}
        return {"algorithm": ALGORITHM, "pixels": self.pixels, **arrays}

    @classmethod
    def from_json(cls, value: object, *, where: str) -> Self:
        """What a store holds.

        Raises:
            DamagedStore: it is not such a fit.
        """
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


class StainWriter(Closing):
    """Puts fits into a store. Nothing else of it is touched, and other processes may read or write it meanwhile.

    Args:
        path: the store's folder. Open this before any `Store` of it in the same process.

    Raises:
        NothingToDo: there is no store.
        DamagedStore, UsageError, MachineShort: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._environment = open_for_change(path)

    def put(self, slide: int, fit: StainFit) -> None:
        """Keep a slide's fit in place of an earlier one."""
        with self._environment.write() as transaction:
            database = self._environment.databases[STAINS]
            transaction.put(slide_key(slide), seal(slide_key(slide), fit.to_json()), db=database)

    def close(self) -> None:
        """Give the environment back."""
        self._environment.close()


def read_fits(entries: Mapping[int, bytes], *, where: str) -> dict[int, StainFit]:
    """Fits by slide number, of those that this version's algorithm made."""
    values = {
        n: unseal(slide_key(n), e, where=f"{where}, slide {n}: stain") for n, e in entries.items()
    }
    return {
        number: StainFit.from_json(value, where=f"{where}, slide {number}")
        for number, value in values.items()
        if value.get("algorithm") == ALGORITHM
    }
