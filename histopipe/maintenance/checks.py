"""Check all entries of single slides. Runs in a worker process, which a damaged file may kill."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from histopipe.errors import DamagedStore, ExitCode, NothingToDo, UnknownVersion
from histopipe.store.data_file import RawStore, page_faults
from histopipe.store.format import (
    DATABASES,
    INDEX,
    MAX_SLIDE_NUMBER,
    META,
    PATCHES,
    SLIDE_KEY_BYTES,
    SLIDES,
    STAINS,
    THUMBNAILS,
    Columns,
    decode_index,
    patch_key,
    slide_key,
    slide_number,
    value_crc,
)
from histopipe.store.reading import (
    check_format,
    decode,
    decode_picture,
    entry,
    read_classes,
    read_spec,
)
from histopipe.store.record import SlideRecord, SlideState, read_fits
from histopipe.system.output import Result, counted, some

_SET_ASIDE = b"set-aside"
"""Database where an interrupted repair of version 0.2.0 left data of slides. Its keys are not those of other databases."""


FindingKind = Literal[
    "structure",
    "format",
    "record",
    "index",
    "value",
    "swapped",
    "hole",
    "orphan",
    "count",
    "thumbnail",
    "stain",
    "image",
]
"""Kind of a finding. docs/how-to/stores.md describes the kinds."""


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
        return any(finding.kind == "structure" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON-ready dict."""
        return Result.to_json(self) | {"damaged_slides": list(self.damaged_slides.values())}

    def __str__(self) -> str:
        checked = (
            f"{counted(self.slides, 'slide')}, {counted(self.patches, 'patch')}, "
            f"{self.file_bytes / 1e6:,.1f} MB in {self.seconds:.1f} s"
        )
        if not self.findings:
            return f"{self.store} is intact: {checked}{', every patch decoded' * self.full}"
        counts = f"{len(self.findings)} findings, {len(self.damaged_slides)} damaged slides"
        return "\n".join(
            [*map(str, self.findings), "", f"{self.store} is damaged: {counts}; {checked}"]
        )


def entry_of(database: bytes, key: bytes) -> tuple[str, str]:
    """Return a database and a key in the form of `Finding.entry`."""
    return database.decode("ascii", "replace"), key.hex()


class WrongValue(NamedTuple):
    """A patch that differs from its index: its length and CRC, and the expected ones."""

    slide: int
    row: int
    length: int
    crc: int
    expected_length: int
    expected_crc: int


@dataclass(slots=True)
class Examination:
    """Findings about a store or some of its slides, and the entries that could be read.

    Attributes:
        spec, next_number: entries of `meta`, as far as they can be read.
        slides: numbers of all slides; all possible numbers if slides cannot be listed.
        records: readable records by slide number; `damaged_records` has the bytes of the others.
        wrong, value_bytes: patches that differ from their index, and the size of all patches.
        transaction: number of the last transaction before the store was verified.
    """

    spec: Mapping[str, Any] | None = None
    next_number: int = 0
    databases: set[bytes] = field(default_factory=set)
    slides: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    records: dict[int, SlideRecord] = field(default_factory=dict)
    damaged_records: dict[int, bytes] = field(default_factory=dict)
    wrong: list[WrongValue] = field(default_factory=list)
    value_bytes: int = 0
    transaction: int = 0
    result: VerifyResult = field(init=False)

    def add(
        self,
        kind: FindingKind,
        what: str,
        number: int | None = None,
        entry: tuple[str, str] | None = None,
    ) -> None:
        """Add a finding, of the slide with this number, if any."""
        record = None if number is None else self.records.get(number)
        self.findings.append(Finding(kind, what, record.id if record else None, number, entry))

    def add_unexpected(self, database: bytes, key: bytes, number: int | None = None) -> None:
        """Add a finding of a key that does not have the form of the keys of its database."""
        name, digits = entry_of(database, key)
        self.add("orphan", f"{name}: unexpected key {digits}", number, (name, digits))

    def add_slides(self, other: Examination) -> None:
        """Add the results of other slides."""
        self.findings += other.findings
        self.records |= other.records
        self.damaged_records |= other.damaged_records
        self.wrong += other.wrong


def check_slides(
    store: Path, numbers: Sequence[int], *, side: int | None = None, records_only: bool = False
) -> Examination:
    """Check slides, each in one transaction. Slides that another process has removed have no result.

    `side` is the patch size in pixels: every patch and picture is also decoded. If it is 0 (unknown), only pictures
    are. `records_only` is for slides whose patches kill a worker.
    """
    check = Examination()
    with RawStore(store) as raw:
        for number in numbers:
            raw.refresh()
            value = b""
            try:
                stored = raw.get(SLIDES, slide_key(number))
                if stored is None:
                    continue
                value = bytes(stored)
                record = SlideRecord.from_bytes(number, value, where="its record")
            except DamagedStore as error:
                check.damaged_records[number] = value
                check.add("record", str(error), number)
            else:
                check.records[number] = record
                if record.state is SlideState.COMPLETE and not records_only:
                    _check_complete(raw, check, number, side)
    return check


