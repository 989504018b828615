"""All that is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from histopipe.doctor import graphics, libraries, machine
from histopipe.doctor.check import Check


def examine(folder: Path) -> Iterator[Check]:
    """Look at the machine and the installation, one thing after another.

    Args:
        folder: a store, or where one would be; it need not exist.
    """
    yield machine.python()
    yield machine.processor()
    yield machine.memory()
    yield machine.address_space()
    yield machine.disk(folder)
    yield machine.filesystem(folder)
    yield libraries.libraries()
    yield libraries.openslide()
    yield libraries.jpeg()
    check, found = graphics.tensorflow()
    yield check
    gpus = graphics.gpus(graphics.find_driver(), found)
    yield from gpus
    yield machine.shared_memory(len(gpus))
