"""What the steps of one pass over a table of patches have said: gathered step by step, then told as predictions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.batch_sampler import BatchSampler
from histopipe.errors import UsageError


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a model says of patches, in the order they came.

    Attributes:
        key: (N,) int64.
        label: (N,) int32.
        probability: (N, C) float32.
        loss: mean cross-entropy, weighted by class.
        seconds, input_wait: wall time, and the part of it spent waiting for batches.
    """

    key: NDArray[np.int64]
    label: NDArray[np.int32]
    probability: NDArray[np.float32]
    loss: float
    seconds: float
    input_wait: float


@dataclass(slots=True)
class Tally:
    """The results of a pass so far.

    Attributes:
        values: by step, (B, C + 2) float32 of the rows that are this worker's: probabilities, loss, and weight in it.
        seconds, input_wait: wall time, and the part of it spent waiting for batches.
    """

    values: list[NDArray[np.float32]] = field(default_factory=list)
    seconds: float = 0.0
    input_wait: float = 0.0


def step_losses(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """(S,) weighted mean loss of each step, from (S, B, C + 2) float32; NaN where no row counts."""
    losses, weights = values[..., -2].astype(np.float64), values[..., -1].astype(np.float64)
    total = weights.sum(axis=1)
    means = np.full(len(values), np.nan)
    np.divide((losses * weights).sum(axis=1), total, out=means, where=total > 0)
    return means


def step_counts(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """(S,) whether any row of a step counts, from (S, B, C + 2) float32."""
    return np.asarray((values[..., -1] > 0).any(axis=1), np.bool_)


def check_finite(values: NDArray[np.float32], epoch: int) -> None:
    """Whether a training still learns anything.

    Args:
        values: (S, B, C + 2) float32 of its steps.
        epoch: from 1.

    Raises:
        UsageError: a loss is not finite.
    """
    diverged = np.flatnonzero(~np.isfinite(step_losses(values)) & step_counts(values))
    if len(diverged):
        raise UsageError(
            f"the loss of epoch {epoch} is not finite from step {diverged[0] + 1} on",
            todo="lower --learning-rate, or clip the gradients (--clip-norm 1)",
        )


def predictions(
    batches: BatchSampler,
    first: int,
    values: NDArray[np.float32],
    *,
    seconds: float,
    input_wait: float,
) -> Predictions | None:
    """The results of whole steps as predictions.

    Args:
        batches: what the steps were of; keys and labels are computed anew, which is cheaper than to keep them.
        first: the first step.
        values: (S, B, C + 2) float32, rows of all workers.
        seconds, input_wait: of the pass.

    Returns:
        None if no row counts.
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
        seconds=seconds,
        input_wait=input_wait,
    )
