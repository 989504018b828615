"""Metrics of predictions, by scikit-learn on the host: exact, and the same however many replicas made them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from histopipe.training.tally import Predictions


@dataclass(frozen=True, slots=True)
class PatchMetrics:
    """How good predictions of patches are.

    Attributes:
        patches: how many were judged.
        loss: mean cross-entropy, weighted by class as in training.
        accuracy: share of patches whose likeliest class is theirs.
        auc: area under the ROC curve; for several classes the mean over one against the rest. None where fewer than two
            classes are there.
    """

    patches: int
    loss: float
    accuracy: float
    auc: float | None

    def to_json(self) -> dict[str, float | None]:
        """The same for a JSON file, which has no NaN."""
        values = dataclasses.asdict(self)
        return {k: v if v is None or math.isfinite(v) else None for k, v in values.items()}


def patch_metrics(predictions: Predictions) -> PatchMetrics:
    """Metrics over all predictions."""
    return PatchMetrics(
        patches=len(predictions.label),
        loss=predictions.loss,
        accuracy=float((predictions.probability.argmax(axis=1) == predictions.label).mean()),
        auc=roc_auc(predictions.label, predictions.probability),
    )


def roc_auc(label: NDArray[np.int32], probability: NDArray[np.float32]) -> float | None:
    """Area under the ROC curve, macro-averaged over the classes that are there and are not all.

    Args:
        label: (N,) int32 class numbers.
        probability: (N, C) float32.
    """
    # Late: a second that only a training spends.
    from sklearn.metrics import roc_auc_score

    present = [
        c for c in range(probability.shape[1]) if 0 < np.count_nonzero(label == c) < len(label)
    ]
    if len(present) < 2 or not np.isfinite(probability).all():
        return None
    if probability.shape[1] == 2:
        return float(roc_auc_score(label == 1, probability[:, 1]))
    return float(np.mean([roc_auc_score(label == c, probability[:, c]) for c in present]))
