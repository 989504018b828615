"""Result of verifying a store: findings, and the slides that they belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from histopipe.errors import ExitCode
from histopipe.system.output import Result, counted


class FindingKind(StrEnum):
    """Kind of a finding. docs/how-to/stores.md describes the kinds."""

    STRUCTURE = "structure"
    FORMAT = "format"
    RECORD = "record"
    INDEX = "index"
    VALUE = "value"
    SWAPPED = "swapped"
    HOLE = "hole"
    ORPHAN = "orphan"
    COUNT = "count"
    THUMBNAIL = "thumbnail"
    STAIN = "stain"
    IMAGE = "image"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault in a store, and the damaged slide, if any.

    `entry` is the database and the key, in hexadecimal digits, of a single unexpected entry.
    """

    kind: FindingKind
    what: str
    slide: str | None = None
    number: int | None = None
    entry: tuple[str, str] | None = None

    def __str__(self) -> str:
        name = self.slide or (f"slide number {self.number}" if self.number is not None else "")
        return f"{self.kind}: {name + ': ' if name else ''}{self.what}"


@dataclass(frozen=True, slots=True, repr=False)
class VerifyResult(Result):
    """Result of `verify`.

    Attributes:
        store: path of the store.
        full: whether every value was also decoded.
        slides, patches: number of verified slides, and of patches of complete slides.
        file_bytes: length of data.mdb.
        seconds: duration.
        findings: faults; empty for an intact store.
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
        """The exit code of the command."""
        return ExitCode.DAMAGED if self.findings else ExitCode.DONE

    @property
    def damaged_slides(self) -> dict[int, str]:
        """Ids of the damaged slides by number."""
        ids = {
            f.number: f.slide or f"slide number {f.number}"
            for f in self.findings
            if f.number is not None
        }
        return dict(sorted(ids.items()))

    @property
    def is_structural(self) -> bool:
        """Whether the file itself is damaged, so that LMDB may crash on it."""
        return any(finding.kind is FindingKind.STRUCTURE for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON-ready dict."""
        return Result.to_json(self) | {"damaged_slides": list(self.damaged_slides.values())}

    def __str__(self) -> str:
        checked = (
            f"{counted(self.slides, 'slide')}, {counted(self.patches, 'patch')}, "
            f"{self.file_bytes / 1e6:,.1f} MB in {self.seconds:.1f} s"
        )
        if not self.findings:
            decoded = ", every patch decoded" if self.full else ""
            return f"{self.store} is intact: {checked}{decoded}"
        counts = f"{len(self.findings)} findings, {len(self.damaged_slides)} damaged slides"
        return "\n".join(
            [*map(str, self.findings), "", f"{self.store} is damaged: {counts}; {checked}"]
        )


def entry_of(database: bytes, key: bytes) -> tuple[str, str]:
    """Return a database and a key in the form of `Finding.entry`."""
    return database.decode("ascii", "replace"), key.hex()
