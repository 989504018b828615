"""Batches as a `tf.data.Dataset`. TensorFlow provides threads, order and prefetch only."""

from __future__ import annotations

import atexit
import contextlib
import resource
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.dataset.sampling import BatchSampler, replica_rows
from histopipe.errors import UsageError
from histopipe.system.worker_pool import count_usable_cores

if TYPE_CHECKING:
    import tensorflow as tf

STEPS_AHEAD = 16
_STEPS_AFTER_WAIT = 256
"""Number of steps for which requests continue after a step had to wait for the disk."""

_feeds: weakref.WeakSet[BatchFeed] = weakref.WeakSet()


@atexit.register
def _settle_all() -> None:
    for feed in list(_feeds):
        feed.settle()


def default_calls() -> int:
    """Return the default number of batches loaded in parallel: the number of cores and a quarter more.

    Batches are delivered in order, and a call that ends early waits until its batch is delivered. The additional calls
    use its core in the meantime.
    """
    cores = count_usable_cores()
    return cores + cores // 4


class BatchFeed:
    """Loader of parts of each step for tf.data (default: all parts), which keeps the first failure.

    An exception in a tf.data function loses its type, and the iterator would continue without the batch. So `failure`
    keeps the first failure, and every later batch raises it too.
    """

    def __init__(self, batches: BatchSampler, parts: Sequence[int] | None = None) -> None:
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

        `BatchSampler` describes the other arguments, and `batches` has their defaults.

        Raises:
            UsageError: this process was forked after TensorFlow ran.
        """
        # Imported late: the other functions work without TensorFlow.
        import tensorflow as tf

        _refuse_fork()
        batches, parts = self.batches, len(self.parts)
        sizes = {len(replica_rows(batches.batch_size, batches.replicas, p)) for p in self.parts}
        rows = sizes.pop() if len(sizes) == 1 else None  # replicas may differ by a row
        names = [field.name for field in batches.fields]
        shapes = [(None if field.ragged else rows, *field.shape) for field in batches.fields]
        types = [tf.as_dtype(field.dtype) for field in batches.fields]
        distance = batches.read_ahead if read_ahead is None else read_ahead
        self._ahead = ReadAhead(batches, self.parts, last_step, distance)
        # TensorFlow never frees the function below, so it must not keep the stores open.
        feed = weakref.ref(self)

        def load_numpy(element: Any) -> tuple[Any, ...]:
            alive = feed()
            if alive is None:
                raise RuntimeError("the dataset has been deleted")
            return alive.load(int(element))

        # AutoGraph has nothing to convert. In Python 3.13 it fails, with a warning, and then keeps the feed alive.
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # tensorflow has no types
        def load(element: tf.Tensor) -> dict[str, tf.Tensor]:
            # Not stateful: with op determinism, TensorFlow runs stateful functions one at a time.
            values = tf.numpy_function(load_numpy, [element], types, stateful=False)
            for value, shape in zip(values, shapes, strict=True):
                value.set_shape(shape)
            return dict(zip(names, values, strict=True))

        calls = parallel_calls or batches.parallel_calls or default_calls()
        dataset = tf.data.Dataset.range(first_step * parts, last_step * parts)
        dataset = dataset.map(load, num_parallel_calls=calls, deterministic=True)
        # Keeps the feed alive as long as the dataset, its iterators and derived datasets.
        dataset.feed = self
        ready = batches.prefetch if prefetch is None else prefetch
        if ready:
            dataset = dataset.prefetch(ready * parts)
        options = tf.data.Options()
        # There is nothing to tune, and closing an iterator would wait for the tuner: up to 7 s per epoch.
        options.autotune.enabled = False
        return dataset.with_options(options)

    def settle(self) -> None:
        """Make every further load fail, and wait for those in progress.

        Called for every feed when Python exits. TensorFlow waits for loads in progress, which would wait forever for
        Python's lock. Without this call, a program that exits during an iteration hangs.
        """
        self.failure = self.failure or RuntimeError("the iterator has been closed")
        if self._ahead is not None:
            self._ahead.close()
        quiet = 0
        while quiet < 3:
            quiet = quiet + 1 if self._running == 0 else 0
            time.sleep(0.01)

    def load(self, element: int) -> tuple[Any, ...]:
        """Load the fields of one element of `dataset`, or raise the failure of this load or of an earlier one."""
        if self.failure is not None or self._ahead is None:
            raise self.failure or RuntimeError("there is no dataset yet")
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


class ReadAhead:
    """Loader of batches that requests the values of the following batches from the disk while it decodes.

    Requests cost a few percent, and a store in the page cache needs none. Major page faults show whether a batch waited
    for the disk. `histopipe.store.reading` explains why the kernel cannot do this.

    `last_step` is the end of the steps, exclusive. `steps` is the number of steps to request in advance: 0 for none,
    None for `STEPS_AHEAD` while batches wait for the disk.
    """

    def __init__(
        self, batches: BatchSampler, parts: Sequence[int], last_step: int, steps: int | None = None
    ) -> None:
        self._batches, self._parts, self._last = batches, parts, last_step
        self._distance = STEPS_AHEAD if steps is None else steps
        self._wanted_until = 0 if steps is None else (1 << 62)
        self._next = 0
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "histopipe-read-ahead") if self._distance else None
        self._window_steps = -(-batches.order.window // batches.batch_size) + 1

    def load(self, step: int, part: int) -> tuple[Any, ...]:
        """Return the fields of a step's part."""
        if self._thread is None:
            return self._batches.values(step, part)
        if step < self._wanted_until:
            self._request_from(step + 1, self._thread)
        before = _major_faults()
        values = self._batches.values(step, part)
        if _major_faults() > before:
            self._wanted_until = max(self._wanted_until, step + _STEPS_AFTER_WAIT)
        return values

    def close(self) -> None:
        """Stop the requests."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _request_from(self, first: int, thread: ThreadPoolExecutor) -> None:
        with self._lock:
            if first + self._distance < self._next - self._window_steps:
                self._next = first  # a new iteration
            begin, end = max(first, self._next), first + self._distance
            if begin >= end:
                return
            end = min(self._last, max(end, self._end_of_window(begin)))
            self._next = end
        if begin < end:
            with contextlib.suppress(
                RuntimeError
            ):  # closed in the meantime, so no requests are needed
                # An error in the thread is raised again when the step is loaded.
                thread.submit(self._batches.advise, range(begin, end), self._parts)

    def _end_of_window(self, step: int) -> int:
        """Return the first step after a step's window: neighbours on disk are requested together."""
        window = self._batches.order.window
        if not window:
            return 0
        epoch, step = divmod(step, self._batches.steps_per_epoch)
        end = (step * self._batches.batch_size // window + 1) * window
        steps = -(-end // self._batches.batch_size)
        return epoch * self._batches.steps_per_epoch + min(steps, self._batches.steps_per_epoch)


def _major_faults() -> int:
    """Return the number of page faults of this thread that waited for a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def _refuse_fork() -> None:
    """Refuse a process forked after TensorFlow ran: its threads are not copied, so TensorFlow would hang."""
    from tensorflow.python.eager import context  # nothing public shows whether it has run

    running = context.context()._initialized
    names = (path.read_text() for path in Path("/proc/self/task").glob("*/comm"))
    if running and not any(name.startswith("tf_") for name in names):
        raise UsageError(
            "TensorFlow ran before this process was forked, and would wait forever for its threads",
            todo="start processes with spawn or forkserver: multiprocessing.get_context('spawn')",
        )
