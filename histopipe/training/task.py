"""What a training learns from and with: patches and their network, or bags of features and theirs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import tensorflow as tf

from histopipe.dataset.options import SIDES, Side
from histopipe.dataset.orders import Order
from histopipe.dataset.patch_batches import PatchBatches
from histopipe.dataset.sample_table import SampleTable, unpack_keys
from histopipe.dataset.samples import SampleSource
from histopipe.dataset.splits import Splits
from histopipe.errors import NothingToDo
from histopipe.evaluation.scores import PatchScores
from histopipe.features.bag_batches import BagBatches
from histopipe.features.bag_set import BagSet
from histopipe.runs.config import TrainConfig
from histopipe.store.store import Store
from histopipe.system.progress import message
from histopipe.training.attention import write_attention
from histopipe.training.bag_model import BagModel
from histopipe.training.bag_steps import BagSteps
from histopipe.training.data import class_weight, patch_table, stain_normaliser
from histopipe.training.models import build_model
from histopipe.training.optimizer import make_optimizer
from histopipe.training.patch_scores import patch_scores
from histopipe.training.steps import Steps, StepSettings
from histopipe.training.tally import Predictions


class Task(Protocol):
    """What a training learns from and with."""

    splits: Splits
    tables: dict[Side, SampleTable]
    unit: str
    """What a batch is of, in words."""
    holders: str
    """What splits call slides, in words."""
    facts: Mapping[str, Any]
    """What those must know who use the model, for `metrics.json`."""

    def batches(self, table: SampleTable, order: Order, replicas: int) -> Any:
        """Batches of a table, in a part for each replica."""

    def steps(self, strategy: tf.distribute.Strategy, steps_per_epoch: int) -> Steps:
        """A new model and its optimizer, within the strategy's scope."""

    def scores(self, predictions: Predictions) -> PatchScores:
        """Predictions with what they are of."""

    def write_more(self, folder: Path, steps: Steps, judged: Sequence[Predictions]) -> None:
        """What else there is to say of the best model's predictions, into the run's folder."""


def task_of(config: TrainConfig, sources: Sequence[SampleSource], splits: Splits) -> Task:
    """The task that settings describe.

    Args:
        config: the settings.
        sources: from `opened_sources`.
        splits: of these.

    Raises:
        NothingToDo: a side that is needed has nothing.
    """
    if config.mil is not None:
        return BagTask(config, cast(BagSet, sources[0]), splits)
    return PatchTask(config, cast(Sequence[Store], sources), splits)


class PatchTask:
    """Learning of patches."""

    unit, holders = "patches", "complete slides"

    def __init__(self, config: TrainConfig, stores: Sequence[Store], splits: Splits) -> None:
        self._config, self._stores, self.splits = config, stores, splits
        scales = [r.patch_mpp for store in stores for r in store.complete.values() if r.patch_mpp]
        self.facts: Mapping[str, Any] = {
            "spec": dict(stores[0].spec),
            "patch_mpp": statistics.median(scales) if scales else None,
        }
        self.tables = _tables(config, stores, splits)

    def batches(self, table: SampleTable, order: Order, replicas: int) -> PatchBatches:
        """Batches of a table, in a part for each replica."""
        return PatchBatches(
            self._stores, table, order=order, batch_size=self._config.batch_size,
            replicas=replicas, on_error=self._config.on_error,
        )  # fmt: skip

    def steps(self, strategy: tf.distribute.Strategy, steps_per_epoch: int) -> Steps:
        """A new model and its optimizer, within the strategy's scope."""
        config = self._config
        with strategy.scope():
            model = build_model(
                config.model, patch_size=self._stores[0].patch_size,
                classes=len(self.splits.classes), dropout=config.dropout, weights=config.weights,
                precision=config.precision,
            )  # fmt: skip
            optimizer = make_optimizer(config, steps_per_epoch)
        normalise = stain_normaliser(config, self._stores)
        settings = _step_settings(config, self.splits, normalise=normalise)
        return Steps(strategy, model, optimizer, settings)

    def scores(self, predictions: Predictions) -> PatchScores:
        """Predictions with the slides, patients and places that they are of."""
        return patch_scores(predictions, self._stores, self.splits)

    def write_more(self, folder: Path, steps: Steps, judged: Sequence[Predictions]) -> None:
        """Nothing: `predictions.csv` says it all."""


class BagTask:
    """Learning of bags."""

    unit = "bags"

    def __init__(self, config: TrainConfig, bags: BagSet, splits: Splits) -> None:
        self._config, self._bags, self.splits = config, bags, splits
        self.holders = f"{config.bag}s"
        self.facts: Mapping[str, Any] = {}
        for note in bags.notes:
            message(note)
        self.tables = _tables(config, [bags], splits)

    def batches(self, table: SampleTable, order: Order, replicas: int) -> BagBatches:
        """Batches of a table, in a part for each replica; only in training, bags are capped."""
        config = self._config
        most = config.max_per_slide if table is self.tables["train"] else 0
        return BagBatches(
            self._bags, table, order=order, batch_size=config.batch_size, replicas=replicas,
            on_error=config.on_error, most=most, seed=config.seed,
        )  # fmt: skip

    def steps(self, strategy: tf.distribute.Strategy, steps_per_epoch: int) -> Steps:
        """A new model and its optimizer, within the strategy's scope."""
        config = self._config
        with strategy.scope():
            model = BagModel(
                config.pooling, dimension=self._bags.dimension, classes=len(self.splits.classes),
                dropout=config.dropout, precision=config.precision,
            )  # fmt: skip
            optimizer = make_optimizer(config, steps_per_epoch)
        return BagSteps(strategy, model, optimizer, _step_settings(config, self.splits))

    def scores(self, predictions: Predictions) -> PatchScores:
        """Predictions with the slides and patients that they are of."""
        return patch_scores(predictions, [self._bags], self.splits, level=self._config.bag)

    def write_more(self, folder: Path, steps: Steps, judged: Sequence[Predictions]) -> None:
        """The attention of each patch of the bags that were judged."""
        if self._config.pooling in ("gated", "attention"):
            model = cast(BagModel, steps.model)
            numbers = [n for found in judged for n in unpack_keys(found.key)[1].tolist()]
            write_attention(folder, [self._bags.bags[number] for number in numbers], model)


def _tables(
    config: TrainConfig, sources: Sequence[SampleSource], splits: Splits
) -> dict[Side, SampleTable]:
    found = {side: patch_table(config, sources, splits, side) for side in SIDES}
    tables = {side: table for side, table in found.items() if table is not None}
    for side in ("train", "validation"):
        if side not in tables:
            raise NothingToDo(f"no patch for {side}")
    return tables


def _step_settings(config: TrainConfig, splits: Splits, **more: Any) -> StepSettings:
    return StepSettings(
        batch_size=config.batch_size, class_weight=class_weight(config, splits),
        augmentations=config.augmentations, label_smoothing=config.label_smoothing,
        clip_norm=config.clip_norm, scale_loss=config.precision == "mixed_float16",
        xla=config.xla, **more,
    )  # fmt: skip
