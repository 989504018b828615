"""Filesystems: type, free space, and errors of a full disk."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_OCTAL = re.compile(r"\\(\d{3})")


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error means that a disk is full. HDF5 and TensorFlow report it only in the text of an error."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    text = str(error)
    return "No space left on device" in text or any(f"errno = {n}" in text for n in _FULL)


def free_bytes(path: Path) -> int:
    """Return the free space for users on the disk of an existing path."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


_NETWORK_FILESYSTEMS = re.compile(
    "9p|afs|beegfs|ceph|cifs|davfs|fhgfs|glusterfs|gpfs|lustre|ncpfs|nfs|nfs4|orangefs|panfs|pvfs2"
    "|smb3|smbfs|vboxsf|virtiofs|wekafs"
    "|fuse[.](ceph-fuse|cvmfs2|gcsfuse|glusterfs|juicefs|mfs|rclone|s3fs|sshfs|vmhgfs-fuse)"
)
"""Linux names of filesystems whose locks and shared memory are unreliable between machines."""


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the Linux name of the filesystem type of a path, which need not exist.

    Source:
        proc_pid_mountinfo(5): the mount point is the fifth field, the type the first one after a single hyphen.
    """
    real = path.resolve()
    best, kind = -1, ""
    for entry in mounts.read_text(errors="surrogateescape").splitlines():
        before, _, after = entry.partition(" - ")
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), before.split(" ")[4])
        # If several filesystems are mounted at one point, the last one is visible.
        if real.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), after.split(" ")[0]
    return kind


def network_filesystem(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of the network filesystem of a path, which need not exist; None for a local filesystem."""
    kind = filesystem_of(path, mounts)
    return kind if _NETWORK_FILESYSTEMS.fullmatch(kind) else None
