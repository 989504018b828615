"""Storage of a search's trials: a journal file in its folder, or an Optuna storage that several machines share."""

from __future__ import annotations

import importlib
import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.errors import HistopipeError, MachineShort, UsageError
from histopipe.system.filesystems import network_filesystem
from histopipe.system.locks import locked

if TYPE_CHECKING:
    import optuna

JOURNAL = "study.journal"


def load_optuna() -> Any:
    """Import Optuna, and let it log warnings only.

    Raises:
        MachineShort: it is not installed.
    """
    try:
        module = importlib.import_module("optuna")
    except ImportError as error:
        raise MachineShort(
            "`histopipe tune` needs Optuna, which is not installed", found=str(error),
            todo="pip install 'histopipe[tune]'",
        ) from error  # fmt: skip
    module.logging.set_verbosity(module.logging.WARNING)
    return module


def open_storage(url: str | None, folder: Path) -> optuna.storages.BaseStorage:
    """Open a storage: `postgresql://`, `mysql://`, `sqlite:///`, `redis://` or the path of a journal; None for the search's own journal.

    Raises:
        UsageError: SQLite on a network filesystem, or a storage that cannot be opened.
    """
    path = Path(url) if url is not None and "://" not in url else folder / JOURNAL
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            f"--storage {url}", found="a folder, or a file in a missing folder", expected="a file"
        )
    _refuse_shared_sqlite(url or "")
    try:
        storage: optuna.storages.BaseStorage = _open(url, path)
    except HistopipeError:
        raise
    except Exception as error:
        raise UsageError(
            "--storage cannot be opened", found=str(error).split("\n")[0],
            expected="a running database server, and its driver installed",
        ) from error  # fmt: skip
    return storage


def _open(url: str | None, path: Path) -> Any:
    storages = load_optuna().storages
    if url is not None and url.startswith("redis"):
        return storages.JournalStorage(storages.journal.JournalRedisBackend(url))
    if url is not None and "://" in url:
        return storages.RDBStorage(url)
    lock = _JournalLock(path.with_name(f"{path.name}.flock"))
    _remove_partial_line(path, lock)
    backend = storages.journal.JournalFileBackend(str(path), lock_obj=lock)
    return storages.JournalStorage(backend)


class _JournalLock:
    """Lock of the journal that the kernel releases when its process ends.

    If a killed process leaves a lock of Optuna's own, the others wait 30 seconds, or forever if the path of the journal is
    relative; then two of them may break the lock at once.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._held = path, ExitStack()

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._held.enter_context(locked(self._path, wait_seconds=math.inf))
        return True

    def release(self) -> None:
        """Release the lock."""
        self._held.close()


def _refuse_shared_sqlite(url: str) -> None:
    if not url.startswith("sqlite"):
        return
    path = url.partition(":///")[2].partition("?")[0]
    kind = network_filesystem(Path(path).parent)
    if kind is not None:
        raise UsageError(
            "--storage: SQLite cannot be shared over a network",
            found=f"{path} on {kind}, where its locks fail and the file gets damaged",
            expected="the default journal file, or a database server",
        )


def _remove_partial_line(path: Path, lock: _JournalLock) -> None:
    """Remove an incomplete last line, as a full disk leaves it: Optuna would append to it."""
    if not path.exists() or path.read_bytes()[-1:] in (b"", b"\n"):
        return
    lock.acquire()  # another process may be writing the line right now
    try:
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    finally:
        lock.release()
