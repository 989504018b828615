"""Compact a store: return the space of deleted and replaced values to the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from histopipe.errors import DamagedStore, HistopipeError, MachineShort, UsageError
from histopipe.maintenance.verify import check_untrusted
from histopipe.store.claims import lock_for_writing
from histopipe.store.data_file import mapped_errors, page_faults
from histopipe.store.environment import open_environment
from histopipe.store.reading import meta_entries
from histopipe.system.files import DATA, atomic_write, flush_to_disk, replacing
from histopipe.system.filesystems import free_bytes, roomy
from histopipe.system.output import Bar, Progress, Result, default_progress
from histopipe.system.worker_pool import WorkerDied, WorkerPool, result_of, silence

_SPARE_BYTES = 16 << 20
"""Free disk space needed in addition to the copy: for other files of the folder, and for LMDB's lock file."""
_NOT_COPIED = (DATA, "lock.mdb", "ingest.lock")
"""Files that the copy already has, or creates when it is opened."""


@dataclass(frozen=True, slots=True, repr=False)
class CompactResult(Result):
    """Result of `compact`.

    Attributes:
        store: path of the copy, which may be the store itself.
        before, after: size of data.mdb in bytes.
    """

    store: str
    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.store}: {self.before / 1e6:,.1f} MB before, {self.after / 1e6:,.1f} MB after"


def compact(
    store: str | Path,
    out: str | Path | None = None,
    *,
    untrusted: bool = False,
    progress: Progress | None = None,
) -> CompactResult:
    """Copy a store without its free pages, and replace the store by the copy.

    All entries are kept, also those of a later version. Processes that read the store continue with the old file.
    After an interruption, the store is unchanged.

    Args:
        store: the store's folder. No process may have it open for writing.
        out: new path for the copy; the store is then not changed.
        untrusted: verify the store before LMDB opens it.
        progress: where to show progress.

    Raises:
        NothingToDo, DamagedStore: there is no store, or it cannot be copied.
        UsageError: it is being written, `out` exists, or the filesystem cannot exchange two folders.
        MachineShort: there is not enough disk space for the copy.
    """
    store, out = Path(store), Path(out) if out is not None else None
    progress = progress or default_progress()
    if untrusted:
        check_untrusted(store, progress=progress)
    with open_environment(store) as environment:
        with environment.read() as transaction:
            meta_entries(transaction, environment.databases, store)
        size = environment.used_bytes()
    before = (store / DATA).stat().st_size
    if out is not None and (out.exists() or out.absolute().is_relative_to(store.absolute())):
        raise UsageError(f"{out} already exists, or is in the store", todo="choose another --out")
    target = (out or store.resolve()).absolute()
    free = free_bytes(target.parent)
    if free < size + _SPARE_BYTES:
        raise MachineShort(
            f"not enough disk space in {target.parent} for a copy of {store}",
            found=f"{free >> 20} MB free",
            expected=f"{size >> 20} MB",
            todo="free disk space, or pass --out with a path on another disk",
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            roomy(target.parent),
            in_place_of(store) if out is None else atomic_write(out) as part,
            progress.bar("compact", unit="bytes", total=size) as bar,
        ):
            part.mkdir(exist_ok=True)
            _copy(store, part, size, bar)
            carry_files(store, part)
            after = (part / DATA).stat().st_size
    except HistopipeError:
        raise
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written", found=error.strerror or str(error)
        ) from error
    return CompactResult(str(out or store), before, after)


def carry_files(store: Path, part: Path) -> None:
    """Copy the other files of a store's folder, such as `ingest.log`, and the owner and permissions of data.mdb."""
    for path in store.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, part / path.name, symlinks=True)
        elif path.name not in _NOT_COPIED:
            shutil.copy2(path, part / path.name, follow_symlinks=False)
    shutil.copymode(store / DATA, part / DATA)
    with suppress(PermissionError):  # only root can change the owner
        for source, copy in ((store / DATA, part / DATA), (store, part)):
            os.chown(copy, source.stat().st_uid, source.stat().st_gid)


@contextmanager
def in_place_of(store: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces a store at the end, by one rename.

    Raises:
        UsageError: a process has the store open for writing, or the filesystem cannot exchange two folders.
    """
    real = store.resolve()
    if real.is_mount():  # before anything is copied
        raise UsageError(
            f"{store} is a mount point and cannot be replaced by a copy",
            todo="write the copy to another path (histopipe compact --out), or mount the parent folder",
        )
    with lock_for_writing(store, alone=True):
        try:
            with replacing(real) as part:
                yield part
        except OSError as error:
            if error.filename != str(real):
                raise
            raise UsageError(
                f"{store} cannot be replaced by a copy on its filesystem",
                found=error.strerror,
                todo="write the copy to another path (histopipe compact --out), and move it",
            ) from error


def _copy(store: Path, part: Path, size: int, bar: Bar) -> None:
    """Copy in a worker process, which can be interrupted at any time. A damaged store may kill it."""
    copy = part / DATA
    try:
        with WorkerPool(1, silence) as pool:
            copied = pool.submit(_copy_compacted, store, part)
            while not wait([copied], timeout=0.1).done:
                if copy.exists():
                    bar.update(min(size, copy.stat().st_size))
            result_of(copied)
    except WorkerDied as error:
        raise DamagedStore(
            f"{store} cannot be copied", found=f"LMDB {error}", todo="see `histopipe verify`"
        ) from error


def _copy_compacted(store: Path, folder: Path) -> None:
    """Copy data.mdb into an empty folder with LMDB, verify the copy, and flush it to disk."""
    with open_environment(store) as environment, mapped_errors(folder):
        environment.handle.copy(str(folder), compact=True)
    faults = page_faults(folder, False)
    if faults:
        raise DamagedStore(
            f"{store} cannot be copied", found=faults[0], todo="see `histopipe verify`"
        )
    for path in (folder / DATA, folder):
        flush_to_disk(path)
