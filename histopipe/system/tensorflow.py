"""Load TensorFlow without its messages."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from histopipe.errors import MachineShort

_OPTIONAL = ("matplotlib", "pandas", "sklearn")
"""Packages that Keras imports for functions that histopipe does not use. They take a third of Keras' loading time."""


def load_quietly(module: str, *, lean: bool = False) -> Any:
    """Import a module that loads TensorFlow.

    With `lean`, Keras loads without its optional packages. They can still be imported later.

    Raises:
        MachineShort: TensorFlow is not installed or cannot be loaded.
    """
    try:
        with _quiet(), _without(_OPTIONAL if lean else ()):
            return importlib.import_module(module)
    except ImportError as error:
        raise MachineShort(
            "this needs TensorFlow, which is not installed or cannot be loaded", found=str(error),
            todo="run pip install 'histopipe[train]' (CPU) or 'histopipe[gpu]'",
        ) from error  # fmt: skip


@contextmanager
def _without(packages: Sequence[str]) -> Iterator[None]:
    """Make imports of packages fail, unless they are already loaded."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard standard error: TensorFlow's libraries write to it while they load, and no setting prevents it."""
    sys.stderr.flush()
    # TensorFlow reads this variable once; child processes must not inherit it.
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        if level is None:
            del os.environ["TF_CPP_MIN_LOG_LEVEL"]
        os.dup2(kept, 2)
        os.close(kept)
