"""Batches as a `tf.data.Dataset`. TensorFlow supplies threads, order and prefetch, and nothing else."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from histopipe.dataset.arguments import check_whole, check_whole_or_none, shard_of, store_paths
from histopipe.dataset.batches import Batches, Column, OnError
from histopipe.dataset.kinds import StainNorm
from histopipe.dataset.read_ahead import ReadAhead
from histopipe.dataset.sampling import Balance, make_order
from histopipe.dataset.selection import Classes, Labels, select
from histopipe.dataset.splits import Side, read_splits
from histopipe.dataset.table import PatchTable
from histopipe.errors import UsageError
from histopipe.slides.tables import SlideNames, read_labels
from histopipe.store.store import Store, check_patch_sizes

if TYPE_CHECKING:
    import tensorflow as tf

_FIELDS = ("image", "label", "weight", "key")
_PREFETCH = 2


def load_dataset(
    path: str | Path | Sequence[str | Path],
    *,
    batch_size: int,
    seed: int | None = None,
    epochs: int = 1,
    start_step: int = 0,
    shuffle: bool = True,
    shuffle_block: int | None = None,
    balance: Balance = "none",
    max_per_slide: int | None = None,
    shard: tuple[int, int] = (0, 1),
    classes: Classes | None = None,
    labels: str | Path | Labels | None = None,
    labelled_only: bool = False,
    splits: str | Path | None = None,
    side: Side = "train",
    columns: Sequence[Column] = (),
    stain_norm: StainNorm = "none",
    on_error: OnError = "raise",
    parallel_calls: int | None = None,
    prefetch: int = _PREFETCH,
    read_ahead: int | None = None,
) -> tf.data.Dataset:
    """Patches of complete slides as batches, decoded on the fly, shuffled over all of them.

    What a step holds depends on the arguments alone: the same ones give the same batches after any restart.

    Args:
        path: a store, or several, whose patches are of one size.
        batch_size: patches a batch, of each shard. The last batch of an epoch is filled up with patches of weight 0.
        seed: decides the order; needed to shuffle.
        epochs: how often to go through all patches, in a new order each time.
        start_step: first step to yield, counted over all epochs. Any step is reached at once.
        shuffle: False reads in the stores' order.
        shuffle_block: shuffle blocks of so many neighbours, and patches within every 16 blocks: for hard disks and network
            filesystems, where 256 is a good size.
        balance: draw "class", "slide" or "patient" equally often. An epoch then has as many patches as without, rounded up
            to a whole number for each of them; small ones come up several times, of large ones each epoch shows another part.
        max_per_slide: different patches of a slide in an epoch, at most; other ones in each epoch.
        shard: (index, count): yield only this worker's part of each step. All shards together are exactly one epoch, and
            have equally many steps.
        classes: names of the classes in the order of their numbers, or numbers by name; the labels, sorted, if not given.
        labels: a labels CSV, or labels by slide id, in place of the recorded ones.
        labelled_only: leave out slides without a label of `classes`, which otherwise have label -1.
        splits: a run's `splits.json`; only patches on `side` of it are read.
        side: "train", "validation" or "test".
        columns: more fields: "x_l0", "y_l0" (level-0 pixels), "slide" (its id).
        stain_norm: "reinhard" or "macenko" gives every slide the stain of one reference; see `histopipe stains`.
        on_error: "raise" ends at a damaged patch; "skip" gives it weight 0, logs it, and notes it in the dataset's
            attribute `skipped`, a dictionary of reasons by key.
        parallel_calls: batches decoded at once; one a core if not given.
        prefetch: batches kept ready.
        read_ahead: batches to ask a disk for before they are wanted; 16 while the disk is waited for, if not given.

    Returns:
        A `tf.data.Dataset` of {"image": (B, H, W, 3) uint8, "label": (B,) int32, "weight": (B,) float32, "key": (B,) int64}
        and, where asked for, "x_l0", "y_l0": (B,) int32, "slide": (B,) string.

    Raises:
        UsageError: arguments that make no sense or do not go together, stores of different patch sizes, or a process that
            was forked after TensorFlow had run, which would hang.
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
    check_whole(1, batch_size=batch_size, epochs=epochs)
    check_whole(0, start_step=start_step, prefetch=prefetch)
    check_whole_or_none(0, seed=seed, read_ahead=read_ahead)
    check_whole_or_none(
        1, parallel_calls=parallel_calls, max_per_slide=max_per_slide, shuffle_block=shuffle_block
    )
    index, count = shard_of(shard)
    if splits is None and side != "train":
        raise UsageError(
            f"side={side!r} is a side of splits", todo="give splits=, a run's splits.json"
        )
    paths = store_paths(path)
    seed = seed if shuffle else None
    with ExitStack() as stack:
        stores = [stack.enter_context(Store(part)) for part in paths]
        check_patch_sizes(stores)
        chosen = select(
            stores, classes=classes, labels=_labels(labels, stores), labelled_only=labelled_only,
            splits=read_splits(Path(splits), stores) if splits is not None else None, side=side,
        )  # fmt: skip
        table = PatchTable(chosen, max_per_slide=max_per_slide, seed=seed)
        batches = Batches(
            stores, table, batch_size=batch_size * count, replicas=count, on_error=on_error,
            order=make_order(table, seed=seed, balance=balance, shuffle_block=shuffle_block),
            columns=columns,
        )  # fmt: skip
        source = BatchSource(batches, parts=(index,))
        last_step = epochs * batches.steps_per_epoch
        if start_step > last_step:
            raise UsageError("start_step", found=start_step, expected=f"0 to {last_step}")
        dataset = source.dataset(
            start_step, last_step,
            parallel_calls=parallel_calls, prefetch=prefetch, read_ahead=read_ahead,
        )  # fmt: skip
        if stain_norm != "none":
            dataset = _normalised(dataset, stores, stain_norm)
        dataset.skipped = batches.skipped
        stack.pop_all()
        # They stay open for as long as anything can load a batch.
        for store in stores:
            weakref.finalize(source, store.close_later)
    return dataset


