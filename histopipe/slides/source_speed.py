"""Measure how fast the disk of slides is read at random places and in sequence."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from histopipe.slides.slide_files import SlideFile

_RANDOM_BYTES = 32 << 10
"""Bytes of a read at a random place: a native tile of 256 pixels has 10 to 40 kB."""
_RANDOM_READS = 16
_SEQUENTIAL_BYTES = 32 << 20
_LONGEST_SECONDS = 5.0
_SLOW_SEEK_MS = 1.0
"""Solid-state disks need 0.05 to 0.3 ms for a read at a random place, hard disks and networks 1 to 20 ms."""
_LEAST_GAIN = 2.0


@dataclass(frozen=True, slots=True)
class SourceSpeed:
    """Speed of reading slides: milliseconds per read of 32 kB at a random place, and MB/s in sequence.

    `workers` processes read in parallel.
    """

    random_ms: float
    sequential_mb_s: float
    workers: int

    @property
    def gain(self) -> float:
        """How many times as fast slides are read by sequential copies as in place."""
        in_place = self.workers * _RANDOM_BYTES / 1e3 / self.random_ms  # bytes per µs are MB/s
        return self.sequential_mb_s / in_place

    @property
    def staging_pays(self) -> bool:
        """Whether reading in place is slow, and copies are at least twice as fast."""
        return self.random_ms >= _SLOW_SEEK_MS and self.gain >= _LEAST_GAIN

    def __str__(self) -> str:
        advice = f"reading copies is up to {self.gain:.0f} times as fast: pass --stage DIR"
        return (
            f"source: {self.random_ms:.2g} ms per read of 32 kB at a random place, {self.sequential_mb_s:,.0f} MB/s in "
            f"sequence; {advice if self.staging_pays else 'staging does not pay'}"
        )


def measure_source(slides: Sequence[SlideFile], workers: int) -> SourceSpeed | None:
    """Measure the largest file of the slides, for up to ten seconds; None if no local file is large enough."""
    sizes = {}
    for file in (file for slide in slides if not slide.remote for file in slide.files):
        with suppress(OSError):
            sizes[file] = file.stat().st_size
    path = max(sizes, key=sizes.__getitem__, default=None)
    if path is None or sizes[path] < 2 * _RANDOM_READS * _RANDOM_BYTES:
        return None
    try:
        return SourceSpeed(_random_ms(path, sizes[path]), _sequential(path, sizes[path]), workers)
    except OSError:
        return None


def _random_ms(path: Path, size: int) -> float:
    """Return the median time of reads at random places of a file that are not cached."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        places = np.random.default_rng(0).integers(0, size - _RANDOM_BYTES, _RANDOM_READS)
        times, until = [], time.monotonic() + _LONGEST_SECONDS
        for place in places.tolist():
            started = time.monotonic()
            os.pread(file, _RANDOM_BYTES, place)
            times.append(time.monotonic() - started)
            if time.monotonic() > until:
                break
    finally:
        os.close(file)
    return max(1e-3, 1000 * statistics.median(times))


def _sequential(path: Path, size: int) -> float:
    """Return the speed of reading a file in sequence in MB/s, without its first part."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        file.seek(max(0, min(size // 4, size - _SEQUENTIAL_BYTES)))
        started, count, buffer = time.monotonic(), 0, bytearray(4 << 20)
        while count < _SEQUENTIAL_BYTES and time.monotonic() - started < _LONGEST_SECONDS:
            read = file.readinto(buffer)
            if not read:
                break
            count += read
    return count / 1e6 / max(1e-6, time.monotonic() - started)
