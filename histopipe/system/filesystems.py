"""Filesystems: which kind a path is on, how much space is free, whether the disk is full."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_OCTAL = re.compile(r"\\(\d{3})")


def is_full_disk(error: BaseException) -> bool:
    """Return whether a disk is full. HDF5 and TensorFlow give the reason in the text of an error only."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    text = str(error)
    return "No space left on device" in text or any(f"errno = {n}" in text for n in _FULL)


def free_bytes(path: Path) -> int:
    """Return the space that a user may still use on the disk of an existing path."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


_NETWORK_FILESYSTEMS = re.compile(
    "9p|afs|beegfs|ceph|cifs|davfs|fhgfs|glusterfs|gpfs|lustre|ncpfs|nfs|nfs4|orangefs|panfs|pvfs2"
    "|smb3|smbfs|vboxsf|virtiofs|wekafs"
    "|fuse[.](ceph-fuse|cvmfs2|gcsfuse|glusterfs|juicefs|mfs|rclone|s3fs|sshfs|vmhgfs-fuse)"
)
"""Filesystems, as Linux names them, whose locks and shared memory are unreliable between machines."""


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the kind of the filesystem of a path, existing or not, as Linux names it.

    Source:
        proc_pid_mountinfo(5): the mount point is the fifth field, the kind the first one after a lone hyphen.
    """
    real = path.resolve()
    best, kind = -1, ""
    for entry in mounts.read_text(errors="surrogateescape").splitlines():
        before, _, after = entry.partition(" - ")
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), before.split(" ")[4])
        # Of several mounts of one point, the last one is seen.
        if real.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), after.split(" ")[0]
    return kind


def network_filesystem(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the kind of the network filesystem of a path, existing or not; None for a local one."""
    kind = filesystem_of(path, mounts)
    return kind if _NETWORK_FILESYSTEMS.fullmatch(kind) else None
