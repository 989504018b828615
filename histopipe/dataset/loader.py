"""`load_dataset`: the patches of stores as a `tf.data.Dataset`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from histopipe.dataset.options import (
    Balance,
    OnError,
    PatchColumn,
    StainNorm,
    check_shard,
    check_whole,
    check_whole_or_none,
)
from histopipe.dataset.patch_batches import PatchBatches
from histopipe.dataset.sample_table import UNLABELLED, SampleRows, SampleTable
from histopipe.dataset.sampling import make_order
from histopipe.dataset.selection import Classes, LabelById, select, store_paths
from histopipe.dataset.tf_data import BatchFeed
from histopipe.errors import UsageError
from histopipe.splits.labelling import PatchFilter, read_slide_labels
from histopipe.splits.splits import read_splits
from histopipe.splits.subsets import LabelsFrom, Subset
from histopipe.store.store import Store, check_patch_sizes
from histopipe.system.csv_files import NA_VALUES
from histopipe.system.result import counted

if TYPE_CHECKING:
    import tensorflow as tf

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
    prefetch: int = _PREFETCH,
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
        side: "train", "validation" or "test".
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
        min_tissue=min_tissue, min_focus=min_focus, exclude_pen=exclude_pen,
        exclude_dark=exclude_dark,
    )  # fmt: skip
    _check_selection(labels, labels_from, splits, side)
    seed = _order_seed(shuffle, seed)
    with ExitStack() as stack:
        stores = [stack.enter_context(Store(part)) for part in store_paths(path)]
        check_patch_sizes(stores)
        if isinstance(labels, str | Path):
            labels = {
                slide: row.label for slide, row in read_slide_labels(labels, stores, na=na).items()
            }
        chosen = select(
            stores, classes=classes, labels=labels, labelled_only=labelled_only, subset=side,
            splits=None if splits is None else read_splits(Path(splits), stores),
            labels_from=labels_from, patch_filter=patch_filter,
        )  # fmt: skip
        if as_supervised:
            _check_labelled(chosen)
        table = SampleTable(chosen, max_per_slide=max_per_slide, seed=seed)
        batches = PatchBatches(
            stores, table, batch_size=batch_size * count, replicas=count, on_error=on_error,
            order=make_order(table, seed=seed, balance=balance, shuffle_block=shuffle_block),
            columns=columns,
        )  # fmt: skip
        last_step = epochs * batches.steps_per_epoch
        if start_step > last_step:
            raise UsageError("start_step", found=start_step, expected=f"0 to {last_step}")
        feed = BatchFeed(batches, parts=(index,))
        dataset = feed.dataset(
            start_step, last_step,
            parallel_calls=parallel_calls, prefetch=prefetch, read_ahead=read_ahead,
        )  # fmt: skip
        if stain_norm != "none":
            dataset = _normalized(dataset, stores, stain_norm)
        if as_supervised:
            dataset = dataset.map(lambda batch: (batch["image"], batch["label"], batch["weight"]))
        dataset.skipped, dataset.steps_per_epoch = batches.skipped, batches.steps_per_epoch
        stack.pop_all()
        # Stores stay open while a dataset or an iterator can load a batch.
        for store in stores:
            weakref.finalize(feed, store.close_later)
    return dataset


def _order_seed(shuffle: bool, seed: int | None) -> int | None:
    """Return the seed of the order; None for the order of the stores."""
    if shuffle and seed is None:
        raise UsageError(
            "load_dataset shuffles, but has no seed",
            todo="call load_dataset(..., seed=1), or shuffle=False to keep the order of the stores",
        )
    return seed if shuffle else None


def _check_selection(
    labels: object, labels_from: LabelsFrom, splits: str | Path | None, side: Subset
) -> None:
    """Check that options of the selection do not contradict each other."""
    if labels_from == "annotation" and labels is not None:
        raise UsageError("labels", found="labels_from='annotation'", expected="only one of the two")
    if splits is None and side != "train":
        raise UsageError(
            f"side={side!r} requires splits", todo="pass splits=, the splits.json of a run"
        )


def _check_labelled(slides: Sequence[SampleRows]) -> None:
    """Check that all slides have a label. Loss functions do not accept label -1, even with weight 0."""
    unlabelled = sum(slide.label == UNLABELLED for slide in slides)
    if unlabelled:
        raise UsageError(
            "as_supervised", found=f"{counted(unlabelled, 'slide')} without a label of the classes",
            expected="a label for every patch", todo="exclude them with labelled_only=True, or label them",
        )  # fmt: skip


def _normalized(
    dataset: tf.data.Dataset, stores: Sequence[Store], stain_norm: StainNorm
) -> tf.data.Dataset:
    """Normalize the stain of the images of every batch."""
    # Imported late: they load TensorFlow.
    from histopipe.dataset.augmentation import to_uint8
    from histopipe.dataset.stain_normalization import StainNormalizer

    normalize = StainNormalizer(stores, stain_norm)
    return dataset.map(
        lambda b: {**b, "image": to_uint8(normalize(b["image"], b["key"]))},
        num_parallel_calls=_PREFETCH, deterministic=True,
    ).prefetch(1)  # fmt: skip
