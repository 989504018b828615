"""Tensors of checkpoint files: `.safetensors`, and PyTorch's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.pretrained.tensors import Tensor, unusable
from histopipe.pretrained.torch_file import read_torch_file
from histopipe.system.files import describe_file

_MOST_TENSORS = 20_000
_LONGEST_PREFIX = 2000
_TORCH = (b"PK", b"\x80\x02\x8a\x0a")
"""Beginnings of PyTorch's formats: a zip archive, and before version 1.6 the pickle of a long number."""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint file by name, without reading their values.

    Names of nested dictionaries are joined by dots.

    Raises:
        UsageError: the file cannot be read, or is no checkpoint.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise UsageError(f"{path} cannot be read", found=str(error)) from error
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if head.startswith(_TORCH):
        return _flat(path, read_torch_file(path))
    raise unusable(path, describe_file(path))


def _flat(path: Path, content: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return the tensors of nested dictionaries. The limits prevent endless work on references to the same objects."""
    tensors: dict[str, Tensor] = {}
    waiting: list[tuple[str, Mapping[Any, Any]]] = [("", content)]
    while waiting:
        prefix, values = waiting.pop()
        if (
            len(tensors) > _MOST_TENSORS
            or len(prefix) > _LONGEST_PREFIX
            or len(waiting) > _MOST_TENSORS
        ):
            raise unusable(path, "dictionaries nested too deep, or too many tensors")
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}{name}"] = replace(value, name=f"{prefix}{name}")
            elif isinstance(value, Mapping):
                waiting.append((f"{prefix}{name}.", value))
    return tensors


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                dtype = _SAFETENSORS_TYPES.get(part.get_dtype())
                if dtype is None:
                    raise unusable(path, f"{name} of type {part.get_dtype()}")
                tensors[name] = Tensor(
                    tuple(part.get_shape()), dtype, path, _loader(path, name), name
                )
    except (SafetensorError, OSError, ValueError) as error:
        raise unusable(path, f"{describe_file(path)}: {error}") from error
    return tensors


def _loader(path: Path, name: str) -> Callable[[], NDArray[Any]]:
    def load() -> NDArray[Any]:
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as file:
            values: NDArray[Any] = file.get_tensor(name)
            return values

    return load


_SAFETENSORS_TYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16), "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
