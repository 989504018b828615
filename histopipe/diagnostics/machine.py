"""Check processor, memory, limits, and the disk of a store."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from histopipe.system.filesystems import filesystem_of, free_bytes, network_filesystem

_NEEDED, _USED = ("avx",), ("avx2", "fma", "avx512f")
"""Features of the processor: TensorFlow's wheels crash without the first, and are faster with the others."""
_LEAST_MEMORY, _LEAST_DISK, _LEAST_SHARED = 8 << 30, 10 << 30, 1 << 30
_OLDEST, _NEWEST = (3, 11), (3, 13)
_CGROUP = Path("/sys/fs/cgroup")


class State(StrEnum):
    """Result of a check."""

    GOOD = "good"
    WARNING = "warning"
    """It works, but slowly or not for long."""
    BAD = "bad"
    """Something does not work."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: what was checked and found, what to do if anything, and details for programs."""

    name: str
    found: str
    state: State = State.GOOD
    todo: str | None = None
    facts: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)


def python() -> Check:
    """Check the version of Python."""
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if _OLDEST <= sys.version_info[:2] <= _NEWEST:
        return Check("Python", found)
    return Check("Python", found, State.BAD, "use Python 3.11, 3.12 or 3.13")


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    """Check the cores that may be used, and the processor's features."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota()
    text = f"{cores} cores" + (f", of which a limit leaves {quota:g}" if quota else "")
    flags = _flags(cpuinfo)
    if platform.machine() != "x86_64" or not flags:
        return Check("processor", f"{text}, {platform.machine()}")
    there = [name for name in (*_NEEDED, *_USED) if name in flags]
    found = f"{text}, {' '.join(there) or 'no AVX'}"
    facts = {"cores": cores, "quota": quota, "features": there}
    if not set(_NEEDED) <= flags:
        todo = "TensorFlow's wheels need AVX: train on another machine; ingest works here"
        return Check("processor", found, State.BAD, todo, facts)
    return Check("processor", found, facts=facts)


def memory() -> Check:
    """Check how much memory processes may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = min([total, *_limits("memory.max", "memory/memory.limit_in_bytes")])
    found = f"{limit / 2**30:.0f} GiB"
    found += f", of the machine's {total / 2**30:.0f}" if limit < total else ""
    facts = {"bytes": limit, "machine_bytes": total}
    if limit < _LEAST_MEMORY:
        todo = "a training takes 3 GB and more: expect --accumulate and small batches"
        return Check("memory", found, State.WARNING, todo, facts)
    return Check("memory", found, facts=facts)


def address_space() -> Check:
    """Check the limit of address space: stores are mapped into memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return Check("address space", "no limit")
    todo = (
        "stores are mapped into memory, 16 TiB for a writer: `ulimit -v unlimited` before histopipe"
    )
    return Check("address space", f"{limit / 2**30:.1f} GiB", State.BAD, todo)


def shared_memory(gpus: int, path: Path = Path("/dev/shm")) -> Check:  # noqa: S108 - the system's own
    """Check the shared memory, through which several GPUs exchange gradients."""
    size = os.statvfs(path).f_blocks * os.statvfs(path).f_frsize if path.is_dir() else 0
    found = f"{size / 2**20:,.0f} MiB in {path}"
    if gpus > 1 and size < _LEAST_SHARED:
        todo = "NCCL needs more with several GPUs: docker run --shm-size 8g, or shm_size in compose.yaml"
        return Check("shared memory", found, State.WARNING, todo)
    return Check("shared memory", found)


def disk(folder: Path) -> Check:
    """Check the free space for a store."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = free_bytes(there)
    found = f"{free / 1e9:,.0f} GB free for {folder}"
    if free < _LEAST_DISK:
        todo = "a slide takes 0.3 to 2 GB in a store: make room, or put it elsewhere"
        return Check("disk", found, State.WARNING, todo)
    return Check("disk", found)


def filesystem(folder: Path) -> Check:
    """Check the kind of filesystem of a store."""
    kind = filesystem_of(folder)
    found = f"{folder} is on {kind}"
    if network_filesystem(folder):
        todo = "LMDB's locks do not hold between machines: write on a local disk, then copy"
        return Check("filesystem", found, State.BAD, todo)
    if kind in ("tmpfs", "ramfs"):
        todo = "it is memory: what is there takes from it, and is gone after a restart; use a disk"
        return Check("filesystem", found, State.WARNING, todo)
    if kind == "overlay":
        todo = "it goes with the container: mount a volume (docker run -v) for stores and runs"
        return Check("filesystem", found, State.WARNING, todo)
    return Check("filesystem", found)


def _flags(cpuinfo: Path) -> set[str]:
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    return set()


def _quota() -> float | None:
    """Return the cores that a control group allows; None if it has no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota = (_CGROUP / "cpu" / "cpu.cfs_quota_us").read_text()
        period = (_CGROUP / "cpu" / "cpu.cfs_period_us").read_text()
        return None if int(quota) < 0 else int(quota) / int(period)
    return None


def _limits(*names: str) -> list[int]:
    """Return the limits of memory by control groups, of either version."""
    found = []
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            found.append(int((_CGROUP / name).read_text()))
    return found
