"""Batches as a `tf.data.Dataset`. TensorFlow provides threads, order and prefetch only."""

from __future__ import annotations

import atexit
import resource
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.dataset.options import (
    Balance,
    PatchColumn,
    StainNorm,
    check_shard,
    check_whole,
    check_whole_or_none,
)
from histopipe.dataset.patch_batches import PatchBatches
from histopipe.dataset.sampling import BatchSampler, make_order, replica_rows
from histopipe.dataset.selection import (
    Classes,
    LabelById,
    SampleRows,
    SampleTable,
    select,
    store_paths,
)
from histopipe.errors import OnError, UsageError
from histopipe.splits.labelling import NO_CLASS, PatchFilter, read_slide_labels
from histopipe.splits.splits import read_splits
from histopipe.splits.subsets import LabelsFrom, Subset
from histopipe.store.store import Store, check_patch_sizes
from histopipe.system.output import counted
from histopipe.system.table_files import NA_VALUES
from histopipe.system.worker_pool import count_usable_cores

if TYPE_CHECKING:
    import tensorflow as tf


STEPS_AHEAD = 16
"""Number of steps whose values are requested in advance. A value on a page that is not in memory costs several page
faults, one after another; with many values requested at once, a disk reads them in parallel."""
_STEPS_AFTER_WAIT = 256
"""Number of steps for which requests continue after a step had to wait for the disk. Requests keep steps from waiting, so
that the end of waits does not show that the store is in the page cache."""

_QUIET_SECONDS = 0.2
"""Time without a call after which TensorFlow makes no more calls, as Python exits."""

_feeds: weakref.WeakSet[BatchFeed] = weakref.WeakSet()