def _check_complete(raw: RawStore, check: Examination, number: int, side: int | None) -> None:
    key = slide_key(number)
    try:
        block = raw.get(INDEX, key)
        if block is None:
            check.add("hole", "its index is missing", number)
        else:
            columns = decode_index(key, bytes(block), where="index")
            _check_counts(raw, check, number, columns)
            _check_patches(raw, check, number, columns, side)
    except DamagedStore as error:
        check.add("index", str(error), number)
    _check_thumbnails(raw, check, number, is_full=side is not None)
    try:
        value = raw.get(STAINS, key)
        if value is not None:
            read_fits({number: bytes(value)}, where="its stains")
    except DamagedStore as error:
        check.add("stain", str(error), number, entry_of(STAINS, key))


def _check_counts(raw: RawStore, check: Examination, number: int, columns: Columns) -> None:
    record, length, labels = check.records[number], columns["length"], columns["label"]
    stored = int(np.count_nonzero(length))
    for name, actual in (
        ("planned", len(length)),
        ("stored", stored),
        ("unreadable", len(length) - stored),
        ("stored_bytes", int(length.sum(dtype=np.int64))),
    ):
        expected = getattr(record, name)
        if expected != actual:
            check.add("count", f"{name}: {expected} in its record, {actual} in its index", number)
    with suppress(DamagedStore, ValueError, TypeError):  # reported as damage of `meta`
        classes = len(json.loads(bytes(raw.get(META, b"classes") or b"")))
        if len(labels) and not -1 <= labels.min() <= labels.max() < classes:
            what = f"labels from {labels.min()} to {labels.max()}, but there are {classes} classes"
            check.add("index", what, number)


def _check_patches(
    raw: RawStore, check: Examination, number: int, columns: Columns, side: int | None
) -> None:
    """Look up every patch as a reader does, and compare it with its CRC. With `side`, also decode it."""
    pixels = np.empty((side, side, 3), np.uint8) if side else None
    lengths, crcs = columns["length"].tolist(), columns["crc"].tolist()
    reached: set[int] = set()
    faults: dict[int, str] = {}
    undecodable: dict[int, str] = {}
    for row, (length, crc) in enumerate(zip(lengths, crcs, strict=True)):
        key = patch_key(number, row)
        try:
            value = raw.get(PATCHES, key)
        except DamagedStore as error:
            faults[row] = str(error)
            continue
        if value is None:
            continue
        reached.add(row)
        size = len(value)
        actual = value_crc(key, value) if size else 0
        check.value_bytes += size
        if size != length or actual != crc:
            check.wrong.append(WrongValue(number, row, size, actual, length, crc))
        elif pixels is not None and size:
            try:
                decode(value, pixels)
            except DamagedStore as error:
                undecodable[row] = str(error)
    missing = sorted(set(range(len(crcs))) - reached - faults.keys())
    findings: tuple[tuple[FindingKind, Collection[int], str], ...] = (
        (
            "structure",
            faults,
            f"cannot read patches {some(faults)}: {some(sorted(set(faults.values())))}",
        ),
        ("hole", missing, f"{len(missing)} of {len(crcs)} patches are missing: {some(missing)}"),
        (
            "image",
            undecodable,
            f"cannot decode patches {some(undecodable)}: {next(iter(undecodable.values()), '')}",
        ),
    )
    for kind, rows, what in findings:
        if rows:
            check.add(kind, what, number)
    _check_patch_keys(raw, check, number, len(crcs), reached)


def _check_patch_keys(
    raw: RawStore, check: Examination, number: int, planned: int, reached: set[int]
) -> None:
    """Check that there are no other patches, and that a lookup reaches all patches in the tree."""
    beyond, unreached = [], []
    try:
        for key in raw.keys(PATCHES, slide_key(number)):
            row = slide_number(key[SLIDE_KEY_BYTES:])
            if not _is_usual(PATCHES, key):
                check.add_unexpected(PATCHES, key, number)
            elif row >= planned:
                beyond.append(row)
            elif row not in reached:
                unreached.append(row)
    except DamagedStore as error:
        check.add("structure", str(error), number)
    if beyond:
        check.add("orphan", f"patches {some(beyond)} are not in its index of {planned}", number)
    if unreached:
        check.add("structure", f"a lookup does not reach patches {some(unreached)}", number)


