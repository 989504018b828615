"""Filesystems: type, free space, and errors of the operating system, which do not mean that a file is damaged."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from histopipe.errors import HistopipeError, MachineShort, UsageError

# The order matters for texts without a number: the first of these whose message is in the text is taken.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)
PASSING = (
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ENOLCK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.EREMOTEIO,
)
"""Limits of a process, locks that a filesystem lacks or another process has, and failures of a disk or a server."""


def error_number(error: BaseException) -> int | None:
    """Return the errno of an error, or None. HDF5, TensorFlow and LMDB report it only in the text of an error."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    text = str(error)
    if number := re.search(r"errno = (\d+)", text):
        return int(number[1])
    return next((n for n in (*_FULL, *_REFUSED, *PASSING) if os.strerror(n) in text), None)


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error means that a disk or a quota is full, or that a file became too large."""
    return error_number(error) in _FULL


def full_disk_error(error: BaseException, folder: Path, then: str) -> MachineShort:
    """Return the error to raise for a full disk; `then` is what to do when there is space."""
    if error_number(error) == errno.EFBIG:
        return MachineShort(
            f"a file in {folder} became too large",
            found=os.strerror(errno.EFBIG),
            expected="at most the size that the filesystem and `ulimit -f` allow",
            todo=f"use another filesystem or raise the limit, and {then}",
        )
    return MachineShort(
        f"the disk that holds {folder} is full", todo=f"free disk space, and {then}"
    )


@contextmanager
def roomy(folder: Path, then: str = "run the same command again") -> Iterator[None]:
    """Report a full disk as MachineShort. `then` is what to do when there is space."""
    try:
        yield
    except Exception as error:  # HDF5 and pyarrow raise several types
        if isinstance(error, MachineShort) or not is_full_disk(error):
            raise
        raise full_disk_error(error, folder, then) from error


def reading_error(error: BaseException, path: Path) -> HistopipeError | None:
    """Return the error to raise if the operating system cannot read a file; None if the file may be damaged."""
    number = error_number(error)
    if number in _REFUSED:
        return UsageError(
            f"{path} cannot be read",
            found=os.strerror(number),
            todo="check its path and its permissions",
        )
    if number in PASSING:
        return MachineShort(
            f"{path} cannot be read now",
            found=os.strerror(number),
            todo="the file may be intact: check the filesystem and the limits of this machine, and run the command again",
        )
    return None


def free_bytes(path: Path) -> int:
    """Return the free space for users on the disk of a path, which need not exist."""
    stat = os.statvfs(next(place for place in (path, *path.absolute().parents) if place.exists()))
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
    real, best, kind = path.resolve(), -1, ""
    for entry in mounts.read_text(errors="surrogateescape").splitlines():
        before, _, after = entry.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), before.split(" ")[4])
        # If several filesystems are mounted at one point, the last one is visible.
        if real.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), after.split(" ")[0]
    return kind


def network_filesystem(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of the network filesystem of a path, which need not exist; None for a local filesystem."""
    kind = filesystem_of(path, mounts)
    return kind if _NETWORK_FILESYSTEMS.fullmatch(kind) else None
