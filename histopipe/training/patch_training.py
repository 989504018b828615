"""The data and the network of a training on patches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from histopipe.dataset.batches import PatchBatches
from histopipe.dataset.transforms import stain_normalizer
from histopipe.pretrained.encoders import named_preset
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.splits.slide_table import SlideEntry
from histopipe.splits.splits import Splits
from histopipe.store.store import Store
from histopipe.system.output import message
from histopipe.tasks.choices import Subset
from histopipe.training.head_features import HeadNotice, HeadStep, with_features
from histopipe.training.models import build_model, frozen_digest, make_optimizer
from histopipe.training.train_step import TrainStep
from histopipe.training.training_setup import TrainingSetup


class PatchTraining(TrainingSetup):
    """Training on patches."""

    units = "complete slides"
    _config: PatchTrainConfig
    _sources: Sequence[Store]

    def __init__(
        self,
        config: PatchTrainConfig,
        stores: Sequence[Store],
        splits: Splits,
        slides: Sequence[SlideEntry] = (),
    ) -> None:
        super().__init__(config, stores, splits, slides, max_per_slide=config.max_per_slide)
        mpps = [r.patch_mpp for store in stores for r in store.complete.values()]
        preset = named_preset(config.model)
        if preset is not None:
            preset.check_patches(stores[0].patch_size, mpps, allowed=config.allow_mismatch)
            if preset.licence:
                message(f"the trained model contains weights of {preset.title}: {preset.licence}")
        scales = [mpp for mpp in mpps if mpp]
        self.description |= {
            "spec": dict(stores[0].spec),
            "patch_mpp": float(np.median(scales)) if scales else None,
        }

    def batches(self, subset: Subset, replicas: int) -> PatchBatches:
        """Return the batches of a subset; see `TrainingSetup`."""
        config = self._config
        return PatchBatches(
            self._sources,
            self._tables[subset],
            batch_size=config.batch_size,
            replicas=replicas,
            order=self._order(subset, shuffle_block=config.shuffle_block or None),
            on_error=config.on_error,
            by_slide=self._by_slide,
        )

    def train_step(self, strategy: tf.distribute.Strategy, steps_per_epoch: int) -> TrainStep:
        """Return the training step; see `TrainingSetup`."""
        config = self._config
        with strategy.scope():
            model = build_model(
                config.model,
                patch_size=self._sources[0].patch_size,
                objective=self.objective,
                dropout=config.dropout,
                weights=config.used_weights,
                precision=config.precision,
                trainable=config.trainable,
                layer_decay=config.layer_decay,
            )
            optimizer = make_optimizer(config, steps_per_epoch)
        if model.description:
            self.description["backbone"] = dict(model.description)
        kind = HeadStep if config.head_copies and model.head is not None else TrainStep
        return kind(
            strategy,
            model,
            optimizer,
            self._step_settings(
                normalize=None
                if config.stain_norm == "none"
                else stain_normalizer(self._sources, config.stain_norm),
                augmentations=config.augmentations,
                xla=config.xla,
            ),
        )

    def notices(
        self, batches: dict[Subset, Any], step: TrainStep
    ) -> list[keras.callbacks.Callback]:
        """Name the training of the last layer where it is far faster; see `TrainingSetup`."""
        config = self._config
        is_slow = not tf.config.get_visible_devices("GPU") and config.used_weights != "none"
        return (
            [HeadNotice(batches, step, config.epochs)]
            if is_slow and config.trainable != "head"
            else []
        )

    def prepared(
        self, batches: dict[Subset, Any], step: TrainStep, folder: Path | None
    ) -> dict[Subset, Any]:
        """With a frozen network, return batches of its features; see `TrainingSetup`."""
        config = self._config
        if not isinstance(step, HeadStep):
            return batches
        if folder is None:  # of another worker of the training
            self._scratch = TemporaryDirectory()
            folder = Path(self._scratch.name) / "run"
        stains = (
            [store.stains() for store in self._sources] if config.stain_norm != "none" else None
        )
        content = (
            frozen_digest(step.whole.training, self.description),
            config.precision,
            config.stain_norm,
            stains,
        )
        copies = config.head_copies if config.augmentations else 1  # else all are equal
        return dict(with_features(batches, step, folder, copies=copies, content=content))
