"""What ingest's processes give each other: a slide to do, its plan, what was stored of it. Plain picklable values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.patch_labels import PatchLabels
from histopipe.annotations.rules import AnnotationRules
from histopipe.geometry import Mpp
from histopipe.ingest.coords import CoordsFile
from histopipe.ingest.route import AskedRoute, RouteChoice
from histopipe.slides.discovery import SlideFile
from histopipe.slides.identity import Fingerprint
from histopipe.store.record import FailureKind, SlideRecord
from histopipe.tiling.plan import TilingPlan
from histopipe.tiling.spec import TilingSpec


@dataclass(frozen=True, slots=True)
class Settings:
    """What is the same for every slide of a run."""

    store: Path
    spec: TilingSpec
    default_mpp: Mpp | None = None
    route: AskedRoute = "auto"
    rules: AnnotationRules = field(default_factory=AnnotationRules)


@dataclass(frozen=True, slots=True)
class SlideJob:
    """One slide to ingest: its number in the store, its files, its record so far.

    `again` says that it is complete already and is meant to be done once more. `coords` are its patches, if another tool has
    chosen them. `annotations` is the file of what is drawn on it, if there is one.
    """

    number: int
    slide: SlideFile
    record: SlideRecord
    mpp_from_csv: Mpp | None = None
    again: bool = False
    coords: CoordsFile | None = None
    annotations: Path | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a slide will take: bytes in the store, and seconds of one worker. From a few of its patches."""

    stored_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedSlide:
    """A slide ready to be stored. `columns` are of its index, (N,) each, beside those that every plan has."""

    record: SlideRecord
    plan: TilingPlan
    route: RouteChoice
    thumbnails: dict[str, bytes]
    before: Fingerprint
    estimate: Estimate
    seconds: float
    labels: PatchLabels | None = None
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlideFailure:
    """Why a slide cannot be ingested; `option` is what it might be due to: another one is a reason to try again."""

    reason: str
    kind: FailureKind
    record: SlideRecord
    option: str | None = None


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What was stored of a chunk.

    Attributes:
        rows: (N,) int64 numbers of its patches.
        length: (N,) uint32 bytes of each value, 0 where unreadable.
        crc: (N,) uint32.
        problem: what the first unreadable patch said; None where all could be read.
        seconds: the time it took.
    """

    rows: NDArray[np.int64]
    length: NDArray[np.uint32]
    crc: NDArray[np.uint32]
    problem: str | None
    seconds: float
