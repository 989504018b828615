"""Read and write files: by one rename, as JSON and as records; types of filesystems, free space, and errors of the
system, which do not mean that a file is damaged.
"""

from __future__ import annotations

import csv
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from histopipe.errors import DamagedStore, HistopipeError, MachineShort, UsageError

TIFF_SIGNS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""First bytes of TIFF files."""


_DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    StopIteration,
    csv.Error,
    zlib.error,
    zipfile.BadZipFile,
)
"""Errors of reading a file whose content is not what is expected."""


class Closing:
    """Base class of objects that a `with` block closes."""

    def close(self) -> None:
        """Release all resources."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def run_on_error(close: Callable[[], object]) -> Iterator[None]:
    """Call a function, such as the `close` of a resource, if the block fails."""
    try:
        yield
    except BaseException:
        close()
        raise


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which is renamed to `path` at the end, or removed after an error.

    The temporary name is unique, and begins with a dot, which names of slides never do. A killed process leaves it
    until `remove_parts`.
    """
    # The name of the file may be as long as the file system allows. Some writers need the suffix.
    part = path.with_name(f".part-{os.getpid():x}-{os.urandom(4).hex()}{path.suffix[-16:]}")
    try:
        yield part
        part.rename(path)
    finally:
        _remove(part)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file by one rename; a text in UTF-8."""
    with atomic_write(path) as part:
        part.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file by one rename."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


_PART = re.compile(r"\.part-([0-9a-f]+)-[0-9a-f]{8}(\.|$)")
"""Temporary name of `atomic_write`, with the number of its process. Other names are those of other commands."""


def remove_parts(folder: Path) -> None:
    """Remove the files and folders that `atomic_write` left in a folder, of processes that do not run any more."""
    for part in folder.glob(".part-*"):
        process = _PART.match(part.name)
        if process is not None and not Path(f"/proc/{int(process[1], 16)}").exists():
            _remove(part)


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part)
    part.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Write a file or a folder to the disk, so that it survives a power failure."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


_LONGEST_NAME = 255
"""Most bytes of a file name on usual file systems."""


def shortened(name: str) -> str:
    """Return a file name. If it is longer than file systems allow, its end is replaced by a hash."""
    data = os.fsencode(name)
    hashed = f"{os.fsdecode(data[: _LONGEST_NAME - 9])}-{zlib.crc32(data):08x}"
    return name if len(data) <= _LONGEST_NAME else hashed


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces an existing folder at the end, by one rename.

    Raises:
        OSError: the filesystem cannot exchange folders.
    """
    part = folder.with_name(shortened(f".part-{folder.name}"))
    if part.exists():  # a killed process left it
        shutil.rmtree(part)
    part.mkdir(mode=0o700)
    try:
        yield part
        shutil.copystat(folder, part)
        # renameat2(2) with RENAME_EXCHANGE, which Python does not provide. After a kill between two renames, there would be
        # no folder (`test_files.py`).
        rename, here, exchange = ctypes.CDLL(None, use_errno=True).renameat2, -100, 2
        if rename(here, os.fsencode(part), here, os.fsencode(folder), exchange) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        shutil.rmtree(part)


_LARGEST_TEXT = 1 << 28
"""Most bytes of a text file: ten times the `splits.json` of 100,000 slides."""


def read_text(path: Path) -> str:
    """Read an untrusted text file in UTF-8.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too long, or not UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(_LARGEST_TEXT + 1)
    if len(content) > _LARGEST_TEXT:
        raise ValueError(f"the file is longer than {_LARGEST_TEXT:,} bytes")
    return content.decode("utf-8")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """Read an untrusted JSON file.

    Raises:
        OSError, ValueError: as `read_text`; or the content is nested too deep, or not JSON.
    """
    try:
        return json.loads(read_text(path))
    except RecursionError as error:
        raise ValueError("brackets are nested too deep") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read an untrusted JSON file that contains an object.

    Raises:
        FileNotFoundError: there is no file.
        DamagedStore: the file cannot be read, or contains no object.
    """
    with reading(path):
        value = read_json(path)
    if not isinstance(value, dict):
        raise DamagedStore(f"{path} is damaged", found=type(value).__name__, expected="an object")
    return value


@contextmanager
def reading(
    path: Path | str, *, todo: str | None = None, missing: HistopipeError | None = None
) -> Iterator[None]:
    """Report errors of reading a file, which may have any content, with its name.

    Raises:
        FileNotFoundError: there is no file; or `missing`, if given.
        DamagedStore: it cannot be read, or has another content than expected.
    """
    try:
        yield
    except HistopipeError:
        raise
    except FileNotFoundError as error:
        if missing is None:
            raise
        raise missing from error
    except _DAMAGE as error:
        raise DamagedStore(f"{path} is damaged", found=repr(error)[:200], todo=todo) from error


def path_within(folder: Path, name: str) -> Path:
    """Return the path of an untrusted name in a folder, such as the id of a slide.

    Raises:
        DamagedStore: the path is outside the folder.
    """
    path = folder / name
    if ".." in Path(name).parts or not path.is_relative_to(folder) or path == folder:
        raise DamagedStore(f"unsafe name {name!r}", expected=f"the name of a path within {folder}")
    return path


def read_record(path: Path) -> dict[str, Any] | None:
    """Read the settings that `record_or_check` wrote; None if there is no file.

    Raises:
        DamagedStore: the file cannot be read.
    """
    return read_json_object(path) if path.exists() else None


def record_or_check(
    path: Path, settings: Mapping[str, Any], *, ignored: Collection[str], contents: str
) -> None:
    """Write the settings that determine the contents of a folder to a JSON file, or compare them with this file.

    The settings in `ignored` may differ. `contents` describes the contents of the folder, for messages.

    Raises:
        UsageError: a setting differs.
        DamagedStore: the recorded settings cannot be read.
    """
    recorded = read_record(path)
    if recorded is None:
        write_atomically(path, json.dumps(settings, indent=2) + "\n")
        return
    names = sorted({*recorded, *settings} - {*ignored})
    differing = [name for name in names if recorded.get(name) != settings.get(name)]
    if differing:
        raise UsageError(
            f"{path.parent} contains {contents} computed with other settings",
            found="; ".join(f"{name} {recorded[name]}" for name in differing if name in recorded),
            expected="; ".join(
                f"{name} {settings[name]}" for name in differing if name in settings
            ),
            todo="choose another --out",
        )


def describe_file(path: Path) -> str:
    """Describe a file of an unknown format by its first bytes, for messages."""
    try:
        with path.open("rb") as file:
            head = file.read(200)
    except OSError as error:
        return str(error)
    signs = {
        "an empty file": not head,
        "a Git LFS pointer (fetch the file itself with `git lfs pull`)": head.startswith(
            b"version https://git-lfs"
        ),
        "a TIFF that is not a tiled slide": head[:4] in TIFF_SIGNS,
        "an HTML or XML page": head.lstrip().startswith(b"<"),
        "a text file": b"\0" not in head and head.isascii(),
    }
    return next((text for text, applies in signs.items() if applies), "unknown data")


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Report a folder that cannot be created or written to as a usage error."""
    try:
        yield
    except OSError as error:
        if is_full_disk(error):
            raise
        raise UsageError(f"cannot create or write to {folder}", found=str(error)) from error


def make_folder(folder: Path, of: Path | None = None) -> None:
    """Create a folder, and those that contain it, if it is missing.

    Args:
        folder: The folder.
        of: The folder that a message names instead, of which it is a part.

    Raises:
        UsageError: it cannot be created.
    """
    with writable(of or folder):
        folder.mkdir(parents=True, exist_ok=True)


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
