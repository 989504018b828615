"""Random numbers and permutations from hashes: the same (seed, epoch, key) gives the same result on every machine."""

from __future__ import annotations

import functools

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
    """Hash several numbers, in order, to one 64-bit number; arrays to one number per element.

    Example:
        >>> combine(1, np.arange(3)).shape
        (3,)
    """
    state = np.zeros((), np.uint64)
    for number in numbers:
        array = np.asarray(number & _WORD if isinstance(number, int) else number)
        state = np.asarray(mix(state ^ array.astype(np.uint64)))
    return state


_ROUNDS = 8
"""Four rounds are proven to be pseudo-random; another number would change the order of resumed runs."""
SMALL = 1024
"""Up to this size, a permutation is computed by sorting hashes. On few points, a Feistel network can reach only few
permutations (on 3 points only the rotations), and sorting is as fast."""

_KEPT = 4096
"""Number of cached sorted permutations: 8 MB at most."""


def permuted(
    places: NDArray[np.integer],
    sizes: int | NDArray[np.integer],
    keys: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """Return the values of random permutations at (N,) positions, as (N,) int64, in O(1) memory and time each.

    `sizes` (1 or more) and `keys` (from `combine`) are scalars, for one permutation of all positions, or (N,).

    Source:
        J. Black and P. Rogaway, "Ciphers with arbitrary finite domains" (2002): a Feistel network on Z_a × Z_b, with
        cycle walking where a·b exceeds n.
    """
    if np.ndim(sizes) == np.ndim(keys) == 0:
        if sizes <= SMALL:
            return np.asarray(_sorted_permutation(int(sizes), int(keys))[places], np.int64)
        return _feistel(places.astype(np.uint64), np.asarray(sizes, np.uint64), keys)
    places, sizes, keys = np.broadcast_arrays(places, sizes, keys)
    result = np.empty(places.shape, np.int64)
    large = sizes > SMALL
    if large.any():
        result[large] = _feistel(
            places[large].astype(np.uint64), sizes[large].astype(np.uint64), keys[large]
        )
    small = ~large
    each = zip(places[small].tolist(), sizes[small].tolist(), keys[small].tolist(), strict=True)
    result[small] = [_sorted_permutation(size, key)[place] for place, size, key in each]
    return result


def _feistel(
    values: NDArray[np.uint64], sizes: NDArray[np.uint64], keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    a = np.maximum(1, np.sqrt(sizes.astype(np.float64)).astype(np.uint64))
    b = (sizes + a - np.uint64(1)) // a
    with np.errstate(over="ignore"):
        round_keys = [mix(np.asarray(keys + np.uint64(i))) for i in range(1, _ROUNDS + 1)]
    result = _feistel_rounds(values, a, b, round_keys)
    outside = np.flatnonzero(result >= sizes)
    while len(outside):
        here = [array if array.ndim == 0 else array[outside] for array in (a, b, *round_keys)]
        result[outside] = _feistel_rounds(result[outside], here[0], here[1], here[2:])
        limits = sizes if sizes.ndim == 0 else sizes[outside]
        outside = outside[result[outside] >= limits]
    return result.astype(np.int64)


def _feistel_rounds(
    values: NDArray[np.uint64],
    a: NDArray[np.uint64],
    b: NDArray[np.uint64],
    round_keys: list[NDArray[np.uint64]],
) -> NDArray[np.uint64]:
    x, y = values % a, values // a
    for number, key in enumerate(round_keys):
        if number % 2:
            y = (y + mix(x ^ key) % b) % b
        else:
            x = (x + mix(y ^ key) % a) % a
    return y * a + x


@functools.lru_cache(maxsize=_KEPT)
def _sorted_permutation(n: int, key: int) -> NDArray[np.uint16]:
    hashes = mix(mix(np.arange(n, dtype=np.uint64)) ^ np.uint64(key))
    return np.argsort(hashes, kind="stable").astype(np.uint16)
