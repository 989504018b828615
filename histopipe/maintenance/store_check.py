"""Check all entries of a store except those of slides. Runs in a worker process, which a damaged file may kill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from histopipe.errors import DamagedStore, NothingToDo, UnknownVersion
from histopipe.maintenance.findings import Finding, FindingKind, VerifyResult, entry_of
from histopipe.store.data_file import RawStore
from histopipe.store.format import (
    DATABASES,
    INDEX,
    MAX_SLIDE_NUMBER,
    META,
    PATCHES,
    SET_ASIDE,
    SLIDES,
    STAINS,
    THUMBNAILS,
    slide_key,
    slide_number,
)
from histopipe.store.meta import check_format, entry, read_classes, read_spec
from histopipe.store.record import SlideRecord, SlideState

T = TypeVar("T")

_NUMBER, _PATCH = 4, 8
"""Bytes of the slide number at the start of a key, and of the key of a patch."""
_FAILED = f'"state":"{SlideState.FAILED}"'.encode()
_NO_RECORD = "which has no record"


@dataclass(slots=True)
class Examination:
    """Findings about a store, and the entries that could be read.

    Attributes:
        spec, next_number: entries of `meta`, as far as they can be read.
        slides: numbers of all slides; all possible numbers if slides cannot be listed.
        records: readable records by slide number; `damaged_records` has the bytes of the others.
        without_record: slide numbers with entries, but no record.
        transaction: number of the last transaction before the store was verified.
    """

    spec: Mapping[str, Any] | None = None
    next_number: int = 0
    databases: set[bytes] = field(default_factory=set)
    slides: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    records: dict[int, SlideRecord] = field(default_factory=dict)
    damaged_records: dict[int, bytes] = field(default_factory=dict)
    without_record: set[int] = field(default_factory=set)
    transaction: int = 0
    result: VerifyResult = field(init=False)

    def add(self, kind: FindingKind, what: str, entry: tuple[str, str] | None = None) -> None:
        """Add a finding."""
        self.findings.append(Finding(kind, what, entry=entry))


def check_store(store: Path) -> Examination:
    """Check the databases and the entries of `meta`, and list the slides.

    Raises:
        NothingToDo: the store is empty, or the environment belongs to another program.
        UnknownVersion: a later version wrote the store.
    """
    check = Examination()
    with RawStore(store) as raw:
        check.databases = raw.databases
        if all(_is_empty(raw, name) for name in raw.databases):
            raise NothingToDo(
                f"{store} is empty: an ingest has just started, or was stopped at its start"
            )
        for database in DATABASES:
            if database not in raw.databases and database != STAINS:
                check.add(FindingKind.FORMAT, f"the database {database.decode()!r} is missing")
        _check_meta(raw, check, store)
        try:
            check.slides = _slides(raw, check)
        except DamagedStore as error:
            check.add(FindingKind.STRUCTURE, f"slides: {error}")
            check.slides = list(range(check.next_number))
    last = max(check.slides, default=-1)
    if last >= check.next_number:
        check.add(
            FindingKind.COUNT,
            f"meta 'next_number' is {check.next_number}, but slide number {last} exists",
        )
    return check


def _is_empty(raw: RawStore, database: bytes) -> bool:
    try:
        return next(raw.keys(database), None) is None
    except DamagedStore:
        return False


def _check_meta(raw: RawStore, check: Examination, store: Path) -> None:
    def stored(key: bytes) -> memoryview | None:
        return raw.get(META, key)

    def read(reader: Callable[..., T], *what: Any) -> T | None:
        try:
            return reader(stored, *what, store)
        except UnknownVersion:
            raise
        except DamagedStore as error:
            check.add(FindingKind.FORMAT, str(error).removeprefix(f"{store}, "))
            return None

    read(check_format)
    for name in ("uuid", "created", "histopipe_version"):
        read(entry, name, str)
    check.spec = read(read_spec)
    read(read_classes)
    check.next_number = read(entry, "next_number", int) or 0
    if not 0 <= check.next_number <= MAX_SLIDE_NUMBER + 1:
        check.add(FindingKind.COUNT, f"meta 'next_number' is {check.next_number}")
        check.next_number = 0


def _slides(raw: RawStore, check: Examination) -> list[int]:
    numbers = []
    for key in raw.keys(SLIDES):
        if len(key) == _NUMBER:
            numbers.append(slide_number(key))
        else:
            check.add(
                FindingKind.ORPHAN, f"slides: unexpected key {key.hex()}", entry_of(SLIDES, key)
            )
    return numbers


def find_orphans(store: Path, complete: set[int]) -> tuple[list[Finding], set[int]]:
    """Find entries whose slide has no record or has failed. The patches of `complete` slides are not listed.

    Returns one finding per entry, or per slide number for patches, and the numbers that have entries but no record.
    """
    findings: list[Finding] = []
    without_record: set[int] = set()
    patches: Counter[int] = Counter()
    with RawStore(store) as raw:

        @cache
        def orphan_reason(number: int) -> str | None:
            record = raw.get(SLIDES, slide_key(number)) if number <= MAX_SLIDE_NUMBER else None
            if record is None:
                without_record.add(number)
                return _NO_RECORD
            return "which failed" if _FAILED in bytes(record) else None

        for database in sorted(raw.databases - {META, SLIDES, SET_ASIDE}):
            name = database.decode("ascii", "replace")
            try:
                for key in raw.keys(database, skip=complete if database == PATCHES else set()):
                    entry = entry_of(database, key)
                    if not _is_usual(database, key):
                        what = f"{name}: unexpected key {key.hex()}"
                        findings.append(Finding(FindingKind.ORPHAN, what, entry=entry))
                        continue
                    number = slide_number(key[:_NUMBER])
                    reason = orphan_reason(number)
                    if reason is not None and database == PATCHES:
                        patches[number] += 1
                    elif reason is not None:
                        what = f"{name}: an entry of slide number {number}, {reason}"
                        findings.append(Finding(FindingKind.ORPHAN, what, None, number, entry))
            except DamagedStore as error:
                findings.append(Finding(FindingKind.STRUCTURE, f"{name}: {error}"))
        for number, count in patches.items():
            what = f"{count} patches of slide number {number}, {orphan_reason(number)}"
            findings.append(Finding(FindingKind.ORPHAN, what, None, number))
    return findings, without_record


def _is_usual(database: bytes, key: bytes) -> bool:
    """Return whether a key has the form of the keys of its database."""
    if database == PATCHES:
        return len(key) == _PATCH
    if database in (INDEX, STAINS):
        return len(key) == _NUMBER
    return len(key) > _NUMBER if database == THUMBNAILS else len(key) >= _NUMBER
