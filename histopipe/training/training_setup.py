"""The data and the network of a training: what all have in common, and those on bags."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.bags import BagSet, read_bag, read_positions
from histopipe.dataset.batches import BagBatches, feature_moments, scaling_variance
from histopipe.dataset.sampling import BatchSampler, Order, make_order
from histopipe.dataset.selection import SampleTable, SlideValues, select, unpack_keys
from histopipe.errors import DamagedStore, UsageError
from histopipe.features.feature_sets import check_level, read_encoder
from histopipe.predictions.prediction_tables import write_patch_values
from histopipe.runs.config import TrainConfig
from histopipe.runs.run import EpochMetrics
from histopipe.runs.task_config import BagTrainConfig
from histopipe.splits.labelling import Covariates
from histopipe.splits.slide_table import SlideEntry
from histopipe.splits.splits import SampleSource, SlideSplit, Splits
from histopipe.system.output import message
from histopipe.tasks.choices import SUBSETS, EvaluationLevel, Subset
from histopipe.tasks.predictions import Predictions
from histopipe.training.bag_model import WITH_POSITIONS, BagModel, Patches
from histopipe.training.bag_pooling import patch_values
from histopipe.training.bag_step import BagTrainStep
from histopipe.training.bag_weights import (
    baseline_weights,
    encoded_covariates,
    read_bag_weights,
    warn_of_leaks,
)
from histopipe.training.models import make_optimizer
from histopipe.training.objectives import objective_class
from histopipe.training.outputs import SampleOutputs
from histopipe.training.train_step import StepSettings, TrainStep


class TrainingSetup(ABC):
    """Data, objective and network of a training.

    `slides` are all slides of the sources, each with its subset or the reason of its exclusion. `max_per_slide` limits the
    training samples of a slide per epoch; 0: no limit.
    """

    units: str
    """Containers of the samples in the splits, as a plural noun for messages."""
    level: EvaluationLevel = "patch"
    """Level of a sample."""
    covariates: Covariates | None = None
    """Inputs of the model apart from features. With them, a new model already predicts."""

    def __init__(
        self,
        config: TrainConfig,
        sources: Sequence[SampleSource],
        splits: Splits,
        slides: Sequence[SlideEntry] = (),
        *,
        max_per_slide: int = 0,
    ) -> None:
        self.splits, self.slides = splits, slides
        self._config, self._sources = config, sources
        self._tables = {
            subset: SampleTable(
                select(sources, splits=splits, subset=subset),
                max_per_slide=(subset == "train" and max_per_slide) or None,
                seed=config.seed,
            )
            for subset in SUBSETS
            if subset == "train" or splits.slides_on(subset)
        }
        if len(self._tables) == 1:
            raise UsageError(
                "the split has neither validation nor test slides",
                todo="put slides into one of them, to know how good the model is",
            )
        self.subsets = tuple(self._tables)
        """Subsets that have samples."""
        self.objective = objective_class(config.task, config.used_loss).of(
            splits.targets_on("train"),
            config.used_loss,
            classes=len(splits.task.classes),
            draws=self._draws() if config.class_weights == "balanced" else None,
        )
        of_task = {
            "task": splits.task_name,
            "targets": splits.targets,
            "objective": self.objective.description,
        }
        self.description: dict[str, Any] = {
            "classes": splits.classes,
            **({} if splits.task.of_classes else of_task),
            "split_by": splits.split_by,
            config.unit: splits.count(),
        }
        """Facts for users of the model, written to `metrics.json`."""

    def notices(
        self, batches: dict[Subset, Any], step: TrainStep
    ) -> list[keras.callbacks.Callback]:
        """Return callbacks that show, while the training runs, how it could be faster."""
        return []

    @abstractmethod
    def batches(self, subset: Subset, replicas: int) -> BatchSampler:
        """Return the batches of a subset, with a part for each replica. Training batches are shuffled."""

    @abstractmethod
    def train_step(self, strategy: tf.distribute.Strategy, steps_per_epoch: int) -> TrainStep:
        """Return the training step of a new model with its optimizer."""

    def initial_values(self, step: TrainStep) -> list[tuple[keras.Variable, NDArray[Any]]]:
        """Return the variables of a new model whose first values depend on the training data, with these values."""
        return []

    def prepared(
        self, batches: dict[Subset, Any], step: TrainStep, folder: Path | None
    ) -> dict[Subset, Any]:
        """Return the batches after what is computed before the first step, in the folder of the run if this is given."""
        return batches

    def metrics(self, outputs: SampleOutputs) -> EpochMetrics:
        """Return the metrics of an epoch. They are the same for any number of replicas."""
        task, target = self.splits.task, self._targets_of(outputs)
        predicted = self.objective.predictions(outputs.output)
        values = self.objective.described(task).epoch_metrics(target, predicted)
        return EpochMetrics(
            len(outputs.output),
            self.objective.epoch_loss(outputs.loss, target, predicted),
            values,
            values[next(iter(task.main))],
        )

    def predictions(self, outputs: SampleOutputs) -> Predictions:
        """Return predictions of patches or bags with their slides, patients and positions, in the order of the slides."""
        keys = outputs.samples.keys
        order = np.argsort(keys, kind="stable")
        ordinals, numbers, rows = unpack_keys(keys[order])
        begins = np.unique(keys[order] >> 32, return_index=True)[1]
        places = list(zip(ordinals[begins].tolist(), numbers[begins].tolist(), strict=True))
        counts, names = np.diff(begins, append=len(order)), self.splits.names
        in_split = self.splits.by_place
        patients = [in_split[place].patient for place in places]
        patient_numbers = {patient: n for n, patient in enumerate(dict.fromkeys(patients))}
        corners = np.zeros((len(order), 2), np.int64)
        if self.level == "patch":
            for (store, number), begin, count in zip(places, begins, counts, strict=True):
                here = slice(begin, begin + count)
                index = self._sources[store].index(number)
                columns = [index[name][rows[here]] for name in ("x_l0", "y_l0")]
                corners[here] = np.stack(columns, axis=1)
        return Predictions(
            self.objective.described(self.splits.task),
            tuple(names[place] for place in places),
            tuple(patient_numbers),
            slide=np.repeat(np.arange(len(places), dtype=np.int32), counts),
            patient=np.repeat(
                np.array([patient_numbers[patient] for patient in patients], np.int32), counts
            ),
            x_l0=corners[:, 0],
            y_l0=corners[:, 1],
            target=self._targets_of(outputs)[order],
            output=self.objective.predictions(outputs.output)[order],
            level=self.level,
        )

    def _targets_of(self, outputs: SampleOutputs) -> NDArray[np.float64]:
        """Return the (N, T) targets of samples; of a classification the class of the patch or bag."""
        samples, in_split = outputs.samples, self.splits.by_place
        if self.splits.task.by_class:
            return self.splits.task.label_targets(samples.labels)
        places = zip(samples.stores.tolist(), samples.slides.tolist(), strict=True)
        return np.array([in_split[place].target for place in places], np.float64)

    def damaged(self, keys: Sequence[int]) -> dict[str, Counter[Subset]]:
        """Return the number of damaged patches of each slide by subset, from the keys of damaged samples."""
        counts: dict[str, Counter[Subset]] = defaultdict(Counter)
        in_split, names = self.splits.by_place, self.splits.names
        places = (column.tolist() for column in unpack_keys(np.array(keys, np.int64)))
        for store, number, row in zip(*places, strict=True):
            slide = in_split[store, number]
            for name, patches in self._patches_of(slide, names[store, number]).items():
                counts[name][SUBSETS[slide.subsets[row]]] += patches
        return counts

    def _patches_of(self, slide: SlideSplit, name: str) -> dict[str, int]:
        """Return the number of patches of a sample of a slide or bag, by slide."""
        return {name: 1}

    @property
    def _by_slide(self) -> dict[str, SlideValues]:
        """Fields of batches with a row per slide."""
        slides, covariates = self.splits.by_place, self.covariates
        fields: dict[str, SlideValues] = {}
        if not self.splits.task.by_class:
            fields["target"] = {place: slide.target or () for place, slide in slides.items()}
        if covariates is not None:
            fields["covariates"] = {
                place: covariates.encode(slide.covariates) for place, slide in slides.items()
            }
        return fields

    def baseline(self) -> dict[Subset, Predictions]:
        """Return the predictions of a model of the covariates alone; empty without covariates.

        It is a logistic, linear or Cox regression, and shows what the slides add.
        """
        splits, covariates, predictions = self.splits, self.covariates, {}
        if covariates is None:
            return {}
        targets = splits.targets_on("train")
        objective = self.objective.for_covariates(
            targets
        )  # that of the slide model keeps its baseline
        kernel, bias = baseline_weights(splits, covariates, objective)
        logits = {
            name: encoded_covariates(splits, covariates, name) @ kernel + bias
            for name in self.subsets
        }
        objective.fit_baseline(logits["train"][:, 0], targets)
        for subset in self.subsets[1:]:
            slides = splits.slides_on(subset)
            patients, patient = np.unique([slide.patient for slide in slides], return_inverse=True)
            zeros = np.zeros(len(patient), np.int64)
            output = np.asarray(objective.activate(tf.constant(logits[subset])), np.float32)
            predictions[subset] = Predictions(
                objective.described(splits.task),
                tuple(slide.id for slide in slides),
                tuple(patients.tolist()),
                slide=np.arange(len(patient), dtype=np.int32),
                patient=patient.astype(np.int32),
                x_l0=zeros,
                y_l0=zeros,
                target=splits.targets_on(subset),
                output=objective.predictions(output),
                level=self.level,
            )
        return predictions

    def write_more(  # noqa: B027 - patches have none
        self, folder: Path, step: TrainStep, evaluated: Sequence[SampleOutputs]
    ) -> None:
        """Write outputs of the evaluated samples that are not in `predictions.csv`."""

    def _order(self, subset: Subset, *, shuffle_block: int | None = None) -> Order:
        config, table = self._config, self._tables[subset]
        if subset != "train":
            return Order(len(table))
        return make_order(
            table, seed=config.seed, balance=config.balance, shuffle_block=shuffle_block
        )

    def _draws(self) -> NDArray[np.float64]:
        """Return the mean number of samples that an epoch draws of each item of the training table."""
        return self._order("train").draws(self._tables["train"])

    def class_weights(self) -> NDArray[np.float32]:
        """Return the (C,) weight of each class in the loss: all 1, or balanced.

        Balanced weights are inverse to the frequencies of the classes among the samples that an epoch draws, and their
        mean over these is 1.
        """
        slides = self._tables["train"].slides
        weights = np.ones(len(self.splits.classes), np.float32)
        if self._config.class_weights == "balanced" and self.splits.task.by_class:
            samples = np.bincount([slide.label for slide in slides], self._draws(), len(weights))
            np.divide(
                samples.sum() / np.count_nonzero(samples),
                samples,
                out=weights,
                where=samples > 0,
                casting="same_kind",
            )
        return weights

    def _step_settings(self, **settings: Any) -> StepSettings:
        config = self._config
        return StepSettings(
            batch_size=config.batch_size,
            objective=self.objective,
            class_weight=self.class_weights(),
            label_smoothing=config.label_smoothing,
            clip_norm=config.clip_norm,
            scale_loss=config.precision == "mixed_float16",
            **settings,
        )


class BagTraining(TrainingSetup):
    """Training on bags of features (multiple-instance learning)."""

    _config: BagTrainConfig

    def __init__(
        self,
        config: BagTrainConfig,
        sources: Sequence[BagSet],
        splits: Splits,
        slides: Sequence[SlideEntry] = (),
    ) -> None:
        bags = self._bags = sources[0]
        for note in bags.notes:
            message(note)
        super().__init__(config, sources, splits, slides)
        self.units, self.level = f"{config.bag}s", config.bag
        self.description["encoders"] = [read_encoder(folder) for folder in bags.folders]
        parts = [part for bag in bags for part in bag.parts]
        check_level(parts, vectors=config.pooling == "none")
        self._weights = read_bag_weights(config, bags.folders, bags.dimension)
        self.description |= self._weights.description
        warn_of_leaks(config, splits)
        if config.pooling in WITH_POSITIONS:
            for bag in bags:
                read_positions(bag)  # raises now, and not after an epoch
        if splits.covariates:
            self.covariates = Covariates.of(
                splits.covariates, [slide.covariates for slide in splits.slides_on("train")]
            )
            self.description["covariates"] = self.covariates.to_json()
            for slide in splits.slides:
                for text in self.covariates.unknown(slide.covariates):
                    message(
                        f"warning: slide {slide.id}, {text} is not in training: taken as missing"
                    )

    def _patches_of(self, slide: SlideSplit, name: str) -> dict[str, int]:
        bag = self._bags.complete[slide.slide]
        return {of_bag: part.rows for of_bag, part in zip(bag.slides, bag.parts, strict=True)}

    def batches(self, subset: Subset, replicas: int) -> BagBatches:
        """Return the batches of a subset. Training bags are limited to `max_per_slide` patches."""
        config = self._config
        return BagBatches(
            self._bags,
            self._tables[subset],
            order=self._order(subset),
            batch_size=config.batch_size,
            replicas=replicas,
            on_error=config.on_error,
            most=config.max_per_slide if subset == "train" else 0,
            seed=config.seed,
            by_slide=self._by_slide,
            positions=config.pooling in WITH_POSITIONS,
        )

    def train_step(self, strategy: tf.distribute.Strategy, steps_per_epoch: int) -> TrainStep:
        """Return the training step; see `TrainingSetup`."""
        config = self._config
        weights = self._weights
        with strategy.scope():
            model = BagModel(
                config.pooling,
                dimension=self._bags.dimension,
                objective=self.objective,
                dropout=config.dropout,
                precision=config.precision,
                covariates=0 if self.covariates is None else len(self.covariates.inputs),
                scaled=config.feature_scaling == "standard" or weights.scaled,
                attention=weights.attention,
                trainable=config.trainable,
            )
            weights.assign(model)
            optimizer = make_optimizer(config, steps_per_epoch)
            if config.pooling != "none":  # a linear model has no other weights
                # The coefficients of covariates begin at a fit that has a separate penalty.
                optimizer.exclude_from_weight_decay(model.last_weights)
        return BagTrainStep(strategy, model, optimizer, self._step_settings())

    def initial_values(self, step: TrainStep) -> list[tuple[keras.Variable, NDArray[Any]]]:
        """Return a last layer that predicts as the covariates alone do, and mean and variance of the features.

        With random weights of the pooled features, the model would first have to unlearn them.
        """
        model = cast(BagModel, step.model)
        values: list[tuple[keras.Variable, NDArray[Any]]] = []
        if self.covariates is not None:
            rows, bias = baseline_weights(self.splits, self.covariates, self.objective)
            kernel = np.zeros(model.last_weights[0].shape)
            kernel[-len(rows) :] = rows
            share = model.last_layer_share
            values += zip(model.last_weights, (kernel / share, bias / share), strict=True)
        if model.scaling is not None and self._config.feature_scaling == "standard":
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
        bags = [
            self._bags.complete[number]
            for outputs in evaluated
            for number in unpack_keys(outputs.samples.keys)[1].tolist()
        ]
        model = cast(BagModel, step.model)
        # Vectors have no places.
        for bag in bags if model.pooling != "none" and model.uses_features else ():
            try:
                positions = read_positions(bag) if model.takes_positions else None
                attention, parts = patch_values(model, Patches(read_bag(bag, bag.dtype), positions))
                write_patch_values(
                    folder,
                    bag.id,
                    bag.places(),
                    names=self.splits.task.names,
                    attention=attention,
                    contributions=self.objective.contributions(parts),
                )
            except DamagedStore as error:  # training skipped this bag, too
                message(f"cannot write attention of {bag.id}: {error}")
