"""A tensor of a checkpoint file, read on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError

_FLOATS = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file.

    Attributes:
        shape, dtype: shape, and type in the file.
        path, name: the file, and the name of the tensor, for messages.
        load: reads the values.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    path: Path
    load: Callable[[], NDArray[Any]]
    name: str = ""

    def read(self) -> NDArray[np.float32]:
        """Read the values as float32.

        Raises:
            UsageError: the values are damaged, not finite, or no floating-point numbers.
        """
        if self.dtype not in _FLOATS:
            raise unusable(self.path, f"{self.name} of type {self.dtype}")
        try:
            values = self.load()
        except Exception as error:  # zipfile and safetensors raise errors of many classes
            raise unusable(self.path, f"{self.name}: {error}") from error
        converted = np.asarray(values, np.float32, order="C")
        if not np.isfinite(converted).all():
            raise unusable(self.path, f"{self.name}: values that are not finite numbers")
        return converted


def unusable(path: Path, problem: str, why: str = "") -> UsageError:
    """Return the error for a file that is not usable as weights."""
    return UsageError(
        f"{path} cannot be used as weights", found=problem[:300],
        expected="a .safetensors file, or a state dict of PyTorch",
        todo=why or "download the file again, and compare its size with that of the source",
    )  # fmt: skip
