"""Options of an ingest, and the limits that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from histopipe.annotations.regions import AnnotationRules
from histopipe.geometry import Mpp
from histopipe.ingestion.route import AskedRoute
from histopipe.slides.readers import AskedReader
from histopipe.system.worker_pool import count_usable_cores

_BASE_SECONDS, _SECONDS_PER_PATCH = 600.0, 0.2
"""Default time limit. It allows five patches per second, a hundredth of the usual rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestOptions:
    """Options of `ingest` that are the same for all slides, apart from the tiling spec."""

    workers: int | None = None
    route: AskedRoute = "auto"
    reader: AskedReader = "auto"
    default_mpp: Mpp | None = None
    rules: AnnotationRules = field(default_factory=AnnotationRules)
    tissue_network: Path | None = None
    max_unreadable: float = 0.01
    slide_timeout: float | None = None
    force: bool = False
    retry_failed: bool = False
    allow_mixed_mpp: bool = False
    allow_network: bool = False
    stage: Path | None = None
    stage_gb: float = 50.0

    @property
    def stage_bytes(self) -> int:
        """Most bytes of all copies in the staging folder together."""
        return int(self.stage_gb * 1e9)

    @property
    def worker_count(self) -> int:
        """Number of processes to start."""
        return self.workers or count_usable_cores()

    def seconds_for(self, patches: int) -> float:
        """Return the time limit of a slide with a number of patches, in seconds of worker time."""
        base, per_patch = self._timeout
        return base + per_patch * patches

    @property
    def timeout_text(self) -> str:
        """Time limit as text in the records of failed slides. A slide is retried if the limit has changed."""
        base, per_patch = self._timeout
        return f"--slide-timeout {base:g}, {per_patch:g} a patch"

    @property
    def unreadable_text(self) -> str:
        """Limit of unreadable patches as text in the records of failed slides."""
        return f"--max-unreadable {self.max_unreadable:g}"

    @property
    def _timeout(self) -> tuple[float, float]:
        if self.slide_timeout is None:
            return _BASE_SECONDS, _SECONDS_PER_PATCH
        return self.slide_timeout, 0.0
