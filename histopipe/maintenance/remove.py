"""Remove slides from a store, and compact it: return the space of deleted and replaced values to the disk."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from histopipe.errors import DamagedStore, MachineShort, UsageError
from histopipe.maintenance.verify import check_untrusted
from histopipe.store.claims import Claims, lock_for_writing
from histopipe.store.data_file import mapped_errors, page_faults
from histopipe.store.environment import open_environment
from histopipe.store.reading import meta_entries
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.files import flush_to_disk, free_bytes, is_full_disk, replacing, roomy
from histopipe.system.folders import DATA
from histopipe.system.output import Bar, Progress, Result, counted, default_progress, some
from histopipe.system.worker_pool import WorkerDied, WorkerPool, result_of, silence

_SPARE_BYTES = 16 << 20
"""Free disk space needed in addition to the copy: for other files of the folder, and for LMDB's lock file."""
_NOT_COPIED = (DATA, "lock.mdb", "ingest.lock")
"""Files that the copy already has, or creates when it is opened."""


@dataclass(frozen=True, slots=True, repr=False)
class RemoveResult(Result):
    """Result of `remove`.

    Attributes:
        store: path of the store.
        slides: ids of the removed slides.
        patches: number of patches of these slides.
        reusable_bytes: free bytes inside the file, also from earlier removals.
        before, after: size of data.mdb in bytes before and after the compaction; None without one.
    """

    store: str
    slides: list[str]
    patches: int
    reusable_bytes: int
    before: int | None = None
    after: int | None = None

    def __str__(self) -> str:
        removed = (
            f"{counted(len(self.slides), 'slide')} with {counted(self.patches, 'patch')} removed"
        )
        free = f"{self.reusable_bytes / 1e6:,.1f} MB of the file are free (--compact returns them to the disk)"
        if self.before is not None and self.after is not None:
            free = f"{self.before / 1e6:,.1f} MB before, {self.after / 1e6:,.1f} MB after"
        return f"{self.store}: {removed}; {free}" if self.slides else f"{self.store}: {free}"


def remove(
    store: str | Path,
    slides: Sequence[str] = (),
    *,
    compact: bool = False,
    untrusted: bool = False,
    progress: Progress | None = None,
) -> RemoveResult:
    """Remove slides from a store, each with all its entries in one transaction, and compact it.

    A compacted store has the same id, slide numbers and entries, so that runs still fit. Processes that read it continue
    with the old file. After an interruption, each slide is complete or removed, and the store compacted or not.

    Args:
        store: the store's folder.
        slides: ids of the slides. If one is unknown, nothing is removed.
        compact: copy the store without its free pages, and replace it by the copy. No process may have it open for
            writing.
        untrusted: verify the store before LMDB opens it.
        progress: where to show progress.

    Raises:
        NothingToDo, DamagedStore: there is no store, or it cannot be written.
        UsageError: a slide is not in the store, or is being ingested; or the store cannot be replaced.
        MachineShort: there is not enough disk space for the copy.
    """
    store, progress = Path(store), progress or default_progress()
    names = list(dict.fromkeys(slides))
    if not names and not compact:
        raise UsageError("no slide given", expected="ids of slides, or --compact")
    if untrusted:
        check_untrusted(store, progress=progress)
    patches, reusable = _remove_slides(store, names, progress) if names else (0, 0)
    if not compact:
        return RemoveResult(str(store), names, patches, reusable)
    return RemoveResult(str(store), names, patches, 0, *_compact(store, progress))


def _remove_slides(store: Path, names: Sequence[str], progress: Progress) -> tuple[int, int]:
    """Remove slides. Return the number of their patches, and the free bytes inside the file."""
    with Store(store) as opened:
        numbers = {record.id: number for number, record in opened.records.items()}
        planned = {record.id: record.planned for record in opened.slides}
    unknown = [name for name in names if name not in numbers]
    if unknown:
        raise UsageError(
            f"{store} has no such slide",
            found=some(unknown),
            expected=some(difflib.get_close_matches(unknown[0], numbers) or numbers)
            or "a store with slides",
        )
    with (
        StoreWriter(store) as writer,
        Claims(store) as claims,
        progress.bar("remove", unit="slides", total=len(names)) as bar,
    ):
        for name in names:
            if not claims.take(numbers[name]):
                raise UsageError(
                    f"slide {name} of {store} is being ingested",
                    todo="wait until the ingest has finished",
                )
            writer.remove(numbers[name])
            claims.release(numbers[name])
            bar.advance()
        return sum(planned[name] for name in names), writer.reusable_bytes()


def _compact(store: Path, progress: Progress) -> tuple[int, int]:
    """Copy a store without its free pages, and replace it by the copy. Return the size of data.mdb before and after.

    All entries are kept, also those of a later version.
    """
    with open_environment(store) as environment:
        with environment.read() as transaction:
            meta_entries(transaction, environment.databases, store)
        size = environment.used_bytes()
    before, folder = (store / DATA).stat().st_size, store.resolve().parent
    free = free_bytes(folder)
    if free < size + _SPARE_BYTES:
        raise MachineShort(
            f"not enough disk space in {folder} for a copy of {store}",
            found=f"{free >> 20} MB free",
            expected=f"{size >> 20} MB",
            todo=f"free disk space, and run `histopipe remove {store} --compact`",
        )
    with (
        roomy(folder, f"run `histopipe remove {store} --compact`"),
        in_place_of(store) as part,
        progress.bar("compact", unit="bytes", total=size) as bar,
    ):
        _copy(store, part, size, bar)
        carry_files(store, part)
    return before, (store / DATA).stat().st_size


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
        UsageError: a process has the store open for writing, the parent folder cannot be written, or the filesystem
            cannot exchange two folders.
    """
    real = store.resolve()
    if real.is_mount():  # before anything is copied
        raise UsageError(
            f"{store} is a mount point and cannot be replaced by a copy",
            todo="mount the parent folder",
        )
    with lock_for_writing(store, alone=True):
        try:
            with replacing(real) as part:
                yield part
        except OSError as error:
            if is_full_disk(error):
                raise
            raise UsageError(
                f"{store} cannot be replaced by a copy",
                found=error.strerror or str(error),
                todo="check the permissions of its parent folder, or move the store to another disk",
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
