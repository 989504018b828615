"""Loss and outputs of a task: from the last layer of a network to what is saved, and back to predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.evaluation.survival import breslow_survival, partial_likelihood, time_grid

_INTERVALS = 4
"""Intervals of the discrete-time model."""
_TINY = 1e-7
Part = Mapping[str, tf.Tensor]


class Objective(ABC):
    """What a network learns. `outputs` is the width of its last layer.

    `joint` losses are of all samples of a step together; see `slopes`.
    """

    name: str
    """Name of the output of a saved model."""
    outputs: int
    joint = False

    @abstractmethod
    def losses(self, part: Part, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the (B,) losses of (B, C) values of the last layer."""

    @abstractmethod
    def activate(self, logits: tf.Tensor) -> tf.Tensor:
        """Return the (B, C) outputs of a saved model."""

    @abstractmethod
    def layer(self, dtype: Any) -> keras.layers.Layer:
        """Return a stock layer that computes `activate`, for the saved model."""

    def logits(self, outputs: tf.Tensor) -> tf.Tensor:
        """Return values of the last layer from (B, C) outputs of a saved model; the inverse of `activate`."""
        raise NotImplementedError

    def slopes(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return loss and slope, (B, 2), from rows with value of the last layer, target, and weight, for a joint loss."""
        raise NotImplementedError

    def predictions(self, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return predictions in the form of `predictions.csv`, from (N, C) outputs."""
        return outputs

    def facts(self) -> dict[str, Any]:
        """Return facts for users of a saved model, as JSON values."""
        return {}


class Classification(Objective):
    """Probabilities of classes, by the cross-entropy."""

    name = "probability"

    def __init__(self, classes: int) -> None:
        self.outputs = classes

    def losses(self, part: Part, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the softmax cross-entropy, with label smoothing."""
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(part["label"], logits)
        if not smoothing:
            return losses
        spread = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
        return (1 - smoothing) * losses + smoothing * spread

    def activate(self, logits: tf.Tensor) -> tf.Tensor:
        """Return probabilities with a sum of 1."""
        return tf.nn.softmax(logits)

    def layer(self, dtype: Any) -> keras.layers.Layer:
        """Return a softmax layer."""
        return keras.layers.Softmax(dtype=dtype, name=self.name)

    def logits(self, outputs: tf.Tensor) -> tf.Tensor:
        """Return the logarithms of probabilities."""
        return tf.math.log(tf.maximum(outputs, 1e-12))


class MultilabelObjective(Objective):
    """Probabilities of labels, by the binary cross-entropy of the known labels.

    `positive_weight` (T,) is the weight of a label's 1 in the loss.
    """

    name = "probability"

    def __init__(self, positive_weight: NDArray[np.float64]) -> None:
        self.outputs = len(positive_weight)
        self._positive = positive_weight

    def losses(self, part: Part, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the sum over the known labels, divided by the number of all labels.

        So a missing label does not change the weight of the others.
        """
        target = tf.cast(part["target"], logits.dtype)
        known = tf.math.is_finite(target)
        truth = tf.where(known, target, 0.0)
        each = tf.nn.sigmoid_cross_entropy_with_logits(truth, logits)
        weight = 1 + truth * tf.constant(self._positive - 1, logits.dtype)
        return tf.reduce_sum(tf.where(known, each * weight, 0.0), axis=-1) / self.outputs

    def activate(self, logits: tf.Tensor) -> tf.Tensor:
        """Return a probability per label."""
        return tf.nn.sigmoid(logits)

    def layer(self, dtype: Any) -> keras.layers.Layer:
        """Return a sigmoid layer."""
        return keras.layers.Activation("sigmoid", dtype=dtype, name=self.name)

    def logits(self, outputs: tf.Tensor) -> tf.Tensor:
        """Return the log odds of probabilities."""
        kept = tf.clip_by_value(outputs, _TINY, 1 - _TINY)
        return tf.math.log(kept) - tf.math.log(1 - kept)


class RegressionObjective(Objective):
    """Numbers, standardised by mean and standard deviation of the (N, T) training targets.

    `loss` is "huber" (squared up to one standard deviation, then linear) or "squared".
    """

    name = "value"

    def __init__(self, targets: NDArray[np.float64], loss: str) -> None:
        self.outputs, self._loss = targets.shape[1], loss
        self._mean = np.nanmean(targets, axis=0)
        deviation = np.nanstd(targets, axis=0)
        self._scale = np.where(deviation > 0, deviation, 1.0)

    def losses(self, part: Part, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the sum over the known columns, divided by the number of all columns."""
        mean, scale = (tf.constant(it, logits.dtype) for it in (self._mean, self._scale))
        target = (tf.cast(part["target"], logits.dtype) - mean) / scale
        known = tf.math.is_finite(target)
        error = tf.abs(logits - tf.where(known, target, 0.0))
        each = error**2 / 2
        if self._loss == "huber":
            each = tf.where(error <= 1, each, error - 0.5)
        return tf.reduce_sum(tf.where(known, each, 0.0), axis=-1) / self.outputs

    def activate(self, logits: tf.Tensor) -> tf.Tensor:
        """Return values in the units of the targets."""
        return logits * tf.constant(self._scale, logits.dtype) + tf.constant(
            self._mean, logits.dtype
        )

    def layer(self, dtype: Any) -> keras.layers.Layer:
        """Return a layer that scales back."""
        return keras.layers.Rescaling(
            self._scale.tolist(), self._mean.tolist(), dtype=dtype, name=self.name
        )

    def logits(self, outputs: tf.Tensor) -> tf.Tensor:
        """Return standardised values."""
        return (outputs - tf.constant(self._mean, outputs.dtype)) / tf.constant(
            self._scale, outputs.dtype
        )

    def facts(self) -> dict[str, Any]:
        """Return mean and standard deviation of the training targets."""
        return {"mean": self._mean.tolist(), "deviation": self._scale.tolist()}


class CoxObjective(Objective):
    """The risk, a logarithm of the hazard, by Cox' partial likelihood of all bags of a step.

    `targets` (N, 2) are the times and events of the training.
    """

    name, outputs, joint = "risk", 1, True

    def __init__(self, targets: NDArray[np.float64]) -> None:
        self.grid = time_grid(*targets.T)
        self._baseline: NDArray[np.float64] | None = None

    def losses(self, part: Part, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return 0: the loss is computed for all bags together."""
        return tf.zeros_like(logits[:, 0])

    def activate(self, logits: tf.Tensor) -> tf.Tensor:
        """Return the risk."""
        return logits

    def layer(self, dtype: Any) -> keras.layers.Layer:
        """Return a layer that changes nothing."""
        return keras.layers.Activation("linear", dtype=dtype, name=self.name)

    def slopes(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the mean loss per event, and the slope of the sum of losses for each risk."""
        risk, time, event, weight = rows.astype(np.float64).T
        loss, gradient = partial_likelihood(risk, time, event, weight)
        events = max((event * (weight > 0)).sum(), 1)
        return np.stack([np.full(len(rows), loss / events), gradient], axis=1).astype(np.float32)

    def fit_baseline(self, risk: NDArray[np.float32], targets: NDArray[np.float64]) -> None:
        """Compute the survival of a patient with risk 0, from (N,) risks of the training."""
        time, event = targets.T
        self._baseline = breslow_survival(risk.astype(np.float64), time, event, self.grid)

    def predictions(self, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return risk, and survival until each time of the grid."""
        if self._baseline is None:
            return outputs
        risk = outputs[:, :1].astype(np.float64)
        survival = self._baseline[None] ** np.exp(np.minimum(risk, 50))
        return np.concatenate([outputs[:, :1], survival.astype(np.float32)], axis=1)

    def facts(self) -> dict[str, Any]:
        """Return the times of the grid, and the baseline survival."""
        baseline = None if self._baseline is None else self._baseline.tolist()
        return {"times": self.grid, "baseline": baseline}


class DiscreteSurvival(Objective):
    """Hazards of the intervals between quantiles of the event times.

    Source:
        M. Gensheimer and B. Narasimhan, "A scalable discrete-time survival model for neural networks" (2019). A censored
        patient survived an interval if the time is in its second half or later.
    """

    name = "hazard"

    def __init__(self, targets: NDArray[np.float64]) -> None:
        time, event = targets.T
        self.grid = time_grid(time, event)
        inner = np.quantile(time[event == 1], np.linspace(0, 1, _INTERVALS + 1)[1:-1])
        last = max(time.max(), inner[-1] * (1 + 1e-6))
        self._edges = np.unique([0.0, *inner, last])
        self.outputs = len(self._edges) - 1

    def losses(self, part: Part, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the negative log likelihood."""
        begin, end = (tf.constant(it, logits.dtype) for it in (self._edges[:-1], self._edges[1:]))
        target = tf.cast(part["target"], logits.dtype)
        time, happened = target[:, :1], target[:, 1:] == 1
        until = tf.where(happened, end, (begin + end) / 2)
        survived = tf.cast(time >= until, logits.dtype)
        # The last interval has no end, so a time after it is inside of it.
        last = tf.one_hot(self.outputs - 1, self.outputs, on_value=True, off_value=False)
        inside = (time >= begin) & ((time < end) | last)
        died = tf.cast(happened & inside, logits.dtype)
        survived = tf.where(died > 0, 0.0, survived)
        stay = tf.nn.softplus(logits)  # -log of survival of the interval
        return tf.reduce_sum(survived * stay + died * tf.nn.softplus(-logits), axis=-1)

    def activate(self, logits: tf.Tensor) -> tf.Tensor:
        """Return the probability of the event in each interval, if it has not happened before."""
        return tf.nn.sigmoid(logits)

    def layer(self, dtype: Any) -> keras.layers.Layer:
        """Return a sigmoid layer."""
        return keras.layers.Activation("sigmoid", dtype=dtype, name=self.name)

    def predictions(self, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the risk, minus the sum of the survival at the ends of the intervals; and survival at the grid."""
        ends = np.cumsum(np.log1p(-np.minimum(outputs.astype(np.float64), 1 - _TINY)), axis=1)
        risk = -np.exp(ends).sum(axis=1, keepdims=True)
        steps = np.concatenate([np.zeros((len(ends), 1)), ends], axis=1)
        # Constant hazards within the intervals.
        survival = np.exp([np.interp(self.grid, self._edges, row) for row in steps])
        return np.concatenate([risk, survival.reshape(len(ends), -1)], axis=1).astype(np.float32)

    def facts(self) -> dict[str, Any]:
        """Return the times of the grid, and the edges of the intervals."""
        return {"times": self.grid, "edges": self._edges.tolist()}


def make_objective(
    task: str, loss: str, targets: NDArray[np.float64], *, classes: int, balanced: bool
) -> Objective:
    """Return the objective of a task, from the (N, T) training targets. `balanced` weights the labels of multilabel."""
    if task == "multilabel":
        positives = np.maximum(np.nansum(targets, axis=0), 1)
        negatives = np.maximum(np.isfinite(targets).sum(axis=0) - positives, 1)
        return MultilabelObjective(negatives / positives if balanced else np.ones(targets.shape[1]))
    if task == "regression":
        return RegressionObjective(targets, loss)
    if task == "survival":
        return CoxObjective(targets) if loss == "cox" else DiscreteSurvival(targets)
    return Classification(classes)
