"""Workers of a training on several machines: addresses, heartbeats, and missing workers."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histopipe.errors import UsageError
from histopipe.system.files import read_json, write_atomically

HEARTBEATS = "workers"
"""Subfolder of a run's folder with the heartbeats of workers."""
_HEARTBEAT_SECONDS = 2.0
_BEAT_SECONDS = 1.0
_STALE_SECONDS = 10.0
_FAILED = "failed: "
COMPUTING, READING = "computing", "reading"


@dataclass(slots=True)
class Cluster:
    """The workers of a training, and the index of this one.

    Attributes:
        workers: their addresses, `host:port`; the first one is the chief, which writes the run's files.
        index: index of this worker.
        resolver: TensorFlow's cluster resolver, for the strategy.
        doing: current activity of this worker, for its heartbeat.
        beat: called regularly while this worker makes progress.
    """

    workers: tuple[str, ...] = ("",)
    index: int = 0
    resolver: Any = field(default=None, repr=False)
    doing: str = "starting"
    beat: Callable[[], None] = field(default=lambda: None, repr=False)
    _last_beat: float = 0.0

    @property
    def alone(self) -> bool:
        """Whether there is no other worker."""
        return len(self.workers) == 1

    @property
    def chief(self) -> bool:
        """Whether this worker writes the run's files."""
        return self.index == 0

    def own_part(self, replicas: int) -> range:
        """Return the replicas of this worker. All workers have the same number."""
        local = replicas // len(self.workers)
        return range(self.index * local, (self.index + 1) * local)

    def note(self, doing: str) -> None:
        """Set the current activity of this worker."""
        self.doing, now = doing, time.monotonic()
        if not self.alone and now - self._last_beat > _BEAT_SECONDS:
            self._last_beat = now
            self.beat()

    @contextlib.contextmanager
    def heartbeats(self, folder: Path) -> Iterator[None]:
        """Write a heartbeat to the run's folder every 2 seconds. At the end remove it, or write the error to it."""
        if self.alone:
            yield
            return
        (folder / HEARTBEATS).mkdir(parents=True, exist_ok=True)
        ended = threading.Event()

        def write_regularly() -> None:
            self._write_heartbeat(folder)
            while not ended.wait(_HEARTBEAT_SECONDS):
                self._write_heartbeat(folder)

        thread = threading.Thread(target=write_regularly, daemon=True, name="heartbeats")
        thread.start()
        try:
            try:
                yield
            finally:
                ended.set()
                thread.join()
        except BaseException as error:
            self.doing = f"{_FAILED}{error or type(error).__name__}"
            self._write_heartbeat(folder)
            raise
        with contextlib.suppress(OSError):
            (folder / HEARTBEATS / f"{self.index}.json").unlink()
            (folder / HEARTBEATS).rmdir()  # the last worker removes the folder

    def _write_heartbeat(self, folder: Path) -> None:
        with contextlib.suppress(OSError):
            write_atomically(
                folder / HEARTBEATS / f"{self.index}.json", json.dumps({"doing": self.doing})
            )

    def missing(self, folder: Path, since: float) -> str:
        """Return a description of the missing workers. Wait as long as a dead worker can seem alive.

        Heartbeats from before `since`, the `time.time()` when this worker started, belong to earlier runs.
        """
        until = time.monotonic() + _STALE_SECONDS + 1
        while True:
            workers: dict[str, bool] = {}
            for index, address in enumerate(self.workers):
                if index != self.index:
                    status, alive = _read_heartbeat(folder, index, since)
                    workers[f"worker {index} ({address}) {status}"] = alive
            lost = [text for text, alive in workers.items() if not alive]
            if lost or time.monotonic() > until:
                break
            time.sleep(1)
        # A computing worker is waiting for the others, too.
        stuck = [text for text in workers if not text.endswith(COMPUTING)]
        return "; ".join(lost or stuck or workers)


def _read_heartbeat(folder: Path, index: int, since: float) -> tuple[str, bool]:
    """Return the last state of another worker, and whether it is alive."""
    path = folder / HEARTBEATS / f"{index}.json"
    try:
        written, doing = path.stat().st_mtime, read_json(path)["doing"]
    except (OSError, ValueError, KeyError):
        return "never started, or uses another run folder", False
    age = time.time() - written
    if written < since - _STALE_SECONDS:
        return "never started", False
    if doing.startswith(_FAILED):
        return doing, False
    if age > _STALE_SECONDS:
        return f"had its last heartbeat {age:.0f} s ago, {doing}", False
    return f"is alive, {doing}", True


def in_cluster(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment describes this process as one of several workers."""
    # The number of tasks of the Slurm job step of this process. A batch script has no step.
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    return tf_config(environment) is not None or tasks > 1


def without_cluster(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without other workers, for one of many independent trainings in a job."""
    return {
        name: value
        for name, value in environment.items()
        if name not in ("TF_CONFIG", "SLURM_STEP_NUM_TASKS")
    }


def tf_config(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return `TF_CONFIG` if it names more than one worker."""
    text = environment.get("TF_CONFIG", "")
    if not text.strip():
        return None
    try:
        config: dict[str, Any] = json.loads(text)
        addresses = [address for part in config["cluster"].values() for address in part]
        int(config["task"]["index"])
        str(config["task"]["type"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            "TF_CONFIG",
            found=repr(error),
            expected='{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}',
        ) from error
    return config if len(addresses) > 1 else None


def slurm_tasks_per_node(environment: Mapping[str, str]) -> list[int]:
    """Return the number of tasks on each node of the Slurm job step."""
    return [int(part.split("(")[0]) for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(",")]
