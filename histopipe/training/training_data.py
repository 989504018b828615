"""The data and the network of a training. One class for patches, one for bags."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.patch_batches import PatchBatches
from histopipe.dataset.sampling import BatchSampler, Order, Sequential, make_order
from histopipe.dataset.selection import SampleTable, SlideValues, select, unpack_keys
from histopipe.dataset.stain_normalization import StainNormalizer
from histopipe.errors import UsageError
from histopipe.features.bags import (
    BagBatches,
    BagSet,
    feature_moments,
    read_positions,
    scaling_variance,
)
from histopipe.features.feature_file import read_encoder
from histopipe.pretrained.encoders import named_preset
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import EpochMetrics
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig
from histopipe.splits.labelling import Covariates
from histopipe.splits.slide_table import SlideEntry
from histopipe.splits.splits import SampleSource, SlideSplit, Splits
from histopipe.splits.subsets import SUBSETS, Subset
from histopipe.store.store import Store
from histopipe.system.output import counted, message
from histopipe.tasks.choices import EvaluationLevel
from histopipe.tasks.predictions import Predictions
from histopipe.training.attention import write_attention
from histopipe.training.bag_model import BagModel
from histopipe.training.covariate_baseline import baseline_scores, baseline_weights
from histopipe.training.models import build_model
from histopipe.training.objectives import make_objective
from histopipe.training.optimizer import make_optimizer
from histopipe.training.outputs import (
    SampleOutputs,
    located,
    targets_of,
)
from histopipe.training.train_step import BagTrainStep, StepSettings, TrainStep


class Problem:
    """Data and network of a training. `max_per_slide` limits the training samples of a slide per epoch; 0: no limit."""

    holders: str
    """Containers of the samples in the splits, as a plural noun for messages."""
    level: EvaluationLevel = "patch"
    """Level of a sample."""
    starts_fitted = False
    """Whether a new model already predicts, so that its first weights are a candidate for the best: epoch 0."""

    def __init__(
        self,
        config: TrainConfig,
        sources: Sequence[SampleSource],
        splits: Splits,
        *,
        max_per_slide: int = 0,
    ) -> None:
        self.splits = splits
        self.slides: Sequence[SlideEntry] = ()
        """All slides of the sources, each with its subset or the reason of its exclusion."""
        self.facts: Mapping[str, Any] = {}
        """Facts for users of the model, written to `metrics.json`."""
        self._settings, self._sources = config, sources
        self._tables: dict[Subset, SampleTable] = {}
        for subset in SUBSETS:
            if subset == "test" and not any(len(slide.on(subset)) for slide in splits.slides):
                continue
            chosen = select(sources, splits=splits, subset=subset)
            cap = max_per_slide if subset == "train" else 0
            self._tables[subset] = SampleTable(chosen, max_per_slide=cap or None, seed=config.seed)
        self.subsets = tuple(self._tables)
        """Sides that have samples."""
        self.objective = make_objective(
            config.task,
            config.used_loss,
            splits.targets_on("train"),
            classes=len(splits.classes),
            draws=self._draws() if config.class_weights == "balanced" else None,
        )

    def batches(self, subset: Subset, replicas: int) -> BatchSampler:
        """Return the batches of a subset, with a part for each replica. Training batches are shuffled."""
        raise NotImplementedError

    def train_step(self, strategy: tf.distribute.Strategy, steps_per_epoch: int) -> TrainStep:
        """Return the training step of a new model with its optimizer."""
        raise NotImplementedError

    def initial_values(self, step: TrainStep) -> list[tuple[keras.Variable, NDArray[Any]]]:
        """Return the variables of a new model whose first values depend on the training data, with these values."""
        return []

    def metrics(self, outputs: SampleOutputs) -> EpochMetrics:
        """Return the metrics of an epoch. They are the same for any number of replicas."""
        task, target = self.splits.task, targets_of(outputs, self.splits)
        predicted = self.objective.predictions(outputs.output)
        values = self.objective.described(task).epoch_metrics(target, predicted)
        loss = self.objective.epoch_loss(outputs.loss, target, predicted)
        return EpochMetrics(len(outputs.key), loss, values, values[next(iter(task.main))])

    def predictions(self, outputs: SampleOutputs) -> Predictions:
        """Return predictions with their slides, patients and positions."""
        return located(
            outputs, self._sources, self.splits, task=self.objective.described(self.splits.task),
            output=self.objective.predictions(outputs.output), level=self.level,
        )  # fmt: skip

    def check_predictions(self, title: str, outputs: SampleOutputs) -> None:
        """Raise a UsageError if a prediction is not finite."""
        wrong = outputs.key[~np.isfinite(outputs.output).all(axis=1)]
        if len(wrong):
            raise UsageError(
                f"{title}: {counted(len(wrong), 'prediction')} not finite",
                found=f"slides {', '.join(list(self.damaged(wrong.tolist()))[:3])}",
                todo="check their values, lower --learning-rate, or use --precision float32",
            )

    def damaged(self, keys: Sequence[int]) -> dict[str, Counter[Subset]]:
        """Return the number of damaged patches of each slide by subset, from the keys of damaged samples."""
        counts: dict[str, Counter[Subset]] = defaultdict(Counter)
        in_split = {(slide.store, slide.slide): slide for slide in self.splits.slides}
        places = (column.tolist() for column in unpack_keys(np.array(keys, np.int64)))
        for store, number, row in zip(*places, strict=True):
            slide = in_split[store, number]
            for name, patches in self._patches_of(slide).items():
                counts[name][SUBSETS[slide.subsets[row]]] += patches
        return counts

    def _patches_of(self, slide: SlideSplit) -> dict[str, int]:
        """Return the number of patches of a sample, by slide."""
        once = sum(other.id == slide.id for other in self.splits.slides) == 1
        return {slide.id if once else f"{slide.id}@{self.splits.uuids[slide.store][:8]}": 1}

    @property
    def task_facts(self) -> dict[str, Any]:
        """The task and what its predictions need; nothing for classification."""
        splits = self.splits
        if splits.task.of_classes:
            return {}
        facts = self.objective.facts()
        return {"task": splits.task_name, "targets": splits.targets, "objective": facts}

    @property
    def _by_slide(self) -> dict[str, SlideValues]:
        """Fields of batches with a row per slide."""
        if self.splits.task.of_classes:
            return {}
        slides = self.splits.slides
        return {
            "target": SlideValues(
                {(slide.store, slide.slide): slide.target or () for slide in slides}
            )
        }

    def baseline(self) -> dict[Subset, Predictions]:
        """Return the predictions of a model of the covariates alone; empty without covariates."""
        return {}

    def write_more(self, folder: Path, step: TrainStep, evaluated: Sequence[SampleOutputs]) -> None:
        """Write outputs of the evaluated samples that are not in `predictions.csv`. Patches have none."""

    def _order(self, subset: Subset, *, shuffle_block: int = 0) -> Order:
        config, table = self._settings, self._tables[subset]
        if subset != "train":
            return Sequential(len(table))
        block = shuffle_block or None
        return make_order(table, seed=config.seed, balance=config.balance, shuffle_block=block)

    def _draws(self) -> NDArray[np.float64]:
        """Return the mean number of samples that an epoch draws of each item of the training table."""
        return self._order("train").draws(self._tables["train"])

    def class_weights(self, *, drawn: bool = True) -> NDArray[np.float32]:
        """Return the (C,) weight of each class in the loss: all 1, or balanced.

        Balanced weights are inverse to the frequencies of the classes among the samples that an epoch draws, and their
        mean over these is 1. With `drawn` off, they are of all samples, as in versions before 0.3.
        """
        config, slides = self._settings, self._tables["train"].slides
        weights = np.ones(len(self.splits.classes), np.float32)
        if config.class_weights == "balanced" and self.splits.task.of_classes:
            draws = self._draws() if drawn else [slide.count for slide in slides]
            samples = np.bincount([slide.label for slide in slides], draws, len(weights))
            np.divide(
                samples.sum() / np.count_nonzero(samples),
                samples,
                out=weights,
                where=samples > 0,
                casting="same_kind",
            )
        return weights

    def restore_former_weights(self, step: TrainStep) -> None:
        """Use the class weights of version 0.2, so that a run that it began continues exactly."""
        step.settings = replace(
            step.settings, class_weight=self.class_weights(drawn=False), row_mean=False
        )

    def _step_settings(self, **settings: Any) -> StepSettings:
        config = self._settings
        return StepSettings(
            batch_size=config.batch_size, objective=self.objective, class_weight=self.class_weights(),
            label_smoothing=config.label_smoothing, clip_norm=config.clip_norm,
            scale_loss=config.precision == "mixed_float16", **settings,
        )  # fmt: skip


class PatchProblem(Problem):
    """Training on patches."""

    holders = "complete slides"

    def __init__(self, config: PatchTrainConfig, stores: Sequence[Store], splits: Splits) -> None:
        super().__init__(config, stores, splits, max_per_slide=config.max_per_slide)
        self._config, self._stores = config, stores
        preset = named_preset(config.model)
        if preset is not None:
            mpps = [r.patch_mpp for store in stores for r in store.complete.values()]
            mismatch = preset.check_patches(
                stores[0].patch_size, mpps, allowed=config.allow_mismatch
            )
            if mismatch:
                message(f"warning: {mismatch}; continuing because of --allow-mismatch")
            if preset.licence:
                message(f"the trained model contains weights of {preset.title}: {preset.licence}")
        scales = [r.patch_mpp for store in stores for r in store.complete.values() if r.patch_mpp]
        patch_mpp = statistics.median(scales) if scales else None
        self.facts = {"spec": dict(stores[0].spec), "patch_mpp": patch_mpp}

    def batches(self, subset: Subset, replicas: int) -> PatchBatches:
        """Return the batches of a subset; see `Problem`."""
        config = self._config
        return PatchBatches(
            self._stores, self._tables[subset], batch_size=config.batch_size, replicas=replicas,
            order=self._order(subset, shuffle_block=config.shuffle_block), on_error=config.on_error,
            by_slide=self._by_slide,
        )  # fmt: skip

    def train_step(self, strategy: tf.distribute.Strategy, steps_per_epoch: int) -> TrainStep:
        """Return the training step; see `Problem`."""
        config = self._config
        with strategy.scope():
            model = build_model(
                config.model, patch_size=self._stores[0].patch_size,
                objective=self.objective, dropout=config.dropout, weights=config.used_weights,
                precision=config.precision, trainable=config.trainable, layer_decay=config.layer_decay,
            )  # fmt: skip
            optimizer = make_optimizer(config, steps_per_epoch)
        if model.facts:
            self.facts = {**self.facts, "backbone": dict(model.facts)}
        normalize = None
        if config.stain_norm != "none":
            normalize = StainNormalizer(self._stores, config.stain_norm)
        settings = self._step_settings(
            normalize=normalize, augmentations=config.augmentations, xla=config.xla
        )
        return TrainStep(strategy, model, optimizer, settings)


def print_splits(splits: Splits, sources: Sequence[SampleSource], holders: str, unit: str) -> None:
    """Print the samples per subset and class. `holders` (see `Problem`) and `unit` are plural nouns."""
    for subset, counts in splits.count().items():
        text = splits.task.subset_text(splits.targets_on(subset), counts, unit)
        message(f"{subset:<11}{text}")
    if splits.split_by == "patch":
        message(
            "warning: split by patch: test patches are neighbours of training patches, so test metrics"
        )
        message("show that the pipeline learns, not how good the model is on other slides")
    left_out = sum(len(source.complete) for source in sources) - len(splits.slides)
    if left_out:
        column = "" if splits.column is None else f", or no value in column {splits.column}"
        message(f"{left_out} {holders} left out: no label, or no patches{column}")
    dropped = sum(int((slide.subsets < 0).sum()) for slide in splits.slides)
    if dropped:
        message(
            f"{dropped} {unit} left out (unreadable, no class, filtered out, too near another subset, "
            "or held out from a search)"
        )
    sites: dict[str, Counter[str]] = defaultdict(Counter)
    for slide in splits.slides:
        sites[slide.site or "no site"][slide.label] += 1
    if len(sites) > 1:
        message("slides by site and label:")
        for site, counts in sorted(sites.items()):
            message(f"  {site:<20}" + ", ".join(f"{counts[c]} {c}" for c in splits.classes))


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
