"""The store that one worker fills on its own disk, and how it gets to where all parts are.

A part lies in the worker's scratch folder until it is published: copied into the folder of parts under a hidden name, then
renamed. A lock tells whether the process that fills a part is still there; the parts of processes that are gone are published
by whoever comes next on that machine, so that a worker's death costs the slide that it was at and nothing else.
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
from dataclasses import dataclass, field
from pathlib import Path

from histopipe.errors import MachineShort, NothingToDo, UsageError
from histopipe.ingest.worker import prepare
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.files import appearing
from histopipe.system.filesystems import is_full_disk
from histopipe.system.locks import lock_if_free
from histopipe.system.worker_pool import WorkerPool
from histopipe.tiling.spec import TilingSpec

_OWN = ("lock.mdb", "ingest.lock", "ingest.csv")
"""Files of a store that mean nothing elsewhere."""


@dataclass(frozen=True, slots=True)
class Depot:
    """Where the parts of one data set are filled and gathered.

    Attributes:
        out: the folder of parts; every machine sees it under this path.
        scratch: on each machine a folder on a local disk.
        dataset: uuid of the catalog.
    """

    out: Path
    scratch: Path
    dataset: str

    @property
    def folder(self) -> Path:
        """Where parts of this data set lie on this machine until they are published."""
        return self.scratch / f"histopipe-{self.dataset}"

    def publish_abandoned(self) -> list[str]:
        """Publish the parts of this machine that no process fills any more; their names."""
        published = []
        for place in sorted(self.folder.glob("part-*/")):
            # Another worker on this machine may be at it, too.
            with contextlib.suppress(FileNotFoundError), _locked(place) as free:
                if free:
                    published += self._publish(place)
        return published

    def _publish(self, place: Path) -> list[str]:
        """Move a part to where all are; its name, if it holds anything."""
        store = next(iter(place.glob("*.lmdb")), None)
        published = []
        if store is not None and _holds_slides(store):
            if not (self.out / store.name).exists():  # else it was killed when it had moved it
                _move(store, self.out / store.name)
            published = [store.name]
        shutil.rmtree(place)
        with contextlib.suppress(OSError):  # others have parts in it
            self.folder.rmdir()
        return published


@dataclass(slots=True)
class Part:
    """A store that this process fills.

    Args:
        depot: where it belongs.
        workers: processes that read and write slides.

    Attributes:
        store: its path, on this machine's scratch disk.
        busy: held by whoever is at it.
    """

    depot: Depot
    workers: int
    busy: threading.Lock = field(default_factory=threading.Lock)
    store: Path = field(init=False)
    _pool: WorkerPool | None = None
    _writer: StoreWriter | None = None
    _lock: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self._begin()

    @property
    def name(self) -> str:
        """Of the store, here and where all parts are."""
        return self.store.name

    @property
    def bytes(self) -> int:
        """Its size now."""
        with contextlib.suppress(OSError):
            return (self.store / "data.mdb").stat().st_size
        return 0

    @property
    def pool(self) -> WorkerPool:
        """The processes, started when they are first wanted."""
        if self._pool is None:
            self._pool = WorkerPool(self.workers, prepare)
        return self._pool

    @contextlib.contextmanager
    def writing(self, spec: TilingSpec) -> Iterator[StoreWriter]:
        """What writes to it, left open as long as nothing goes wrong: opening a store of many slides takes time."""
        if self._writer is None:
            self._writer = StoreWriter(self.store, spec, alone=True)
        try:
            yield self._writer
        except BaseException:
            self._close_writer()
            raise

    def publish(self) -> list[str]:
        """Move it to where all parts are, and begin another; its name, if it holds anything."""
        self._close_writer()
        if not (self.store / "data.mdb").exists():
            return []
        published = self.depot._publish(self.store.parent)
        self._lock.close()
        self._begin()
        return published

    def close(self) -> None:
        """End the processes; what the part holds stays, for whoever comes next."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._close_writer()
        if not (self.store / "data.mdb").exists():
            shutil.rmtree(self.store.parent, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.depot.folder.rmdir()
        self._lock.close()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _begin(self) -> None:
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
        name = f"part-{host}-{uuid.uuid4().hex[:8]}"
        place = self.depot.folder / name
        begun = place.with_name(f".{name}")  # until it is locked nobody is to find it
        try:
            begun.mkdir(parents=True)
            self._lock.enter_context(_locked(begun))
            begun.rename(place)
        except OSError as error:
            raise UsageError(
                f"the scratch folder {self.depot.scratch} cannot be written on {socket.gethostname()}",
                found=error.strerror, todo="name another with --scratch",
            ) from error  # fmt: skip
        self.store = place / f"{name}.lmdb"


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[bool]:
    """Lock a part's folder for as long as this process needs it; False if another process has."""
    folder = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield lock_if_free(folder)
    finally:
        os.close(folder)


def _holds_slides(store: Path) -> bool:
    """Whether there is anything in a part: one that was killed as it began is no store yet."""
    try:
        with Store(store, hidden=True) as part:
            return bool(part.slides)
    except NothingToDo:
        return False


def _move(store: Path, target: Path) -> None:
    """Put a store that nobody writes elsewhere, whole or not at all.

    Raises:
        MachineShort: there is no room.
    """
    try:
        with appearing(target, hidden=True) as part:
            shutil.rmtree(part, ignore_errors=True)  # of one that was killed
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
