"""Batches as a `tf.data.Dataset`. TensorFlow provides threads, order and prefetch only."""

from __future__ import annotations

import atexit
import resource
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.annotations.rules import PixelRules
from histopipe.dataset.batches import PatchBatches
from histopipe.dataset.patch_masks import open_stores
from histopipe.dataset.sampling import BatchSampler, make_order, replica_rows
from histopipe.dataset.selection import (
    LabelById,
    LoadOptions,
    SampleRows,
    SampleTable,
    check_whole,
    select,
    store_paths,
)
from histopipe.errors import UsageError
from histopipe.splits.labelling import NO_CLASS, PatchFilter, read_slide_labels
from histopipe.splits.splits import read_splits
from histopipe.store.store import Store
from histopipe.system.output import counted
from histopipe.system.settings import (
    check_type,
    declared_settings,
    flag,
    make_settings,
    split_settings,
    takes,
)
from histopipe.system.worker_pool import count_usable_cores
from histopipe.tasks.choices import StainNorm, Subset

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


@takes(declared_settings(LoadOptions, PixelRules))
def load_dataset(
    path: str | Path | Sequence[str | Path],
    *,
    batch_size: int,
    seed: int | None = None,
    epochs: int = 1,
    as_supervised: bool = False,
    labels: str | Path | LabelById | None = None,
    splits: str | Path | None = None,
    subset: Subset = "train",
    masks: str | Path | None = None,
    **settings: Any,
) -> tf.data.Dataset:
    """Load the patches of complete slides as batches, decoded on the fly and shuffled over all slides.

    The content of a step depends on the arguments only: the same arguments give the same batches after a restart.

    Args:
        path: a store, or several whose patches are of one size.
        batch_size: patches per batch of each shard. The last batch of an epoch is padded with patches of weight 0.
        seed: seed of the order; required to shuffle.
        epochs: number of passes over all patches, each in a new order.
        as_supervised: yield tuples (image, label, weight) for `keras.Model.fit` instead of dictionaries. Every patch
            must have a label.
        labels: a labels CSV, or labels by slide id; replaces the recorded labels.
        splits: `splits.json` of a run; only patches of `subset` are read.
        subset: "train", "validation", "test", or "calibration" of prediction sets. Its name was `side` up to version 0.2.
        masks: folder of annotations SLIDE.geojson, SLIDE.xml, …, or with `mask_values` of label images SLIDE.png. Batches
            have the class of each pixel, as "mask"; 255 where nothing is annotated. With `as_supervised`, it takes the place
            of the label: use a loss with `ignore_class=255`.
        settings: further options by name, as in docs/reference/settings.md.

    Returns:
        A finite `tf.data.Dataset` of {"image": (B, H, W, 3) uint8, "label": (B,) int32, "weight": (B,) float32,
        "key": (B,) int64} and, if requested, "mask": (B, H, W) uint8, "x_l0", "y_l0": (B,) int32, "slide": (B,) string. Its
        attribute `steps_per_epoch` is the number of batches of one epoch, and `classes` has the names of the classes of
        masks.

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
    if "side" in settings:
        warnings.warn("side= of load_dataset is now subset=", FutureWarning, stacklevel=3)
        if subset != "train":
            raise UsageError("side", found=f"subset={subset!r}, too", expected="subset only")
        subset = settings.pop("side")
        check_type("side", subset, Subset)
    of_masks, of_loading = split_settings(settings, PixelRules)
    rules, options = make_settings(PixelRules, of_masks), make_settings(LoadOptions, of_loading)
    if masks is not None:
        options = replace(options, labels_from="annotation")
    elif of_masks:
        raise UsageError(flag(next(iter(of_masks))), found="no masks", expected="masks=, a folder")
    check_whole(1, batch_size=batch_size, epochs=epochs)
    _check_order(options, seed)
    _check_sources(labels, options, splits, subset, as_supervised=as_supervised)
    with ExitStack() as stack:
        stores = open_stores(store_paths(path), masks, rules, stack=stack, classes=options.classes)
        slides = _select_slides(
            stores, labels, splits, subset, options, as_supervised=as_supervised and masks is None
        )
        batches = _batches(stores, slides, options, batch_size, seed if options.shuffle else None)
        last_step = epochs * batches.steps_per_epoch
        if options.start_step > last_step:
            raise UsageError("start_step", found=options.start_step, expected=f"0 to {last_step}")
        feed = BatchFeed(batches, parts=(options.shard[0],))
        dataset = _converted(
            feed.dataset(options.start_step, last_step),
            stores,
            options.stain_norm,
            as_supervised=as_supervised,
        )
        dataset.skipped, dataset.steps_per_epoch = batches.skipped, batches.steps_per_epoch
        dataset.classes = stores[0].classes if masks is not None else ()
        stack.pop_all()
    # Stores stay open while a dataset or an iterator can load a batch.
    for store in stores:
        weakref.finalize(feed, store.close_later)
    return dataset


def _check_order(options: LoadOptions, seed: int | None) -> None:
    if seed is not None:
        check_whole(0, seed=seed)
    elif options.shuffle:
        raise UsageError(
            "load_dataset shuffles, but has no seed",
            todo="call load_dataset(..., seed=1), or shuffle=False to keep the order of the stores",
        )


def _check_sources(
    labels: object,
    options: LoadOptions,
    splits: object,
    subset: Subset,
    *,
    as_supervised: bool,
) -> None:
    if as_supervised and options.columns:
        raise UsageError(
            "columns", found=repr(options.columns), expected="none, with as_supervised=True"
        )
    if options.labels_from == "annotation" and labels is not None:
        raise UsageError("labels", found="labels_from='annotation'", expected="only one of the two")
    if splits is None and subset != "train":
        raise UsageError(
            f"subset={subset!r} requires splits", todo="pass splits=, the splits.json of a run"
        )


def _batches(
    stores: Sequence[Store],
    slides: Sequence[SampleRows],
    options: LoadOptions,
    batch_size: int,
    seed: int | None,
) -> PatchBatches:
    """Return the batches of all shards, in the order of the options."""
    table, count = (
        SampleTable(slides, max_per_slide=options.max_per_slide, seed=seed),
        options.shard[1],
    )
    batches = PatchBatches(
        stores,
        table,
        batch_size=batch_size * count,
        replicas=count,
        on_error=options.on_error,
        order=make_order(
            table, seed=seed, balance=options.balance, shuffle_block=options.shuffle_block
        ),
        columns=options.columns,
    )
    batches.parallel_calls, batches.read_ahead = options.parallel_calls, options.read_ahead
    batches.prefetch = options.prefetch
    return batches


def _select_slides(
    stores: Sequence[Store],
    labels: str | Path | LabelById | None,
    splits: str | Path | None,
    subset: Subset,
    options: LoadOptions,
    *,
    as_supervised: bool,
) -> list[SampleRows]:
    """Read labels and splits, and select the patches of a subset."""
    if isinstance(labels, str | Path):
        rows = read_slide_labels(labels, stores, na=options.na)
        labels = {slide: row.label for slide, row in rows.items()}
    slides = select(
        stores,
        labels=labels,
        splits=None if splits is None else read_splits(Path(splits), stores),
        classes=options.classes,
        labelled_only=options.labelled_only,
        subset=subset,
        labels_from=options.labels_from,
        patch_filter=PatchFilter(
            min_tissue=options.min_tissue,
            min_focus=options.min_focus,
            exclude_pen=options.exclude_pen,
            exclude_dark=options.exclude_dark,
        ),
    )
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
        from histopipe.dataset.transforms import stain_normalizer, to_uint8

        normalize = stain_normalizer(stores, stain_norm)
        dataset = dataset.map(
            lambda b: {**b, "image": to_uint8(normalize(b["image"], b["key"]))},
            num_parallel_calls=BatchSampler.prefetch,
            deterministic=True,
        ).prefetch(1)
    if as_supervised:
        dataset = dataset.map(
            lambda batch: (
                (batch["image"], batch["mask"], batch["weight"][:, None, None])
                if "mask" in batch
                else (batch["image"], batch["label"], batch["weight"])
            )
        )
    return dataset
