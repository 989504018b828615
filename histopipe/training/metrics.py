"""The figures of an epoch's predictions, on the host: exact, and the same however many replicas made them."""

from __future__ import annotations

from dataclasses import dataclass

from histopipe.evaluation.statistics import area_under_roc
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


def patch_metrics(predictions: Predictions) -> PatchMetrics:
    """Metrics over all predictions."""
    return PatchMetrics(
        patches=len(predictions.label),
        loss=predictions.loss,
        accuracy=float((predictions.probability.argmax(axis=1) == predictions.label).mean()),
        auc=area_under_roc(predictions.label, predictions.probability),
    )
