"""Open a store for writing, or create it. A folder with other contents is refused."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lmdb

from histopipe._version import __version__
from histopipe.errors import MachineShort, NothingToDo, SpecMismatch, UsageError
from histopipe.store.environment import Environment, open_environment
from histopipe.store.format import FORMAT_NAME, META, VERSION, to_json
from histopipe.store.meta import read_meta
from histopipe.tiling.spec import differences

_BEGUN_FILES = ("data.mdb", "lock.mdb", "ingest.lock")
_OWN_FILES = {*_BEGUN_FILES, "ingest.log", "ingest.csv"}


def open_for_change(path: Path) -> Environment:
    """Open an existing store for writing. Call it before a `Store` of it is opened in the same process.

    Raises:
        NothingToDo: there is no store.
        DamagedStore, UnknownVersion, UsageError, MachineShort: it cannot be written.
    """
    open_environment(path).close()  # do not create a store at a wrong path
    environment = open_environment(path, write=True)
    try:
        with environment.read() as transaction:
            read_meta(transaction, environment.databases, "format", dict, path)
    except BaseException:
        environment.close()
        raise
    return environment


def open_or_make(path: Path, spec: Mapping[str, Any]) -> Environment:
    """Open or create a store of a spec for writing; raises as `StoreWriter`."""
    is_new = _make_folder(path)
    try:
        environment = open_environment(path, write=True)
    except MachineShort:
        if is_new:
            for name in _BEGUN_FILES:
                (path / name).unlink(missing_ok=True)
            path.rmdir()
        raise

    def work(transaction: lmdb.Transaction) -> None:
        databases = environment.databases
        if transaction.stat(databases[META])["entries"]:
            check_spec(read_meta(transaction, databases, "spec", dict, path), spec, path)
            return
        for name, value in _new_meta(spec).items():
            transaction.put(name.encode(), to_json(value), db=databases[META])

    try:
        environment.change(work)
    except BaseException:
        environment.close()
        raise
    return environment


def check_spec(stored: Mapping[str, Any], requested: Mapping[str, Any], path: Path) -> None:
    """Raise SpecMismatch if the spec of a store differs from the requested one."""
    if stored != requested:
        raise SpecMismatch(
            f"{path} was created with other settings",
            found="; ".join(differences(stored, requested)),
            todo="use the store's settings, or another --out",
        )


def _new_meta(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": {"name": FORMAT_NAME, "version": VERSION},
        "required_features": [],
        "uuid": str(uuid.uuid4()),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "histopipe_version": __version__,
        "spec": dict(spec),
        "classes": [],
        "next_number": 0,
    }


def _make_folder(path: Path) -> bool:
    """Create the folder of a store; return False if it exists. Nothing is written into a folder with other contents."""
    if path.is_dir():
        contents = [p.name for p in path.iterdir() if p.name not in _OWN_FILES]
        if contents and not (path / "data.mdb").exists():
            raise UsageError(
                f"{path} is not a store, and not empty",
                found=", ".join(sorted(contents)[:3]),
                expected="a store, an empty folder, or a new path",
                todo="choose another --out",
            )
    elif path.exists():
        raise UsageError(f"{path} is a file", expected="a folder", todo="choose another --out")
    try:
        environment = open_environment(path)  # for reading
    except NothingToDo:
        is_new = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path} cannot be created", found=str(error)) from error
        return is_new
    with environment, environment.read() as transaction:
        if environment.databases[META] is not None:
            if transaction.stat(environment.databases[META])["entries"]:
                read_meta(transaction, environment.databases, "format", dict, path)
        elif transaction.stat()["entries"]:
            raise UsageError(
                f"{path} is an LMDB environment of another program", todo="choose another --out"
            )
    return False
