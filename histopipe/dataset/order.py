"""In which order an epoch visits its patches: a permutation that is computed, never stored.

A generalised Feistel network maps place to patch one to one, so any step of any epoch is known without the steps before it.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.hashing import combine, mix

_ROUNDS = 8
SMALL = 1024
"""Up to here a permutation is sorted out in memory: on few points a Feistel network reaches few permutations (of 3 points
it makes only rotations), and sorting costs no more."""


class Permutation:
    """A random permutation of 0 … n-1, fixed by its seeds.

    Args:
        n: how many there are, at least 1.
        seeds: any integers, such as the run's seed and the epoch.

    Source:
        J. Black and P. Rogaway, "Ciphers with arbitrary finite domains" (2002): a Feistel network on Z_a × Z_b, with
        cycle walking where a·b exceeds n.

    Example:
        >>> sorted(Permutation(5, 1, 0)(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, n: int, *seeds: int) -> None:
        self._n = n
        self._a = np.uint64(max(1, int(np.sqrt(n))))
        self._b = np.uint64(-(-n // int(self._a)))
        key = combine(*seeds)
        self._small = n <= SMALL
        self._key = key
        self._round_keys = mix(key + np.arange(1, _ROUNDS + 1, dtype=np.uint64))

    def __call__(self, places: NDArray[np.integer]) -> NDArray[np.int64]:
        """The patches at these places of the order, each place from 0 to n-1. int64, same shape."""
        if self._small:
            return np.asarray(_sorted_permutation(self._n, int(self._key))[places])
        result = self._walk(places.astype(np.uint64))
        outside = result >= self._n
        while outside.any():
            result[outside] = self._walk(result[outside])
            outside = result >= self._n
        return result.astype(np.int64)

    def _walk(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x, y = values % self._a, values // self._a
        for number, key in enumerate(self._round_keys):
            if number % 2:
                y = (y + mix(x ^ key) % self._b) % self._b
            else:
                x = (x + mix(y ^ key) % self._a) % self._a
        return y * self._a + x


@functools.lru_cache(maxsize=16)
def _sorted_permutation(n: int, key: int) -> NDArray[np.int64]:
    return np.argsort(mix(mix(np.arange(n, dtype=np.uint64)) ^ np.uint64(key)), kind="stable")
