"""How a training's patches are divided: read where that is given, else made. TensorFlow is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from histopipe.dataset.labels import labels_from
from histopipe.dataset.split_makers import make_folds, make_splits
from histopipe.dataset.splits import Splits, read_splits
from histopipe.errors import UsageError
from histopipe.geometry import Micrometres
from histopipe.store.store import Store
from histopipe.training import run_folder
from histopipe.training.config import TrainConfig


def run_splits(
    config: TrainConfig, stores: Sequence[Store], folder: Path, *, resume: bool
) -> Splits:
    """The run's splits: read if it goes on, else as its settings say."""
    return read_splits(folder / run_folder.SPLITS, stores) if resume else new_splits(config, stores)


def new_splits(config: TrainConfig, stores: Sequence[Store]) -> Splits:
    """Splits as the settings say: read if they are given, else made.

    Raises:
        UsageError: a patient or slide is on several sides.
    """
    if config.splits is not None:
        splits = read_splits(Path(config.splits), stores)
    else:
        splits = make_splits(
            stores,
            split_by=config.split_by,
            seed=config.seed,
            labels=labels_from(config.labels, stores, allow_extra=config.allow_extra_rows),
            fractions=_three(config.fractions),
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


def new_folds(config: TrainConfig, stores: Sequence[Store], folds: int) -> tuple[Splits, ...]:
    """Splits for each fold of a cross-validation, as the settings say."""
    return make_folds(
        stores,
        folds,
        split_by=config.split_by,
        seed=config.seed,
        labels=labels_from(config.labels, stores, allow_extra=config.allow_extra_rows),
        fractions=_three(config.fractions),
        region=Micrometres(config.region_um),
    )


def _three(fractions: tuple[float, ...]) -> tuple[float, float, float]:
    first, second, third = fractions
    return first, second, third
