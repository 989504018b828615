"""Training on patches with masks: a class for each pixel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import tensorflow as tf

from histopipe.dataset.patch_masks import MaskedStore
from histopipe.errors import UsageError
from histopipe.predictions.prediction_tables import PixelErrors
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.splits.slide_table import SlideEntry
from histopipe.splits.splits import Splits
from histopipe.tasks.choices import Subset
from histopipe.tasks.segmentation import divide_counts
from histopipe.training.models import PatchModel
from histopipe.training.outputs import SampleOutputs
from histopipe.training.patch_training import PatchTraining
from histopipe.training.segmenter import SegmentationObjective, build_segmenter
from histopipe.training.train_step import TrainStep

_MOST_ERRORS = 16
"""Patches whose masks are kept for the report."""


class PixelTraining(PatchTraining):
    """Training on the patches of stores with masks.

    Raises:
        UsageError: the splits have other classes than the masks.
    """

    def __init__(
        self,
        config: PatchTrainConfig,
        stores: Sequence[MaskedStore],
        splits: Splits,
        slides: Sequence[SlideEntry] = (),
    ) -> None:
        if tuple(stores[0].classes) != splits.classes:
            raise UsageError(
                "the splits are of other annotations",
                found=", ".join(splits.classes),
                expected=", ".join(stores[0].classes),
                todo="create new splits",
            )
        super().__init__(config, stores, splits, slides)
        cast(SegmentationObjective, self.objective).patch_mpp = self.description["patch_mpp"]
        self.description["annotations"] = {
            store.records[number].id: f"{masks.file.name}, crc32 {masks.crc:08x}"
            for store in stores
            for number, masks in store.masks.items()
        }

    def notices(self, *_: Any) -> list[Any]:
        """Return none: the last layer alone is not trained on features of patches."""
        return []

    def _build(self, name: str, **options: Any) -> PatchModel:
        """Build the network; see `build_segmenter`."""
        return build_segmenter(name, **options)

    def write_more(self, folder: Path, step: TrainStep, evaluated: Sequence[SampleOutputs]) -> None:
        """Write the masks of the test patches with the most wrong pixels, or of validation; see `TrainingSetup`."""
        subset: Subset = "test" if "test" in self.subsets else "validation"
        outputs = evaluated[self.subsets.index(subset) - 1]
        confusion = divide_counts(outputs.output, len(self.splits.classes))[0]
        right = np.trace(confusion, axis1=1, axis2=2)
        worst = np.argsort(right - confusion.sum(axis=(1, 2)), kind="stable")[:_MOST_ERRORS]
        samples = outputs.samples.rows_at(worst)
        batch = self.batches(subset, 1).read(samples, np.ones(len(worst), np.float32))
        part = {"image": tf.constant(batch["image"].copy()), "key": tf.constant(batch["key"])}
        predicted = np.argmax(step.whole.serving(step.inputs(part), training=False), axis=-1)
        places = zip(samples.stores.tolist(), samples.slides.tolist(), strict=True)
        names, corners = self.splits.names, []
        for store, slide, row in zip(samples.stores, samples.slides, samples.rows, strict=True):
            index = self._sources[int(store)].index(int(slide))
            corners.append([index["x_l0"][row], index["y_l0"][row]])
        PixelErrors(
            np.array([names[place] for place in places]),
            np.array(corners, np.int64),
            batch["mask"].copy(),
            predicted.astype(np.uint8),
        ).write(folder)
