"""Check the processor, memory, limits, the disk of a store, the library versions and the speed of JPEG decoding."""

from __future__ import annotations

import importlib
import os
import platform
import re
import resource
import sys
import timeit
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from histopipe.errors import MachineShort
from histopipe.system.filesystems import filesystem_of, free_bytes, network_filesystem
from histopipe.system.worker_pool import WorkerDied, WorkerPool, count_usable_cores

_NEEDED, _USED = ("avx",), ("avx2", "fma", "avx512f")
"""Processor features. TensorFlow's wheels crash without the needed ones, and are faster with the others."""
_LEAST_MEMORY, _LEAST_DISK, _LEAST_SHARED = 8 << 30, 10 << 30, 1 << 30
_OLDEST, _NEWEST = (3, 11), (3, 13)
_CGROUP = Path("/sys/fs/cgroup")
_MEMORY = "it is in memory: files there use memory, and are lost on a restart; use a disk"
_WARNINGS = {
    "tmpfs": _MEMORY,
    "ramfs": _MEMORY,
    "overlay": "it is removed with the container: mount a volume (docker run -v) for stores and runs",
}
"""Advice on filesystems that should not hold a store."""
_IMPORTS = {"openslide-python": "openslide", "pillow": "PIL", "opencv-python-headless": "cv2"}
"""Module names that differ from the package name."""
_DECODINGS = 9
"""Number of measurements, of which the shortest counts: others are disturbed by other programs."""
_FASTER = 1.15
"""Minimum speed-up by SIMD. libjpeg-turbo usually decodes 1.5 to 4 times as fast with it."""


class State(StrEnum):
    """Result of a check."""

    GOOD = "good"
    WARNING = "warning"
    """It works, but slowly or not for long."""
    BAD = "bad"
    """Something does not work."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check: its name, what was found, what to do (if anything), and details for programs."""

    name: str
    found: str
    state: State = State.GOOD
    todo: str | None = None
    facts: dict[str, Any] | None = None


def _advised(
    name: str, description: str, todo: str | None, details: dict[str, Any] | None = None
) -> Check:
    """Return a check that is a warning if `todo` is given."""
    return Check(name, description, State.WARNING if todo else State.GOOD, todo, details)


def python() -> Check:
    """Check the version of Python."""
    description = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if _OLDEST <= sys.version_info[:2] <= _NEWEST:
        return Check("Python", description)
    return Check("Python", description, State.BAD, "use Python 3.11, 3.12 or 3.13")


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    """Check the number of usable cores and the processor features."""
    cores, quota = count_usable_cores(), _quota()
    text = f"{cores} cores" + (f", limited to {quota:g}" if quota else "")
    match = re.search(r"^flags[^:]*:(.*)", _text(cpuinfo), re.MULTILINE)
    if platform.machine() != "x86_64" or not match:
        return Check("processor", f"{text}, {platform.machine()}")
    present = [name for name in (*_NEEDED, *_USED) if name in match[1].split()]
    text += f", {' '.join(present) or 'no AVX'}"
    facts = {"cores": cores, "quota": quota, "features": present}
    if set(_NEEDED) <= set(present):
        return Check("processor", text, facts=facts)
    todo = "TensorFlow's wheels need AVX: train on another machine; ingest works here"
    return Check("processor", text, State.BAD, todo, facts)


def memory() -> Check:
    """Check how much memory processes may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [_text(_CGROUP / name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
    limit = min([total, *(int(text) for text in limits if text.strip().isdigit())])
    description = f"{limit / 2**30:.0f} GiB"
    description += f" of {total / 2**30:.0f} GiB in the machine" if limit < total else ""
    todo = "training takes 3 GB or more: you may need --accumulate and small batches"
    return _advised(
        "memory",
        description,
        todo if limit < _LEAST_MEMORY else None,
        {"bytes": limit, "machine_bytes": total},
    )


def address_space() -> Check:
    """Check the address space limit, since stores are mapped into memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return Check("address space", "no limit")
    return Check(
        "address space",
        f"{limit / 2**30:.1f} GiB",
        State.BAD,
        "stores are mapped into memory, 16 TiB for a writer: run `ulimit -v unlimited` first",
    )


def shared_memory(gpus: int, path: Path = Path("/dev/shm")) -> Check:  # noqa: S108 - the system's own
    """Check the shared memory, through which several GPUs exchange gradients."""
    size = os.statvfs(path).f_blocks * os.statvfs(path).f_frsize if path.is_dir() else 0
    todo = "NCCL needs more for several GPUs: docker run --shm-size 8g, or shm_size in compose.yaml"
    return _advised(
        "shared memory",
        f"{size / 2**20:,.0f} MiB in {path}",
        todo if gpus > 1 and size < _LEAST_SHARED else None,
    )


