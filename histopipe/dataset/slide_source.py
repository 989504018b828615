"""What splits are made of: a store of patches, or anything else that holds slides with a number, a label and a patient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from histopipe.store.record import SlideRecord


class SlideSource(Protocol):
    """Slides, each with so many items as its record has planned: patches in a store, one in a set of bags."""

    @property
    def path(self) -> Path:
        """Where it lies."""

    @property
    def uuid(self) -> str:
        """What tells it from others."""

    @property
    def records(self) -> Mapping[int, SlideRecord]:
        """Every slide's record by number."""

    @property
    def slides(self) -> list[SlideRecord]:
        """The same in the order of their numbers."""

    @property
    def complete(self) -> Mapping[int, SlideRecord]:
        """Records of the slides that can be read."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes that single items may have, in the order of their numbers."""

    def index(self, slide: int) -> Mapping[str, NDArray[Any]]:
        """A slide's columns, one row an item; `crc` at least."""