def _check_thumbnails(raw: RawStore, check: Examination, number: int, *, is_full: bool) -> None:
    checksums = check.records[number].thumbnail_crc
    try:
        pictures = {
            key[SLIDE_KEY_BYTES:].decode("utf-8", "replace"): (
                key,
                bytes(raw.get(THUMBNAILS, key) or b""),
            )
            for key in list(raw.keys(THUMBNAILS, slide_key(number)))
        }
    except DamagedStore as error:
        check.add("structure", f"its pictures: {error}", number)
        return
    pictures.pop("", None)  # `find_orphans` reports it
    for kind, (key, value) in pictures.items():
        crc = value_crc(key, value)
        if checksums.get(kind, crc) != crc:
            check.add("thumbnail", f"its picture {kind!r} does not match its checksum", number)
        elif is_full:
            try:
                decode_picture(value, "it")
            except DamagedStore as error:
                check.add("thumbnail", f"its picture {kind!r}: {error}", number)
    for kind in sorted(checksums.keys() - pictures.keys()):
        check.add("hole", f"its picture {kind!r} is missing", number)


T = TypeVar("T")


def check_pages(store: Path, keep_state: bool) -> Examination:
    """Check the pages of the file as `page_faults`."""
    return Examination(
        findings=[Finding("structure", fault) for fault in page_faults(store, keep_state)]
    )


def check_store(store: Path) -> Examination:
    """Check the databases and the entries of `meta`, and list the slides.

    Raises:
        NothingToDo: the store is empty, or the environment belongs to another program.
        UnknownVersion: a later version wrote the store.
    """
    check = Examination()
    with RawStore(store) as raw:
        check.databases = set(raw.databases)
        if all(_is_empty(raw, name) for name in raw.databases):
            raise NothingToDo(
                f"{store} is empty: an ingest has just started, or was stopped at its start"
            )
        for database in DATABASES:
            if database not in {*raw.databases, STAINS}:
                check.add("format", f"the database {database.decode()!r} is missing")
        _check_meta(raw, check, store)
        try:
            for key in raw.keys(SLIDES):
                if len(key) == SLIDE_KEY_BYTES:
                    check.slides.append(slide_number(key))
                else:
                    check.add_unexpected(SLIDES, key)
        except DamagedStore as error:
            check.add("structure", f"slides: {error}")
            check.slides = list(range(check.next_number))
    last = max(check.slides, default=-1)
    if last >= check.next_number:
        check.add(
            "count",
            f"meta 'next_number' is {check.next_number}, but slide number {last} exists",
        )
    return check


def _is_empty(raw: RawStore, database: bytes) -> bool:
    with suppress(DamagedStore):
        return next(raw.keys(database), None) is None
    return False


def _check_meta(raw: RawStore, check: Examination, store: Path) -> None:
    def read(reader: Callable[..., T], *what: Any) -> T | None:
        try:
            return reader(partial(raw.get, META), *what, store)
        except UnknownVersion:
            raise
        except DamagedStore as error:
            check.add("format", str(error).removeprefix(f"{store}, "))
            return None

    read(check_format)
    for name in ("uuid", "created", "histopipe_version"):
        read(entry, name, str)
    check.spec = read(read_spec)
    read(read_classes)
    check.next_number = read(entry, "next_number", int) or 0
    if not 0 <= check.next_number <= MAX_SLIDE_NUMBER + 1:
        check.add("count", f"meta 'next_number' is {check.next_number}")
        check.next_number = 0


def find_orphans(store: Path, complete: set[int]) -> Examination:
    """Find entries whose slide has no record or has failed. The patches of `complete` slides are not listed.

    Returns one finding per entry, or per slide number for patches.
    """
    check = Examination()
    patches: Counter[int] = Counter()
    with RawStore(store) as raw:

        @cache
        def orphan_reason(number: int) -> str | None:
            record = raw.get(SLIDES, slide_key(number)) if number <= MAX_SLIDE_NUMBER else None
            if record is None:
                return "which has no record"
            return "which failed" if b'"state":"failed"' in bytes(record) else None

        for database in sorted(raw.databases.keys() - {META, SLIDES, _SET_ASIDE}):
            name = database.decode("ascii", "replace")
            try:
                for key in raw.keys(database, skip=complete if database == PATCHES else set()):
                    number = slide_number(key)
                    if not _is_usual(database, key):
                        check.add_unexpected(database, key)
                    elif (reason := orphan_reason(number)) and database != PATCHES:
                        what = f"{name}: an entry of slide number {number}, {reason}"
                        check.add("orphan", what, number, entry_of(database, key))
                    elif reason:
                        patches[number] += 1
            except DamagedStore as error:
                check.add("structure", f"{name}: {error}")
        for number, count in patches.items():
            what = f"{count} patches of slide number {number}, {orphan_reason(number)}"
            check.add("orphan", what, number)
    return check


def _is_usual(database: bytes, key: bytes) -> bool:
    """Return whether a key has the form of the keys of its database."""
    if database == PATCHES:
        return len(key) == len(patch_key(0, 0))
    if database in (INDEX, STAINS):
        return len(key) == SLIDE_KEY_BYTES
    return len(key) >= SLIDE_KEY_BYTES + (database == THUMBNAILS)
