"""Out of memory: detection, and the size of micro-batches that fits, which is recorded in the run."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import tensorflow as tf

from histopipe.errors import OutOfMemory
from histopipe.runs import folder as run_folder
from histopipe.runs.fork_server import Report
from histopipe.system.filesystems import is_full_disk
from histopipe.system.output import counted, message

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
    why = str(error).split("\n")[0][:200]
    todo = "not even single patches fit: use a smaller --model, or smaller patches"
    # Not half of the last size: later failures may come from fragmented memory.
    size = first // 2
    if size:
        run_folder.write_micro_batch(folder, size, why)
        report("restart", size)
        todo = f"{run_folder.resume_hint(folder)}, which uses micro-batches of {counted(size, 'patch')}"
    return OutOfMemory("memory ran out while training", found=why, todo=todo)
