"""Where a search keeps its trials: a file in its folder, or any storage of Optuna's that several machines can share."""

from __future__ import annotations

import fcntl
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.errors import HistopipeError, MachineShort, UsageError
from histopipe.system.filesystems import network_filesystem

if TYPE_CHECKING:
    import optuna

JOURNAL = "study.journal"


def load_optuna() -> Any:
    """Optuna, quiet but for warnings.

    Raises:
        MachineShort: it is not installed.
    """
    try:
        module = importlib.import_module("optuna")
    except ImportError as error:
        raise MachineShort(
            "this needs Optuna, which is not installed", found=str(error),
            todo="pip install 'histopipe[tune]'",
        ) from error  # fmt: skip
    module.logging.set_verbosity(module.logging.WARNING)
    return module


def open_storage(url: str | None, folder: Path) -> optuna.storages.BaseStorage:
    """A storage by its URL.

    Args:
        url: `postgresql://`, `mysql://`, `sqlite:///` (on a local disk), `redis://`, or the path of a journal file; None for
            the journal in the search's folder.
        folder: of the search.

    Raises:
        UsageError: SQLite on a network filesystem, or a storage that cannot be opened.
    """
    path = Path(url) if url is not None and "://" not in url else folder / JOURNAL
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            f"--storage {url}", found="a folder, or none to put it in", expected="a file"
        )
    _refuse_shared_sqlite(url or "")
    try:
        storage: optuna.storages.BaseStorage = _opened(url, path)
    except HistopipeError:
        raise
    except Exception as error:
        raise UsageError(
            "--storage cannot be opened", found=str(error).split("\n")[0],
            expected="a database server that is up, and its driver installed",
        ) from error  # fmt: skip
    return storage


def _opened(url: str | None, path: Path) -> Any:
    storages = load_optuna().storages
    if url is not None and url.startswith("redis"):
        return storages.JournalStorage(storages.journal.JournalRedisBackend(url))
    if url is not None and "://" in url:
        return storages.RDBStorage(url)
    lock = KernelLock(path.with_name(f"{path.name}.flock"))
    _end_whole(path, lock)
    backend = storages.journal.JournalFileBackend(str(path), lock_obj=lock)
    return storages.JournalStorage(backend)


class KernelLock:
    """A lock between processes that the kernel lets go of when its holder ends, however that is.

    Optuna's own is a symbolic link. Left behind by a process that was killed, the others wait for it: for 30 s, or for ever if the path
    of the journal is a relative one.

    Args:
        path: of a file for it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, -1

    def acquire(self) -> bool:
        """Wait until nobody else has it."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Let the next one have it."""
        os.close(self._fd)


def _refuse_shared_sqlite(url: str) -> None:
    if not url.startswith("sqlite"):
        return
    path = url.partition(":///")[2].partition("?")[0]
    kind = network_filesystem(Path(path).parent)
    if kind is not None:
        raise UsageError(
            "--storage: SQLite cannot be shared over a network",
            found=f"{path} on {kind}, where its locks do not hold and the file gets damaged",
            expected="the default journal file, or a database server",
        )


def _end_whole(path: Path, lock: KernelLock) -> None:
    """Cut off a last line that was not written to its end, as on a full disk: the next one would be lost with it."""
    if not path.exists() or path.read_bytes()[-1:] in (b"", b"\n"):
        return
    lock.acquire()  # an end that is being written looks the same
    try:
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)
    finally:
        lock.release()
