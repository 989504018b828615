"""Loss and outputs of each task: from the last layer of a network to what is saved, and back to predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.system.arrays import FloatArray
from histopipe.tasks.task import Predictions, Task

TINY = 1e-7
_ABSENT = 20.0
"""Log odds of the rarest class against one without a training sample."""
BatchTensors = Mapping[str, tf.Tensor]


class Objective(ABC):
    """What a network learns. `outputs` is the width of its last layer.

    `joint` losses are of all samples of a step together; see `slopes`.
    """

    name: str
    """Name of the output of a saved model."""
    outputs: int
    activation = "linear"
    """Name of the function from the last layer to the outputs of a saved model."""
    joint = False
    bias: NDArray[np.float64] | None = None
    """(C,) initial bias of the last layer of slide models; None for 0."""

    @classmethod
    @abstractmethod
    def of(
        cls,
        targets: FloatArray,
        *,
        loss: str = "",
        classes: int = 0,
        draws: FloatArray | None = None,
    ) -> Self:
        """Return the objective of (N, T) training targets. `draws` is the number of samples per epoch of each target."""

    @classmethod
    @abstractmethod
    def recorded(cls, description: Mapping[str, Any], *, loss: str, outputs: int) -> Self:
        """Return the objective of a finished run, from what `describe` returned. `outputs` is the number of classes or labels.

        Raises:
            KeyError, TypeError: the facts are not those of this objective.
        """

    @abstractmethod
    def fit_linear(self, inputs: FloatArray, targets: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return (K, C) kernel and (C,) bias of a last layer: a linear model of (N, K) inputs, such as covariates."""

    @abstractmethod
    def losses(self, part: BatchTensors, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the (B,) losses of (B, C) values of the last layer."""

    def activate(self, logits: tf.Tensor) -> tf.Tensor:
        """Return the (B, C) outputs of a saved model."""
        return keras.activations.get(self.activation)(logits)

    def layer(self, dtype: Any) -> keras.layers.Layer:
        """Return a stock layer that computes `activate`, for the saved model."""
        return keras.layers.Activation(self.activation, dtype=dtype, name=self.name)

    def logits(self, outputs: tf.Tensor) -> tf.Tensor:
        """Return values of the last layer from (B, C) outputs of a saved model; the inverse of `activate`."""
        raise NotImplementedError

    def slopes(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return loss and slope, (B, 2), from rows with value of the last layer, target, and weight, for a joint loss."""
        raise NotImplementedError

    def predictions(self, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return predictions in the form of `predictions.csv`, from (N, C) outputs."""
        return outputs

    def contributions(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what patches contribute to each prediction that has a name, from (N, C) parts of the last layer."""
        return values

    def describe(self) -> dict[str, Any]:
        """Return facts for users of a saved model, as JSON values."""
        return {}

    def described(self, task: Task) -> Task:
        """Return the task with what is known of the form of `predictions`."""
        return task

    def epoch_loss(self, loss: float, targets: Any, outputs: NDArray[np.float32]) -> float:
        """Return the loss of an epoch from the mean over its samples, and their (N, T) targets and (N, C) outputs."""
        return loss

    def for_covariates(self, targets: FloatArray) -> Objective:
        """Return the objective of a model of the covariates alone, from its (N, T) training targets."""
        return self

    def fit_baseline(self, risk: FloatArray, targets: FloatArray) -> None:  # noqa: B027 - see `finish`
        """Compute what predictions need from (N,) first values of the last layer and (N, T) targets of the training."""

    def finish(self, predict_train: Callable[[], Predictions]) -> None:  # noqa: B027 - for most, nothing
        """Compute what predictions need from those of the training, with the best model."""


class ClassObjective(Objective):
    """Probabilities of classes, by the cross-entropy."""

    name = "probability"

    def __init__(self, classes: int) -> None:
        self.outputs = classes

    @classmethod
    def of(
        cls,
        targets: FloatArray,
        *,
        loss: str = "",
        classes: int = 0,
        draws: FloatArray | None = None,
    ) -> Self:
        """Return the objective of `classes` classes."""
        return cls(classes)

    @classmethod
    def recorded(cls, description: Mapping[str, Any], *, loss: str, outputs: int) -> Self:
        """Return the objective of a finished run."""
        return cls(outputs)

    def fit_linear(self, inputs: FloatArray, targets: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Fit a logistic regression. Classes without a sample are nearly impossible."""
        from sklearn.linear_model import LogisticRegression

        model = LogisticRegression(max_iter=1000).fit(inputs, targets[:, 0].astype(int))
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

    def activate(self, logits: tf.Tensor) -> tf.Tensor:
        """Return probabilities with a sum of 1."""
        return tf.nn.softmax(logits)

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
    """Probabilities of labels, by the binary cross-entropy of the known labels.

    `positive_weight` (T,) is the weight of a label's 1 in the loss.
    """

    name, activation = "probability", "sigmoid"

    def __init__(self, positive_weight: NDArray[np.float64]) -> None:
        self.outputs = len(positive_weight)
        self._positive = positive_weight

    @classmethod
    def of(
        cls,
        targets: FloatArray,
        *,
        loss: str = "",
        classes: int = 0,
        draws: FloatArray | None = None,
    ) -> Self:
        """With `draws`, weight the 1 of each label by the ratio of zeros to ones among the samples."""
        weights = np.ones(targets.shape[1])
        if draws is not None:
            ones, zeros = (
                np.nansum(draws[:, None] * (targets == value), axis=0) for value in (1, 0)
            )
            np.divide(zeros, ones, out=weights, where=(ones > 0) & (zeros > 0))
        return cls(weights)

    @classmethod
    def recorded(cls, description: Mapping[str, Any], *, loss: str, outputs: int) -> Self:
        """Return the objective of a finished run."""
        return cls(np.ones(outputs))

    def fit_linear(self, inputs: FloatArray, targets: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Fit a logistic regression of each label."""
        from sklearn.linear_model import LogisticRegression

        return _fit_columns(lambda: LogisticRegression(max_iter=1000), inputs, targets)

    def losses(self, part: BatchTensors, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the sum over the known labels, divided by the number of all labels.

        So a missing label does not change the weight of the others.
        """
        target = tf.cast(part["target"], logits.dtype)
        finite = tf.math.is_finite(target)
        truth = tf.where(finite, target, 0.0)
        each = tf.nn.sigmoid_cross_entropy_with_logits(truth, logits)
        weight = 1 + truth * tf.constant(self._positive - 1, logits.dtype)
        return tf.reduce_sum(tf.where(finite, each * weight, 0.0), axis=-1) / self.outputs

    def logits(self, outputs: tf.Tensor) -> tf.Tensor:
        """Return the log odds of probabilities."""
        kept = tf.clip_by_value(outputs, TINY, 1 - TINY)
        return tf.math.log(kept) - tf.math.log(1 - kept)


class RegressionObjective(Objective):
    """Numbers, standardised by mean and standard deviation (T,) of the training targets.

    `loss` is "huber" (squared up to one standard deviation, then linear) or "squared".
    """

    name = "value"

    def __init__(self, mean: Sequence[float], deviation: Sequence[float], loss: str) -> None:
        self.outputs, self._loss = len(mean), loss
        self._mean, self._scale = np.array(mean, np.float64), np.array(deviation, np.float64)

    def fit_linear(self, inputs: FloatArray, targets: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Fit a ridge regression of each standardised column."""
        from sklearn.linear_model import Ridge

        return _fit_columns(Ridge, inputs, np.asarray(self.logits(tf.constant(targets))))

    @classmethod
    def recorded(cls, description: Mapping[str, Any], *, loss: str, outputs: int) -> Self:
        """Return the objective of a finished run."""
        return cls(description["mean"], description["deviation"], loss)

    @classmethod
    def of(
        cls,
        targets: FloatArray,
        *,
        loss: str = "",
        classes: int = 0,
        draws: FloatArray | None = None,
    ) -> Self:
        """Standardise by these targets."""
        deviation = np.nanstd(targets, axis=0)
        scale = np.where(deviation > 0, deviation, 1.0)
        return cls(np.nanmean(targets, axis=0).tolist(), scale.tolist(), loss)

    def losses(self, part: BatchTensors, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the sum over the known columns, divided by the number of all columns."""
        target = self.logits(tf.cast(part["target"], logits.dtype))
        finite = tf.math.is_finite(target)
        error = tf.abs(logits - tf.where(finite, target, 0.0))
        each = error**2 / 2
        if self._loss == "huber":
            each = tf.where(error <= 1, each, error - 0.5)
        return tf.reduce_sum(tf.where(finite, each, 0.0), axis=-1) / self.outputs

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

    def contributions(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (N, C) contributions in the units of the targets."""
        return values * self._scale

    def describe(self) -> dict[str, Any]:
        """Return mean and standard deviation of the training targets."""
        return {"mean": self._mean.tolist(), "deviation": self._scale.tolist()}


def _fit_columns(
    make: Callable[[], Any], inputs: FloatArray, targets: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return (K, T) kernel and (T,) bias of a linear model for each of T columns, with NaN for unknown targets."""
    models = [
        make().fit(inputs[finite], column[finite])
        for column, finite in zip(targets.T, np.isfinite(targets).T, strict=True)
    ]
    kernels = np.stack([np.ravel(model.coef_) for model in models], axis=1)
    return kernels, np.concatenate([np.ravel(model.intercept_) for model in models])
