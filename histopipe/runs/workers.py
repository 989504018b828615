"""Workers of a training on several machines: heartbeats, and missing workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histopipe.system.files import read_json, write_json

HEARTBEATS = "workers"
"""Subfolder of a run's folder with the heartbeat of each worker: a JSON file, whose time is that of the last beat."""
_HEARTBEAT_SECONDS = 2.0
_STALE_SECONDS = 10.0  # age of a dead worker's heartbeat: network filesystems show a new time late
COMPUTING, READING, _FAILED = "computing", "reading", "failed: "
_LOST, _STUCK, _COMPUTING = range(3)  # the likely cause first: a computing worker waits for others


@dataclass(slots=True)
class Cluster:
    """The addresses `host:port` of the workers of a training, and the index of this one.

    `resolver` is TensorFlow's cluster resolver, and `doing` the activity of this worker, for its heartbeat.
    """

    workers: tuple[str, ...] = ("",)
    index: int = 0
    resolver: Any = field(default=None, repr=False)
    doing: str = "starting"

    @property
    def alone(self) -> bool:
        """Whether there is no other worker."""
        return len(self.workers) == 1

    @property
    def chief(self) -> bool:
        """Whether this worker, the first one, writes the run's files."""
        return self.index == 0

    def own_part(self, replicas: int) -> range:
        """Return the replicas of this worker. All workers have the same number."""
        local = replicas // len(self.workers)
        return range(self.index * local, (self.index + 1) * local)

    @contextmanager
    def heartbeats(self, folder: Path) -> Iterator[None]:
        """Write a heartbeat to the run's folder every 2 seconds. At the end remove it, or write the error to it."""
        if self.alone:
            yield
            return
        path, ended = folder / HEARTBEATS / f"{self.index}.json", threading.Event()
        path.parent.mkdir(parents=True, exist_ok=True)

        def beat() -> None:
            is_last = False
            while not is_last:
                is_last = ended.is_set()
                with suppress(OSError):  # the next beat may succeed
                    write_json(path, {"doing": self.doing})
                ended.wait(_HEARTBEAT_SECONDS)

        # A thread, which beats also while this worker waits for data or for others.
        thread = threading.Thread(target=beat, daemon=True, name="heartbeats")
        thread.start()
        try:
            yield
        except BaseException as error:
            self.doing = f"{_FAILED}{error or type(error).__name__}"
            raise
        finally:
            ended.set()
            thread.join()
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()  # the last worker removes the folder

    def missing(self, folder: Path, since: float) -> str:
        """Describe the missing workers, from heartbeats after `since`, the `time.time()` when this worker started."""
        until = time.monotonic() + _STALE_SECONDS + 1  # until then, a dead worker can seem alive
        while True:
            workers = [
                (f"worker {index} ({address})", *_read_heartbeat(folder, index, since))
                for index, address in enumerate(self.workers)
                if index != self.index
            ]
            worst = min(rank for _, rank, _ in workers)
            if worst == _LOST or time.monotonic() > until:
                return "; ".join(f"{name} {text}" for name, rank, text in workers if rank == worst)
            time.sleep(1)


def _read_heartbeat(folder: Path, index: int, since: float) -> tuple[int, str]:
    """Return the state of another worker, also as text."""
    path = folder / HEARTBEATS / f"{index}.json"
    try:
        written, doing = path.stat().st_mtime, read_json(path)["doing"]
    except (OSError, ValueError, KeyError):
        return _LOST, "never started, or uses another run folder"
    age = time.time() - written
    if written < since - _STALE_SECONDS:
        return _LOST, "never started"
    if doing.startswith(_FAILED):
        return _LOST, doing
    if age > _STALE_SECONDS:
        return _LOST, f"had its last heartbeat {age:.0f} s ago, {doing}"
    return _COMPUTING if doing == COMPUTING else _STUCK, f"is alive, {doing}"
