"""Out of memory: how it is recognised, and the size of micro-batches that fits, which a run remembers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from histopipe.errors import OutOfMemory

T = TypeVar("T")

_SIGNS = ("out of memory", "OOM when allocating", "ALLOC_FAILED", "failed to allocate memory")
"""How CUDA's libraries say it through other kinds of error."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on host or device."""
    if isinstance(error, MemoryError | tf.errors.ResourceExhaustedError):
        return True
    return isinstance(error, tf.errors.OpError) and any(sign in str(error) for sign in _SIGNS)


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
