"""Slides from one store into another, with everything that is stored of them, known to this version or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.store.format import (
    INDEX,
    META,
    PATCHES,
    SLIDES,
    STAINS,
    THUMBNAILS,
    patch_key,
    seal,
    slide_key,
    unseal,
    value_crc,
)
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter

_CHUNK_ROWS, _CHUNK_BYTES = 4096, 32 << 20
"""What is held in memory, and put in one transaction."""
_OWN = {META, SLIDES, PATCHES, INDEX, THUMBNAILS, STAINS}

Told = Callable[[int], None]
"""Called with the bytes of values that have been copied."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies complete slides. Every value is held against its checksum on the way, so that damage does not spread.

    Args:
        source: open for reading.
        target: of the same spec.
    """

    source: Store
    target: StoreWriter

    def copy(
        self,
        slide: int,
        number: int,
        told: Told = lambda _: None,
        *,
        record: SlideRecord | None = None,
        columns: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    ) -> None:
        """Copy a slide.

        Args:
            slide: its number in the source.
            number: its number in the target, where it is pending.
            told: hears of every chunk.
            record: what is known of it, if that is not what the source knows.
            columns: of the target's index, (N,) each, in place of the source's.

        Raises:
            DamagedStore: it is not what was written; it stays pending in the target.
        """
        index = dict(self.source.index(slide))
        index["crc"] = self._copy_patches(slide, number, index, told)
        index["label"] = renumbered(index["label"], self.source.classes, self.target)
        self.target.complete(
            number, record or self.source.records[slide], {**index, **columns},
            self.pictures(slide), dict(self._further(slide, number)),
        )  # fmt: skip

    def copy_meta(self) -> None:
        """Copy what `meta` holds that this version does not know."""
        self.target.add_meta(self.source.further_meta())

    def pictures(self, slide: int) -> dict[str, bytes]:
        """A slide's pictures by name.

        Raises:
            DamagedStore: one is not what was written.
        """
        pictures, known = {}, self.source.records[slide].thumbnail_crc
        for key, value in self.source.entries(THUMBNAILS, slide):
            name, crc = key[len(slide_key(slide)) :].decode(), value_crc(key, value)
            if known.get(name, crc) != crc:
                raise DamagedStore(
                    f"{self._where(slide)}: picture {name!r} is not what was written"
                )
            pictures[name] = value
        return pictures

    def _copy_patches(
        self, slide: int, number: int, columns: dict[str, NDArray[Any]], told: Told
    ) -> NDArray[np.uint32]:
        """Copy the values; their checksums under their new keys."""
        made = np.zeros(len(columns["crc"]), np.uint32)
        for rows in _chunks(columns["length"]):
            self.source.advise([(slide, row) for row in rows])
            values = self._values(slide, rows, columns)
            made[rows] = self.target.put_patches(number, rows, values)
            told(sum(map(len, values)))
        return made

    def _values(
        self, slide: int, rows: Sequence[int], columns: dict[str, NDArray[Any]]
    ) -> list[bytes]:
        length, crc = columns["length"][rows].tolist(), columns["crc"][rows].tolist()
        with self.source.reading() as reading:
            values = [bytes(reading.value(slide, row)) for row in rows]
            for row, value, size, checksum in zip(rows, values, length, crc, strict=True):
                if len(value) != size or (
                    size and value_crc(patch_key(slide, row), value) != checksum
                ):
                    raise DamagedStore(
                        f"{self._where(slide)}: patch {row} is not what was written",
                        todo="see `histopipe verify` and `histopipe repair`",
                    )
        return values

    def _where(self, slide: int) -> str:
        return f"{self.source.path}, slide {self.source.records[slide].id}"

    def _further(self, slide: int, number: int) -> Iterator[tuple[tuple[bytes, bytes], bytes]]:
        """Stains, and what a later version holds of a slide, under its new number."""
        for key, value in self.source.entries(STAINS, slide):
            stain = unseal(key, value, where=f"{self._where(slide)}: stain")
            yield (STAINS, slide_key(number)), seal(slide_key(number), stain)
        for database in self.source.databases - _OWN:
            for key, value in self.source.entries(database, slide):
                yield (database, slide_key(number) + key[4:]), value


def renumbered(
    labels: NDArray[np.int32], classes: Sequence[str], target: StoreWriter
) -> NDArray[np.int32]:
    """Numbers of classes, -1 for none, as the target counts these, which gets those that it lacks."""
    used = np.unique(labels[labels >= 0]).tolist()
    numbers = target.class_numbers([classes[number] for number in used])
    made = labels.copy()
    for old in used:
        made[labels == old] = numbers[classes[old]]
    return made


def _chunks(lengths: NDArray[np.integer]) -> Iterator[list[int]]:
    """Rows that are copied at once."""
    begin, size = 0, 0
    for row, length in enumerate(lengths.tolist()):
        if row > begin and (row - begin == _CHUNK_ROWS or size + length > _CHUNK_BYTES):
            yield list(range(begin, row))
            begin, size = row, 0
        size += length
    if begin < len(lengths):
        yield list(range(begin, len(lengths)))
