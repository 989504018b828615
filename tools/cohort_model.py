"""A model of ingesting a cohort on a cluster: which resource is busy for how long, given what a slide costs each of them.

Every resource works beside the others, so the one that is busy for longest sets the time; then what lies on scratch disks is
published. Reading is counted by what storage and network can carry, not by how long a single read takes to come back.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

PART = 16e9
"""Bytes of a part, as `histopipe ingest --part-gb` has it if not told otherwise."""


@dataclass(frozen=True)
class Cohort:
    """Slides, by how many patches each has."""

    patches: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a slide costs.

    Attributes:
        start: seconds before the first slide and after the last.
        slide_seconds, patch_seconds: of a worker: of each slide, and of each patch of it.
        busy: processor time in that, as a share.
        task_seconds: of a worker, for what Dask does around each slide; all of it processor time.
        command, scheduler: processor seconds of a slide, in `histopipe ingest` and in Dask's scheduler.
        slide_read, patch_read: bytes.
        patch_stored: bytes.
        publish_speed: bytes a second, of one worker that moves its part.
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
        """For people."""
        return [
            f"start           {self.start:.1f} s",
            f"a worker        {1e3 * self.slide_seconds:.1f} ms a slide and {1e3 * self.patch_seconds:.3f} ms a patch, "
            f"{self.busy:.0%} of it processor time; {1e3 * self.task_seconds:.1f} ms a slide for Dask",
            f"the command     {1e3 * self.command:.2f} ms a slide",
            f"the scheduler   {1e3 * self.scheduler:.2f} ms a slide",
            f"read            {self.slide_read / 1e3:.0f} kB a slide and {self.patch_read / 1e3:.1f} kB a patch",
            f"stored          {self.patch_stored / 1e3:.1f} kB a patch",
            f"published       {self.publish_speed / 1e6:.0f} MB/s",
        ]


@dataclass(frozen=True)
class Site:
    """Where.

    Attributes:
        nodes: that have workers.
        workers, cores: of a node.
        network: bytes a second of a node.
        storage: bytes a second of the storage that all share.
        shared: the command and the scheduler run on the cores of the workers, and parts are published on one disk.
    """

    nodes: int
    workers: int
    cores: int
    network: float = math.inf
    storage: float = math.inf
    shared: bool = False

    def of(self, nodes: int) -> Site:
        """The same with so many nodes."""
        return replace(self, nodes=nodes)

    def __str__(self) -> str:
        return (
            f"{self.workers} workers on {self.cores} cores and {self.network / 1e9:.3g} GB/s a node, "
            f"storage {self.storage / 1e9:.3g} GB/s"
        )


@dataclass(frozen=True)
class Prediction:
    """What it takes.

    Attributes:
        seconds: in all.
        demands: seconds that each resource is busy.
        read, stored: bytes.
        scratch: bytes on each node's disk at most.
    """

    seconds: float
    demands: dict[str, float]
    read: float
    stored: float
    scratch: float

    @property
    def bottleneck(self) -> str:
        """The resource that is busy for longest."""
        return max(self.demands, key=self.demands.__getitem__)


def predict(costs: Costs, cohort: Cohort, site: Site) -> Prediction:
    """How long ingesting a cohort takes at a site."""
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
    """When the last worker is done, each taking the next slide as soon as it is free."""
    free = [0.0] * min(workers, len(seconds))
    for each in seconds.tolist():
        heapq.heapreplace(free, free[0] + each)
    return max(free)
