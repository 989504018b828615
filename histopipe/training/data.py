"""What a run trains on: its splits, and the patches of each of their sides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import Side
from histopipe.dataset.sample_table import SampleTable
from histopipe.dataset.samples import SampleSource
from histopipe.dataset.selection import select
from histopipe.dataset.splits import Splits, site_by_label
from histopipe.dataset.stain_normalisation import StainNormaliser
from histopipe.runs.config import TrainConfig
from histopipe.store.store import Store
from histopipe.system.progress import message


def tell_splits(splits: Splits, sources: Sequence[SampleSource], holders: str, unit: str) -> None:
    """What the model will see, before the long wait.

    Args:
        splits: the sides.
        sources: what they are of.
        holders, unit: what their slides, and the items of these, are called.
    """
    for side, counts in splits.count().items():
        message(f"{side:<11}" + ", ".join(f"{counts[c]} {c}" for c in splits.classes))
    if splits.split_by == "patch":
        message(
            "warning: split by patch: neighbours of training patches are in the test set, so its"
        )
        message("figures say that the pipeline learns, not how good the model is on another slide")
    left_out = sum(len(source.complete) for source in sources) - len(splits.slides)
    if left_out:
        message(f"{left_out} {holders} left out: they have no label, or no patch")
    dropped = sum(int((slide.sides < 0).sum()) for slide in splits.slides)
    if dropped:
        message(
            f"{dropped} {unit} left out (unreadable, of no class, unfit, too near another side's, or kept from a search)"
        )
    sites = site_by_label(splits.slides)
    if len(sites) > 1:
        message("slides by site and label:")
        for site, counts in sorted(sites.items()):
            message(f"  {site:<20}" + ", ".join(f"{counts[c]} {c}" for c in splits.classes))


def patch_table(
    config: TrainConfig, sources: Sequence[SampleSource], splits: Splits, side: Side
) -> SampleTable | None:
    """The patches, or bags, of one side; None for a test set that was not asked for. Only training is capped."""
    if side == "test" and not any(len(slide.on(side)) for slide in splits.slides):
        return None
    cap = config.max_per_slide if side == "train" and config.mil is None else 0
    chosen = select(sources, splits=splits, side=side)
    return SampleTable(chosen, max_per_slide=cap or None, seed=config.seed)


def stain_normaliser(config: TrainConfig, stores: Sequence[Store]) -> StainNormaliser | None:
    """What gives every patch one stain; None if that is not wanted."""
    return None if config.stain_norm == "none" else StainNormaliser(stores, config.stain_norm)


def class_weight(config: TrainConfig, splits: Splits) -> NDArray[np.float32]:
    """(C,) weights in the loss: 1, or so that every class weighs the same in all."""
    counts = splits.count()["train"]
    if config.class_weights == "none":
        return np.ones(len(splits.classes), np.float32)
    patches = np.array([counts[name] for name in splits.classes], np.float64)
    return np.asarray(patches.sum() / (len(patches) * np.maximum(patches, 1)), np.float32)
