"""Batches as a `tf.data.Dataset`. TensorFlow supplies threads, order and prefetch only."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.dataset.batch_sampler import BatchLoader
from histopipe.dataset.read_ahead import ReadAhead
from histopipe.errors import UsageError

if TYPE_CHECKING:
    import tensorflow as tf

_feeds: weakref.WeakSet[BatchFeed] = weakref.WeakSet()


@atexit.register
def _settle_all() -> None:
    for feed in list(_feeds):
        feed.settle()


class BatchFeed:
    """Loads batches for tf.data and keeps the first failure.

    An exception in a tf.data function loses its type, and the iterator would continue after it with a batch missing. So the
    first failure is kept in `failure`, and every later batch fails with it too.

    Args:
        batches: batches to load.
        parts: parts of each step, in turn; all if not given.
    """

    def __init__(self, batches: BatchLoader, parts: Sequence[int] | None = None) -> None:
        self.batches = batches
        self.parts = tuple(parts if parts is not None else range(batches.replicas))
        self.failure: Exception | None = None
        self._ahead: ReadAhead | None = None
        self._lock = threading.Lock()
        self._running = 0
        _feeds.add(self)

    def dataset(
        self,
        first_step: int,
        last_step: int,
        *,
        parallel_calls: int | None = None,
        prefetch: int | None = None,
        read_ahead: int | None = None,
    ) -> tf.data.Dataset:
        """Return a dataset of steps `first_step` to `last_step` - 1, one element per step and part.

        Args:
            first_step: first step.
            last_step: first step that is not included.
            parallel_calls: batches loaded at the same time.
            prefetch: steps kept ready.
            read_ahead: steps requested from the disk in advance, see `ReadAhead`. The batches have the defaults of all three.

        Raises:
            UsageError: this process was forked after TensorFlow had run.
        """
        # Late: everything above works without TensorFlow.
        import tensorflow as tf

        _refuse_fork()
        batches, parts = self.batches, len(self.parts)
        sizes = {len(batches.rows(part)) for part in self.parts}
        rows = sizes.pop() if len(sizes) == 1 else None  # replicas may differ by a row
        names = [field.name for field in batches.fields]
        shapes = [(None if field.ragged else rows, *field.shape) for field in batches.fields]
        types = [tf.as_dtype(field.dtype) for field in batches.fields]
        distance = batches.read_ahead if read_ahead is None else read_ahead
        self._ahead = ReadAhead(batches, self.parts, last_step, distance)
        # TensorFlow never frees such a function, so it must not keep the stores open.
        feed = weakref.ref(self)

        def load_numpy(element: Any) -> tuple[Any, ...]:
            alive = feed()
            if alive is None:
                raise RuntimeError("the dataset is gone")
            return alive.load(int(element))

        def load(element: tf.Tensor) -> dict[str, tf.Tensor]:
            # Not stateful: it is a pure function, and op determinism runs stateful ones one at a time.
            values = tf.numpy_function(load_numpy, [element], types, stateful=False)
            for value, shape in zip(values, shapes, strict=True):
                value.set_shape(shape)
            return dict(zip(names, values, strict=True))

        calls = parallel_calls or batches.parallel_calls or len(os.sched_getaffinity(0))
        dataset = tf.data.Dataset.range(first_step * parts, last_step * parts)
        dataset = dataset.map(load, num_parallel_calls=calls, deterministic=True)
        dataset.feed = (
            self  # keeps it alive as long as the dataset, its iterators and derived datasets
        )
        ready = batches.prefetch if prefetch is None else prefetch
        if ready:
            dataset = dataset.prefetch(ready * parts)
        options = tf.data.Options()
        # Nothing is left to tune, and closing an iterator would wait for the tuner: up to 7 s per epoch.
        options.autotune.enabled = False
        return dataset.with_options(options)

    def settle(self) -> None:
        """Make every further load fail, and wait for those in progress.

        Called for every feed when Python ends: TensorFlow waits for loads in progress, and these would wait for Python's lock
        for ever. A program that ended in the middle of an iteration hung every time.
        """
        self.failure = self.failure or RuntimeError("the iterator was dropped")
        if self._ahead is not None:
            self._ahead.close()
        quiet = 0
        while quiet < 3:
            quiet = quiet + 1 if self._running == 0 else 0
            time.sleep(0.01)

    def load(self, element: int) -> tuple[Any, ...]:
        """Load the fields of one element of `dataset`.

        Raises:
            Exception: the failure of this load or of an earlier one.
        """
        if self.failure is not None or self._ahead is None:
            raise self.failure or RuntimeError("no dataset has been made")
        with self._lock:
            self._running += 1
        try:
            step, part = divmod(element, len(self.parts))
            return self._ahead.load(step, self.parts[part])
        except Exception as error:
            with self._lock:
                self.failure = self.failure or error
            raise
        finally:
            with self._lock:
                self._running -= 1


def _refuse_fork() -> None:
    """Refuse a forked process: TensorFlow's threads are not copied, and it would wait for them for ever."""
    from tensorflow.python.eager import context  # nothing public shows whether it has run

    running = context.context()._initialized
    names = (path.read_text() for path in Path("/proc/self/task").glob("*/comm"))
    if running and not any(name.startswith("tf_") for name in names):
        raise UsageError(
            "TensorFlow ran before this process was forked, and would wait for ever for its threads",
            todo="start processes by spawn or forkserver: multiprocessing.get_context('spawn')",
        )