@atexit.register
def _settle_all() -> None:
    feeds = list(_feeds)
    for feed in feeds:
        feed.settle()
    # TensorFlow may have begun calls that have not taken Python's lock yet. They fill its buffers, and then there are none.
    # Without this wait, a program that ended by an exception hung in 1 of 5 runs, and without `settle` in 5 of 5.
    calls = -1 if feeds else 0
    while calls != (total := sum(feed.calls for feed in feeds)):
        calls = total
        time.sleep(_QUIET_SECONDS)


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
        self.calls = 0
        """Number of loads after `settle`, all of which fail."""
        _feeds.add(self)

    def dataset(self, first_step: int, last_step: int) -> tf.data.Dataset:
        """Return a dataset of steps `first_step` to `last_step` - 1, one element per step and part.

        `batches` has the number of parallel calls, and the number of steps to load and to request in advance.

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
        self._ahead = ReadAhead(batches, self.parts, last_step, batches.read_ahead)
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

        dataset = tf.data.Dataset.range(first_step * parts, last_step * parts).map(
            load,
            num_parallel_calls=batches.parallel_calls or default_calls(),
            deterministic=True,
        )
        # Keeps the feed alive as long as the dataset, its iterators and derived datasets.
        dataset.feed = self
        if batches.prefetch:
            dataset = dataset.prefetch(batches.prefetch * parts)
        options = tf.data.Options()
        # There is nothing to tune, and closing an iterator would wait for the tuner: up to 7 s per epoch.
        options.autotune.enabled = False
        return dataset.with_options(options)

    def settle(self) -> None:
        """Make every further load fail, and wait for those in progress.

        Called for every feed when Python exits. TensorFlow waits for loads in progress, which would wait forever for
        Python's lock. Without this call, a program that exits during an iteration hangs.
        """
        with self._lock:
            self.failure = self.failure or RuntimeError("the iterator has been closed")
        if self._ahead is not None:
            self._ahead.close()
        while self._running:
            time.sleep(0.01)

    def load(self, element: int) -> tuple[Any, ...]:
        """Load the fields of one element of `dataset`, or raise the failure of this load or of an earlier one."""
        # One lock for both: a load that has passed the check is counted, so that `settle` waits for it.
        with self._lock:
            if self.failure is not None or self._ahead is None:
                self.calls += 1
                raise self.failure or RuntimeError("there is no dataset yet")
            self._running += 1
        try:
            step, part = divmod(element, len(self.parts))
            with self.batches.stages.reading():
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

    From a disk, it reads 1.2 to 1.4 times as many patches per second (`bench_reader.py cold`). Requests cost a few percent,
    and a store in the page cache needs none: major page faults show whether a batch waited for the disk.
    `histopipe.store.reading` explains why the kernel cannot do this.

    `last_step` is the end of the steps, exclusive. `steps` is the number of steps to request in advance: 0 for none,
    None for `STEPS_AHEAD` while batches wait for the disk.
    """

    def __init__(
        self, batches: BatchSampler, parts: Sequence[int], last_step: int, steps: int | None = None
    ) -> None:
        self._batches, self._parts, self._last = batches, parts, last_step
        self._distance = STEPS_AHEAD if steps is None else steps
        self._until = 0 if steps is None else (1 << 62)  # requests are made for steps before it
        self._next = 0
        self._lock = threading.Lock()
        # The thread starts with the first request: without requests, there is none.
        self._thread = ThreadPoolExecutor(1, "histopipe-read-ahead")
        self._window_steps = -(-batches.order.window // batches.batch_size) + 1

    def load(self, step: int, part: int) -> tuple[Any, ...]:
        """Return the fields of a step's part."""
        if step < self._until:
            self._request_from(step + 1)
        before = _major_faults()
        values = tuple(self._batches.load(step, part).values())
        if _major_faults() > before:
            self._until = max(self._until, step + _STEPS_AFTER_WAIT)
        return values

    def close(self) -> None:
        """Stop the requests."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _request_from(self, first: int) -> None:
        with self._lock:
            if first + self._distance < self._next - self._window_steps:
                self._next = first  # a new iteration
            begin, end = max(first, self._next), first + self._distance
            if begin >= end:
                return
            end = min(self._last, max(end, self._end_of_window(begin)))
            self._next = end
        if begin < end:
            # If it has been closed in the meantime, no requests are needed.
            with suppress(RuntimeError):
                # An error in the thread is raised again when the step is loaded.
                self._thread.submit(self._batches.advise, range(begin, end), self._parts)

    def _end_of_window(self, step: int) -> int:
        """Return the first step after a step's window. Neighbours on disk are requested together.

        With `shuffle_block=256`, an epoch of 3,113 patches is 66 requests, not 2,727: for disks that are slow per request.
        """
        batches, window = self._batches, self._batches.order.window
        if not window:
            return 0
        epoch, step = divmod(step, batches.steps_per_epoch)
        end = (step * batches.batch_size // window + 1) * window
        steps = -(-end // batches.batch_size)
        return epoch * batches.steps_per_epoch + min(steps, batches.steps_per_epoch)


def _major_faults() -> int:
    """Return the number of page faults of this thread that waited for a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def _refuse_fork() -> None:
    """Refuse a process forked after TensorFlow ran: its threads are not copied, so TensorFlow would hang."""
    from tensorflow.python.eager import context  # nothing public shows whether it has run

    names = (path.read_text() for path in Path("/proc/self/task").glob("*/comm"))
    if context.context()._initialized and not any(name.startswith("tf_") for name in names):
        raise UsageError(
            "TensorFlow ran before this process was forked, and would wait forever for its threads",
            todo="start processes with spawn or forkserver: multiprocessing.get_context('spawn')",
        )


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
    labels: str | Path | LabelById | None = None,
    na: Sequence[str] = NA_VALUES,
    labelled_only: bool = False,
    labels_from: LabelsFrom = "slide",
    min_tissue: float = 0.0,
    min_focus: float = 0.0,
    exclude_pen: float = 1.0,
    exclude_dark: float = 1.0,
    splits: str | Path | None = None,
    side: Subset = "train",
    columns: Sequence[PatchColumn] = (),
    as_supervised: bool = False,
    stain_norm: StainNorm = "none",
    on_error: OnError = "raise",
    parallel_calls: int | None = None,
    prefetch: int = BatchSampler.prefetch,
    read_ahead: int | None = None,
) -> tf.data.Dataset:
    """Load the patches of complete slides as batches, decoded on the fly and shuffled over all slides.

    The content of a step depends on the arguments only: the same arguments give the same batches after a restart.

    Args:
        path: a store, or several whose patches are of one size.
        batch_size: patches per batch of each shard. The last batch of an epoch is padded with patches of weight 0.
        seed: seed of the order; required to shuffle.
        epochs: number of passes over all patches, each in a new order.
        start_step: first step to yield, counted over all epochs. Skipping steps costs nothing.
        shuffle: False keeps the order of the stores.
        shuffle_block: shuffle blocks of this many neighbours, and patches within every 16 blocks. For hard disks and
            network filesystems; 256 is a good size.
        balance: draw every "class", "slide" or "patient" equally often. The length of an epoch is rounded up to a
            multiple of the number of classes, slides or patients. Patches of small groups are repeated. For large
            groups, each epoch draws different patches.
        max_per_slide: maximum number of patches per slide and epoch; each epoch draws different ones. With labels from
            annotations, the maximum is per class of a slide.
        shard: (index, count): yield only this worker's part of each step. All shards together are one epoch, and have the
            same number of steps.
        classes: names of the classes in the order of their numbers, or numbers by name; default: the sorted labels.
        labels: a labels CSV, or labels by slide id; replaces the recorded labels.
        na: cells of a labels CSV that are missing values, apart from the empty cell.
        labelled_only: leave out slides, or patches, without a label in `classes`. Otherwise they have label -1.
        labels_from: "annotation" takes the class of each patch from `histopipe annotate`. `splits` record their source.
        min_tissue: minimum tissue share of a patch, 0 to 1.
        min_focus, exclude_pen, exclude_dark: minimum focus; maximum share of pen, and of folds and black
            (`histopipe quality`).
        splits: `splits.json` of a run; only patches on `side` are read.
        side: "train", "validation", "test", or "calibration" of prediction sets.
        columns: additional fields: "x_l0", "y_l0" (level-0 pixels), "slide" (its id).
        as_supervised: yield tuples (image, label, weight) for `keras.Model.fit` instead of dictionaries. Every patch
            must have a label.
        stain_norm: "reinhard" or "macenko" normalizes the stain of every slide to one reference; see `histopipe stains`.
        on_error: "raise" stops at a damaged patch. "skip" gives it weight 0, logs it, and records it in the dataset's
            attribute `skipped`, a dictionary of reasons by key.
        parallel_calls: number of batches decoded in parallel; default: the number of cores and a quarter more.
        prefetch: number of batches to load in advance.
        read_ahead: number of batches to request from disk in advance; default: 16 while batches wait for the disk.

    Returns:
        A finite `tf.data.Dataset` of {"image": (B, H, W, 3) uint8, "label": (B,) int32, "weight": (B,) float32,
        "key": (B,) int64} and, if requested, "x_l0", "y_l0": (B,) int32, "slide": (B,) string. Its attribute
        `steps_per_epoch` is the number of batches of one epoch.

    Raises:
        UsageError: arguments are wrong or contradict each other, the stores have different patch sizes, or this process was
            forked after TensorFlow ran, so that TensorFlow would hang.
        NothingToDo: there is no store, or no patch.
        DamagedStore: a store cannot be read. During iteration, TensorFlow raises another error with this message.

    Example:
        >>> for batch in load_dataset("patches.lmdb", batch_size=64, seed=1):  # doctest: +SKIP
        ...     batch["image"].shape

        Keras iterates a dataset once per epoch, and each iteration has the same order. For a new order in each epoch,
        pass the number of epochs to both functions, and the steps per epoch to Keras:

        >>> train = load_dataset("patches.lmdb", batch_size=64, seed=1, epochs=5, as_supervised=True)  # doctest: +SKIP
        >>> model.fit(train, epochs=5, steps_per_epoch=train.steps_per_epoch)  # doctest: +SKIP
    """
    if as_supervised and columns:
        raise UsageError("columns", found=repr(columns), expected="none, with as_supervised=True")
    check_whole(1, batch_size=batch_size, epochs=epochs)
    check_whole(0, start_step=start_step, prefetch=prefetch)
    check_whole_or_none(0, seed=seed, read_ahead=read_ahead)
    check_whole_or_none(
        1, parallel_calls=parallel_calls, max_per_slide=max_per_slide, shuffle_block=shuffle_block
    )
    index, count = check_shard(shard)
    patch_filter = PatchFilter(
        min_tissue=min_tissue,
        min_focus=min_focus,
        exclude_pen=exclude_pen,
        exclude_dark=exclude_dark,
    )
    _check_sources(labels, labels_from, splits, side)
    if shuffle and seed is None:
        raise UsageError(
            "load_dataset shuffles, but has no seed",
            todo="call load_dataset(..., seed=1), or shuffle=False to keep the order of the stores",
        )
    seed = seed if shuffle else None
    with ExitStack() as stack:
        stores = [stack.enter_context(Store(part)) for part in store_paths(path)]
        check_patch_sizes(stores)
        slides = _select_slides(
            stores,
            *(labels, na, splits, as_supervised),
            classes=classes,
            labelled_only=labelled_only,
            subset=side,
            labels_from=labels_from,
            patch_filter=patch_filter,
        )
        table = SampleTable(slides, max_per_slide=max_per_slide, seed=seed)
        batches = PatchBatches(
            stores,
            table,
            batch_size=batch_size * count,
            replicas=count,
            on_error=on_error,
            order=make_order(table, seed=seed, balance=balance, shuffle_block=shuffle_block),
            columns=columns,
        )
        last_step = epochs * batches.steps_per_epoch
        if start_step > last_step:
            raise UsageError("start_step", found=start_step, expected=f"0 to {last_step}")
        batches.parallel_calls, batches.read_ahead = parallel_calls, read_ahead
        batches.prefetch = prefetch
        feed = BatchFeed(batches, parts=(index,))
        dataset = _converted(
            feed.dataset(start_step, last_step), stores, stain_norm, as_supervised=as_supervised
        )
        dataset.skipped, dataset.steps_per_epoch = batches.skipped, batches.steps_per_epoch
        stack.pop_all()
    # Stores stay open while a dataset or an iterator can load a batch.
    for store in stores:
        weakref.finalize(feed, store.close_later)
    return dataset


