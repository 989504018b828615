"""Batches as a `tf.data.Dataset`. TensorFlow supplies threads, order and prefetch, and nothing else."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from histopipe.dataset.batches import Batches
from histopipe.dataset.table import class_names, whole_table
from histopipe.errors import UsageError
from histopipe.store.store import Store, check_patch_sizes

if TYPE_CHECKING:
    import tensorflow as tf

_FIELDS = ("image", "label", "weight", "key")


def load_dataset(
    path: str | Path | Sequence[str | Path],
    *,
    batch_size: int,
    seed: int | None = None,
    epochs: int = 1,
    start_step: int = 0,
    shuffle: bool = True,
    classes: Sequence[str] | None = None,
    labelled_only: bool = False,
) -> tf.data.Dataset:
    """Patches of complete slides as batches, decoded on the fly, shuffled over all of them.

    Args:
        path: a store, or several.
        batch_size: patches a batch. The last one of an epoch is filled up with patches of weight 0.
        seed: decides the order; needed to shuffle.
        epochs: how often to go through all patches, in a new order each time.
        start_step: first step to yield, counted over all epochs. Any step is reached at once.
        shuffle: False reads in the stores' order.
        classes: names of the classes in the order of their numbers; the slides' labels, sorted, if not given.
        labelled_only: leave out slides without a label of `classes`, which otherwise have label -1.

    Returns:
        A `tf.data.Dataset` of {"image": (B, H, W, 3) uint8, "label": (B,) int32, "weight": (B,) float32, "key": (B,) int64}.

    Raises:
        UsageError: shuffling without a seed, or stores of different patch sizes.
        NothingToDo: no store, or no patch.
        DamagedStore: a store cannot be read. While iterating, TensorFlow hides the type of such an error in its message.

    Example:
        >>> for batch in load_dataset("patches.lmdb", batch_size=64, seed=1):  # doctest: +SKIP
        ...     batch["image"].shape
    """
    if shuffle and seed is None:
        raise UsageError(
            "load_dataset shuffles, but has no seed",
            todo="call load_dataset(..., seed=1), or shuffle=False to read in the stores' order",
        )
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(part) for part in path]
    stores = [Store(part) for part in paths]
    check_patch_sizes(stores)
    names = classes or class_names([r for store in stores for r in store.complete.values()])
    table = whole_table(stores, names, labelled_only=labelled_only)
    batches = Batches(stores, table, batch_size=batch_size, seed=seed if shuffle else None)
    return BatchSource(batches).dataset(start_step, epochs * batches.steps_per_epoch)


_sources: weakref.WeakSet[BatchSource] = weakref.WeakSet()


@atexit.register
def _settle_all() -> None:
    for source in list(_sources):
        source.settle()


class BatchSource:
    """Serves batches to tf.data and remembers what went wrong.

    An exception inside a tf.data function loses its type, and the iterator would go on behind it with a batch missing. So
    the first failure is kept in `failure`, and every later batch fails with it too.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.failure: Exception | None = None
        self._lock = threading.Lock()
        self._running = 0
        _sources.add(self)

    def dataset(
        self, first_step: int, last_step: int, *, parallel_calls: int | None = None
    ) -> tf.data.Dataset:
        """Steps `first_step` to `last_step` - 1, one element a step and replica, replicas in turn.

        Args:
            parallel_calls: batches decoded at once; one a core if not given.
        """
        # Late: everything above works without TensorFlow.
        import tensorflow as tf

        batches, replicas = self.batches, self.batches.replicas
        rows, side = batches.rows_per_replica, batches.patch_size
        shapes = ((rows, side, side, 3), (rows,), (rows,), (rows,))
        types = (tf.uint8, tf.int32, tf.float32, tf.int64)

        def load(element: tf.Tensor) -> dict[str, tf.Tensor]:
            # Not stateful: it is a pure function, and op determinism would run it one at a time.
            values = tf.numpy_function(self._load, [element], types, stateful=False)
            for value, shape in zip(values, shapes, strict=True):
                value.set_shape(shape)
            return dict(zip(_FIELDS, values, strict=True))

        calls = parallel_calls or len(os.sched_getaffinity(0))
        dataset = tf.data.Dataset.range(first_step * replicas, last_step * replicas)
        dataset = dataset.map(load, num_parallel_calls=calls, deterministic=True)
        # A batch is megabytes: enough are kept ready to ride out one slow read, not to fill memory.
        dataset = dataset.prefetch(2 * replicas)
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
        quiet = 0
        while quiet < 3:
            quiet = quiet + 1 if self._running == 0 else 0
            time.sleep(0.01)

    def _load(self, element: Any) -> tuple[Any, ...]:
        if self.failure is not None:
            raise self.failure
        with self._lock:
            self._running += 1
        try:
            batch = self.batches.load(*divmod(int(element), self.batches.replicas))
        except Exception as error:
            with self._lock:
                self.failure = self.failure or error
            raise
        finally:
            with self._lock:
                self._running -= 1
        return batch.image, batch.label, batch.weight, np.asarray(batch.key)
