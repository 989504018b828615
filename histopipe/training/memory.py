"""Out of memory: how it is recognised, and the size of micro-batches that fits, which a run remembers."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import tensorflow as tf

from histopipe.errors import OutOfMemory
from histopipe.runs import folder as run_folder
from histopipe.runs.messages import Report
from histopipe.system.filesystems import is_full_disk
from histopipe.system.progress import message

T = TypeVar("T")

_SIGNS = ("out of memory", "OOM when allocating", "ALLOC_FAILED", "failed to allocate memory")
"""How CUDA's libraries say it through other kinds of error."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on host or device."""
    if is_full_disk(error):  # a resource that is exhausted, to TensorFlow's writers
        return False
    if isinstance(error, MemoryError | tf.errors.ResourceExhaustedError):
        return True
    return isinstance(error, tf.errors.OpError) and any(sign in str(error) for sign in _SIGNS)


def peak_bytes() -> tuple[int, int | None]:
    """The most memory that this process has taken, on the host and on all its GPUs; None without a GPU."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gpus = tf.config.list_logical_devices("GPU")
    names = [gpu.name.removeprefix("/device:") for gpu in gpus]
    peaks = [tf.config.experimental.get_memory_info(name)["peak"] for name in names]
    return host, sum(peaks) if peaks else None


class MicroBatch:
    """How many patches a replica computes at once: halved where memory runs out.

    Args:
        size: to begin with.
        repeatable: whether a computation can be repeated without the other workers.
        changed: told the new size, and why, if given.

    Attributes:
        size: as it is now.
        first: as it was to begin with.
    """

    def __init__(
        self,
        size: int,
        *,
        repeatable: bool = True,
        changed: Callable[[int, str], None] | None = None,
    ) -> None:
        self.size = self.first = size
        self._repeatable, self._changed = repeatable, changed

    def fit(self, compute: Callable[[int], T]) -> T:
        """The result of a computation that changes nothing, in pieces that fit into memory.

        Raises:
            OutOfMemory: not even one patch fits, or only a fresh process can tell.
        """
        while True:
            try:
                return compute(self.size)
            except tf.errors.ResourceExhaustedError as error:
                why = str(error.message).split("\n")[0][:200]
            # Behind the except: a traceback holds on to the tensors of the step.
            if self.size == 1 or not self._repeatable:
                raise OutOfMemory("memory ran out while training", found=why)
            self.size //= 2
            if self._changed is not None:
                self._changed(self.size, why)


def remembered_micro_batch(
    folder: Path, size: int, *, report: Report, repeatable: bool
) -> MicroBatch:
    """The micro-batch of a run: the size that its settings make, or the smaller one that fitted into memory before.

    Args:
        folder: the run's, where each smaller size is kept.
        size: by the settings.
        report: told each size.
        repeatable: as of `MicroBatch`.
    """

    def changed(size: int, why: str) -> None:
        report("micro_batch", size)
        message(
            f"memory ran out ({why}): going on with micro-batches of {size} patches a device, "
            "added up to the same batch"
        )
        run_folder.write_micro_batch(folder, size, why)

    remembered = run_folder.read_micro_batch(folder)
    if remembered is not None and remembered < size:
        message(f"micro-batches of {remembered} patches a device, as memory ran out before")
        size = remembered
    report("micro_batch", size)
    return MicroBatch(size, repeatable=repeatable, changed=changed)


def out_of_memory(error: Exception, folder: Path, first: int, report: Report) -> OutOfMemory:
    """What is left where smaller pieces in this process do not help, or its weights may be half changed.

    Args:
        error: what happened.
        folder: the run's.
        first: the size of micro-batches that this process began with.
        report: told if a fresh process may go on.
    """
    what, why = "memory ran out while training", str(error).split("\n")[0][:200]
    if first == 1:
        todo = "not even single patches fit: take a smaller --model, or smaller patches"
        return OutOfMemory(what, found=why, todo=todo)
    # Not from the size that this process ended with: an allocator in pieces may have failed all the rest.
    size = first // 2
    run_folder.write_micro_batch(folder, size, why)
    report("restart", size)
    todo = f"go on with `histopipe train --resume --out {folder}`, which takes micro-batches of {size} patches"
    return OutOfMemory(what, found=why, todo=todo)
