"""The results of the steps of an epoch, and the predictions and metrics that they make up."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.batch_sampler import BatchSampler
from histopipe.dataset.sample_table import SampleSource, unpack_keys
from histopipe.dataset.splits import Splits
from histopipe.errors import UsageError
from histopipe.evaluation.scores import Level, PatchScores
from histopipe.evaluation.statistics import area_under_roc
from histopipe.runs.result import EpochMetrics


@dataclass(frozen=True, slots=True)
class Predictions:
    """The predictions of a model, in the order of the batches."""

    key: NDArray[np.int64]
    """(N,)"""
    label: NDArray[np.int32]
    """(N,)"""
    probability: NDArray[np.float32]
    """(N, C)"""
    loss: float
    """Mean cross-entropy, weighted by class."""


@dataclass(slots=True)
class StepResults:
    """The results of the steps of a pass so far."""

    values: list[NDArray[np.float32]] = field(default_factory=list)
    """By step, (B, C + 2) of the rows that are this worker's: probabilities, loss, and weight in it."""
    seconds: float = 0.0
    """Wall time."""
    input_wait: float = 0.0
    """The part of it spent waiting for batches."""


def step_losses(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the (S,) weighted mean loss of each step from (S, B, C + 2) float32; NaN if no row has weight."""
    losses, weights = values[..., -2].astype(np.float64), values[..., -1].astype(np.float64)
    total = weights.sum(axis=1)
    means = np.full(len(values), np.nan)
    np.divide((losses * weights).sum(axis=1), total, out=means, where=total > 0)
    return means


def check_finite(values: NDArray[np.float32], epoch: int) -> None:
    """Raise a UsageError if a loss of an epoch, from 1, is not finite. `values` are (S, B, C + 2) float32."""
    has_weight = (values[..., -1] > 0).any(axis=1)
    diverged = np.flatnonzero(~np.isfinite(step_losses(values)) & has_weight)
    if len(diverged):
        raise UsageError(
            f"the loss of epoch {epoch} is not finite from step {diverged[0] + 1} on",
            todo="lower --learning-rate, or clip the gradients (--clip-norm 1)",
        )


def predictions(
    batches: BatchSampler, first: int, values: NDArray[np.float32]
) -> Predictions | None:
    """Return the results of steps, (S, B, C + 2) of all workers, as predictions; None if no row has weight.

    Keys and labels are computed again from the batches, which is cheaper than keeping them.
    """
    located = [batches.locate(first + step)[0] for step in range(len(values))]
    flat = values.reshape(-1, values.shape[-1])
    real = flat[:, -1] > 0
    if not real.any():
        return None
    flat = flat[real]
    return Predictions(
        np.concatenate([part.keys for part in located])[real],
        np.concatenate([part.labels for part in located])[real],
        flat[:, :-2],
        loss=float(np.average(flat[:, -2].astype(np.float64), weights=flat[:, -1])),
    )


def epoch_metrics(predictions: Predictions) -> EpochMetrics:
    """Return the metrics of predictions. They are computed on the host: the same for any number of replicas."""
    return EpochMetrics(
        count=len(predictions.label),
        loss=predictions.loss,
        accuracy=float((predictions.probability.argmax(axis=1) == predictions.label).mean()),
        auc=area_under_roc(predictions.label, predictions.probability),
    )


def patch_scores(
    predictions: Predictions,
    sources: Sequence[SampleSource],
    splits: Splits,
    *,
    level: Level = "patch",
) -> PatchScores:
    """Return predictions of patches or bags with their slides, patients and positions, in the order of the slides."""
    order = np.argsort(predictions.key, kind="stable")
    ordinals, slides, rows = unpack_keys(predictions.key[order])
    patient_of = {(slide.store, slide.slide): slide.patient for slide in splits.slides}
    begins = np.unique(predictions.key[order] >> 32, return_index=True)[1].tolist()
    ids = Counter(slide.id for slide in splits.slides)
    slide_names: dict[str, int] = {}
    patient_names: dict[str, int] = {}
    slide, patient = np.empty(len(rows), np.int32), np.empty(len(rows), np.int32)
    corners = np.zeros((len(rows), 2), np.int64)
    for begin, end in itertools.pairwise([*begins, len(rows)]):
        here, place = slice(begin, end), (int(ordinals[begin]), int(slides[begin]))
        source = sources[place[0]]
        name = source.records[place[1]].id
        # Two stores may each have a slide "1".
        name = name if ids[name] == 1 else f"{name}@{source.uuid[:8]}"
        slide[here] = slide_names.setdefault(name, len(slide_names))
        patient[here] = patient_names.setdefault(patient_of[place], len(patient_names))
        if level == "patch":
            index = source.index(place[1])
            corners[here] = np.stack([index["x_l0"][rows[here]], index["y_l0"][rows[here]]], axis=1)
    return PatchScores(
        splits.classes, tuple(slide_names), tuple(patient_names), slide=slide, patient=patient,
        x_l0=corners[:, 0], y_l0=corners[:, 1], label=predictions.label[order],
        probability=predictions.probability[order], level=level,
    )  # fmt: skip
