"""What a run trains on: its splits, and the patches of each of their sides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.labels import labels_from
from histopipe.dataset.selection import select
from histopipe.dataset.split_makers import make_splits
from histopipe.dataset.splits import Side, Splits, read_splits, site_by_label
from histopipe.dataset.stain import StainNormaliser
from histopipe.dataset.table import PatchTable
from histopipe.errors import UsageError
from histopipe.geometry import Micrometres
from histopipe.store.store import Store
from histopipe.training import run_folder
from histopipe.training.config import TrainConfig
from histopipe.training.progress import say


def run_splits(
    config: TrainConfig, stores: Sequence[Store], folder: Path, *, resume: bool
) -> Splits:
    """The run's splits: read if it goes on or if they are given, else made."""
    if resume:
        return read_splits(folder / run_folder.SPLITS, stores)
    if config.splits is not None:
        splits = read_splits(Path(config.splits), stores)
    else:
        first, second, third = config.fractions
        splits = make_splits(
            stores,
            split_by=config.split_by,
            seed=config.seed,
            labels=labels_from(config.labels, stores, allow_extra=config.allow_extra_rows),
            fractions=(first, second, third),
            region=Micrometres(config.region_um),
        )
    leaks = splits.leaks() if splits.split_by in ("patient", "site", "slide") else []
    if leaks and not config.allow_leaks:
        raise UsageError(
            "the split leaks",
            found="; ".join(leaks[:3]) + ("; …" if len(leaks) > 3 else ""),
            expected="each patient and slide on one side",
            todo="split by patient, or pass --allow-leaks if you mean it",
        )
    return splits


def tell_splits(splits: Splits, stores: Sequence[Store]) -> None:
    """What the model will see, before the long wait."""
    for side, counts in splits.count().items():
        say(f"{side:<11}" + ", ".join(f"{counts[c]} {c}" for c in splits.classes))
    if splits.split_by == "patch":
        say("warning: split by patch: neighbours of training patches are in the test set, so its")
        say("figures say that the pipeline learns, not how good the model is on another slide")
    left_out = sum(len(store.complete) for store in stores) - len(splits.slides)
    if left_out:
        say(f"{left_out} complete slides left out: they have no label, or no patch")
    dropped = sum(int((slide.sides < 0).sum()) for slide in splits.slides)
    if dropped:
        say(f"{dropped} patches left out (unreadable, or too near another side's)")
    sites = site_by_label(splits.slides)
    if len(sites) > 1:
        say("slides by site and label:")
        for site, counts in sorted(sites.items()):
            say(f"  {site:<20}" + ", ".join(f"{counts[c]} {c}" for c in splits.classes))


def patch_table(
    config: TrainConfig, stores: Sequence[Store], splits: Splits, side: Side
) -> PatchTable | None:
    """The patches of one side; None for a test set that was not asked for. Only training is capped."""
    if side == "test" and not any(len(slide.on(side)) for slide in splits.slides):
        return None
    cap = config.max_per_slide if side == "train" else 0
    chosen = select(stores, splits=splits, side=side)
    return PatchTable(chosen, max_per_slide=cap or None, seed=config.seed)


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
