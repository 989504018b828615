"""How long a run takes, from the work that is left, and which stage limits it."""

from __future__ import annotations

import resource
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
PLANNING = "planning"
_LONG = (("days", 86_400.0), ("h", 3600.0), ("min", 60.0))


def spelled(seconds: float) -> str:
    """Return a duration in the largest unit of which there are two or more: `45 s`, `12 min`, `3.4 h`."""
    for unit, size in _LONG:
        if seconds >= 2 * size:
            count = seconds / size
            return f"{count:.{0 if count >= 10 else 1}f} {unit}"
    return f"{seconds:.0f} s"


class Outlook:
    """Estimates the work that is left, for slides whose `work` is known, by id: their patches, or their size in bytes.

    Slides that are not planned yet count with the patches per work of those that are. Seconds are those of one patch and
    those of one slide: many small slides take longer than a large one.
    """

    def __init__(self, work: Mapping[str, float]) -> None:
        self._work, self._rest = dict(work), float(sum(work.values()))
        self._patches = self._planned = 0.0
        self._of_patches, self._of_slides = [0.0, 0.0], [0.0, 0.0, 0.0]
        self._last: tuple[str, float, int] | None = None
        self.done = 0

    def planned(self, slide: str, patches: int) -> None:
        """Add the patches of a planned slide. A slide that is added again does not count."""
        if slide in self._work:
            self._planned += self._work[slide]
            self._patches += patches
            self.left_out(slide)

    def left_out(self, slide: str) -> None:
        """Remove a slide that is done already, or has failed: it shows nothing of the rest."""
        self._rest -= self._work.pop(slide, 0.0)

    def lost(self, patches: int) -> None:
        """Subtract planned patches that will not be done."""
        self._patches -= patches

    def spent(self, seconds: float, patches: int, slides: int | None = None) -> None:
        """Add the seconds of some patches; with `slides`, those of a part with as many slides and these patches."""
        if slides is None:
            self._of_patches[0] += seconds
            self._of_patches[1] += patches
        else:
            for place, value in enumerate((seconds, patches, slides)):
                self._of_slides[place] += value

    def advanced(self, slide: str, *, steady: bool) -> None:
        """Note that patches have ended since the last call, of slides that are done one after the other.

        Steady are batches in the middle of a slide: they show the time of patches. All others also show that of slides.
        """
        now = slide, time.monotonic(), self.done
        if self._last is not None:  # the first batch also takes the time of starting up
            before, began, patches = self._last
            slides = None if steady and before == slide else int(before != slide)
            self.spent(now[1] - began, self.done - patches, slides)
        self._last = now

    @property
    def total(self) -> int:
        """Estimated number of patches of all slides."""
        return round(self._patches + self.total_of(self._rest))

    def seconds_left(self, slides: int | None = None) -> float | None:
        """Return the seconds that are left with a number of slides (default: those not planned); None if unknown."""
        left = len(self._work) if slides is None else slides
        return self.seconds_of(max(0, self.total - self.done), left) or None

    def total_of(self, work: float) -> float:
        """Return the number of patches that belong to some work."""
        return work * self._patches / (self._planned or 1.0)

    def seconds_of(self, patches: float, slides: int) -> float:
        """Return the seconds that patches of a number of slides take; 0 if unknown."""
        seconds, mixed, ended = self._of_slides
        # While all slides are small, there are no seconds of patches alone.
        spent, computed = self._of_patches if self._of_patches[1] else (seconds, mixed)
        if not computed:  # slides have been planned only
            return 0.0
        per_patch = spent / computed
        per_slide = max(0.0, seconds - per_patch * mixed) / (ended or 1.0)
        return per_patch * patches + per_slide * slides


class Stages:
    """Seconds that threads spend in each stage: `disk`, `decoding`, `preparation`, `writing` and others."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, **seconds: float) -> None:
        """Add seconds by stage."""
        with self._lock:
            self.seconds.update(seconds)

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        """Measure a stage."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(**{stage: time.monotonic() - began})

    def pulled(self, items: Iterable[T], stage: str) -> Iterator[T]:
        """Yield items, and measure how long each is waited for."""
        began = time.monotonic()
        for item in items:
            self.add(**{stage: time.monotonic() - began})
            yield item
            began = time.monotonic()

    @contextmanager
    def reading(self, waiting: str = "disk") -> Iterator[None]:
        """Measure reading and decoding in one thread: what it does not compute, it waits.

        It waits for the disk only if this thread has read from it; else for a processor, which counts as decoding.
        """
        began, computed, reads = time.monotonic(), time.thread_time(), _disk_reads()
        try:
            yield
        finally:
            seconds, computed = time.monotonic() - began, time.thread_time() - computed
            waited = (
                max(0.0, seconds - computed) if waiting != "disk" or _disk_reads() > reads else 0.0
            )
            self.add(**{waiting: waited}, decoding=seconds - waited)

    def divided(self, seconds: float) -> dict[str, float]:
        """Divide the time for which a run waited for these stages, in the ratio of their seconds."""
        total = sum(self.seconds.values()) or 1.0
        return {stage: seconds * value / total for stage, value in self.seconds.items()}


def _disk_reads() -> int:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_inblock + usage.ru_majflt


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each stage in the sum, the largest first."""
    total = sum(seconds.values()) or 1.0
    return {
        stage: round(value / total, 4)
        for stage, value in sorted(seconds.items(), key=lambda item: -item[1])
    }


def bottleneck(shares: Mapping[str, float]) -> str:
    """Return a line that names the stage with the largest share, and the others of a percent or more."""
    (first, share), *smaller = shares.items()
    rest = ", ".join(f"{stage} {value:.0%}" for stage, value in smaller if value >= 0.01)
    return f"limited by {first}: {share:.0%} of the time" + f" ({rest})" * bool(rest)
