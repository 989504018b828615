"""Stream the patches of many slides through a network. Batches are loaded ahead, also across slides."""

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

_STARTED_BATCHES = 2
"""Batches that may still be on the device: fetching each at once would make the device wait for the host."""

Results = tuple[NDArray[np.float32], NDArray[np.integer]]
"""(N, D) results of a network, and the (N, 2) top left corners of their patches in level-0 pixels."""


@dataclass(frozen=True, slots=True)
class PatchBatch:
    """A batch of patches of one slide.

    Attributes:
        images: (B, H, W, 3) uint8 RGB.
        corners: (B, 2) top left corners, level-0 pixels.
        valid: (B,) bool; False for patches that fill up the batch or cannot be read.
    """

    images: NDArray[np.uint8]
    corners: NDArray[np.integer]
    valid: NDArray[np.bool_]


class SlidePatches(Protocol):
    """The patches of one slide, in batches of one size."""

    @property
    def steps(self) -> int:
        """Number of batches."""

    def load(self, step: int) -> PatchBatch:
        """Load a batch. Called from several threads.

        Raises:
            SlideError, DamagedStore: the slide cannot be used.
        """


class Network(Protocol):
    """A network that computes D numbers per patch."""

    def prepare(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        """Convert (B, H, W, 3) uint8 RGB to the input of the network. Called from several threads."""

    def start(self, inputs: NDArray[Any]) -> Any:
        """Start computing a batch; `finish` takes what is returned."""

    def finish(self, started: Any) -> NDArray[np.float32]:
        """Wait for the (B, D) results of a batch."""


S = TypeVar("S", bound=SlidePatches)
_Loaded = tuple[PatchBatch, NDArray[Any]]


class PatchStream(Closing):
    """Stream slides through a network, one after the other.

    Args:
        network: the network.
        bar: counts batches.

    Attributes:
        input_wait: seconds of waiting for patches so far.
    """

    def __init__(self, network: Network, bar: Bar) -> None:
        self._network, self._bar = network, bar
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "histopipe-load")
        self._failures: dict[int, Exception] = {}
        self.input_wait = 0.0

    def run(self, slides: Iterable[S]) -> Iterator[tuple[S, Iterator[Results]]]:
        """Yield each slide with an iterator over its results; results not taken before the next slide are dropped.

        The iterator of a slide that cannot be used raises a SlideError or DamagedStore.
        """
        loaded = self._loaded(slides)
        for slide, first in loaded:
            results = self._results(slide, first, loaded)
            yield slide, results
            with suppress(SlideError, DamagedStore):
                deque(results, maxlen=0)

    def close(self) -> None:
        """Drop the batches that are loaded ahead."""
        self._pool.shutdown(cancel_futures=True)

    def _loaded(self, slides: Iterable[S]) -> Iterator[tuple[S, Future[_Loaded | None]]]:
        """Yield the batches of all slides in order; some more are being loaded."""
        ahead: deque[tuple[S, Future[_Loaded | None]]] = deque()
        for slide in slides:
            for step in range(slide.steps):
                ahead.append((slide, self._pool.submit(self._load, slide, step)))
                if len(ahead) > len(os.sched_getaffinity(0)) + 1:
                    yield ahead.popleft()
        while ahead:
            yield ahead.popleft()

    def _load(self, slide: S, step: int) -> _Loaded | None:
        """Load a batch; None once a batch of its slide has failed."""
        if id(slide) in self._failures:
            return None
        try:
            batch = slide.load(step)
        except (SlideError, DamagedStore) as error:
            self._failures[id(slide)] = error
            return None
        return batch, self._network.prepare(batch.images)

    def _results(
        self,
        slide: S,
        first: Future[_Loaded | None],
        loaded: Iterator[tuple[S, Future[_Loaded | None]]],
    ) -> Iterator[Results]:
        started: deque[tuple[PatchBatch, Any]] = deque()
        for step in range(slide.steps):
            future = first if step == 0 else next(loaded)[1]
            before = time.monotonic()
            found = future.result()
            self.input_wait += time.monotonic() - before
            if found is not None:
                started.append((found[0], self._network.start(found[1])))
            if len(started) > _STARTED_BATCHES:
                yield self._finish(*started.popleft())
            self._bar.advance()
        while started:
            yield self._finish(*started.popleft())
        failure = self._failures.pop(id(slide), None)
        if failure is not None:
            raise failure

    def _finish(self, batch: PatchBatch, started: Any) -> Results:
        return self._network.finish(started)[batch.valid], batch.corners[batch.valid]
