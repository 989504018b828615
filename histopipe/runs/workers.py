"""Workers of a training on several machines: addresses, signs of life, and which one is missing."""

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
from histopipe.system.files import appearing, read_json

SIGNS = "workers"
"""The folder in a run's folder where workers leave signs of life."""
_SIGN_SECONDS = 2.0
_BEAT_SECONDS = 1.0
_STALE_SECONDS = 10.0
_FAILED = "failed: "
COMPUTING, READING = "computing", "reading"


@dataclass(slots=True)
class Cluster:
    """The workers of a training, and the index of this one.

    Attributes:
        workers: their addresses, `host:port`; the first one is the chief, who writes the run's files.
        index: of this worker.
        resolver: TensorFlow's, for its strategy.
        doing: present activity of this worker, for its signs of life.
        beat: called regularly while this worker makes progress.
    """

    workers: tuple[str, ...] = ("",)
    index: int = 0
    resolver: Any = field(default=None, repr=False)
    doing: str = "starting"
    beat: Callable[[], None] = field(default=lambda: None, repr=False)
    _beaten: float = 0.0

    @property
    def alone(self) -> bool:
        """Whether there is no other worker."""
        return len(self.workers) == 1

    @property
    def chief(self) -> bool:
        """Whether this worker writes the run's files."""
        return self.index == 0

    def own_part(self, replicas: int) -> range:
        """Return the replicas of this worker. All workers have equally many."""
        local = replicas // len(self.workers)
        return range(self.index * local, (self.index + 1) * local)

    def note(self, doing: str) -> None:
        """Set the present activity of this worker."""
        self.doing = doing
        now = time.monotonic()
        if not self.alone and now - self._beaten > _BEAT_SECONDS:
            self._beaten = now
            self.beat()

    @contextlib.contextmanager
    def signs(self, folder: Path) -> Iterator[None]:
        """Write a sign of life to the run's folder every few seconds. At the end remove it, or write the error."""
        if self.alone:
            yield
            return
        (folder / SIGNS).mkdir(parents=True, exist_ok=True)
        ended = threading.Event()

        def show() -> None:
            while not ended.is_set():
                self._sign(folder)
                ended.wait(_SIGN_SECONDS)

        thread = threading.Thread(target=show, daemon=True, name="signs of life")
        thread.start()
        try:
            try:
                yield
            finally:
                ended.set()
                thread.join()
        except BaseException as error:
            self.doing = f"{_FAILED}{error or type(error).__name__}"
            self._sign(folder)
            raise
        with contextlib.suppress(OSError):
            (folder / SIGNS / f"{self.index}.json").unlink()
            (folder / SIGNS).rmdir()  # by the last one

    def _sign(self, folder: Path) -> None:
        with contextlib.suppress(OSError), appearing(folder / SIGNS / f"{self.index}.json") as part:
            part.write_text(json.dumps({"doing": self.doing}))

    def missing(self, folder: Path, since: float) -> str:
        """Return which other worker is missing. Waits as long as a dead worker looks alive.

        Signs from before `since`, the `time.time()` when this worker started, are of earlier runs.
        """
        until = time.monotonic() + _STALE_SECONDS + 1
        while True:
            signs: dict[str, bool] = {}
            for index, address in enumerate(self.workers):
                if index != self.index:
                    says, alive = self._last_sign(folder, index, since)
                    signs[f"worker {index} ({address}) {says}"] = alive
            lost = [text for text, alive in signs.items() if not alive]
            if lost or time.monotonic() > until:
                break
            time.sleep(1)
        # A worker that computes waits for the others in turn.
        stuck = [text for text in signs if not text.endswith(COMPUTING)]
        return "; ".join(lost or stuck or signs)

    def _last_sign(self, folder: Path, index: int, since: float) -> tuple[str, bool]:
        """Return the last sign of another worker, and whether it is alive."""
        path = folder / SIGNS / f"{index}.json"
        try:
            shown = path.stat().st_mtime
            doing = read_json(path)["doing"]
        except (OSError, ValueError, KeyError):
            return "never came, or sees another run folder", False
        age = time.time() - shown
        if shown < since - _STALE_SECONDS:
            return "never came", False
        if doing.startswith(_FAILED):
            return doing, False
        if age > _STALE_SECONDS:
            return f"gave its last sign of life {age:.0f} s ago, {doing}", False
        return f"is alive, {doing}", True


def in_cluster(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment makes this process one of several workers."""
    return tf_config(environment) is not None or _slurm_tasks(environment) > 1


def without_cluster(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without other workers, for a training that is one of many in a job."""
    return {
        name: value for name, value in environment.items()
        if name not in ("TF_CONFIG", "SLURM_STEP_NUM_TASKS")
    }  # fmt: skip


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
            "TF_CONFIG", found=repr(error),
            expected='{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}',
        ) from error  # fmt: skip
    return config if len(addresses) > 1 else None


def _slurm_tasks(environment: Mapping[str, str]) -> int:
    """Return the number of tasks of the Slurm job step of this process. A batch script itself has no step."""
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1"))


def slurm_tasks_per_node(environment: Mapping[str, str]) -> list[int]:
    """Number of tasks on each node of the Slurm job step."""
    return [int(part.split("(")[0]) for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(",")]
