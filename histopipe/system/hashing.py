"""Random numbers as hashes: the same (seed, epoch, key) gives the same number on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD = 0xFFFFFFFFFFFFFFFF


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit numbers one to one, by the finaliser of SplitMix64.

    Source:
        Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    with np.errstate(over="ignore"):
        values = values + _GOLDEN
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def combine(*numbers: int | NDArray[np.integer]) -> NDArray[np.uint64]:
    """Hash several numbers, in order, to a 64-bit number; arrays to one per element.

    Example:
        >>> combine(1, np.arange(3)).shape
        (3,)
    """
    state = np.zeros((), np.uint64)
    for number in numbers:
        array = np.asarray(number & _WORD if isinstance(number, int) else number)
        state = np.asarray(mix(state ^ array.astype(np.uint64)))
    return state
