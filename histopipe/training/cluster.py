"""The workers of a training on several machines: who they are, what they tell each other, and who is missing."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.files import appearing

if TYPE_CHECKING:
    import tensorflow as tf

SIGNS = "workers"
"""The folder in a run's folder where workers leave signs of life."""
_SIGN_SECONDS = 2.0
_BEAT_SECONDS = 1.0
_STALE_SECONDS = 10.0


@dataclass(slots=True)
class Cluster:
    """The workers of a training, and this one's place among them.

    Attributes:
        workers: their addresses, `host:port`; the first one is the chief, who writes the run's files.
        index: this one.
        resolver: TensorFlow's, for its strategy.
        doing: what this one is at, as its signs of life tell.
        beat: called now and then while this worker gets on.
    """

    workers: tuple[str, ...] = ("",)
    index: int = 0
    resolver: Any = field(default=None, repr=False)
    doing: str = "starting"
    beat: Callable[[], None] = field(default=lambda: None, repr=False)
    _beaten: float = 0.0
    _ended: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def alone(self) -> bool:
        """Whether there is no other worker."""
        return len(self.workers) == 1

    @property
    def chief(self) -> bool:
        """Whether this worker writes the run's files."""
        return self.index == 0

    def own_part(self, replicas: int) -> range:
        """Which of all replicas are this worker's: all workers have equally many."""
        local = replicas // len(self.workers)
        return range(self.index * local, (self.index + 1) * local)

    def note(self, doing: str) -> None:
        """What this worker is at from now on."""
        self.doing = doing
        now = time.monotonic()
        if not self.alone and now - self._beaten > _BEAT_SECONDS:
            self._beaten = now
            self.beat()

    def gathered(
        self, strategy: tf.distribute.Strategy, values: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Arrays of all workers joined along axis 1, in the workers' order. All of them must call it.

        Args:
            strategy: of all workers.
            values: (S, N, F) float32; N may differ between workers.
        """
        if self.alone:
            return values
        import tensorflow as tf  # late: the rest of this module is wanted without it

        parts = [values, *[values[:, :0]] * (len(self.own_part(strategy.num_replicas_in_sync)) - 1)]
        first = self.own_part(strategy.num_replicas_in_sync)[0]
        each = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(parts[int(context.replica_id_in_sync_group) - first])
        )
        return np.asarray(strategy.gather(each, axis=1))

    def check_same(self, strategy: tf.distribute.Strategy, numbers: Sequence[int]) -> None:
        """Wait for all workers, and see whether each has the same numbers, below 65,536.

        Raises:
            UsageError: one has others than the first.
        """
        everyones = self.gathered(strategy, np.asarray([[numbers]], np.float32))[0]
        differing = [
            f"worker {index} ({self.workers[index]})"
            for index, theirs in enumerate(everyones)
            if not np.array_equal(theirs, everyones[0])
        ]
        if differing:
            raise UsageError(
                "the workers do not agree", found=f"{', '.join(differing)} other than the first",
                expected="the same settings, stores, splits and run folder everywhere",
            )  # fmt: skip

    def show_signs(self, folder: Path) -> None:
        """Leave a sign of life in a run's folder every few seconds, until `end_signs`."""
        if self.alone:
            return
        signs = folder / SIGNS
        signs.mkdir(parents=True, exist_ok=True)

        def show() -> None:
            while not self._ended.is_set():
                with (
                    contextlib.suppress(OSError),
                    appearing(signs / f"{self.index}.json") as part,
                ):
                    part.write_text(json.dumps({"doing": self.doing}))
                self._ended.wait(_SIGN_SECONDS)

        threading.Thread(target=show, daemon=True, name="signs of life").start()

    def end_signs(self, folder: Path) -> None:
        """This worker ends well: nobody need look for it."""
        self._ended.set()
        with contextlib.suppress(OSError):
            (folder / SIGNS / f"{self.index}.json").unlink(missing_ok=True)
            (folder / SIGNS).rmdir()

    def missing(self, folder: Path, since: float) -> str:
        """Which of the other workers is to blame for a wait, as far as their signs of life tell.

        Args:
            folder: the run's.
            since: `time.time()` when this worker began; older signs are of earlier runs.
        """
        told, silent = {}, []
        for index, address in enumerate(self.workers):
            if index == self.index:
                continue
            name = f"worker {index} ({address})"
            path = folder / SIGNS / f"{index}.json"
            try:
                age = time.time() - path.stat().st_mtime
                doing = json.loads(path.read_text())["doing"]
            except (OSError, ValueError, KeyError):
                silent.append(f"{name} never came, or sees another run folder")
                continue
            if age > time.time() - since + _STALE_SECONDS:
                silent.append(f"{name} never came")
            elif age > _STALE_SECONDS:
                silent.append(f"{name} gave its last sign of life {age:.0f} s ago, {doing}")
            else:
                told[name] = doing
        stuck = [
            f"{name} is alive but {doing}" for name, doing in told.items() if doing != "computing"
        ]
        return "; ".join(silent or stuck or [f"{name} is {doing}" for name, doing in told.items()])


def in_cluster(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment says that this process is one of several workers."""
    return _tf_config(environment) is not None or _slurm_tasks(environment) > 1


def find_cluster(environment: Mapping[str, str] = os.environ) -> Cluster:
    """The workers that `TF_CONFIG` names, or those of a Slurm job step; else this process alone.

    Raises:
        UsageError: what the environment says makes no cluster of workers.
    """
    if not in_cluster(environment):
        return Cluster()
    # Late: as above.
    import tensorflow as tf

    config = _tf_config(environment)
    if config is not None:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        index = int(config["task"]["index"])
        kind = config["task"]["type"]
    else:
        # A task sees the GPUs that Slurm gives to it: the resolver is told of one a task, and not to choose.
        tasks = max(_slurm_per_node(environment))
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            gpus_per_node=tasks, gpus_per_task=1, auto_set_gpu=False
        )
        kind, index = "worker", int(environment["SLURM_PROCID"])
    spec = resolver.cluster_spec().as_dict()
    chiefs = spec.get("chief", [])
    workers = (*chiefs, *spec.get("worker", []))
    if set(spec) - {"chief", "worker"} or kind not in ("chief", "worker"):
        raise UsageError(
            "TF_CONFIG", found=f"{', '.join(sorted(spec))}; this one is {kind} {index}",
            expected="workers alone, with or without a chief",
        )  # fmt: skip
    place = index if kind == "chief" else len(chiefs) + index
    if not place < len(workers):
        raise UsageError("TF_CONFIG", found=f"{kind} {index} of {len(workers)} workers")
    return Cluster(workers, place, resolver)


def _tf_config(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """`TF_CONFIG`, if it names more than one worker."""
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
    """Tasks of the Slurm job step that this process is in: in a batch script itself there is none."""
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1"))


def _slurm_per_node(environment: Mapping[str, str]) -> list[int]:
    return [int(part.split("(")[0]) for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(",")]
