"""Check all entries of single slides. Runs in a worker process, which a damaged file may kill."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.maintenance.findings import Finding, FindingKind, entry_of
from histopipe.store.data_file import RawStore
from histopipe.store.format import (
    INDEX,
    META,
    PATCHES,
    SLIDES,
    STAINS,
    THUMBNAILS,
    decode_index,
    patch_key,
    slide_key,
    value_crc,
)
from histopipe.store.reading import decode_picture
from histopipe.store.record import SlideRecord, SlideState, read_fits
from histopipe.system.result import some

_NUMBER = 4
"""Bytes of the slide number at the start of a key."""

CheckedColumns = dict[str, NDArray[Any]]


class WrongValue(NamedTuple):
    """A patch that differs from its index: its length and CRC, and the expected ones."""

    slide: int
    row: int
    length: int
    crc: int
    expected_length: int
    expected_crc: int


@dataclass(slots=True)
class SlideCheck:
    """Result for one slide. A damaged record is None, and its bytes are in `damaged_record`."""

    number: int
    record: SlideRecord | None = None
    damaged_record: bytes = b""
    value_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    wrong: list[WrongValue] = field(default_factory=list)

    def add(self, kind: FindingKind, what: str, entry: tuple[str, str] | None = None) -> None:
        """Add a finding."""
        name = self.record.id if self.record else None
        self.findings.append(Finding(kind, what, name, self.number, entry))


def check_slides(
    store: Path, numbers: Sequence[int], *, side: int | None = None, records_only: bool = False
) -> list[SlideCheck]:
    """Check slides, each in one transaction. Slides that another process has removed have no result.

    `side` is the patch size in pixels: every patch and picture is also decoded. If it is 0 (unknown), only pictures
    are. `records_only` is for slides whose patches kill a worker.
    """
    checks = []
    with RawStore(store) as raw:
        for number in numbers:
            raw.refresh()
            check = _read_record(raw, number)
            if check is None:
                continue
            checks.append(check)
            record = check.record
            if record and record.state is SlideState.COMPLETE and not records_only:
                _check_complete(raw, check, record, side)
    return checks


def _read_record(raw: RawStore, number: int) -> SlideCheck | None:
    check, key = SlideCheck(number), slide_key(number)
    try:
        value = raw.get(SLIDES, key)
        if value is None:
            return None
        check.record = SlideRecord.from_bytes(number, value, where="its record")
    except DamagedStore as error:
        with contextlib.suppress(DamagedStore):
            check.damaged_record = bytes(raw.get(SLIDES, key) or b"")
        check.add(FindingKind.RECORD, str(error))
    return check


def _check_complete(
    raw: RawStore, check: SlideCheck, record: SlideRecord, side: int | None
) -> None:
    key = slide_key(check.number)
    try:
        block = raw.get(INDEX, key)
        if block is None:
            check.add(FindingKind.HOLE, "its index is missing")
        else:
            columns = decode_index(key, bytes(block), where="index")
            _check_counts(raw, check, record, columns)
            _check_patches(raw, check, columns, side)
    except DamagedStore as error:
        check.add(FindingKind.INDEX, str(error))
    _check_thumbnails(raw, check, record, is_full=side is not None)
    try:
        value = raw.get(STAINS, key)
        if value is not None:
            read_fits({check.number: bytes(value)}, where="its stains")
    except DamagedStore as error:
        check.add(FindingKind.STAIN, str(error), entry_of(STAINS, key))


def _check_counts(
    raw: RawStore, check: SlideCheck, record: SlideRecord, columns: CheckedColumns
) -> None:
    length, labels = columns["length"], columns["label"]
    stored = int(np.count_nonzero(length))
    for what, expected, actual in (
        ("planned", record.planned, len(length)),
        ("stored", record.stored, stored),
        ("unreadable", record.unreadable, len(length) - stored),
        ("stored_bytes", record.stored_bytes, int(length.sum(dtype=np.int64))),
    ):
        if expected != actual:
            check.add(FindingKind.COUNT, f"{what}: {expected} in its record, {actual} in its index")
    with contextlib.suppress(DamagedStore, ValueError, TypeError):  # reported as damage of `meta`
        classes = len(json.loads(bytes(raw.get(META, b"classes") or b"")))
        if len(labels) and not -1 <= labels.min() <= labels.max() < classes:
            check.add(
                FindingKind.INDEX,
                f"labels from {labels.min()} to {labels.max()}, but there are {classes} classes",
            )


def _check_patches(
    raw: RawStore, check: SlideCheck, columns: CheckedColumns, side: int | None
) -> None:
    """Look up every patch as a reader does, and compare it with its CRC. With `side`, also decode it."""
    pixels = None
    if side:
        # Imported late: otherwise, no image library is needed.
        from histopipe.dataset.patch_batches import decode

        pixels = np.empty((side, side, 3), np.uint8)

    lengths, crcs = columns["length"].tolist(), columns["crc"].tolist()
    reached: set[int] = set()
    faults: dict[int, str] = {}
    undecodable: dict[int, str] = {}
    for row, (length, crc) in enumerate(zip(lengths, crcs, strict=True)):
        key = patch_key(check.number, row)
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
            check.wrong.append(WrongValue(check.number, row, size, actual, length, crc))
        elif pixels is not None and size:
            try:
                decode(value, pixels)
            except DamagedStore as error:
                undecodable[row] = str(error)
    if faults:
        texts = some(sorted(set(faults.values())))
        check.add(FindingKind.STRUCTURE, f"cannot read patches {some(faults)}: {texts}")
    missing = sorted(set(range(len(crcs))) - reached - faults.keys())
    if missing:
        check.add(
            FindingKind.HOLE, f"{len(missing)} of {len(crcs)} patches are missing: {some(missing)}"
        )
    if undecodable:
        reason = next(iter(undecodable.values()))
        check.add(FindingKind.IMAGE, f"cannot decode patches {some(undecodable)}: {reason}")
    _check_patch_keys(raw, check, len(crcs), reached)


def _check_patch_keys(raw: RawStore, check: SlideCheck, planned: int, reached: set[int]) -> None:
    """Check that there are no other patches, and that a lookup reaches all patches in the tree."""
    beyond, unreached = [], []
    try:
        for key in raw.keys(PATCHES, slide_key(check.number)):
            if len(key) != 2 * _NUMBER:
                entry = entry_of(PATCHES, key)
                check.add(FindingKind.ORPHAN, f"patches: unexpected key {key.hex()}", entry)
                continue
            row = int.from_bytes(key[_NUMBER:], "big")
            if row >= planned:
                beyond.append(row)
            elif row not in reached:
                unreached.append(row)
    except DamagedStore as error:
        check.add(FindingKind.STRUCTURE, str(error))
    if beyond:
        check.add(FindingKind.ORPHAN, f"patches {some(beyond)} are not in its index of {planned}")
    if unreached:
        check.add(FindingKind.STRUCTURE, f"a lookup does not reach patches {some(unreached)}")


def _check_thumbnails(
    raw: RawStore, check: SlideCheck, record: SlideRecord, *, is_full: bool
) -> None:
    kinds = set()
    try:
        for key in list(raw.keys(THUMBNAILS, slide_key(check.number))):
            kind = key[_NUMBER:].decode("utf-8", "replace")
            if not kind:
                continue  # `find_orphans` reports it
            kinds.add(kind)
            value = bytes(raw.get(THUMBNAILS, key) or b"")
            crc = value_crc(key, value)
            if record.thumbnail_crc.get(kind, crc) != crc:
                check.add(
                    FindingKind.THUMBNAIL, f"its picture {kind!r} does not match its checksum"
                )
            elif is_full:
                try:
                    decode_picture(value, "it")
                except DamagedStore as error:
                    check.add(FindingKind.THUMBNAIL, f"its picture {kind!r}: {error}")
    except DamagedStore as error:
        check.add(FindingKind.STRUCTURE, f"its pictures: {error}")
        return
    for kind in sorted(record.thumbnail_crc.keys() - kinds):
        check.add(FindingKind.HOLE, f"its picture {kind!r} is missing")
