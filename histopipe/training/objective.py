"""Loss and outputs of each task: from the last layer of a network to what is saved, and back to predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self, cast

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.system.arrays import FloatArray
from histopipe.tasks.survival import Survival, breslow_survival, partial_likelihood, time_grid
from histopipe.tasks.task import Task

TINY = 1e-7
"""Distance from 0 and 1 at which the logarithms of probabilities are finite in float32."""
PENALTY = 0.1
"""Ridge penalty of Cox' regression per patient, without which few events have no finite solution."""
_ABSENT = 20.0
"""Log odds of the rarest class against one without a training sample."""
_INTERVALS = 4
"""Intervals of the discrete-time model."""
BatchTensors = Mapping[str, tf.Tensor]


class Objective(ABC):
    """What a network learns.

    Args:
        targets: number of classes, labels or numbers.
        loss: name of the loss.
        description: `description` of the objective of a finished run; see `FACTS`.

    Raises:
        KeyError: the description is that of another objective.
    """

    FACTS: ClassVar[tuple[str, ...]] = ()
    """Keys of `description`."""
    name: str
    """Name of the output of a saved model."""
    activation = "linear"
    """Name of the function from the last layer to the outputs of a saved model."""
    logits: Callable[[tf.Tensor], tf.Tensor]
    """Of patches only: returns values of the last layer from (B, C) outputs of a saved model; the inverse of `activate`."""
    joint = False
    """Whether the loss is of all samples of a step together; see `slopes`."""
    slopes: Callable[[NDArray[np.float32]], NDArray[np.float32]]
    """Of a joint loss only: returns loss and slope, (B, 2), from rows with value of the last layer, target, and weight."""
    bias: NDArray[np.float64] | None = None
    """(C,) initial bias of the last layer of slide models; None for 0."""

    def __init__(self, targets: int, loss: str = "", description: Mapping[str, Any] = {}) -> None:
        self.targets, self.loss = targets, loss
        self.description = {name: description[name] for name in self.FACTS}
        """Facts for users of a saved model, as JSON values."""

    @classmethod
    def of(
        cls,
        targets: FloatArray,
        loss: str = "",
        *,
        classes: int = 0,
        draws: FloatArray | None = None,
    ) -> Self:
        """Return the objective of the targets of a training.

        Args:
            targets: (N, T) targets.
            loss: name of the loss.
            classes: number of classes; 0 for other tasks than classification.
            draws: (N,) number of samples per epoch of each target, if the loss balances the classes.
        """
        return cls(classes or targets.shape[1], loss, cls.describe(targets))

    @classmethod
    def describe(cls, targets: FloatArray) -> dict[str, Any]:
        """Return the `description` of the objective of (N, T) training targets."""
        return {}

    @property
    def outputs(self) -> int:
        """Width of the last layer, C."""
        return self.targets

    @property
    def columns(self) -> int:
        """Width of `outcomes`."""
        return self.outputs

    def outcomes(
        self, truth: BatchTensors, outputs: tf.Tensor, *, final: bool = False
    ) -> tf.Tensor:
        """Return what is kept of the (B, C) outputs of a step, or of predictions, if `final`: all."""
        return outputs

    @abstractmethod
    def fit_linear(
        self, inputs: FloatArray, targets: FloatArray, penalty: float | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Return (K, C) kernel and (C,) bias of a last layer: a linear model of (N, K) inputs, such as covariates.

        Half of `penalty` times the squared coefficients is added to the sum of the losses. If it is None, it is 1; of
        Cox' regression `PENALTY` per patient.
        """

    @abstractmethod
    def losses(self, part: BatchTensors, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the (B,) losses of (B, C) values of the last layer."""

    def activate(self, logits: tf.Tensor) -> tf.Tensor:
        """Return the (B, C) outputs of a saved model."""
        return keras.activations.get(self.activation)(logits)

    def layer(self, dtype: Any) -> keras.layers.Layer:
        """Return a stock layer that computes `activate`, for the saved model."""
        return keras.layers.Activation(self.activation, dtype=dtype, name=self.name)

    def predictions(self, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return predictions in the form of `predictions.csv`, from (N, C) outputs."""
        return outputs

    def contributions(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what patches contribute to each prediction that has a name, from (N, C) parts of the last layer."""
        return values

    def described(self, task: Task) -> Task:
        """Return the task with what is known of the form of `predictions`."""
        return task

    def epoch_loss(self, loss: float, targets: Any, outputs: NDArray[np.float32]) -> float:
        """Return the loss of an epoch from the mean over its samples, and their (N, T) targets and (N, C) outputs."""
        return loss

    def for_covariates(self, targets: FloatArray) -> Objective:
        """Return the objective of a model of the covariates alone, from its (N, T) training targets."""
        return self

    def fit_baseline(self, risk: NDArray[np.floating], targets: FloatArray) -> None:  # noqa: B027 - for most, nothing
        """Compute what predictions need from (N,) first values of the last layer and (N, T) targets of the training."""


class ClassObjective(Objective):
    """Probabilities of classes, by the cross-entropy."""

    name, activation = "probability", "softmax"

    def fit_linear(
        self, inputs: FloatArray, targets: FloatArray, penalty: float | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Fit a logistic regression. Classes without a sample are nearly impossible."""
        model = _logistic_regression(penalty).fit(inputs, targets[:, 0].astype(int))
        kernel, bias = model.coef_.T, model.intercept_
        if len(bias) == 1:  # the log odds of the second of two classes
            kernel, bias = np.hstack([-kernel, kernel]) / 2, np.array([-bias[0], bias[0]]) / 2
        all_kernels = np.zeros((len(kernel), self.outputs))
        all_biases = np.full(self.outputs, bias.min() - _ABSENT)
        all_kernels[:, model.classes_], all_biases[model.classes_] = kernel, bias
        return all_kernels, all_biases

    def losses(self, part: BatchTensors, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the softmax cross-entropy, with label smoothing."""
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(part["label"], logits)
        if not smoothing:
            return losses
        spread = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
        return (1 - smoothing) * losses + smoothing * spread

    def layer(self, dtype: Any) -> keras.layers.Layer:
        """Return a softmax layer."""
        return keras.layers.Softmax(dtype=dtype, name=self.name)

    def contributions(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (N, C) contributions less their mean over the classes: only differences change probabilities."""
        return np.asarray(values - values.mean(axis=1, keepdims=True))

    def logits(self, outputs: tf.Tensor) -> tf.Tensor:
        """Return the logarithms of probabilities."""
        return tf.math.log(tf.maximum(outputs, 1e-12))


class MultilabelObjective(Objective):
    """Probabilities of labels, by the binary cross-entropy of the known labels."""

    name, activation = "probability", "sigmoid"
    positive_weight: float | NDArray[np.float64] = 1.0
    """(T,) weight of a label's 1 in the loss."""

    @classmethod
    def of(
        cls,
        targets: FloatArray,
        loss: str = "",
        *,
        classes: int = 0,
        draws: FloatArray | None = None,
    ) -> Self:
        """With draws, weight the 1 of each label by the ratio of zeros to ones among the samples."""
        objective = super().of(targets, loss, classes=classes)
        if draws is not None:
            ones, zeros = (
                np.nansum(draws[:, None] * (targets == value), axis=0) for value in (1, 0)
            )
            objective.positive_weight = np.divide(
                zeros, ones, out=np.ones(len(ones)), where=(ones > 0) & (zeros > 0)
            )
        return objective

    def fit_linear(
        self, inputs: FloatArray, targets: FloatArray, penalty: float | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Fit a logistic regression of each label."""
        return _fit_columns(partial(_logistic_regression, penalty), inputs, targets)

    def losses(self, part: BatchTensors, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the sum over the known labels, divided by the number of all labels.

        So a missing label does not change the weight of the others.
        """
        target = tf.cast(part["target"], logits.dtype)
        finite = tf.math.is_finite(target)
        truth = tf.where(finite, target, 0.0)
        each = tf.nn.sigmoid_cross_entropy_with_logits(truth, logits)
        weight = 1 + truth * tf.constant(self.positive_weight - 1, logits.dtype)
        return tf.reduce_sum(tf.where(finite, each * weight, 0.0), axis=-1) / self.outputs

    def logits(self, outputs: tf.Tensor) -> tf.Tensor:
        """Return the log odds of probabilities."""
        kept = tf.clip_by_value(outputs, TINY, 1 - TINY)
        return tf.math.log(kept) - tf.math.log(1 - kept)


class RegressionObjective(Objective):
    """Numbers, standardised by mean and standard deviation (T,) of the training targets.

    The loss is "huber" (squared up to one standard deviation, then linear) or "squared".
    """

    FACTS = ("mean", "deviation")
    name = "value"

    @classmethod
    def describe(cls, targets: FloatArray) -> dict[str, Any]:
        """Return mean and standard deviation; 1 of equal targets."""
        deviation = np.nanstd(targets, axis=0)
        scale = np.where(deviation > 0, deviation, 1.0)
        return {"mean": np.nanmean(targets, axis=0).tolist(), "deviation": scale.tolist()}

    def fit_linear(
        self, inputs: FloatArray, targets: FloatArray, penalty: float | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Fit a ridge regression of each standardised column; the loss of a row is half of its squared error."""
        from sklearn.linear_model import Ridge

        make = partial(Ridge, alpha=penalty or 1.0)
        return _fit_columns(make, inputs, np.asarray(self.logits(tf.constant(targets))))

    def losses(self, part: BatchTensors, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the sum over the known columns, divided by the number of all columns."""
        target = self.logits(tf.cast(part["target"], logits.dtype))
        finite = tf.math.is_finite(target)
        error = tf.abs(logits - tf.where(finite, target, 0.0))
        each = error**2 / 2
        if self.loss == "huber":
            each = tf.where(error <= 1, each, error - 0.5)
        return tf.reduce_sum(tf.where(finite, each, 0.0), axis=-1) / self.outputs

    def activate(self, logits: tf.Tensor) -> tf.Tensor:
        """Return values in the units of the targets."""
        mean, scale = (tf.constant(self.description[name], logits.dtype) for name in self.FACTS)
        return logits * scale + mean

    def layer(self, dtype: Any) -> keras.layers.Layer:
        """Return a layer that scales back."""
        mean, scale = (self.description[name] for name in self.FACTS)
        return keras.layers.Rescaling(scale, mean, dtype=dtype, name=self.name)

    def logits(self, outputs: tf.Tensor) -> tf.Tensor:
        """Return standardised values."""
        mean, scale = (tf.constant(self.description[name], outputs.dtype) for name in self.FACTS)
        return (outputs - mean) / scale

    def contributions(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (N, C) contributions in the units of the targets."""
        return values * np.array(self.description["deviation"], np.float64)


def _logistic_regression(penalty: float | None) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=1 / (penalty or 1.0), max_iter=1000)


def _fit_columns(
    make: Callable[[], Any], inputs: FloatArray, targets: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return (K, T) kernel and (T,) bias of a linear model for each of T columns, with NaN for unknown targets."""
    models = [
        make().fit(inputs[finite], column[finite])
        for column, finite in zip(targets.T, np.isfinite(targets).T, strict=True)
    ]
    return (
        np.stack([np.ravel(model.coef_) for model in models], axis=1),
        np.concatenate([np.ravel(model.intercept_) for model in models]),
    )


class SurvivalObjective(Objective):
    """Survival until each of the `times` of the description."""

    def described(self, task: Task) -> Task:
        """Return the task with the times of the survival."""
        return replace(cast(Survival, task), grid=tuple(self.description["times"]))

    def for_covariates(self, targets: FloatArray) -> Objective:
        """Return Cox' regression, with the baseline of these covariates."""
        return CoxObjective.of(targets)

    def fit_linear(
        self, inputs: FloatArray, targets: FloatArray, penalty: float | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Fit Cox' regression: with several outputs, the same ratio of hazards in all intervals."""
        weights = cox_weights(inputs, targets, penalty)
        bias = np.zeros(self.outputs) if self.bias is None else self.bias
        return np.tile(weights[:, None], len(bias)), bias - float(inputs.mean(axis=0) @ weights)


class CoxObjective(SurvivalObjective):
    """The risk, a logarithm of the hazard, by Cox' partial likelihood of all bags of a step.

    The `baseline` is the survival of a patient with risk 0, at the `times`; None until `fit_baseline`.
    """

    FACTS = ("times", "baseline")
    name, outputs, joint = "risk", 1, True

    @classmethod
    def describe(cls, targets: FloatArray) -> dict[str, Any]:
        """Predict at times of the (N, 2) times and events of the training."""
        return {"times": time_grid(*targets.T), "baseline": None}

    def losses(self, part: BatchTensors, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return 0: the loss is computed for all bags together."""
        return tf.zeros_like(logits[:, 0])

    def slopes(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the mean loss per event, and the slope of the sum of losses for each risk."""
        risk, time, event, weight = rows.astype(np.float64).T
        loss, gradient = partial_likelihood(risk, time, event, weight)
        events = max((event * (weight > 0)).sum(), 1)
        return np.stack([np.full(len(rows), loss / events), gradient], axis=1).astype(np.float32)

    def described(self, task: Task) -> Task:
        """Return the task with the times of the survival, if it is predicted."""
        return task if self.description["baseline"] is None else super().described(task)

    def epoch_loss(self, loss: float, targets: Any, outputs: NDArray[np.float32]) -> float:
        """Return the loss of all bags together, per event."""
        time, event = targets.T
        total, _ = partial_likelihood(outputs[:, 0].astype(np.float64), time, event)
        return float(total / max(event.sum(), 1))

    def fit_baseline(self, risk: NDArray[np.floating], targets: FloatArray) -> None:
        """Compute the survival of a patient with risk 0, from (N,) risks of the training."""
        time, event = targets.T
        self.description["baseline"] = breslow_survival(
            risk.astype(np.float64), time, event, self.description["times"]
        ).tolist()

    def predictions(self, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return risk, and survival until each time of the grid."""
        if self.description["baseline"] is None:
            return outputs
        risk = np.minimum(outputs[:, :1].astype(np.float64), 50)  # exp(50) is finite
        survival = np.array([self.description["baseline"]], np.float64) ** np.exp(risk)
        return np.concatenate([outputs[:, :1], survival.astype(np.float32)], axis=1)


class DiscreteSurvival(SurvivalObjective):
    """Hazards of the intervals between quantiles of the event times: probabilities of the event, if not yet happened.

    Source:
        M. Gensheimer and B. Narasimhan, "A scalable discrete-time survival model for neural networks" (2019). A censored
        patient survived an interval if the time is in its second half or later.
    """

    FACTS = ("times", "edges")
    name, activation = "hazard", "sigmoid"

    @property
    def outputs(self) -> int:
        """Number of intervals."""
        return len(self.description["edges"]) - 1

    @classmethod
    def describe(cls, targets: FloatArray) -> dict[str, Any]:
        """Choose the intervals by the (N, 2) times and events of the training."""
        time, event = targets.T
        inner = np.quantile(time[event == 1], np.linspace(0, 1, _INTERVALS + 1)[1:-1])
        last = max(time.max(), inner[-1] * (1 + 1e-6))
        return {
            "times": time_grid(time, event),
            "edges": np.unique([0.0, *inner, last]).tolist(),
        }

    @classmethod
    def of(cls, targets: FloatArray, loss: str = "", **options: Any) -> Self:
        """Start from the log odds of the hazards of all patients, so that few steps suffice for those of each."""
        objective, (time, event) = super().of(targets, loss, **options), targets.T
        edges = np.array(objective.description["edges"], np.float64)
        begin, end = edges[:-1], edges[1:]
        at_risk = (time[:, None] >= begin).sum(axis=0)
        inside = (time[:, None] >= begin) & (time[:, None] < end)
        inside[:, -1] |= time >= begin[-1]
        died = (inside & (event[:, None] == 1)).sum(axis=0)
        share = (died + 0.5) / (at_risk + 1)
        objective.bias = np.asarray(np.log(share / (1 - share)))
        return objective

    def losses(self, part: BatchTensors, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the negative log likelihood."""
        edges = tf.constant(np.array(self.description["edges"], np.float64), logits.dtype)
        begin, end = edges[:-1], edges[1:]
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

    def predictions(self, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the risk, minus the sum of the survival at the ends of the intervals; and survival at the grid."""
        ends = np.cumsum(np.log1p(-np.minimum(outputs.astype(np.float64), 1 - TINY)), axis=1)
        risk = -np.exp(ends).sum(axis=1, keepdims=True)
        steps = np.concatenate([np.zeros((len(ends), 1)), ends], axis=1)
        # Constant hazards within the intervals.
        times, edges = self.description["times"], self.description["edges"]
        survival = np.exp([np.interp(times, edges, row) for row in steps])
        return np.concatenate([risk, survival.reshape(len(ends), -1)], axis=1).astype(np.float32)

    def contributions(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (N, 1) contributions to the risk: the mean over the log odds of all hazards."""
        return np.asarray(values.mean(axis=1, keepdims=True))


def cox_weights(
    inputs: FloatArray, targets: FloatArray, penalty: float | None = None
) -> FloatArray:
    """Return the (K,) coefficients of Cox' regression of standardised inputs."""
    from scipy.optimize import minimize

    time, event = targets.T
    share = PENALTY if penalty is None else penalty / len(time)
    varied = np.flatnonzero(inputs.std(axis=0) > 0)
    scale = inputs[:, varied].std(axis=0, ddof=1)
    standardised = (inputs[:, varied] - inputs[:, varied].mean(axis=0)) / scale

    def loss(weights: FloatArray) -> tuple[float, FloatArray]:
        likelihood, slopes = partial_likelihood(standardised @ weights, time, event)
        gradient = slopes @ standardised / len(time) + share * weights
        return likelihood / len(time) + share / 2 * float(weights @ weights), gradient

    fitted = minimize(
        loss,
        np.zeros(len(varied)),
        jac=True,
        method="L-BFGS-B",
        options={"ftol": 1e-12, "gtol": 1e-8},
    )
    weights = np.zeros(inputs.shape[1])
    weights[varied] = fitted.x / scale
    return weights
