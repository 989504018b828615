"""How slides are to be predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histopipe.dataset.batches import OnError
from histopipe.evaluation.scores import Aggregation


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """How slides are predicted.

    Attributes:
        batch_size: patches at once, over all devices.
        devices: as for training.
        aggregate: how patches are put together to slides and patients.
        labels: a labels file; the recorded ones of a store if not given.
        allow_extra_rows: ignore its rows, and those of `mpp_csv`, that name no slide.
        on_error: "skip" leaves out patches that are damaged in a store.
        tiling: of slides' files: settings of a `TilingSpec` that are to be others than in training.
        mpp_csv, default_mpp: scales of slides' files that do not say theirs.
        max_unreadable: share of the patches of a slide's file that may be lost to damage.
        workers: processes that read slides' files.
    """

    batch_size: int = 64
    devices: str = "auto"
    aggregate: Aggregation = "mean"
    labels: Path | None = None
    allow_extra_rows: bool = False
    on_error: OnError = "raise"
    tiling: Mapping[str, Any] = field(default_factory=dict)
    mpp_csv: Path | None = None
    default_mpp: float | None = None
    max_unreadable: float = 0.01
    workers: int | None = None
