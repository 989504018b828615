"""The patches of slides, held against their indices and records."""

from __future__ import annotations

import zlib
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.maintenance.contents import Contents, LoosePatches
from histopipe.maintenance.finding import Kind, some
from histopipe.maintenance.values import Values
from histopipe.store.format import PATCHES, patch_key
from histopipe.store.record import SlideRecord, SlideState

_KEY = 8
"""Bytes of a patch's key."""
_MOST_COMPARED = 200
"""Wrong values that are looked for in each other's places."""


@dataclass(frozen=True, slots=True)
class _Wrong:
    """A value that is not what the index says: what it is, and what it should be."""

    slide: int
    row: int
    length: int
    crc: int
    expected_length: int
    expected_crc: int


class PatchCheck:
    """Takes in values in the order of their keys, and looks at each slide once it has all of it.

    Attributes:
        patches: rows of complete slides.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._open: dict[
            int, list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]]
        ] = defaultdict(list)
        self._done: set[int] = set()
        self._wrong: list[_Wrong] = []
        self._no_images: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self.patches = 0

    def take(self, values: Values) -> None:
        """Values after all those taken before."""
        usual = values.key_lengths == _KEY
        for node in np.flatnonzero(~usual).tolist():
            key = values.keys[node, : values.key_lengths[node]].tobytes()
            self._contents.add(Kind.ORPHAN, f"patches: a key {key.hex()}", entry=(PATCHES, key))
        for key, why in values.no_images:
            if len(key) == _KEY:
                slide, row = np.frombuffer(key, ">u4").tolist()
                self._no_images[slide].append((row, why))
        if not usual.any():
            return
        keys = np.ascontiguousarray(values.keys[usual, :_KEY]).view(">u4").astype(np.int64)
        lengths, crc = values.lengths[usual], values.crc[usual]
        starts = np.flatnonzero(np.diff(keys[:, 0], prepend=-1))
        for start, end in pairwise([*starts.tolist(), len(keys)]):
            slide = int(keys[start, 0])
            for ended in [number for number in self._open if number < slide]:
                self._look_at(ended)
            part = slice(start, end)
            self._open[slide].append((keys[part, 1], lengths[part], crc[part]))

    def finish(self) -> None:
        """Look at the slides that are left, also those of which nothing is there."""
        for slide in [
            *self._open,
            *(self._contents.complete.keys() - self._done - self._open.keys()),
        ]:
            self._look_at(slide)
        self._tell_wrong()

    def _look_at(self, slide: int) -> None:
        parts = self._open.pop(slide, [])
        self._done.add(slide)
        contents = self._contents
        if parts and contents.is_lost(slide):
            rows, lengths, crc = (np.concatenate(column) for column in zip(*parts, strict=True))
            contents.loose[slide] = LoosePatches(rows, lengths, crc)
        if contents.is_orphan(slide):
            count = sum(len(rows) for rows, _, _ in parts)
            contents.add(
                Kind.ORPHAN,
                f"{count} patches of slide number {slide}, {contents.why_orphan(slide)}",
                slide,
            )
            return
        record = contents.records.get(slide)
        if record is None or record.state is not SlideState.COMPLETE:
            return
        self.patches += record.planned
        try:
            columns = contents.columns(slide)
        except DamagedStore as error:
            contents.add(Kind.INDEX, str(error), slide)
            return
        if columns is None:
            contents.add(Kind.HOLE, "its index is missing", slide)
            return
        self._check_counts(slide, record, columns)
        empty = np.empty(0, np.int64)
        rows, lengths, crc = (
            (np.concatenate([empty, *column]) for column in zip(*parts, strict=True))
            if parts
            else (empty,) * 3
        )
        self._check_values(slide, columns, rows, lengths, crc)

    def _check_counts(
        self, slide: int, record: SlideRecord, columns: dict[str, NDArray[Any]]
    ) -> None:
        length, label = columns["length"], columns["label"]
        stored = int(np.count_nonzero(length))
        for what, told, found in (
            ("planned", record.planned, len(length)),
            ("stored", record.stored, stored),
            ("unreadable", record.unreadable, len(length) - stored),
            ("stored_bytes", record.stored_bytes, int(length.sum(dtype=np.int64))),
        ):
            if told != found:
                self._contents.add(
                    Kind.COUNT, f"{what}: {told} in its record, {found} in its index", slide
                )
        if len(label) and not -1 <= label.min() <= label.max() < len(self._contents.classes):
            self._contents.add(
                Kind.INDEX,
                f"labels from {label.min()} to {label.max()}, where there are {len(self._contents.classes)} classes",
                slide,
            )

    def _check_values(
        self,
        slide: int,
        columns: dict[str, NDArray[Any]],
        rows: NDArray[np.int64],
        lengths: NDArray[np.int64],
        crc: NDArray[np.int64],
    ) -> None:
        planned = len(columns["crc"])
        beyond = rows >= planned
        if beyond.any():
            self._contents.add(
                Kind.ORPHAN, f"patches {some(rows[beyond].tolist())}, of {planned}", slide
            )
            rows, lengths, crc = rows[~beyond], lengths[~beyond], crc[~beyond]
        missing = np.setdiff1d(np.arange(planned), rows, assume_unique=True)
        if len(missing):
            self._contents.add(
                Kind.HOLE,
                f"{len(missing)} of {planned} patches are missing: {some(missing.tolist())}",
                slide,
            )
        should = columns["length"][rows].astype(np.int64), columns["crc"][rows].astype(np.int64)
        wrong = np.flatnonzero((lengths != should[0]) | (crc != should[1]))
        facts = np.stack([rows, lengths, crc, *should], axis=1)[wrong]
        self._wrong += [_Wrong(slide, *row) for row in facts.tolist()]
        bad = [
            (row, why)
            for row, why in self._no_images.pop(slide, [])
            if row not in set(rows[wrong].tolist())
        ]
        if bad:
            self._contents.add(
                Kind.IMAGE,
                f"patches {some(row for row, _ in bad)} are no images: {bad[0][1]}",
                slide,
            )

    def _tell_wrong(self) -> None:
        """Wrong values slide by slide, and of a few of them whether they are in each other's places."""
        changed: dict[int, list[int]] = defaultdict(list)
        few = self._wrong[:_MOST_COMPARED]
        for wrong in self._wrong:
            owner = (
                next((other for other in few if _is_value_of(wrong, other)), None)
                if len(few) == len(self._wrong)
                else None
            )
            if owner is None:
                changed[wrong.slide].append(wrong.row)
                continue
            name = self._contents.records[owner.slide].id
            place = f"patch {owner.row}" + ("" if owner.slide == wrong.slide else f" of {name}")
            self._contents.add(
                Kind.SWAPPED, f"patch {wrong.row} holds the value of {place}", wrong.slide
            )
        for slide, rows in changed.items():
            count = f"{len(rows)} patches are" if len(rows) > 1 else "a patch is"
            self._contents.add(Kind.VALUE, f"{count} not what was written: {some(rows)}", slide)


def _is_value_of(wrong: _Wrong, other: _Wrong) -> bool:
    """Whether what is in one place is what should be in another.

    CRC-32 is linear: under another key a value's checksum differs by what as many zeros make of the two keys.
    """
    if wrong is other or wrong.length != other.expected_length:
        return False
    zeros = bytes(wrong.length)
    here, there = (zlib.crc32(zeros, zlib.crc32(patch_key(w.slide, w.row))) for w in (wrong, other))
    return wrong.crc ^ here ^ there == other.expected_crc
