"""TensorFlow's modules, loaded at their first use: only the workers that run tests with them load them."""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """Stands for a module, or for the modules of a package."""

    def __init__(self, name: str, *, package: bool = False) -> None:
        self._name, self._package = name, package

    def __getattr__(self, name: str) -> Any:
        if self._package:
            return Lazy(f"{self._name}.{name}")
        return getattr(importlib.import_module(self._name), name)


keras: Any = Lazy("keras")
tf: Any = Lazy("tensorflow")
training: Any = Lazy("histopipe.training", package=True)
