"""Devices and workers of a training: the `tf.distribute` strategy, communication between workers, and memory.

Out of memory is an error that a smaller micro-batch may avoid; the size that fits is recorded in the run.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.errors import OutOfMemory, UsageError, first_line
from histopipe.runs import folder as run_folder
from histopipe.runs.fork_server import Report
from histopipe.runs.supervision import Cluster
from histopipe.system.files import is_full_disk
from histopipe.system.output import counted, message
from histopipe.system.tensorflow import check_keras, in_cluster, parse_devices, tf_config


def make_strategy(
    devices: str,
    cluster: Cluster | None = None,
    *,
    timeout: float = 600.0,
    communication: str = "auto",
) -> tf.distribute.Strategy:
    """Return the strategy for `--devices`. Call it before TensorFlow uses a device. Wait for the workers of a cluster.

    Devices of each worker: "auto" (GPUs if there are any), "cpu:N" (N logical CPU devices), "gpu:0,1". A step that
    waits for another worker fails after `timeout` seconds. `communication` is "auto", "ring" (gRPC) or "nccl".

    Raises:
        UsageError: `devices` is malformed, a GPU does not exist, TensorFlow already uses other devices, or the program
            has given Keras other settings.
    """
    check_keras()
    names = _set_up(devices)
    if cluster is None or cluster.alone:
        return (
            tf.distribute.OneDeviceStrategy(names[0])
            if len(names) == 1
            else tf.distribute.MirroredStrategy(names)
        )
    if len(names) > 1 and names[0].startswith("/CPU"):
        raise UsageError(
            f"--devices cpu:{len(names)}",
            found=f"{len(cluster.workers)} workers",
            expected="--devices cpu: a worker has one CPU device",
        )
    distribution = tf.distribute.experimental
    return tf.distribute.MultiWorkerMirroredStrategy(
        cluster.resolver,
        distribution.CommunicationOptions(
            timeout_seconds=timeout,
            implementation=distribution.CommunicationImplementation[communication.upper()],
        ),
    )


def _set_up(devices: str) -> list[str]:
    """Configure the devices and return their names."""
    match = parse_devices(devices)
    gpus = tf.config.list_physical_devices("GPU")
    try:
        if devices.startswith("gpu") or (devices == "auto" and gpus):
            return _gpus(gpus, match["gpus"])
        count = int(match["cpus"] or 1)
        tf.config.set_visible_devices([], "GPU")
        if count > 1:
            tf.config.set_logical_device_configuration(
                tf.config.list_physical_devices("CPU")[0],
                [tf.config.LogicalDeviceConfiguration() for _ in range(count)],
            )
        return [f"/CPU:{number}" for number in range(count)]
    except RuntimeError as error:
        raise UsageError(
            f"--devices {devices}",
            found="TensorFlow already uses its devices in this process",
            todo="train in a separate process",
        ) from error


def _gpus(gpus: list[tf.config.PhysicalDevice], requested: str | None) -> list[str]:
    if not gpus:
        raise UsageError(
            "--devices gpu",
            found="no GPU that TensorFlow can use",
            todo="install the extra [gpu] and check `nvidia-smi`, or use --devices cpu",
        )
    numbers = [int(n) for n in requested.split(",")] if requested else list(range(len(gpus)))
    if max(numbers) >= len(gpus) or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"--devices gpu:{requested}",
            found=f"{len(gpus)} GPUs, 0 to {len(gpus) - 1}",
            expected="numbers in this range, each once",
        )
    chosen = [gpus[number] for number in numbers]
    tf.config.set_visible_devices(chosen, "GPU")
    for gpu in chosen:
        # Allocate memory on demand, because the GPU of a workstation is often shared.
        tf.config.experimental.set_memory_growth(gpu, True)
    return [f"/GPU:{number}" for number in range(len(chosen))]


def find_cluster() -> Cluster:
    """Return the workers named by `TF_CONFIG` or of the Slurm job step, or this process alone.

    Raises:
        UsageError: the environment describes no valid cluster.
    """
    if not in_cluster():
        return Cluster()
    config = tf_config(os.environ)
    if config is not None:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        kind, index = config["task"]["type"], int(config["task"]["index"])
    else:
        # Slurm assigns GPUs to each task, so the resolver gets one per task and must not select any.
        # The tasks on each node are given as 2(x3),1.
        per_node = os.environ["SLURM_STEP_TASKS_PER_NODE"].split(",")
        tasks = max(int(tasks.split("(")[0]) for tasks in per_node)
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            gpus_per_node=tasks, gpus_per_task=1, auto_set_gpu=False
        )
        kind, index = "worker", int(os.environ["SLURM_PROCID"])
    spec = resolver.cluster_spec().as_dict()
    if set(spec) - {"chief", "worker"} or not 0 <= index < len(spec.get(kind, [])):
        raise UsageError(
            "TF_CONFIG",
            found=f"{', '.join(sorted(spec))}; this process is {kind} {index}",
            expected="workers, with or without a chief, including this process",
        )
    chiefs = spec.get("chief", [])
    workers = (*chiefs, *spec.get("worker", []))
    return Cluster(workers, index if kind == "chief" else len(chiefs) + index, resolver)


def one_per_replica(strategy: tf.distribute.Strategy, parts: Sequence[Any], first: int) -> Any:
    """Return one value per replica, from the parts of this worker's replicas. `first` is its first replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: parts[int(context.replica_id_in_sync_group) - first]
    )


