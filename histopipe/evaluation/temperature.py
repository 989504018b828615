"""Temperature scaling: probabilities that are calibrated on validation data.

Source:
    C. Guo et al., On calibration of modern neural networks, ICML (2017).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.evaluate import evaluate_subsets
from histopipe.splits.subsets import Subset
from histopipe.system.arrays import FloatArray
from histopipe.tasks.predictions import Predictions
from histopipe.tasks.task import EvaluationSettings

_SMALLEST = 1e-30
_RANGE = (0.05, 20.0)
_PRIOR = 0.5
"""Standard deviation of the logarithm of temperatures: two thirds are between 0.6 and 1.6. See docs/design/evaluation.md."""
_CHANGED = (
    "log_loss", "brier", "calibration_error", "calibration_intercept", "calibration_slope",
)  # fmt: skip
"""Metrics that a temperature changes."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Temperature scaling of a model.

    Attributes:
        temperature: one value for classes; one per label for several labels. Above 1: less extreme probabilities.
        before: metrics without it, by subset, level and metric; with several labels, their means.
    """

    temperature: tuple[float, ...]
    before: Mapping[Subset, Mapping[str, Mapping[str, float | None]]]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {"temperature": self.temperature, "before": self.before}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Calibration:
        """Create it from the result of `to_json`."""
        return cls(tuple(map(float, value["temperature"])), value["before"])


def calibrated(
    predictions: Mapping[Subset, Predictions], settings: EvaluationSettings
) -> tuple[dict[Subset, Predictions], Calibration]:
    """Return predictions with the temperature that is fitted to those of validation, and what it changes."""
    temperature = fit_temperature(predictions["validation"])
    before = {
        subset: {
            level: {name: metrics.values[name] for name in _CHANGED if name in metrics.values}
            for level, metrics in evaluation.named()
        }
        for subset, evaluation in evaluate_subsets(
            predictions, replace(settings, resamples=0)
        ).items()
    }
    scaled = {subset: with_temperature(part, temperature) for subset, part in predictions.items()}
    return scaled, Calibration(temperature, before)


def fit_temperature(predictions: Predictions) -> tuple[float, ...]:
    """Return the temperature that minimises the log loss of predictions, or one for each of several labels.

    A few patients say little: without a prior, right predictions alone would be made certain. The logarithm of the
    temperature has a normal prior with mean 0, and each patient counts once. So the log loss never increases.
    """
    output, patient = predictions.output, predictions.patient
    if predictions.task.of_classes:
        return (_fitted(output, predictions.label, patient),)
    temperatures = []
    for label, probability in zip(predictions.target.T, output.T, strict=True):
        rows = np.isfinite(label)
        both = np.stack([1 - probability[rows], probability[rows]], axis=1)
        temperatures.append(_fitted(both, label[rows].astype(np.int32), patient[rows]))
    return tuple(temperatures)


def _fitted(
    probability: NDArray[np.floating], label: NDArray[np.int32], patient: NDArray[np.int32]
) -> float:
    from scipy.optimize import minimize_scalar

    if not len(label):
        return 1.0
    rows, patients = np.arange(len(label)), len(np.unique(patient))

    def loss(logarithm: float) -> float:
        of_label = tempered(probability, (math.exp(logarithm),))[rows, label]
        likelihood = patients * float(np.log(np.maximum(of_label, _SMALLEST)).mean())
        return (logarithm / _PRIOR) ** 2 / 2 - likelihood

    bounds = tuple(map(math.log, _RANGE))
    best = float(minimize_scalar(loss, bounds=bounds, method="bounded").x)
    return math.exp(best) if loss(best) < loss(0) else 1.0


def tempered(probability: NDArray[np.floating], temperature: Sequence[float]) -> FloatArray:
    """Return (..., C) probabilities whose logits are divided by a temperature, or (..., T) of labels by one each."""
    values = probability.astype(np.float64)
    if len(temperature) == values.shape[-1]:  # classes are two or more, with one temperature
        both = np.stack([1 - values, values], axis=-1)
        return _scaled(both, np.asarray(temperature)[:, None])[..., 1]
    return _scaled(values, np.asarray(temperature))


def _scaled(probability: FloatArray, temperature: FloatArray) -> FloatArray:
    logits = np.log(np.maximum(probability, _SMALLEST)) / temperature
    power = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(power / power.sum(axis=-1, keepdims=True), np.float64)


def with_temperature(predictions: Predictions, temperature: Sequence[float]) -> Predictions:
    """Return predictions with the probabilities of `tempered`."""
    scaled = tempered(predictions.output, temperature)
    return replace(predictions, output=scaled.astype(np.float32))
