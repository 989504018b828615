"""Opening a store's folder for writing, if nothing else is in it."""

from __future__ import annotations

from pathlib import Path

from histopipe.errors import NothingToDo, UsageError
from histopipe.store.environment import Environment, open_environment
from histopipe.store.format import META
from histopipe.store.meta import read_meta

_OWN_FILES = {"data.mdb", "lock.mdb", "ingest.lock", "ingest.log", "ingest.csv"}


def remove_begun(path: Path) -> None:
    """Delete a store that could not be begun."""
    for name in ("data.mdb", "lock.mdb", "ingest.lock"):
        (path / name).unlink(missing_ok=True)
    path.rmdir()


def make_folder(path: Path) -> bool:
    """Make a store's folder; False if it was there. Something else than a store is refused, and nothing is written into it."""
    _refuse_other_folders(path)
    try:
        environment = open_environment(path)  # for reading
    except NothingToDo:
        made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path} cannot be made", found=str(error)) from error
        return made
    with environment, environment.read() as transaction:
        if environment.databases[META] is not None:
            if transaction.stat(environment.databases[META])["entries"]:
                read_meta(transaction, environment.databases, "format", dict, path)
        elif transaction.stat()["entries"]:
            raise UsageError(
                f"{path} is an LMDB environment of something else", todo="choose another --out"
            )
    return False


def open_for_change(path: Path) -> Environment:
    """Open an existing store for writing, before any `Store` of it in the same process.

    Raises:
        NothingToDo: there is no store.
        DamagedStore, UnknownVersion, UsageError, MachineShort: it cannot be written.
    """
    open_environment(path).close()  # a wrong path must not become a store
    environment = open_environment(path, write=True)
    try:
        with environment.read() as transaction:
            read_meta(transaction, environment.databases, "format", dict, path)
    except BaseException:
        environment.close()
        raise
    return environment


def _refuse_other_folders(path: Path) -> None:
    if path.is_dir():
        others = [p.name for p in path.iterdir() if p.name not in _OWN_FILES]
        if others and not (path / "data.mdb").exists():
            raise UsageError(
                f"{path} is a folder of something else",
                found=", ".join(sorted(others)[:3]),
                expected="a store, an empty folder, or a new path",
                todo="choose another --out",
            )
    elif path.exists():
        raise UsageError(f"{path} is a file", expected="a folder", todo="choose another --out")
