"""A dataset of patches, from paths to a `tf.data.Dataset`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from histopipe.dataset.labelling import read_slide_labels
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
from histopipe.dataset.orders import make_order
from histopipe.dataset.patch_batches import PatchBatches
from histopipe.dataset.patch_filter import PatchFilter
from histopipe.dataset.sample_table import SampleTable
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
        max_per_slide: different patches of a slide in an epoch, at most; other ones in each epoch. Where labels come from
            annotations, of each class of a slide.
        shard: (index, count): yield only this worker's part of each step. All shards together are exactly one epoch, and
            have equally many steps.
        classes: names of the classes in the order of their numbers, or numbers by name; the labels, sorted, if not given.
        labels: a labels CSV, or labels by slide id, in place of the recorded ones.
        labelled_only: leave out slides, or patches, without a label of `classes`, which otherwise have label -1.
        labels_from: "annotation" gives patches the classes that are drawn on them (`histopipe annotate`). Splits say themselves
            what they go by.
        min_tissue: least share of tissue of a patch.
        min_focus, exclude_pen, exclude_dark: least focus; most share of pen, and of folds and black (`histopipe quality`).
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
    index, count = check_shard(shard)
    patch_filter = PatchFilter(
        min_tissue=min_tissue, min_focus=min_focus, exclude_pen=exclude_pen,
        exclude_dark=exclude_dark,
    )  # fmt: skip
    check_choice(LabelsFrom, labels_from=labels_from)
    if labels_from == "annotation" and labels is not None:
        raise UsageError("labels", found="labels_from='annotation'", expected="one of them")
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
            labels_from=labels_from, patch_filter=patch_filter,
        )  # fmt: skip
        table = SampleTable(chosen, max_per_slide=max_per_slide, seed=seed)
        batches = PatchBatches(
            stores, table, batch_size=batch_size * count, replicas=count, on_error=on_error,
            order=make_order(table, seed=seed, balance=balance, shuffle_block=shuffle_block),
            columns=columns,
        )  # fmt: skip
        source = BatchFeed(batches, parts=(index,))
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
    from histopipe.dataset.stain_normalisation import StainNormaliser

    normalise = StainNormaliser(stores, method)
    dataset = dataset.map(
        lambda b: {**b, "image": to_uint8(normalise(b["image"], b["key"]))},
        num_parallel_calls=_PREFETCH, deterministic=True,
    )  # fmt: skip
    return dataset.prefetch(1)


def _labels(
    labels: str | Path | LabelById | None, stores: Sequence[Store]
) -> Mapping[str, str | None] | None:
    if not isinstance(labels, str | Path):
        return labels
    return {name: row.label for name, row in read_slide_labels(labels, stores).items()}
