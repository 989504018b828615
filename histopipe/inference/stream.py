"""Patches of many slides through a network, with batches loaded ahead, across the border between two slides too."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, SlideError
from histopipe.system.files import Closing
from histopipe.system.progress import Bar

_BEHIND = 2
"""Batches that may still be on the device: to fetch them at once would make it wait for the host."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A batch of one slide's patches.

    Attributes:
        images: (B, H, W, 3) uint8 RGB.
        corners: (B, 2) top left corners, level-0 pixels.
        real: (B,) bool; the others only fill the batch up, or could not be read.
    """

    images: NDArray[np.uint8]
    corners: NDArray[np.integer]
    real: NDArray[np.bool_]


class SlidePatches(Protocol):
    """The patches of one slide, in batches of one size."""

    @property
    def steps(self) -> int:
        """Batches."""

    def load(self, step: int) -> Piece:
        """A batch; called from several threads.

        Raises:
            SlideError, DamagedStore: this slide cannot be used.
        """


class Network(Protocol):
    """What batches go through."""

    def prepared(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        """What `start` takes, from (B, H, W, 3) uint8 RGB. Called from several threads."""

    def start(self, inputs: NDArray[Any]) -> Any:
        """Begin with a batch; what `features` takes."""

    def features(self, started: Any) -> NDArray[np.float32]:
        """(B, D) results of a batch, waiting for them."""


S = TypeVar("S", bound=SlidePatches)
_Loaded = tuple[Piece, NDArray[Any]]


class PatchStream(Closing):
    """Takes slides through a network, one after the other.

    Args:
        network: what their patches go through.
        progress: counts batches.

    Attributes:
        input_wait: seconds of waiting for patches so far.
    """

    def __init__(self, network: Network, progress: Bar) -> None:
        self._network, self._progress = network, progress
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "histopipe-load")
        self._failures: dict[int, Exception] = {}
        self.input_wait = 0.0

    def run(self, slides: Iterable[S]) -> Iterator[tuple[S, Iterator[_Results]]]:
        """Each slide with its results; what of these is not taken before the next slide is dropped.

        Taking them raises what the slide failed with: a SlideError or DamagedStore.
        """
        loaded = self._loaded(slides)
        for slide, first in loaded:
            results = self._results(slide, first, loaded)
            yield slide, results
            with suppress(SlideError, DamagedStore):
                deque(results, maxlen=0)

    def close(self) -> None:
        """Drop what is loaded ahead."""
        self._pool.shutdown(cancel_futures=True)

    def _loaded(self, slides: Iterable[S]) -> Iterator[tuple[S, Future[_Loaded | None]]]:
        """Batches of all slides in turn, some of them ahead of what is asked for."""
        ahead: deque[tuple[S, Future[_Loaded | None]]] = deque()
        for slide in slides:
            for step in range(slide.steps):
                ahead.append((slide, self._pool.submit(self._load, slide, step)))
                if len(ahead) > len(os.sched_getaffinity(0)) + 1:
                    yield ahead.popleft()
        while ahead:
            yield ahead.popleft()

    def _load(self, slide: S, step: int) -> _Loaded | None:
        """A batch; None once one of its slide has failed."""
        if id(slide) in self._failures:
            return None
        try:
            piece = slide.load(step)
        except (SlideError, DamagedStore) as error:
            self._failures[id(slide)] = error
            return None
        return piece, self._network.prepared(piece.images)

    def _results(
        self,
        slide: S,
        first: Future[_Loaded | None],
        loaded: Iterator[tuple[S, Future[_Loaded | None]]],
    ) -> Iterator[_Results]:
        behind: deque[tuple[Piece, Any]] = deque()
        for step in range(slide.steps):
            future = first if step == 0 else next(loaded)[1]
            before = time.monotonic()
            found = future.result()
            self.input_wait += time.monotonic() - before
            if found is not None:
                behind.append((found[0], self._network.start(found[1])))
            if len(behind) > _BEHIND:
                yield self._fetched(*behind.popleft())
            self._progress.advance()
        while behind:
            yield self._fetched(*behind.popleft())
        failure = self._failures.pop(id(slide), None)
        if failure is not None:
            raise failure

    def _fetched(self, piece: Piece, started: Any) -> _Results:
        return self._network.features(started)[piece.real], piece.corners[piece.real]


_Results = tuple[NDArray[np.float32], NDArray[np.integer]]
"""(n, D) results of real patches, and their (n, 2) corners."""
