"""Check what a store holds besides its slides. Runs in a worker process, which a damaged file may kill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore, NothingToDo, UnknownVersion
from histopipe.maintenance.findings import Finding, FindingKind
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
from histopipe.store.raw_store import RawStore
from histopipe.store.record import SlideState

_NUMBER, _PATCH = 4, 8
"""Bytes of a slide number at the start of a key; bytes of a patch's key."""
_OPTIONAL = {STAINS}
_FAILED = f'"state":"{SlideState.FAILED}"'.encode()


@dataclass(slots=True)
class StoreCheck:
    """Settings and slide numbers of a store.

    Attributes:
        spec: how patches are made; None if it cannot be read.
        classes: of patches.
        next_number: the number that a new slide gets.
        databases: names of the databases that there are.
        slides: numbers of all slides; None if they cannot be listed.
        findings: what is wrong.
    """

    spec: Mapping[str, Any] | None = None
    classes: list[str] = field(default_factory=list)
    next_number: int = 0
    databases: set[bytes] = field(default_factory=set)
    slides: list[int] | None = None
    findings: list[Finding] = field(default_factory=list)

    def add(self, kind: FindingKind, what: str, entry: tuple[bytes, bytes] | None = None) -> None:
        """Add a finding."""
        written = (entry[0].decode(), entry[1].hex()) if entry else None
        self.findings.append(Finding(kind, what, entry=written))


def check_store(store: Path) -> StoreCheck:
    """Check the databases and the entries of `meta`, and list the slides.

    Raises:
        NothingToDo: the store is empty, or the environment of another program.
        UnknownVersion: a later version wrote the store.
    """
    check = StoreCheck()
    with RawStore(store) as raw:
        check.databases = raw.databases
        missing = [d.decode() for d in DATABASES if d not in raw.databases and d not in _OPTIONAL]
        if all(_is_empty(raw, database) for database in raw.databases):
            raise NothingToDo(
                f"{store} is empty: an ingest has only just begun it, or was stopped there"
            )
        for name in missing:
            check.add(FindingKind.FORMAT, f"the database {name!r} is missing")
        _check_meta(raw, check, store)
        try:
            check.slides = list(_slides(raw, check))
        except DamagedStore as error:
            check.add(FindingKind.STRUCTURE, f"slides: {error}")
    last = max(check.slides or [-1])
    if last >= check.next_number:
        check.add(
            FindingKind.COUNT,
            f"meta 'next_number' is {check.next_number}, but there is a slide number {last}",
        )
    return check


def _is_empty(raw: RawStore, database: bytes) -> bool:
    try:
        return next(raw.keys(database), None) is None
    except DamagedStore:
        return False


def _check_meta(raw: RawStore, check: StoreCheck, store: Path) -> None:
    def stored(key: bytes) -> memoryview | None:
        return raw.get(META, key)

    @contextmanager
    def findings() -> Iterator[None]:
        try:
            yield
        except UnknownVersion:
            raise
        except DamagedStore as error:
            check.add(FindingKind.FORMAT, str(error).removeprefix(f"{store}, "))

    with findings():
        check_format(stored, store)
    for name in ("uuid", "created", "histopipe_version"):
        with findings():
            entry(stored, name, str, store)
    with findings():
        check.spec = read_spec(stored, store)
    with findings():
        check.classes = read_classes(stored, store)
    with findings():
        check.next_number = entry(stored, "next_number", int, store)
    if not 0 <= check.next_number <= MAX_SLIDE_NUMBER + 1:
        check.add(FindingKind.COUNT, f"meta 'next_number' is {check.next_number}")
        check.next_number = 0


def _slides(raw: RawStore, check: StoreCheck) -> Iterator[int]:
    for key in raw.keys(SLIDES):
        if len(key) == _NUMBER:
            yield slide_number(key)
        else:
            check.add(FindingKind.ORPHAN, f"slides: a key {key.hex()}", (SLIDES, key))


@dataclass(slots=True)
class Orphans:
    """Entries that belong to no slide.

    Attributes:
        findings: one for each entry, or for all patches of a number.
        without_record: numbers that have entries, but no record.
    """

    findings: list[Finding] = field(default_factory=list)
    without_record: set[int] = field(default_factory=set)


def find_orphans(store: Path, complete: set[int]) -> Orphans:
    """Find entries whose slide has no record or has failed.

    Args:
        store: the store's folder.
        complete: numbers of slides whose entries need not be read.
    """
    orphans = Orphans()
    with RawStore(store) as raw:
        patches: Counter[int] = Counter()
        whys: dict[int, str | None] = {}
        for database in sorted(raw.databases - {META, SLIDES, SET_ASIDE}):
            name = database.decode("ascii", "replace")
            try:
                for key in raw.keys_but(database, complete if database == PATCHES else set()):
                    if not _is_usual(database, key):
                        written = (name, key.hex())
                        what = f"{name}: a key {key.hex()}"
                        orphans.findings.append(Finding(FindingKind.ORPHAN, what, entry=written))
                        continue
                    number = slide_number(key[:_NUMBER])
                    if number not in whys:
                        whys[number] = _why_orphan(raw, number)
                    why = whys[number]
                    if why is None:
                        continue
                    if why == _NO_RECORD:
                        orphans.without_record.add(number)
                    if database == PATCHES:
                        patches[number] += 1
                        continue
                    what = f"{name}: an entry of slide number {number}, {why}"
                    orphans.findings.append(
                        Finding(FindingKind.ORPHAN, what, None, number, (name, key.hex()))
                    )
            except DamagedStore as error:
                orphans.findings.append(Finding(FindingKind.STRUCTURE, f"{name}: {error}"))
        for number, count in patches.items():
            what = f"{count} patches of slide number {number}, {whys[number]}"
            orphans.findings.append(Finding(FindingKind.ORPHAN, what, None, number))
    return orphans


_NO_RECORD = "which has no record"


def _why_orphan(raw: RawStore, number: int) -> str | None:
    record = raw.get(SLIDES, slide_key(number)) if number <= MAX_SLIDE_NUMBER else None
    if record is None:
        return _NO_RECORD
    return "which failed" if _FAILED in bytes(record) else None


def _is_usual(database: bytes, key: bytes) -> bool:
    """Whether a key has the form that its database has."""
    if database == PATCHES:
        return len(key) == _PATCH
    if database in (INDEX, STAINS):
        return len(key) == _NUMBER
    return len(key) > _NUMBER if database == THUMBNAILS else len(key) >= _NUMBER
