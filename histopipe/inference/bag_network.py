"""The slide model of a run, ready to predict bags. Imports TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, OutOfMemory
from histopipe.runs import folder as run_folder
from histopipe.runs.task_config import BagTrainConfig
from histopipe.tasks.task import Task
from histopipe.training.attention import patch_values
from histopipe.training.bag_model import BagModel, Patches
from histopipe.training.bag_pooling import PIECE, pool
from histopipe.training.devices import make_strategy
from histopipe.training.fine_tuning import check_weights, digest
from histopipe.training.memory import is_out_of_memory
from histopipe.training.objectives import recorded_objective
from histopipe.training.train_step import values_of


class BagPrediction(NamedTuple):
    """The prediction of a bag."""

    output: NDArray[np.float32]
    """(C,) in the form of `predictions.csv`: probabilities, values, or risk and survival."""
    attention: NDArray[np.float64]
    """(N,) with a sum of 1."""
    contributions: NDArray[np.float64]
    """(N, K) per named prediction."""


class BagNetwork:
    """A slide model on the first of its devices, `device`."""

    def __init__(self, model: BagModel, objective: Any, device: str, dimension: int) -> None:
        self._model, self._objective, self._device = model, objective, device
        self.dimension = dimension
        """Features per patch."""
        self.sha256 = digest(model.serving.weights)
        self.takes_positions = model.takes_positions

    def described(self, task: Task) -> Task:
        """Return the task with the form of the predictions; see `Objective`."""
        described: Task = self._objective.described(task)
        return described

    def predict(
        self,
        features: NDArray[np.floating],
        positions: NDArray[np.float32] | None,
        covariates: Sequence[float] | None,
    ) -> BagPrediction:
        """Predict a bag from (N, D) features, (N, 2) positions if the model takes them, and encoded covariates.

        Raises:
            OutOfMemory: the bag is too large.
            DamagedStore: the prediction is not finite.
        """
        model, objective = self._model, self._objective
        try:
            with tf.device(self._device):
                patches = Patches(tf.constant(features), positions)
                pooled = pool(model, values_of(model.patch_weights), patches, tf.constant(PIECE))
                covariate_row = (
                    None if covariates is None else tf.constant([covariates], tf.float32)
                )
                logits = model.logits(values_of(model.last_weights), pooled.value, covariate_row)
                worth = patch_values(model, patches)
        except (tf.errors.OpError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"memory ran out with a bag of {len(features):,} patches",
                todo="use a machine with more memory, or a model with --pooling gated",
            ) from error
        output = objective.predictions(np.asarray(objective.activate(logits), np.float32))[0]
        if not np.isfinite(output).all():
            raise DamagedStore("the prediction is not finite", todo="check features and covariates")
        return BagPrediction(output, worth.attention, objective.contributions(worth.parts))


def load_bag_network(
    folder: Path,
    config: BagTrainConfig,
    facts: Mapping[str, Any],
    *,
    devices: str,
    outputs: int,
    covariates: int,
) -> BagNetwork:
    """Load the slide model of a run. `facts` are of its objective; `outputs` is the number of classes or targets.

    Raises:
        DamagedStore: the model cannot be read.
        UsageError: its weights are not finite.
    """
    device = make_strategy(devices).extended.worker_devices[0]
    objective = recorded_objective(config.task, config.used_loss, facts, outputs=outputs)
    path = folder / run_folder.MODEL
    try:
        with tf.device(device):
            saved = keras.models.load_model(path, safe_mode=True)  # runs no code from the file
            weights = saved.get_weights()
            dimension = int(weights[0].shape[0])
            model = BagModel(
                config.pooling, dimension=dimension, objective=objective, dropout=0.0,
                covariates=covariates, scaled=config.feature_scaling == "standard",
            )  # fmt: skip
            model.serving.set_weights(weights)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedStore(
            f"{path} cannot be read", found=str(error).split("\n")[0][:200],
            expected="the model of a run on bags",
        ) from error  # fmt: skip
    check_weights(saved.weights, str(path), "train the model again")
    return BagNetwork(model, objective, device, dimension)
