"""Where a search keeps its trials: a file in its folder, or any storage of Optuna's that several machines can share."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.errors import MachineShort, UsageError
from histopipe.files import network_filesystem

if TYPE_CHECKING:
    import optuna
    from optuna.storages.journal import JournalFileSymlinkLock

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
    optuna = load_optuna()
    journal = optuna.storages.journal
    if url is not None and "://" in url and not url.startswith("redis"):
        _refuse_shared_sqlite(url)
        try:
            return optuna.storages.RDBStorage(url)  # type: ignore[no-any-return]
        except Exception as error:
            raise UsageError(
                "--storage cannot be opened", found=str(error).split("\n")[0],
                expected="a database server that is up, and its driver installed",
            ) from error  # fmt: skip
    if url is not None and url.startswith("redis"):
        return optuna.storages.JournalStorage(journal.JournalRedisBackend(url))  # type: ignore[no-any-return]
    path = folder / JOURNAL if url is None else Path(url)
    _end_whole(path, journal.JournalFileSymlinkLock(str(path)))
    return optuna.storages.JournalStorage(journal.JournalFileBackend(str(path)))  # type: ignore[no-any-return]


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


def _end_whole(path: Path, lock: JournalFileSymlinkLock) -> None:
    """Cut off a last line that was not written to its end, as on a full disk: the next one would be lost with it."""
    if not path.exists() or path.read_bytes()[-1:] in (b"", b"\n"):
        return
    lock.acquire()  # an end that is being written looks the same
    try:
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)
    finally:
        lock.release()
