"""Loading TensorFlow without what it says about itself."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from histopipe.errors import MachineShort


def load_quietly(module: str) -> Any:
    """A module that loads TensorFlow.

    Raises:
        MachineShort: it is not installed, or does not load.
    """
    try:
        with _quiet():
            return importlib.import_module(module)
    except ImportError as error:
        raise MachineShort(
            "this needs TensorFlow, which is not installed or does not load", found=str(error),
            todo="pip install 'histopipe[train]' (CPU) or 'histopipe[gpu]'",
        ) from error  # fmt: skip


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what TensorFlow's libraries write to standard error while they load, which no setting of theirs stops."""
    sys.stderr.flush()
    # TensorFlow looks at it once; processes started from here must not inherit it.
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        if level is None:
            del os.environ["TF_CPP_MIN_LOG_LEVEL"]
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