def _check_sources(labels: object, labels_from: LabelsFrom, splits: object, side: Subset) -> None:
    if labels_from == "annotation" and labels is not None:
        raise UsageError("labels", found="labels_from='annotation'", expected="only one of the two")
    if splits is None and side != "train":
        raise UsageError(
            f"side={side!r} requires splits", todo="pass splits=, the splits.json of a run"
        )


def _select_slides(
    stores: Sequence[Store],
    labels: str | Path | LabelById | None,
    na: Sequence[str],
    splits: str | Path | None,
    as_supervised: bool,
    **selection: Any,
) -> list[SampleRows]:
    """Read labels and splits, and select slides; see `select` for the other arguments."""
    if isinstance(labels, str | Path):
        rows = read_slide_labels(labels, stores, na=na)
        labels = {slide: row.label for slide, row in rows.items()}
    read = None if splits is None else read_splits(Path(splits), stores)
    slides = select(stores, labels=labels, splits=read, **selection)
    unlabelled = sum(slide.label == NO_CLASS for slide in slides)
    if as_supervised and unlabelled:  # losses do not accept label -1, even with weight 0
        raise UsageError(
            "as_supervised",
            found=f"{counted(unlabelled, 'slide')} without a label of the classes",
            expected="a label for every patch",
            todo="exclude them with labelled_only=True, or label them",
        )
    return slides


def _converted(
    dataset: tf.data.Dataset,
    stores: Sequence[Store],
    stain_norm: StainNorm,
    *,
    as_supervised: bool,
) -> tf.data.Dataset:
    """Normalize the stain of the images of every batch, and convert dictionaries to the tuples of Keras."""
    if stain_norm != "none":
        # Imported late: they load TensorFlow.
        from histopipe.dataset.augmentation import to_uint8
        from histopipe.dataset.stain_normalization import stain_normalizer

        normalize = stain_normalizer(stores, stain_norm)
        dataset = dataset.map(
            lambda b: {**b, "image": to_uint8(normalize(b["image"], b["key"]))},
            num_parallel_calls=BatchSampler.prefetch,
            deterministic=True,
        ).prefetch(1)
    if as_supervised:
        dataset = dataset.map(lambda batch: (batch["image"], batch["label"], batch["weight"]))
    return dataset
