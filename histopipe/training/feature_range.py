"""The range of the features that a network was trained on, which `predict` compares other slides with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from histopipe.dataset.augmentation import to_uint8
from histopipe.dataset.bag_batches import BagBatches
from histopipe.dataset.bags import read_bag
from histopipe.dataset.patch_batches import PatchBatches
from histopipe.errors import DamagedStore
from histopipe.evaluation.unusual import (
    MOST_SLIDES,
    RANGE,
    PatchFeatures,
    TrainingRange,
    spread,
    training_range,
)
from histopipe.splits.splits import Splits
from histopipe.splits.subsets import Subset
from histopipe.system.output import message
from histopipe.training.models import without_last_layer
from histopipe.training.train_step import TrainStep
from histopipe.training.training_setup import TrainingSetup

_ROWS = 32
"""Patches of a step, which fit into memory where the batches of the training do not."""


def write_range(folder: Path, setup: TrainingSetup, model: keras.Model, step: TrainStep) -> None:
    """Write the range of a training. Without it, the run is complete, but `predict` marks no unusual slides."""
    try:
        written = range_of_training(setup, model, step)
        if written is not None:
            written.write(folder)
    except (OSError, ValueError, MemoryError, np.linalg.LinAlgError, tf.errors.OpError) as error:
        reason = str(error).split("\n")[0][:200]
        message(f"warning: no {RANGE}, so that unusual slides will not be marked: {reason}")


def range_of_training(
    setup: TrainingSetup, model: keras.Model, step: TrainStep
) -> TrainingRange | None:
    """Return the range of the features of a trained model: those of bags, or the input of its last layer.

    The limits are from patients who are in neither training nor test.
    """
    seed = setup.splits.seed

    def features_of(subset: Subset) -> PatchFeatures:
        batches: Any = setup.batches(subset, 1)
        if isinstance(batches, BagBatches):
            return _features_of_bags(batches, setup.splits, subset, seed)
        return _features_of_patches(batches, setup.splits, model, step, seed)

    held_out: Sequence[Subset] = ("validation", "calibration")
    of_subsets = [features_of(subset) for subset in held_out if subset in setup.subsets]
    joined = PatchFeatures.joined(of_subsets) if of_subsets else None
    return training_range(features_of("train"), joined, seed)


def _features_of_patches(
    batches: PatchBatches, splits: Splits, model: keras.Model, step: TrainStep, seed: int
) -> PatchFeatures:
    """Return the features of patches of random slides, without augmentation."""
    network, slides, parts = without_last_layer(model), splits.by_place, []
    table = batches.table
    chosen = np.random.default_rng(seed).permutation(len(table.counts))[:MOST_SLIDES]
    numbers = np.concatenate([table.starts[i] + spread(table.counts[i]) for i in chosen.tolist()])
    for first in range(0, len(numbers), _ROWS):
        located = table.locate(numbers[first : first + _ROWS])
        batch = batches.read(located, np.ones(len(located.rows), np.float32))
        images = to_uint8(step.normalized({"image": batch["image"].copy(), "key": batch["key"]}))
        values = np.asarray(network(images, training=False), np.float32)
        places = zip(located.stores.tolist(), located.slides.tolist(), strict=True)
        patients = np.array([slides[place].patient for place in places])
        features = PatchFeatures(values, located.labels, located.keys >> 32, patients)
        parts.append(features.rows(batch["weight"] > 0))
    return PatchFeatures.joined(parts)


def _features_of_bags(
    batches: BagBatches, splits: Splits, subset: Subset, seed: int
) -> PatchFeatures:
    """Return the features of patches of random bags."""
    rng, parts = np.random.default_rng(seed), []
    for slide in rng.permutation(np.array(splits.slides_on(subset), object))[:MOST_SLIDES].tolist():
        bag = batches.bags.complete[slide.slide]
        rows = spread(bag.rows)
        columns = (np.full(len(rows), value) for value in (slide.label, bag.id, slide.patient))
        with suppress(DamagedStore):  # training skipped this bag, too
            parts.append(PatchFeatures(read_bag(bag, bag.dtype, rows), *columns))
    return PatchFeatures.joined(parts)
