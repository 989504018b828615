"""Data and network of a training on bags of features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.sample_table import SlideValues, unpack_keys
from histopipe.features.bag_batches import BagBatches
from histopipe.features.bag_statistics import feature_moments, scaling_variance
from histopipe.features.bags import BagSet, read_positions
from histopipe.features.feature_file import read_encoder
from histopipe.runs.config import TrainConfig
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig
from histopipe.splits.covariates import Covariates
from histopipe.splits.sources import SampleSource
from histopipe.splits.splits import SlideSplit, Splits
from histopipe.splits.subsets import Subset
from histopipe.store.store import Store
from histopipe.system.progress import message
from histopipe.tasks.predictions import Predictions
from histopipe.training.attention import write_attention
from histopipe.training.bag_model import BagModel
from histopipe.training.bag_train_step import BagTrainStep
from histopipe.training.covariate_baseline import baseline_scores, baseline_weights
from histopipe.training.optimizer import make_optimizer
from histopipe.training.outputs import SampleOutputs
from histopipe.training.problem import PatchProblem, Problem
from histopipe.training.train_step import TrainStep


def make_problem(config: TrainConfig, sources: Sequence[SampleSource], splits: Splits) -> Problem:
    """Return the problem for a configuration, with sources from `opened_sources`.

    Raises:
        NothingToDo: training or validation has no data.
    """
    if isinstance(config, BagTrainConfig):
        return BagProblem(config, cast(BagSet, sources[0]), splits)
    return PatchProblem(cast(PatchTrainConfig, config), cast(Sequence[Store], sources), splits)


class BagProblem(Problem):
    """Training on bags of features (multiple-instance learning)."""

    def __init__(self, config: BagTrainConfig, bags: BagSet, splits: Splits) -> None:
        for note in bags.notes:
            message(note)
        super().__init__(config, [bags], splits)
        self._config, self._bags = config, bags
        self.holders, self.level = f"{config.bag}s", config.bag
        self.facts = {"encoders": [read_encoder(folder) for folder in bags.folders]}
        if config.pooling == "transformer":
            for bag in bags.bags.values():
                read_positions(bag)  # raises now, and not after an epoch
        self._covariates: Covariates | None = None
        if splits.covariates:
            rows = [slide.covariates for slide in splits.slides if len(slide.on("train"))]
            self._covariates = Covariates.of(splits.covariates, rows)
            self.starts_fitted = True
            self.facts = {**self.facts, "covariates": self._covariates.to_json()}
            for slide in splits.slides:
                for text in self._covariates.unknown(slide.covariates):
                    message(
                        f"warning: slide {slide.id}, {text} is not in training: taken as missing"
                    )

    def _patches_of(self, slide: SlideSplit) -> dict[str, int]:
        bag = self._bags.bags[slide.slide]
        return {name: part.rows for name, part in zip(bag.slides, bag.parts, strict=True)}

    @property
    def _by_slide(self) -> dict[str, SlideValues]:
        fields = super()._by_slide
        if self._covariates is not None:
            encode, slides = self._covariates.encode, self.splits.slides
            values = {(slide.store, slide.slide): encode(slide.covariates) for slide in slides}
            fields["covariates"] = SlideValues(values)
        return fields

    def baseline(self) -> dict[Subset, Predictions]:
        """Return the predictions of a model of the covariates alone; empty without covariates."""
        if self._covariates is None:
            return {}
        return baseline_scores(self.splits, self._covariates, self.objective, self.level)

    def batches(self, subset: Subset, replicas: int) -> BagBatches:
        """Return the batches of a subset. Training bags are limited to `max_per_slide` patches."""
        config = self._config
        return BagBatches(
            self._bags, self._tables[subset], order=self._order(subset), batch_size=config.batch_size,
            replicas=replicas, on_error=config.on_error,
            most=config.max_per_slide if subset == "train" else 0, seed=config.seed,
            by_slide=self._by_slide, positions=config.pooling == "transformer",
        )  # fmt: skip

    def train_step(self, strategy: tf.distribute.Strategy, steps_per_epoch: int) -> TrainStep:
        """Return the training step; see `Problem`."""
        config = self._config
        with strategy.scope():
            model = BagModel(
                config.pooling, dimension=self._bags.dimension, objective=self.objective,
                dropout=config.dropout, precision=config.precision,
                covariates=0 if self._covariates is None else len(self._covariates.inputs),
                scaled=config.feature_scaling == "standard",
            )  # fmt: skip
            optimizer = make_optimizer(config, steps_per_epoch)
            # The coefficients of covariates begin at a fit that has a separate penalty.
            optimizer.exclude_from_weight_decay(model.last_weights)
        return BagTrainStep(strategy, model, optimizer, self._step_settings())

    def initial_values(self, step: TrainStep) -> list[tuple[keras.Variable, NDArray[Any]]]:
        """Return a last layer that predicts as the covariates alone do, and mean and variance of the features.

        With random weights of the pooled features, the model would first have to unlearn them.
        """
        model = cast(BagModel, step.model)
        values: list[tuple[keras.Variable, NDArray[Any]]] = []
        if self._covariates is not None:
            rows, bias = baseline_weights(self.splits, self._covariates, self.objective)
            # The last layer of DSMIL has half of the prediction.
            share = 2 if model.pooling == "dsmil" else 1
            kernel = np.zeros(model.last_weights[0].shape)
            kernel[-len(rows) :] = share * rows
            values += zip(model.last_weights, (kernel, share * bias), strict=True)
        if model.scaling is not None:
            mean, variance = feature_moments(
                self._bags,
                [slide.slide for slide in self._tables["train"].slides],
                on_error=self._config.on_error,
            )
            varied, variance = scaling_variance(mean, variance)
            values += zip(model.scaling.weights, (varied, mean, variance), strict=True)
        return values

    def write_more(self, folder: Path, step: TrainStep, evaluated: Sequence[SampleOutputs]) -> None:
        """Write attention and contributions of each patch of the evaluated bags."""
        numbers = [n for outputs in evaluated for n in unpack_keys(outputs.key)[1].tolist()]
        bags = [self._bags.bags[number] for number in numbers]
        names = self.splits.task.names
        write_attention(folder, bags, cast(BagModel, step.model), self.objective, names)
