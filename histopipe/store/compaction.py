"""A copy of a store without the pages that deleted and replaced values have left free."""

from __future__ import annotations

import os
from pathlib import Path

from histopipe.errors import DamagedStore
from histopipe.store.environment import open_environment
from histopipe.store.lmdb_errors import mapped_errors
from histopipe.store.meta import read_meta
from histopipe.store.structure import structure_faults


def used_bytes(store: Path) -> int:
    """What a store's pages that are in use take in its file.

    Raises:
        NothingToDo, DamagedStore, UnknownVersion: there is no store, or it cannot be read.
    """
    environment = open_environment(store)
    try:
        with environment.read() as transaction:
            read_meta(transaction, environment.databases, "format", dict, store)
        return environment.used_bytes()
    finally:
        environment.close()


def copy_compacted(store: Path, folder: Path) -> None:
    """Copy data.mdb into an empty folder, by LMDB, with all that it holds, known to this version or not; safe on disk.

    Raises:
        DamagedStore: the copy is not whole, because the store is not.
    """
    environment = open_environment(store)
    try:
        with mapped_errors(folder):
            environment.handle.copy(str(folder), compact=True)
    finally:
        environment.close()
    faults = structure_faults(folder / "data.mdb")
    if faults:
        raise DamagedStore(
            f"{store} cannot be copied", found=faults[0].text, todo="see `histopipe verify`"
        )
    for path in (folder / "data.mdb", folder):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
