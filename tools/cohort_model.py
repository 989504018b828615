"""A model of ingest on a cluster: how long each resource is busy, from the costs of a slide.

All resources work in parallel, so the slowest one determines the time. Afterwards the parts on scratch disks are
published. Reading is limited by the bandwidth of storage and network. The latency of single reads is not included.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

PART = 16e9
"""Bytes of a part: the default of `histopipe ingest --part-gb`."""


@dataclass(frozen=True)
class Cohort:
    """Slides, as their numbers of patches."""

    patches: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a slide.

    Attributes:
        start: seconds before the first slide and after the last.
        slide_seconds, patch_seconds: seconds of a worker per slide, and per patch.
        busy: fraction of these seconds that is CPU time.
        task_seconds: seconds of a worker per slide for Dask; all of it is CPU time.
        command, scheduler: CPU seconds per slide, in `histopipe ingest` and in Dask's scheduler.
        slide_read, patch_read: bytes read per slide, and per patch.
        patch_stored: bytes stored per patch.
        publish_speed: bytes per second of one worker that moves its part.
    """

    start: float
    slide_seconds: float
    patch_seconds: float
    busy: float
    task_seconds: float
    command: float
    scheduler: float
    slide_read: float
    patch_read: float
    patch_stored: float
    publish_speed: float

    def lines(self) -> list[str]:
        """Return the costs as lines of text."""
        return [
            f"start        {self.start:.1f} s",
            f"worker       {1e3 * self.slide_seconds:.1f} ms per slide and {1e3 * self.patch_seconds:.3f} ms per patch, "
            f"{self.busy:.0%} of it CPU time; {1e3 * self.task_seconds:.1f} ms per slide for Dask",
            f"command      {1e3 * self.command:.2f} ms per slide",
            f"scheduler    {1e3 * self.scheduler:.2f} ms per slide",
            f"read         {self.slide_read / 1e3:.0f} kB per slide and {self.patch_read / 1e3:.1f} kB per patch",
            f"stored       {self.patch_stored / 1e3:.1f} kB per patch",
            f"published    {self.publish_speed / 1e6:.0f} MB/s",
        ]


@dataclass(frozen=True)
class Site:
    """Machines on which a cohort is ingested.

    Attributes:
        nodes: number of nodes with workers.
        workers, cores: number of workers and cores per node.
        network: bytes per second of a node.
        storage: bytes per second of the shared storage.
        shared: the command and the scheduler run on the cores of the workers, and parts are published on one disk.
    """

    nodes: int
    workers: int
    cores: int
    network: float = math.inf
    storage: float = math.inf
    shared: bool = False

    def of(self, nodes: int) -> Site:
        """Return the same site with another number of nodes."""
        return replace(self, nodes=nodes)

    def __str__(self) -> str:
        return (
            f"{self.workers} workers, {self.cores} cores and {self.network / 1e9:.3g} GB/s per node, "
            f"storage {self.storage / 1e9:.3g} GB/s"
        )


@dataclass(frozen=True)
class Prediction:
    """Predicted time and bytes of an ingest.

    Attributes:
        seconds: total time.
        demands: seconds that each resource is busy.
        read, stored: bytes read and stored.
        scratch: maximum bytes on each node's disk.
    """

    seconds: float
    demands: dict[str, float]
    read: float
    stored: float
    scratch: float

    @property
    def bottleneck(self) -> str:
        """Name of the resource that is busy for the longest time."""
        return max(self.demands, key=self.demands.__getitem__)


def predict(costs: Costs, cohort: Cohort, site: Site) -> Prediction:
    """Return the predicted time and bytes of ingesting a cohort at a site."""
    slides, patches = len(cohort.patches), float(cohort.patches.sum())
    workers = site.nodes * site.workers
    each = (costs.slide_seconds + costs.patch_seconds * cohort.patches).astype(np.float64)
    read = slides * costs.slide_read + patches * costs.patch_read
    stored = patches * costs.patch_stored
    computed = costs.busy * float(each.sum()) + slides * costs.task_seconds
    central = max(costs.command, costs.scheduler)
    if site.shared:
        computed += slides * (costs.command + costs.scheduler)
        publishing = stored / costs.publish_speed
    else:
        speed = min(costs.publish_speed, site.network / site.workers, site.storage / workers)
        publishing = stored / workers / speed
    demands = {
        "workers": makespan(each + costs.task_seconds, workers),
        "cores": computed / (site.nodes * site.cores),
        "scheduler": slides * central,
        "network": read / (site.nodes * site.network),
        "storage": read / site.storage,
        "publishing": publishing,
    }
    longest = max(value for name, value in demands.items() if name != "publishing")
    scratch = min(site.workers * PART, stored / site.nodes)
    return Prediction(costs.start + longest + publishing, demands, read, stored, scratch)


def makespan(seconds: NDArray[np.float64], workers: int) -> float:
    """Return the time at which the last worker ends, if free workers always take the next slide."""
    free = [0.0] * min(workers, len(seconds))
    for each in seconds.tolist():
        heapq.heapreplace(free, free[0] + each)
    return max(free)
