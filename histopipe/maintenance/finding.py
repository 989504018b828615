"""What is wrong with a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from histopipe.errors import ExitCode

_SHOWN = 8


class Kind(StrEnum):
    """What a finding is about."""

    STRUCTURE = "structure"
    """Pages of the file: LMDB itself cannot be trusted with it."""
    FORMAT = "format"
    """The databases and what the store says of itself."""
    RECORD = "record"
    """What is known of a slide."""
    INDEX = "index"
    """Where a slide's patches lie, and their checksums."""
    VALUE = "value"
    """A patch is not what was written."""
    SWAPPED = "swapped"
    """A patch is another one's."""
    HOLE = "hole"
    """Something is missing."""
    ORPHAN = "orphan"
    """Something belongs to no slide."""
    COUNT = "count"
    """Two numbers that should agree do not."""
    THUMBNAIL = "thumbnail"
    """A slide's picture or tissue mask."""
    STAIN = "stain"
    """How a slide is stained."""
    IMAGE = "image"
    """A value is what was written, and yet no image of the patch size."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        slide: id of the slide that it costs; None of one that costs none, or none that can be named.
        number: of that slide.
        entry: database and key, in hexadecimal digits, of an entry that is all there is to it: without it nothing is wrong.
    """

    kind: Kind
    what: str
    slide: str | None = None
    number: int | None = None
    entry: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """What was looked at, and what is wrong.

    Attributes:
        slides, patches: looked at; patches of complete slides.
        file_bytes: length of the file.
        seconds: that it took.
        full: whether every value was decoded, too.
    """

    store: str
    full: bool
    slides: int
    patches: int
    file_bytes: int
    seconds: float
    findings: list[Finding] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        """Of the command."""
        return ExitCode.DAMAGED if self.findings else ExitCode.DONE

    @property
    def damaged_slides(self) -> dict[int, str]:
        """Ids by number of the slides that something is wrong with."""
        found = {
            f.number: f.slide or f"slide number {f.number}"
            for f in self.findings
            if f.number is not None
        }
        return dict(sorted(found.items()))

    @property
    def is_structural(self) -> bool:
        """Whether LMDB cannot be trusted with the file."""
        return any(finding.kind is Kind.STRUCTURE for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready: all of it, and the ids of the slides that are damaged."""
        return {
            **asdict(self),
            "damaged_slides": list(self.damaged_slides.values()),
            "exit_code": int(self.exit_code),
        }


def some(items: Sequence[object] | Iterable[object]) -> str:
    """The first few of many, for a message."""
    items = list(items)
    text = ", ".join(map(str, items[:_SHOWN]))
    return text + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
