"""What a split needs of its data: groups of samples, by number.

A sample is one input of a model: a patch of a store, or a bag of feature files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from histopipe.slides.slide_hashes import SlideHashes


class SampleGroup(Protocol):
    """Samples that share an id, a label, a patient and a site: a `SlideRecord`, or a `Bag`."""

    @property
    def id(self) -> str:
        """Name, unique in its source."""

    @property
    def label(self) -> str | None:
        """Class of the group; None if it is unlabelled."""

    @property
    def patient(self) -> str | None:
        """Patient; None if unknown, which is replaced by the id."""

    @property
    def site(self) -> str | None:
        """Hospital or scanner; None if unknown."""

    @property
    def scans(self) -> Sequence[SlideHashes]:
        """Hashes of each of its slides."""

    @property
    def planned(self) -> int:
        """Number of samples, including those that could not be read."""

    @property
    def stored(self) -> int:
        """Number of samples that can be read."""

    @property
    def patch_labels(self) -> Mapping[str, int]:
        """Number of samples by class; empty if samples have no separate classes."""


class SampleSource(Protocol):
    """Groups of samples by number: a `Store` of slides, or a `BagSet`."""

    @property
    def path(self) -> Path:
        """File or folder, for messages."""

    @property
    def uuid(self) -> str:
        """Identifier, as recorded in splits."""

    @property
    def records(self) -> Mapping[int, SampleGroup]:
        """All groups by number."""

    @property
    def complete(self) -> Mapping[int, SampleGroup]:
        """All groups that can be read, by number."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes that single samples may have, in the order of their numbers."""

    def index(self, slide: int) -> Mapping[str, NDArray[Any]]:
        """Columns of a group, one row per sample; `crc` at least."""