def disk(folder: Path) -> Check:
    """Check the free space for a store."""
    free = free_bytes(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
    todo = "a slide takes 0.3 to 2 GB in a store: free disk space, or use another disk"
    description = f"{free / 1e9:,.0f} GB free for {folder}"
    return _advised("disk", description, todo if free < _LEAST_DISK else None)


def filesystem(folder: Path) -> Check:
    """Check the kind of filesystem of a store."""
    kind = filesystem_of(folder)
    description = f"{folder} is on {kind}"
    if network_filesystem(folder):
        return Check(
            "filesystem",
            description,
            State.BAD,
            "LMDB's locks do not work between machines: write to a local disk, then copy",
        )
    return _advised("filesystem", description, _WARNINGS.get(kind))


def _text(path: Path) -> str:
    """Return the content of a file of the kernel; empty if there is none."""
    with suppress(OSError):
        return path.read_text()
    return ""


def _quota() -> float | None:
    """Return the number of cores that a control group, of version 2 or 1, allows; None if there is no limit."""
    files = ("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    words = " ".join(_text(_CGROUP / name) for name in files).split()
    if len(words) < 2 or not words[0].isdigit():  # "max" or -1
        return None
    return int(words[0]) / int(words[1])


def libraries() -> Check:
    """Check that every library that ingest needs can be imported and has a supported version."""
    versions, wrong = {}, []
    for requirement in map(Requirement, metadata.requires("histopipe") or []):
        if requirement.marker is not None:
            continue  # it belongs to an extra
        name = requirement.name
        try:
            versions[name] = metadata.version(name)
            if name != "openslide-bin":  # it has no module
                importlib.import_module(_IMPORTS.get(name, name))
        except Exception as error:  # noqa: BLE001 - a broken library may raise any error
            wrong.append(f"{name}: {error}")
            continue
        if not requirement.specifier.contains(versions[name], prereleases=True):
            wrong.append(f"{name} {versions[name]}, expected {requirement}")
    if wrong:
        return Check(
            "libraries",
            "; ".join(wrong),
            State.BAD,
            "reinstall histopipe in a separate environment",
            versions,
        )
    return Check("libraries", f"all {len(versions)} are installed", facts=versions)


def openslide() -> Check:
    """Check which slide formats OpenSlide can open."""
    try:
        from histopipe.slides.openslide_reader import (
            openslide_formats,  # late: the library may be broken
        )

        version, formats = openslide_formats()
    except (ImportError, OSError) as error:
        return Check(
            "OpenSlide", f"cannot be loaded: {error}", State.BAD, "pip install openslide-bin"
        )
    return Check(
        "OpenSlide",
        f"{version}: {', '.join(formats) or 'formats unknown'}",
        facts={"version": version, "formats": formats},
    )


def readers() -> Check:
    """List the libraries that read what OpenSlide does not, and their formats."""
    versions = {}
    for name, formats in (
        ("tifffile", "OME-TIFF and plain TIFF, 8-bit RGB or grey"),
        ("fastslide", "iSyntax, CZI, VSI, QPTIFF, OME-Zarr (experimental)"),
    ):
        try:
            versions[name] = f"{metadata.version(name)}: {formats}"
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return Check(
        "other readers", "; ".join(f"{k} {v}" for k, v in versions.items()), facts=versions
    )


def jpeg() -> Check:
    """Check whether the JPEG library uses SIMD, by measuring its speed with and without SIMD."""
    try:
        used, plain = _seconds(None), _seconds(_without_simd)
    except (WorkerDied, MachineShort, ImportError) as error:
        return Check("JPEG", f"cannot be decoded: {error}", State.BAD, "reinstall simplejpeg")
    todo = "its libjpeg-turbo was built without SIMD: install simplejpeg from its wheel"
    return _advised(
        "JPEG",
        f"{1 / used:.0f} megapixels per second on one core, {plain / used:.1f} times as fast as without SIMD",
        todo if plain < used * _FASTER else None,
        {"megapixels_per_second": round(1 / used), "without_simd": round(1 / plain)},
    )


def _seconds(prepare: object) -> float:
    """Return the seconds to decode a megapixel. A new process is needed: the library chooses its instructions once."""
    with WorkerPool(1, prepare) as pool:  # type: ignore[arg-type]
        return pool.submit_within(60.0, _decode).result()


def _without_simd() -> None:
    os.environ["JSIMD_FORCENONE"] = "1"  # a switch of libjpeg-turbo


def _decode() -> float:
    import numpy as np  # late: the libraries may be broken
    import simplejpeg

    steps = np.random.default_rng(0).integers(-3, 4, (1000, 1000, 3))
    content = simplejpeg.encode_jpeg(np.cumsum(steps, axis=1).astype(np.uint8), 85)
    return min(timeit.repeat(partial(simplejpeg.decode_jpeg, content), number=1, repeat=_DECODINGS))
