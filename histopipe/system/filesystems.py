"""Filesystems: which kind a path is on, how much space is free, whether the disk is full."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_OCTAL = re.compile(r"\\(\d{3})")


def is_full_disk(error: BaseException) -> bool:
    """Whether an error means that a disk is full. HDF5 and TensorFlow have the reason in their text only."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    text = str(error)
    return "No space left on device" in text or any(f"errno = {n}" in text for n in _FULL)


def free_bytes(path: Path) -> int:
    """What a user may still write to the disk that an existing path lies on."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


NETWORK_FILESYSTEMS = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "davfs",
        "fhgfs",
        "fuse.ceph-fuse",
        "fuse.cvmfs2",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.juicefs",
        "fuse.mfs",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
        "fuse.vmhgfs-fuse",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
        "wekafs",
    ]
)
"""Filesystems, as Linux names them, on which locks and shared memory between machines cannot be relied on."""


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The kind of filesystem that a path lies on, existing or not, as Linux names it.

    Source:
        proc_pid_mountinfo(5): the mount point is the fifth field, the kind the first one after a lone hyphen.
    """
    real = path.resolve()
    best, kind = -1, ""
    for entry in mounts.read_text(errors="surrogateescape").splitlines():
        before, _, after = entry.partition(" - ")
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), before.split(" ")[4])
        # Mounts of one point stack up, and the last one is seen.
        if real.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), after.split(" ")[0]
    return kind


def network_filesystem(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The kind of network filesystem that a path lies on, existing or not; None on a local one."""
    kind = filesystem_of(path, mounts)
    return kind if kind in NETWORK_FILESYSTEMS else None
