"""The samples of a dataset: bags, or all or selected patches of slides, in sequence.

A sample is one input of a model: a patch of a store, or a bag of feature files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import NothingToDo, UsageError
from histopipe.system.hashing import combine, permuted

UNLABELLED = -1
MAX_STORES = 127

_CAP_DRAW = 201


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of one slide, or of one bag, in a dataset.

    `store` is the position in the list of stores, `label` a class number or `UNLABELLED`. `rows` are (N,) int32, or
    None for all rows.
    """

    store: int
    slide: int
    count: int
    label: int
    rows: NDArray[np.int32] | None = None
    patient: str = ""


@dataclass(frozen=True, slots=True)
class SampleLocations:
    """Locations of samples, (N,) each: position of the store, slide number, row in the slide; and class numbers."""

    stores: NDArray[np.int64]
    slides: NDArray[np.int64]
    rows: NDArray[np.int64]
    labels: NDArray[np.int32]

    @property
    def keys(self) -> NDArray[np.int64]:
        """Keys of the samples in the dataset, (N,) int64."""
        return pack_keys(self.stores, self.slides, self.rows)


class SlideValues:
    """Values of slides: targets, or covariates. `values` has a row of numbers by position of the store and slide number."""

    def __init__(self, values: Mapping[tuple[int, int], Sequence[float]]) -> None:
        places = sorted(values)
        self._keys = np.array([_slide_key(*place) for place in places], np.int64)
        self._values = np.array([values[place] for place in places], np.float32)
        self.width = int(self._values.shape[1])

    def of(self, located: SampleLocations) -> NDArray[np.float32]:
        """Return the (N, W) values of the slides of samples."""
        rows = np.searchsorted(self._keys, _slide_key(located.stores, located.slides))
        return np.asarray(self._values[rows], np.float32)


def _slide_key(stores: Any, slides: Any) -> Any:
    return stores << 24 | slides


class SampleTable:
    """All samples of a dataset, numbered consecutively. Memory: a row per slide, and 4 bytes per selected row.

    `max_per_slide` limits the samples of a slide per epoch. With a seed, each epoch draws different samples, until all
    have been drawn. Without a seed, the samples are spread evenly over the slide.

    Attributes:
        counts, starts: (S,) samples of each slide per epoch, and the number of its first sample.

    Raises:
        NothingToDo: there is no sample.
        UsageError: `max_per_slide` is not positive.
    """

    def __init__(
        self,
        slides: Sequence[SampleRows],
        *,
        max_per_slide: int | None = None,
        seed: int | None = None,
    ) -> None:
        if max_per_slide is not None and max_per_slide < 1:
            raise UsageError("max_per_slide", found=max_per_slide, expected="1 or more")
        self.slides = [slide for slide in slides if slide.count]
        if not self.slides:
            raise NothingToDo(
                "no patch to read", todo="run `histopipe info` to show the contents of the store"
            )
        self._sizes = np.array([slide.count for slide in self.slides], np.int64)
        self._cap, self._seed = max_per_slide, seed
        self.capped = max_per_slide is not None
        self.counts = np.minimum(self._sizes, max_per_slide or self._sizes.max())
        self._ends = np.cumsum(self.counts)
        self.starts = self._ends - self.counts
        self._stores = np.array([slide.store for slide in self.slides], np.int64)
        self._numbers = np.array([slide.slide for slide in self.slides], np.int64)
        self._labels = np.array([slide.label for slide in self.slides], np.int32)
        chosen = ((i, slide.rows) for i, slide in enumerate(self.slides))
        self._chosen = {i: rows for i, rows in chosen if rows is not None}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, numbers: NDArray[np.int64], epoch: int = 0) -> SampleLocations:
        """Locate samples by number (N,); with `max_per_slide` the location depends on the epoch."""
        position = np.searchsorted(self._ends, numbers, side="right")
        rows = numbers - self.starts[position]
        if self._cap is not None:
            rows = self._draw_rows(position, rows, epoch)
        for i in self._chosen.keys() & position.tolist():
            in_slide = position == i
            rows[in_slide] = self._chosen[i][rows[in_slide]]
        return SampleLocations(
            self._stores[position], self._numbers[position], rows, self._labels[position]
        )

    def _draw_rows(
        self, position: NDArray[np.int64], rows: NDArray[np.int64], epoch: int
    ) -> NDArray[np.int64]:
        """Return the row of each sample of an epoch, from its number within its slide."""
        sizes, counts = self._sizes[position], self.counts[position]
        if self._seed is None:
            return rows * sizes // counts
        # A round of epochs goes through one permutation. Its last epoch continues at the start of the permutation.
        rounds, number = np.divmod(epoch, -(-sizes // counts))
        index = (number * counts + rows) % sizes
        return permuted(index, sizes, combine(self._seed, _CAP_DRAW, position, rounds))


def pack_keys(
    stores: NDArray[np.int64], slides: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Pack keys (N,) int64: store << 56 | slide << 32 | row."""
    return (stores << 56) | (slides << 32) | rows


def unpack_keys(
    keys: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Unpack keys into store, slide and row, (N,) each."""
    return keys >> 56, (keys >> 32) & 0xFFFFFF, keys & 0xFFFFFFFF