def gathered(
    cluster: Cluster, strategy: tf.distribute.Strategy, values: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the arrays of all workers, (S, N, F) with any N, joined along axis 1. All workers must call it."""
    if cluster.alone:
        return values
    replicas = cluster.own_part(strategy.num_replicas_in_sync)
    # The first replica has the values, the others none.
    parts = [tf.constant(values if place == 0 else values[:, :0]) for place in range(len(replicas))]
    return np.asarray(strategy.gather(one_per_replica(strategy, parts, replicas[0]), axis=1))


def assign_same(
    cluster: Cluster,
    strategy: tf.distribute.Strategy,
    values: Sequence[tuple[Any, NDArray[Any]]],
) -> None:
    """Assign values to variables: on all workers those of the first, since others may round differently."""
    for variable, value in values:
        row = value.reshape(1, 1, -1).astype(np.float32)
        variable.assign(gathered(cluster, strategy, row)[0, 0].reshape(value.shape))


def check_same(cluster: Cluster, strategy: tf.distribute.Strategy, numbers: Sequence[int]) -> None:
    """Wait for all workers, and check that all have the same numbers, each below 65,536.

    Raises:
        UsageError: the numbers of a worker differ from those of the first worker.
    """
    all_numbers = gathered(cluster, strategy, np.asarray([[numbers]], np.float32))[0]
    differing = [
        f"worker {index} ({cluster.workers[index]})"
        for index, worker_numbers in enumerate(all_numbers)
        if not np.array_equal(worker_numbers, all_numbers[0])
    ]
    if differing:
        raise UsageError(
            "workers differ from the first worker",
            found=", ".join(differing),
            expected="the same settings, stores, splits and run folder on all workers",
        )


T = TypeVar("T")

_SIGNS = ("out of memory", "OOM when allocating", "ALLOC_FAILED", "failed to allocate memory")
"""Texts in other errors that mean out of memory in CUDA libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on host or device."""
    # TensorFlow's writers report a full disk as an exhausted resource.
    return not is_full_disk(error) and (
        isinstance(error, MemoryError | tf.errors.ResourceExhaustedError)
        or (isinstance(error, tf.errors.OpError) and any(sign in str(error) for sign in _SIGNS))
    )


def peak_bytes() -> tuple[int, int | None]:
    """Return the peak memory of this process on the host and on all its GPUs; None without a GPU."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = [
        tf.config.experimental.get_memory_info(gpu.name.removeprefix("/device:"))["peak"]
        for gpu in tf.config.list_logical_devices("GPU")
    ]
    return host, sum(peaks) if peaks else None


class MicroBatch:
    """The number of patches that a replica computes at once. It is halved when memory runs out.

    Then `changed` is called with the new size and the reason. A computation that needs other
    workers is not `repeatable`, and fails instead.
    """

    def __init__(
        self,
        size: int,
        *,
        repeatable: bool = True,
        changed: Callable[[int, str], None] = lambda *_: None,
    ) -> None:
        self.size = self.first = size
        self._repeatable, self._changed = repeatable, changed

    def fit(self, compute: Callable[[int], T]) -> T:
        """Run a computation without side effects, in pieces that fit into memory.

        Raises:
            OutOfMemory: not even one patch fits, or the computation cannot be repeated.
        """
        while True:
            try:
                return compute(self.size)
            except tf.errors.ResourceExhaustedError as error:
                why = str(error.message).split("\n")[0][:200]
            # Outside of the except block, because a traceback keeps the tensors of the step.
            if self.size == 1 or not self._repeatable:
                raise OutOfMemory("memory ran out while training", found=why)
            self.size //= 2
            self._changed(self.size, why)


def remembered_micro_batch(
    folder: Path, size: int, *, report: Report, repeatable: bool
) -> MicroBatch:
    """Return the micro-batch of a run: the size from its settings, or a smaller size that fitted into memory before.

    Each smaller size is recorded in the folder of the run.
    """

    def changed(size: int, why: str) -> None:
        report("micro_batch", size)
        message(
            f"memory ran out ({why}): continuing with micro-batches of {counted(size, 'patch')} per device, "
            "summed to the same batch"
        )
        run_folder.write_micro_batch(folder, size, why)

    remembered = run_folder.read_micro_batch(folder)
    if remembered is not None and remembered < size:
        message(
            f"micro-batches of {counted(remembered, 'patch')} per device, because memory ran out before"
        )
        size = remembered
    report("micro_batch", size)
    return MicroBatch(size, repeatable=repeatable, changed=changed)


def out_of_memory(error: Exception, folder: Path, first: int, report: Report) -> OutOfMemory:
    """Return the error to raise if smaller pieces in this process do not help, or weights may be partly updated.

    A new process may continue with half of `first`, the initial micro-batch of this process.
    """
    why = first_line(error)
    todo = "not even single patches fit: use a smaller --model, or smaller patches"
    # Not half of the last size: later failures may come from fragmented memory.
    size = first // 2
    if size:
        run_folder.write_micro_batch(folder, size, why)
        report("restart", size)
        todo = f"{run_folder.resume_hint(folder)}, which uses micro-batches of {counted(size, 'patch')}"
    return OutOfMemory("memory ran out while training", found=why, todo=todo)
