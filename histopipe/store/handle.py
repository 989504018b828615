"""Opening LMDB under a store: how large a map, with which lock, and the store's databases."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb

from histopipe.errors import DamagedStore, MachineShort
from histopipe.store.format import DATABASES, META
from histopipe.store.lmdb_errors import MAX_READERS

MAP_SIZE = 1 << 44
"""16 TiB of address space for a writer. The file grows as it is used; this only bounds it."""

_SMALLEST_MAP = 1 << 28
_READ_MAP, _READ_ROOM = 1 << 36, 8
"""A reader's map: 64 GiB, or eight times the file. A process has 128 TiB, so that eight stores of 16 TiB would be all it
could open."""
_MAX_DATABASES = 32
_LOCK_BYTES = 128 + 64 * MAX_READERS


def open_handle(
    path: Path, *, write: bool, readahead: bool = False
) -> tuple[lmdb.Environment, dict[bytes, Any]]:
    """LMDB's environment and the store's databases, None for one that is not there. Called within `mapped_errors`.

    `readahead` lets the kernel read ahead also for a reader, which suits reading all of a store.
    """
    if write or os.access(path, os.W_OK):
        _allocate_lock(path)
    while True:
        before = path.stat().st_ino
        handle = _open(path, write=write, readahead=readahead or write)
        if path.stat().st_ino == before:
            break
        handle.close()  # another store was put in its place just now: LMDB may have opened a file of each
    try:
        if write:
            handle.reader_check()  # free the slots of readers that were killed
        found = {name: _open_database(handle, name, create=write) for name in DATABASES}
        return handle, found | _further_databases(handle, found)
    except BaseException:
        handle.close()
        raise


def read_map_size(length: int) -> int:
    """Address space for a reader of a file of so many bytes."""
    return min(MAP_SIZE, max(_READ_MAP, _READ_ROOM * length))


def _allocate_lock(path: Path) -> None:
    """Give LMDB's lock file its disk space: LMDB maps it sparse, and a full disk would then be a SIGBUS.

    Raises:
        DamagedStore: it is a link, which would have another file written.
    """
    if (path / "lock.mdb").is_symlink():
        raise DamagedStore(
            f"{path / 'lock.mdb'} is a link", expected="a file of the store's own", todo="delete it"
        )
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        lock = os.open(path / "lock.mdb", flags, 0o664)
        try:
            os.posix_fallocate(lock, 0, _LOCK_BYTES)
        finally:
            os.close(lock)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineShort(f"the disk that holds {path} is full", todo="make room") from error
        # Anything else is LMDB's to tell.


def _open(path: Path, *, write: bool, readahead: bool) -> lmdb.Environment:
    size = MAP_SIZE if write else read_map_size((path / "data.mdb").stat().st_size)
    while True:
        try:
            return lmdb.open(
                str(path),
                map_size=size,
                max_dbs=_MAX_DATABASES,
                max_readers=MAX_READERS,
                readonly=not write,
                create=write,
                # Without the lock a reader beside a writer sees wrong data, so only where no writer can be.
                lock=write or os.access(path, os.W_OK),
                max_spare_txns=0,  # a spare one could not be left behind by a fork
                readahead=readahead,
            )
        except lmdb.Error as error:
            if size <= _SMALLEST_MAP or not _out_of_address_space(error):
                raise
            size //= 2


def _out_of_address_space(error: lmdb.Error) -> bool:
    return isinstance(error, lmdb.MemoryError) or os.strerror(errno.ENOMEM) in str(error)


def _open_database(handle: lmdb.Environment, name: bytes, *, create: bool) -> Any:
    try:
        return handle.open_db(name, create=create)
    except lmdb.NotFoundError:
        return None  # an environment without our databases: told by whoever reads its meta


def _further_databases(handle: lmdb.Environment, known: Mapping[bytes, Any]) -> dict[bytes, Any]:
    """A later version's databases, of a store of ours."""
    if known[META] is None:
        return {}
    with handle.begin() as transaction, transaction.cursor() as cursor:
        names = [bytes(name) for name in islice(cursor.iternext(values=False), _MAX_DATABASES)]
    found = {}
    for name in names:
        if name not in known:
            try:
                found[name] = handle.open_db(name, create=False)
            except (lmdb.IncompatibleError, lmdb.NotFoundError):
                continue  # no database
    return found
