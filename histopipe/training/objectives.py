"""Losses and outputs of survival: Cox' partial likelihood, and hazards of intervals; and the objective of each task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.system.arrays import FloatArray
from histopipe.tasks.survival import Survival, breslow_survival, partial_likelihood, time_grid
from histopipe.tasks.task import Predictions, Task
from histopipe.training.objective import (
    TINY,
    BatchTensors,
    ClassObjective,
    MultilabelObjective,
    Objective,
    RegressionObjective,
)

PENALTY = 0.1
"""Ridge penalty of Cox' regression per patient, without which few events have no finite solution."""
_INTERVALS = 4
"""Intervals of the discrete-time model."""


class CoxObjective(Objective):
    """The risk, a logarithm of the hazard, by Cox' partial likelihood of all bags of a step.

    `times` are those at which survival is predicted, from that of a patient with risk 0, `baseline`.
    """

    name, outputs, joint = "risk", 1, True

    def __init__(self, times: Sequence[float], baseline: Sequence[float] | None = None) -> None:
        self.grid = list(times)
        self._baseline = None if baseline is None else np.array(baseline, np.float64)

    @classmethod
    def recorded(cls, description: Mapping[str, Any], *, loss: str, outputs: int) -> Self:
        """Return the objective of a finished run."""
        return cls(description["times"], description["baseline"])

    @classmethod
    def of(
        cls,
        targets: FloatArray,
        *,
        loss: str = "",
        classes: int = 0,
        draws: FloatArray | None = None,
    ) -> Self:
        """Predict at times of the (N, 2) times and events of the training."""
        return cls(time_grid(*targets.T))

    def losses(self, part: BatchTensors, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return 0: the loss is computed for all bags together."""
        return tf.zeros_like(logits[:, 0])

    def slopes(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the mean loss per event, and the slope of the sum of losses for each risk."""
        risk, time, event, weight = rows.astype(np.float64).T
        loss, gradient = partial_likelihood(risk, time, event, weight)
        events = max((event * (weight > 0)).sum(), 1)
        return np.stack([np.full(len(rows), loss / events), gradient], axis=1).astype(np.float32)

    def for_covariates(self, targets: FloatArray) -> Objective:
        """Return Cox' regression, with the baseline of these covariates."""
        return CoxObjective.of(targets)

    def fit_linear(self, inputs: FloatArray, targets: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Fit Cox' regression."""
        return _cox_layer(inputs, targets, np.zeros(1))

    def described(self, task: Task) -> Task:
        """Return the task with the times of the survival, if it is predicted."""
        grid = () if self._baseline is None else tuple(self.grid)
        return replace(cast(Survival, task), grid=grid)

    def epoch_loss(self, loss: float, targets: Any, outputs: NDArray[np.float32]) -> float:
        """Return the loss of all bags together, per event."""
        time, event = targets.T
        total, _ = partial_likelihood(outputs[:, 0].astype(np.float64), time, event)
        return float(total / max(event.sum(), 1))

    def finish(self, predict_train: Callable[[], Predictions]) -> None:
        """Compute the baseline survival."""
        predictions = predict_train()
        self.fit_baseline(predictions.output[:, 0], predictions.target)

    def fit_baseline(self, risk: NDArray[np.floating], targets: NDArray[np.float64]) -> None:
        """Compute the survival of a patient with risk 0, from (N,) risks of the training."""
        time, event = targets.T
        self._baseline = breslow_survival(risk.astype(np.float64), time, event, self.grid)

    def predictions(self, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return risk, and survival until each time of the grid."""
        if self._baseline is None:
            return outputs
        risk = np.minimum(outputs[:, :1].astype(np.float64), 50)
        survival = self._baseline[None] ** np.exp(risk)
        return np.concatenate([outputs[:, :1], survival.astype(np.float32)], axis=1)

    def describe(self) -> dict[str, Any]:
        """Return the times of the grid, and the baseline survival."""
        baseline = None if self._baseline is None else self._baseline.tolist()
        return {"times": self.grid, "baseline": baseline}


class DiscreteSurvival(Objective):
    """Hazards of the intervals between quantiles of the event times: probabilities of the event, if not yet happened.

    Source:
        M. Gensheimer and B. Narasimhan, "A scalable discrete-time survival model for neural networks" (2019). A censored
        patient survived an interval if the time is in its second half or later.
    """

    name, activation = "hazard", "sigmoid"

    def __init__(self, times: Sequence[float], edges: Sequence[float]) -> None:
        self.grid, self._edges = list(times), np.array(edges, np.float64)
        self.outputs = len(self._edges) - 1

    @classmethod
    def recorded(cls, description: Mapping[str, Any], *, loss: str, outputs: int) -> Self:
        """Return the objective of a finished run."""
        return cls(description["times"], description["edges"])

    @classmethod
    def of(
        cls,
        targets: FloatArray,
        *,
        loss: str = "",
        classes: int = 0,
        draws: FloatArray | None = None,
    ) -> Self:
        """Choose the intervals by the (N, 2) times and events of the training."""
        time, event = targets.T
        inner = np.quantile(time[event == 1], np.linspace(0, 1, _INTERVALS + 1)[1:-1])
        last = max(time.max(), inner[-1] * (1 + 1e-6))
        objective = cls(time_grid(time, event), np.unique([0.0, *inner, last]).tolist())
        objective.bias = objective._initial_bias(time, event)
        return objective

    def _initial_bias(
        self, time: NDArray[np.float64], event: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the log odds of the hazards of all patients, so that few steps suffice for those of each."""
        begin, end = self._edges[:-1], self._edges[1:]
        at_risk = (time[:, None] >= begin).sum(axis=0)
        inside = (time[:, None] >= begin) & (time[:, None] < end)
        inside[:, -1] |= time >= begin[-1]
        died = (inside & (event[:, None] == 1)).sum(axis=0)
        share = (died + 0.5) / (at_risk + 1)
        return np.asarray(np.log(share / (1 - share)))

    def losses(self, part: BatchTensors, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the negative log likelihood."""
        edges = tf.constant(self._edges, logits.dtype)
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
        survival = np.exp([np.interp(self.grid, self._edges, row) for row in steps])
        return np.concatenate([risk, survival.reshape(len(ends), -1)], axis=1).astype(np.float32)

    def for_covariates(self, targets: FloatArray) -> Objective:
        """Return Cox' regression, with the baseline of these covariates."""
        return CoxObjective.of(targets)

    def fit_linear(self, inputs: FloatArray, targets: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Fit Cox' regression: the same ratio of hazards in all intervals."""
        return _cox_layer(
            inputs, targets, np.zeros(self.outputs) if self.bias is None else self.bias
        )

    def described(self, task: Task) -> Task:
        """Return the task with the times of the survival."""
        return replace(cast(Survival, task), grid=tuple(self.grid))

    def contributions(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (N, 1) contributions to the risk: the mean over the log odds of all hazards."""
        return np.asarray(values.mean(axis=1, keepdims=True))

    def describe(self) -> dict[str, Any]:
        """Return the times of the grid, and the edges of the intervals."""
        return {"times": self.grid, "edges": self._edges.tolist()}


def _cox_layer(
    inputs: FloatArray, targets: FloatArray, bias: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return kernel and bias of a last layer whose outputs all have the coefficients of Cox' regression."""
    weights = cox_weights(inputs, targets)
    return np.tile(weights[:, None], len(bias)), bias - float(inputs.mean(axis=0) @ weights)


def cox_weights(inputs: FloatArray, targets: FloatArray) -> FloatArray:
    """Return the (K,) coefficients of Cox' regression."""
    from scipy.optimize import minimize

    time, event = targets.T
    varied = np.flatnonzero(inputs.std(axis=0) > 0)
    scale = inputs[:, varied].std(axis=0, ddof=1)
    standardised = (inputs[:, varied] - inputs[:, varied].mean(axis=0)) / scale

    def loss(weights: FloatArray) -> tuple[float, FloatArray]:
        likelihood, slopes = partial_likelihood(standardised @ weights, time, event)
        gradient = slopes @ standardised / len(time) + PENALTY * weights
        return likelihood / len(time) + PENALTY / 2 * float(weights @ weights), gradient

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


OBJECTIVES: Mapping[str, type[Objective]] = {
    "classification": ClassObjective,
    "multilabel": MultilabelObjective,
    "regression": RegressionObjective,
    "survival": DiscreteSurvival,
    "cox": CoxObjective,
}
"""The objective of each task, or of a loss that has another one."""


def objective_class(task: str, loss: str) -> type[Objective]:
    """Return the class of the objective of a task with this loss."""
    return OBJECTIVES.get(loss) or OBJECTIVES[task]