def _normalised(
    dataset: tf.data.Dataset, stores: Sequence[Store], method: StainNorm
) -> tf.data.Dataset:
    # Late: they load TensorFlow.
    from histopipe.dataset.augmentation import to_uint8
    from histopipe.dataset.stain import StainNormaliser

    normalise = StainNormaliser(stores, method)
    dataset = dataset.map(
        lambda b: {**b, "image": to_uint8(normalise(b["image"], b["key"]))},
        num_parallel_calls=_PREFETCH, deterministic=True,
    )  # fmt: skip
    return dataset.prefetch(1)


def _labels(
    labels: str | Path | Labels | None, stores: Sequence[Store]
) -> Mapping[str, str | None] | None:
    if not isinstance(labels, str | Path):
        return labels
    names = SlideNames(record.id for store in stores for record in store.slides)
    return {name: row.label for name, row in read_labels(Path(labels), names).items()}


_sources: weakref.WeakSet[BatchSource] = weakref.WeakSet()


@atexit.register
def _settle_all() -> None:
    for source in list(_sources):
        source.settle()


class BatchSource:
    """Serves batches to tf.data and remembers what went wrong.

    An exception inside a tf.data function loses its type, and the iterator would go on behind it with a batch missing. So
    the first failure is kept in `failure`, and every later batch fails with it too.

    Args:
        batches: what is served.
        parts: which parts of each step, in turn; all of them if not given.
    """

    def __init__(self, batches: Batches, parts: Sequence[int] | None = None) -> None:
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
        prefetch: int = _PREFETCH,
        read_ahead: int | None = None,
    ) -> tf.data.Dataset:
        """Steps `first_step` to `last_step` - 1, one element a step and part, parts in turn.

        Args:
            parallel_calls: batches decoded at once; one a core if not given.
            prefetch: steps kept ready. A batch is megabytes: enough to ride out one slow read, not to fill memory.
            read_ahead: see `ReadAhead`.

        Raises:
            UsageError: this process was forked after TensorFlow had run.
        """
        # Late: everything above works without TensorFlow.
        import tensorflow as tf

        _refuse_fork()
        batches, parts = self.batches, len(self.parts)
        side = batches.patch_size
        sizes = {len(batches.rows(part)) for part in self.parts}
        rows = sizes.pop() if len(sizes) == 1 else None  # replicas may differ by a row
        column_types = {"x_l0": tf.int32, "y_l0": tf.int32, "slide": tf.string}
        fields = (*_FIELDS, *batches.columns)
        shapes = ((rows, side, side, 3), *[(rows,)] * (len(fields) - 1))
        types = (
            tf.uint8, tf.int32, tf.float32, tf.int64,
            *(column_types[name] for name in batches.columns),
        )  # fmt: skip
        self._ahead = ReadAhead(batches, self.parts, last_step, read_ahead)
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
            return dict(zip(fields, values, strict=True))

        calls = parallel_calls or len(os.sched_getaffinity(0))
        dataset = tf.data.Dataset.range(first_step * parts, last_step * parts)
        dataset = dataset.map(load, num_parallel_calls=calls, deterministic=True)
        dataset.source = (
            self  # which thus lives as long as the dataset, its iterators and what is made of it
        )
        dataset = dataset.prefetch(prefetch * parts)
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
            batch = self._ahead.load(step, self.parts[part])
        except Exception as error:
            with self._lock:
                self.failure = self.failure or error
            raise
        finally:
            with self._lock:
                self._running -= 1
        columns = (batch.columns[name] for name in self.batches.columns)
        return batch.image, batch.label, batch.weight, np.asarray(batch.key), *columns


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
