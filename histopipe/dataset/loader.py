"""`load_dataset`: the patches of stores as a `tf.data.Dataset`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from histopipe.dataset.labelling import PatchFilter, read_slide_labels
from histopipe.dataset.options import (
    Balance,
    Column,
    LabelsFrom,
    OnError,
    Side,
    StainNorm,
    check_choice,
    check_shard,
    check_whole,
    check_whole_or_none,
)
from histopipe.dataset.patch_batches import PatchBatches
from histopipe.dataset.sample_table import UNLABELLED, SampleRows, SampleTable
from histopipe.dataset.sampling import make_order
from histopipe.dataset.selection import Classes, LabelById, select, store_paths
from histopipe.dataset.splits import read_splits
from histopipe.dataset.tf_data import BatchFeed
from histopipe.errors import UsageError
from histopipe.store.store import Store, check_patch_sizes

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
    labelled_only: bool = False,
    labels_from: LabelsFrom = "slide",
    min_tissue: float = 0.0,
    min_focus: float = 0.0,
    exclude_pen: float = 1.0,
    exclude_dark: float = 1.0,
    splits: str | Path | None = None,
    side: Side = "train",
    columns: Sequence[Column] = (),
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
        batch_size: patches per batch of each shard. The last batch of an epoch is filled up with patches of weight 0.
        seed: seed of the order; required to shuffle.
        epochs: number of passes over all patches, each in a new order.
        start_step: first step to yield, counted over all epochs. Skipping steps costs nothing.
        shuffle: False reads in the stores' order.
        shuffle_block: shuffle blocks of this many neighbours, and patches within every 16 blocks: for hard disks and
            network filesystems, where 256 is a good size.
        balance: draw "class", "slide" or "patient" equally often. The epoch has as many patches as without, rounded up to a
            multiple of the number of classes, slides or patients. Patches of small ones are repeated; of large ones each
            epoch shows another part.
        max_per_slide: maximum number of patches of a slide per epoch, different ones in each epoch. Where labels come from
            annotations, of each class of a slide.
        shard: (index, count): yield only this worker's part of each step. All shards together are one epoch, and have the
            same number of steps.
        classes: names of the classes in the order of their numbers, or numbers by name; the sorted labels, if not given.
        labels: a labels CSV, or labels by slide id, in place of the recorded labels.
        labelled_only: leave out slides, or patches, without a label of `classes`. They have label -1 otherwise.
        labels_from: "annotation" takes the class of each patch from `histopipe annotate`. Splits record where theirs come from.
        min_tissue: minimum tissue share of a patch, 0 to 1.
        min_focus, exclude_pen, exclude_dark: minimum focus; maximum share of pen, and of folds and black
            (`histopipe quality`).
        splits: `splits.json` of a run; only patches on `side` of it are read.
        side: "train", "validation" or "test".
        columns: further fields: "x_l0", "y_l0" (level-0 pixels), "slide" (its id).
        as_supervised: yield tuples (image, label, weight), as `keras.Model.fit` takes them, in place of dictionaries. Every
            patch must have a label.
        stain_norm: "reinhard" or "macenko" normalizes the stain of every slide to one reference; see `histopipe stains`.
        on_error: "raise" stops at a damaged patch. "skip" gives it weight 0, logs it, and records it in the dataset's
            attribute `skipped`, a dictionary of reasons by key.
        parallel_calls: batches decoded at the same time; the number of cores, if not given.
        prefetch: batches kept ready.
        read_ahead: batches to request from a disk in advance; if not given, 16 while batches wait for the disk.

    Returns:
        A finite `tf.data.Dataset` of {"image": (B, H, W, 3) uint8, "label": (B,) int32, "weight": (B,) float32,
        "key": (B,) int64} and, if requested, "x_l0", "y_l0": (B,) int32, "slide": (B,) string. Its attribute
        `steps_per_epoch` is the number of batches of one epoch.

    Raises:
        UsageError: arguments are wrong or contradict each other, the stores have different patch sizes, or this process was
            forked after TensorFlow had run, where TensorFlow would hang.
        NothingToDo: no store, or no patch.
        DamagedStore: a store cannot be read. While iterating, TensorFlow raises an error of its own with the same message.

    Example:
        >>> for batch in load_dataset("patches.lmdb", batch_size=64, seed=1):  # doctest: +SKIP
        ...     batch["image"].shape

        Keras iterates a dataset once per epoch, and each iteration has the same order. To train several epochs in a new
        order each, pass the number of epochs to both, and the length of one:

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
            labels = {slide: row.label for slide, row in read_slide_labels(labels, stores).items()}
        chosen = select(
            stores, classes=classes, labels=labels, labelled_only=labelled_only, side=side,
            splits=None if splits is None else read_splits(Path(splits), stores),
            labels_from=labels_from, patch_filter=patch_filter,
        )  # fmt: skip
        if as_supervised:
            _refuse_unlabelled(chosen)
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
        # They stay open for as long as anything can load a batch.
        for store in stores:
            weakref.finalize(feed, store.close_later)
    return dataset


def _order_seed(shuffle: bool, seed: int | None) -> int | None:
    """Return the seed of the order; None for the order of the stores."""
    if shuffle and seed is None:
        raise UsageError(
            "load_dataset shuffles, but has no seed",
            todo="call load_dataset(..., seed=1), or shuffle=False to read in the stores' order",
        )
    return seed if shuffle else None


def _check_selection(
    labels: object, labels_from: LabelsFrom, splits: str | Path | None, side: Side
) -> None:
    """Refuse options of the selection that contradict each other."""
    check_choice(LabelsFrom, labels_from=labels_from)
    if labels_from == "annotation" and labels is not None:
        raise UsageError("labels", found="labels_from='annotation'", expected="one of them")
    if splits is None and side != "train":
        raise UsageError(
            f"side={side!r} is a side of splits", todo="give splits=, a run's splits.json"
        )


def _refuse_unlabelled(slides: Sequence[SampleRows]) -> None:
    """Refuse slides without a label: a loss function takes no label -1, even of weight 0."""
    unlabelled = sum(slide.label == UNLABELLED for slide in slides)
    if unlabelled:
        raise UsageError(
            "as_supervised", found=f"{unlabelled} slides without a label of the classes",
            expected="a label for every patch", todo="leave them out (labelled_only=True), or label them",
        )  # fmt: skip


def _normalized(
    dataset: tf.data.Dataset, stores: Sequence[Store], stain_norm: StainNorm
) -> tf.data.Dataset:
    """Normalize the stain of the images of every batch."""
    # Late: they load TensorFlow.
    from histopipe.dataset.augmentation import to_uint8
    from histopipe.dataset.stain_normalization import StainNormalizer

    normalize = StainNormalizer(stores, stain_norm)
    return dataset.map(
        lambda b: {**b, "image": to_uint8(normalize(b["image"], b["key"]))},
        num_parallel_calls=_PREFETCH, deterministic=True,
    ).prefetch(1)  # fmt: skip
