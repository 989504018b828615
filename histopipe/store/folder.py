"""Opening a store for writing, which may have to be made; a folder of something else is refused."""

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


def open_or_make(path: Path, spec: Mapping[str, Any]) -> Environment:
    """Open a store of a spec for writing; raises as `StoreWriter`."""
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


def check_spec(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Refuse to put patches of one spec into a store of another, with SpecMismatch."""
    if found != wanted:
        raise SpecMismatch(
            f"{path} was made with other settings",
            found="; ".join(differences(found, wanted)),
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
    """Make a store's folder; False if it was there. Something else than a store is refused, and nothing is written into it."""
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
