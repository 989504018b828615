"""TensorFlow, Keras and what imports them, at the first use: only the worker that needs them loads them."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """A module that is imported at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


class LazyPackage:
    """A package whose modules are imported at their first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(f"{self._name}.{name}")


tf: Any = LazyModule("tensorflow")
keras: Any = LazyModule("keras")
training_modules: Any = LazyPackage("histopipe.training")
