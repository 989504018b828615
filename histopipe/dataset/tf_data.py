"""Batches served to tf.data. TensorFlow supplies threads, order and prefetch, and nothing else."""

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

_sources: weakref.WeakSet[BatchFeed] = weakref.WeakSet()


@atexit.register
def _settle_all() -> None:
    for source in list(_sources):
        source.settle()


class BatchFeed:
    """Serves batches to tf.data and remembers what went wrong.

    An exception inside a tf.data function loses its type, and the iterator would go on behind it with a batch missing. So
    the first failure is kept in `failure`, and every later batch fails with it too.

    Args:
        batches: what is served.
        parts: which parts of each step, in turn; all of them if not given.
    """

    def __init__(self, batches: BatchLoader, parts: Sequence[int] | None = None) -> None:
        self.batches = batches
        self.parts = tuple(parts if parts is not None else range(batches.replicas))
        self.failure: Exception | None = None
        self._ahead: ReadAhead | None = None
        self._lock = threading.Lock()
        self._running = 0
        _sources.add(self)

    def dataset(
        self,
        first_step: int,
        last_step: int,
        *,
        parallel_calls: int | None = None,
        prefetch: int | None = None,
        read_ahead: int | None = None,
    ) -> tf.data.Dataset:
        """Steps `first_step` to `last_step` - 1, one element a step and part, parts in turn.

        Args:
            parallel_calls: batches loaded at once.
            prefetch: steps kept ready.
            read_ahead: see `ReadAhead`. All three as the batches have them, if not given.

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
        # TensorFlow keeps every such function for ever, and would keep the stores open with it.
        source = weakref.ref(self)

        def load_numpy(element: Any) -> tuple[Any, ...]:
            alive = source()
            if alive is None:
                raise RuntimeError("the dataset is gone")
            return alive.load(int(element))

        def load(element: tf.Tensor) -> dict[str, tf.Tensor]:
            # Not stateful: it is a pure function, and op determinism would run it one at a time.
            values = tf.numpy_function(load_numpy, [element], types, stateful=False)
            for value, shape in zip(values, shapes, strict=True):
                value.set_shape(shape)
            return dict(zip(names, values, strict=True))

        calls = parallel_calls or batches.parallel_calls or len(os.sched_getaffinity(0))
        dataset = tf.data.Dataset.range(first_step * parts, last_step * parts)
        dataset = dataset.map(load, num_parallel_calls=calls, deterministic=True)
        dataset.source = (
            self  # which thus lives as long as the dataset, its iterators and what is made of it
        )
        ready = batches.prefetch if prefetch is None else prefetch
        if ready:
            dataset = dataset.prefetch(ready * parts)
        options = tf.data.Options()
        # Nothing here is left to tune, and ending an iterator would wait for the tuner's sleep: up to 7 s an epoch.
        options.autotune.enabled = False
        return dataset.with_options(options)

    def settle(self) -> None:
        """Fail all that is still to be loaded, and wait for what is under way.

        Called for every source when Python ends: TensorFlow waits for loads under way, and these would wait for Python's lock,
        which is gone by then. A program that ended with an iterator half-way was seen to hang so, every time.
        """
        self.failure = self.failure or RuntimeError("the iterator was dropped")
        if self._ahead is not None:
            self._ahead.close()
        quiet = 0
        while quiet < 3:
            quiet = quiet + 1 if self._running == 0 else 0
            time.sleep(0.01)

    def load(self, element: int) -> tuple[Any, ...]:
        """The fields of one element of `dataset`.

        Raises:
            Exception: what went wrong with this one or any before.
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
    """TensorFlow's threads do not come along into a forked process, which then waits for them for ever."""
    from tensorflow.python.eager import context  # the one place that tells whether it has run

    running = context.context()._initialized
    names = (path.read_text() for path in Path("/proc/self/task").glob("*/comm"))
    if running and not any(name.startswith("tf_") for name in names):
        raise UsageError(
            "TensorFlow ran before this process was forked, and would wait for ever for its threads",
            todo="start processes by spawn or forkserver: multiprocessing.get_context('spawn')",
        )
