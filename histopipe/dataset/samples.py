"""What splits, selection and orders need to know of samples, be they patches of stores or bags of feature files.

A sample is what a model sees once: a patch, or a bag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray


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
        """Patient; None if unknown, and the id is used."""

    @property
    def site(self) -> str | None:
        """Hospital or scanner; None if unknown."""

    @property
    def content(self) -> str | None:
        """Checksum that copies of one slide share; None matches nothing."""

    @property
    def planned(self) -> int:
        """Number of samples, with those that could not be read."""

    @property
    def stored(self) -> int:
        """Number of samples that can be read."""

    @property
    def patch_labels(self) -> Mapping[str, int]:
        """Number of samples by their own class, where samples have one; else empty."""


class SampleSource(Protocol):
    """Groups of samples by number: a `Store` of slides, or a `BagSet`."""

    @property
    def path(self) -> Path:
        """File or folder, for messages."""

    @property
    def uuid(self) -> str:
        """Identity, which splits record."""

    @property
    def records(self) -> Mapping[int, SampleGroup]:
        """Every group by number."""

    @property
    def slides(self) -> Sequence[SampleGroup]:
        """Every group, in the order of their numbers."""

    @property
    def complete(self) -> Mapping[int, SampleGroup]:
        """The groups that can be read, by number."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes that single samples may have, in the order of their numbers."""

    def index(self, slide: int) -> Mapping[str, NDArray[Any]]:
        """Columns of a group, one row per sample; `crc` at least."""
