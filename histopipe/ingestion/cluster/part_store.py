"""The store that one worker fills on its own disk, and publishes into the folder of parts: copied, then renamed.

The process that fills a part holds a lock on its folder in scratch. Parts whose process has ended are published by the next
process on that machine, so that a worker's death costs only the slide in work.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from histopipe.errors import MachineShort, NothingToDo, UsageError
from histopipe.ingestion.storing import prepare
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.files import appearing
from histopipe.system.filesystems import is_full_disk
from histopipe.system.locks import locked
from histopipe.system.worker_pool import WorkerPool
from histopipe.tiling.spec import TilingSpec

_OWN = ("lock.mdb", "ingest.lock", "ingest.csv")
"""Files of a store that are not copied."""


@contextlib.contextmanager
def parts_locked(out: Path) -> Iterator[None]:
    """Lock the folder of parts, created if missing, for this process.

    Raises:
        UsageError: it is a store, another run has it, or it cannot be created.
    """
    if (out / "data.mdb").exists() or out.suffix == ".lmdb":
        raise UsageError(
            f"{out} is a store, or has the name of one", expected="with --cluster: a folder for parts",
            todo="pass another --out; `histopipe merge` makes one store of it",
        )  # fmt: skip
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be created", found=error.strerror) from error
    with locked(out) as free:
        if not free:
            raise UsageError(f"another run ingests into {out}", todo="wait for it")
        yield


@dataclass(frozen=True, slots=True)
class PartFolders:
    """Where the parts of one data set are filled and published: `dataset` is the uuid of the catalog.

    Every machine sees `out`, the folder of parts, under this path, and has `scratch` on a local disk.
    """

    out: Path
    scratch: Path
    dataset: str

    @property
    def folder(self) -> Path:
        """Folder of this machine where parts of this data set are filled."""
        return self.scratch / f"histopipe-{self.dataset}"

    def publish_abandoned(self) -> list[str]:
        """Publish the parts of this machine whose process has ended; return their names."""
        published = []
        for place in sorted(self.folder.glob("part-*/")):
            # Another worker on this machine may publish it at the same time.
            with contextlib.suppress(FileNotFoundError), locked(place) as free:
                if free:
                    published += self.publish(place)
        return published

    def publish(self, place: Path) -> list[str]:
        """Move a part into the folder of parts; return its name, or nothing if it has no slides."""
        store, published = place / f"{place.name}.lmdb", list[str]()
        if _holds_slides(store):
            target = self.out / store.name
            if not target.exists():  # else a process was killed after it had moved it
                _move(store, target)
            published = [store.name]
        shutil.rmtree(place)
        with contextlib.suppress(OSError):  # other parts are in it
            self.folder.rmdir()
        return published


class PartStore:
    """A store that this process fills with a pool of processes; `busy` is held by the thread that writes to it."""

    def __init__(self, folders: PartFolders, workers: int) -> None:
        self._folders, self.busy = folders, threading.Lock()
        self._writer: StoreWriter | None = None
        self._lock = contextlib.ExitStack()
        self.store = self._begin()
        self.pool = WorkerPool(workers, prepare)

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
        with contextlib.suppress(OSError):
            return (self.store / "data.mdb").stat().st_size
        return 0

    @contextlib.contextmanager
    def writing(self, spec: TilingSpec) -> Iterator[StoreWriter]:
        """Return its writer, which stays open until an error: opening a store of many slides takes time."""
        if self._writer is None:
            self._writer = StoreWriter(self.store, spec, alone=True)
        try:
            yield self._writer
        except BaseException:
            self._close_writer()
            raise

    def publish(self) -> list[str]:
        """Move it into the folder of parts, and begin another; return its name, or nothing if it has no slides."""
        self._close_writer()
        if not (self.store / "data.mdb").exists():
            return []
        published = self._folders.publish(self.store.parent)
        self._lock.close()
        self.store = self._begin()
        return published

    def close(self) -> None:
        """End the processes. The part stays, to be published by the next process."""
        self.pool.shutdown(cancel_futures=True)
        self._close_writer()
        if not (self.store / "data.mdb").exists():
            shutil.rmtree(self.store.parent, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._folders.folder.rmdir()
        self._lock.close()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _begin(self) -> Path:
        """Make and lock the folder of a new store; return the path of the store."""
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
        name = f"part-{host}-{uuid.uuid4().hex[:8]}"
        place = self._folders.folder / name
        begun = place.with_name(f".{name}")  # no other process finds it before it is locked
        try:
            begun.mkdir(parents=True)
            self._lock.enter_context(locked(begun))
            begun.rename(place)
        except OSError as error:
            raise UsageError(
                f"the scratch folder {self._folders.scratch} cannot be written on {socket.gethostname()}",
                found=error.strerror, todo="choose another one with --scratch",
            ) from error  # fmt: skip
        return place / f"{name}.lmdb"


def _holds_slides(store: Path) -> bool:
    """Return whether a part has slides. It is no store if its process was killed at the start."""
    try:
        with Store(store, hidden=True) as part:
            return bool(part.slides)
    except NothingToDo:
        return False


def _move(store: Path, target: Path) -> None:
    """Move a store that no process writes; the target appears when it is complete.

    Raises:
        MachineShort: the disk is full.
    """
    try:
        with appearing(target, hidden=True) as part:
            shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
            shutil.copytree(store, part, ignore=shutil.ignore_patterns(*_OWN))
            for path in (*part.iterdir(), part):
                file = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
    except OSError as error:
        if is_full_disk(error):
            raise MachineShort(
                f"the disk that holds {target.parent} is full", todo="make room; the same command goes on"
            ) from error  # fmt: skip
        raise UsageError(
            f"{target} cannot be written from {socket.gethostname()}", found=error.strerror,
            todo="let every machine write the folder of parts",
        ) from error  # fmt: skip
