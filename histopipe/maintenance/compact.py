"""Giving back the room that deleted and replaced values have left free inside a store's file."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from histopipe.errors import DamagedStore, HistopipeError, MachineShort, UsageError
from histopipe.store.claims import WriteLease
from histopipe.store.compaction import copy_compacted, used_bytes
from histopipe.system.files import appearing, replacing
from histopipe.system.filesystems import free_bytes, is_full_disk
from histopipe.system.worker_pool import WorkerDied, WorkerPool

_SECONDS_BETWEEN_LOOKS = 0.1
_SPARE_BYTES = 16 << 20
_LMDB_S = ("data.mdb", "lock.mdb", "ingest.lock")
"""Files that the copy has, or will have, of its own."""

Told = Callable[[int, int], None]
"""Called with the bytes that have been written, and with about how many will be."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction did: where the copy is, and bytes of data.mdb before and after."""

    store: str
    before: int
    after: int


def compact(
    store: str | Path, out: str | Path | None = None, *, told: Told = lambda *_: None
) -> Compacted:
    """Copy a store without its free room, and put the copy in its place at once, or elsewhere.

    All that it holds is kept, whether this version knows it or not. Who reads the store meanwhile goes on reading the old
    file. Interrupted at any moment, the store is as it was.

    Args:
        store: the store's folder. No process may have it open for writing.
        out: a path that does not exist, for the copy; the store then stays as it is.
        told: hears how far it is.

    Raises:
        NothingToDo, DamagedStore: there is no store, or it cannot be copied.
        UsageError: it is being written, `out` exists, or the filesystem cannot put one folder in another's place.
        MachineShort: there is no room for the copy.
    """
    store, out = Path(store), Path(out) if out is not None else None
    size = used_bytes(store)
    before = (store / "data.mdb").stat().st_size
    target = store.resolve() if out is None else out
    if out is not None and (out.exists() or out.absolute().is_relative_to(store.absolute())):
        raise UsageError(f"{out} exists already, or lies in the store", todo="choose another --out")
    with _told_as_ours(target):
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
    if free_bytes(target.absolute().parent) < size + _SPARE_BYTES:
        raise MachineShort(
            f"the disk that holds {target.parent} has no room for a copy of {store}",
            found=f"{free_bytes(target.absolute().parent) >> 20} MB free",
            expected=f"{size >> 20} MB",
            todo="make room, or pass --out with a path on another disk",
        )
    with _told_as_ours(target), _copy_of(store, out) as part:
        _copy(store, part, size, told)
        carry_files(store, part)
        after = (part / "data.mdb").stat().st_size
    return Compacted(str(target if out else store), before, after)


def carry_files(store: Path, part: Path) -> None:
    """Copy what lies in a store's folder beside its data, such as `ingest.log`; who may read the data stays the same."""
    for path in store.iterdir():
        if path.name in _LMDB_S or path == part:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, part / path.name, symlinks=True)
        else:
            shutil.copy2(path, part / path.name, follow_symlinks=False)
    data = store / "data.mdb"
    shutil.copymode(data, part / "data.mdb")
    with contextlib.suppress(PermissionError):  # only root gives files away
        os.chown(part / "data.mdb", data.stat().st_uid, data.stat().st_gid)
        os.chown(part, store.stat().st_uid, store.stat().st_gid)


@contextmanager
def _told_as_ours(path: Path) -> Iterator[None]:
    """A folder that cannot be written, or a full disk, told as everywhere."""
    try:
        yield
    except HistopipeError:
        raise
    except OSError as error:
        if is_full_disk(error):
            raise MachineShort(
                f"the disk that holds {path.parent} is full", todo="make room"
            ) from error
        raise UsageError(f"{path} cannot be written", found=error.strerror or str(error)) from error


@contextmanager
def in_place_of(store: Path) -> Iterator[Path]:
    """An empty folder that takes a store's place at the end; nobody may be writing the store.

    Raises:
        UsageError: somebody is, or the filesystem cannot put one folder in another's place.
    """
    real = store.resolve()
    if real.is_mount():  # told before anything is copied
        raise UsageError(
            f"{store} is a mount point, which no copy can take the place of",
            todo="write the copy elsewhere (histopipe compact --out), or mount the folder above",
        )
    with WriteLease(store, alone=True):
        try:
            with replacing(real) as part:
                yield part
        except OSError as error:
            if error.filename != str(real):
                raise
            raise UsageError(
                f"the filesystem of {store} cannot put a copy in its place",
                found=error.strerror,
                todo="write the copy elsewhere (histopipe compact --out), and move it there yourself",
            ) from error


@contextmanager
def _copy_of(store: Path, out: Path | None) -> Iterator[Path]:
    """The folder for the copy, which at the end is the store, or `out`."""
    if out is not None:
        with appearing(out, hidden=True) as part:
            shutil.rmtree(part, ignore_errors=True)  # of one that was killed
            part.mkdir(parents=True)
            yield part
        return
    with in_place_of(store) as part:
        yield part


def _copy(store: Path, part: Path, size: int, told: Told) -> None:
    """Let another process copy, which can be ended at any moment, and which a damaged store may bring down."""
    pool = WorkerPool(1)
    try:
        copied: Future[None] = pool.submit(copy_compacted, store, part)
        while True:
            try:
                copied.result(timeout=_SECONDS_BETWEEN_LOOKS)
            except NotYet:
                if (part / "data.mdb").exists():
                    told(min(size, (part / "data.mdb").stat().st_size), size)
            else:
                return
    except WorkerDied as error:
        raise DamagedStore(
            f"{store} cannot be copied", found=f"LMDB {error}", todo="see `histopipe verify`"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
