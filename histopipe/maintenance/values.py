"""What a worker process does with some leaf pages: read every value on or under them, and tell its checksum."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, UsageError
from histopipe.store.data_file import DataFile
from histopipe.store.leaves import LeafCount, read_leaves
from histopipe.store.pages import Place
from histopipe.store.picture import decode_picture


@dataclass(frozen=True, slots=True)
class Values:
    """Values as they are in the file, in the order of their keys. N values.

    Attributes:
        count: of the pages.
        keys: (N, W) uint8, of which `key_lengths`, (N,) int64, count.
        lengths: (N,) int64, bytes.
        crc: (N,) uint32, bound to their keys; 0 of an empty value.
        lost: keys whose value cannot be reached, and why.
        no_images: keys whose value cannot be decoded, and why; looked for only if asked to.
    """

    count: LeafCount
    keys: NDArray[np.uint8]
    key_lengths: NDArray[np.int64]
    lengths: NDArray[np.int64]
    crc: NDArray[np.uint32]
    lost: list[tuple[bytes, str]]
    no_images: list[tuple[bytes, str]]


Decoder = Callable[[memoryview], str | None]
"""Why a value is no image; None if it is."""


def read_values(
    path: Path, identity: tuple[int, int], places: list[Place], decoder: Decoder | None = None
) -> Values:
    """Read leaf pages and all values on or under them.

    Args:
        path: of data.mdb.
        identity: of the file that the places are of.
        places: of the leaf pages.
        decoder: what every value is to be decoded by.

    Raises:
        UsageError: another file was put in its place.
    """
    with DataFile(path) as file:
        if file.identity != identity:
            raise UsageError(
                f"{path} was replaced while it was looked at", todo="run the same command again"
            )
        read = read_leaves(file, places)
        nodes = read.nodes
        crc = np.zeros(len(nodes), np.uint32)
        reached = np.zeros(len(nodes), bool)
        lost: list[tuple[bytes, str]] = []
        no_images: list[tuple[bytes, str]] = []
        width, packed, lengths = (
            nodes.keys.shape[1],
            nodes.keys.tobytes(),
            nodes.key_lengths.tolist(),
        )
        for node, value in read.values(file, lambda node, why: lost.append((nodes.key(node), why))):
            reached[node] = True
            if len(value) == 0:
                continue
            key = packed[width * node : width * node + lengths[node]]
            crc[node] = zlib.crc32(value, zlib.crc32(key))
            problem = decoder and decoder(value)
            if problem:
                no_images.append((key, problem))
    return Values(
        read.count, nodes.keys[reached], nodes.key_lengths[reached], nodes.sizes[reached],
        crc[reached], lost, no_images,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PatchDecoder:
    """Decodes patches of a size, pixels."""

    size: int

    def __call__(self, value: memoryview) -> str | None:
        """Why a value is no patch."""
        # Late: without --full no image library is needed.
        from histopipe.dataset.patch_batches import decode

        try:
            decode(value, np.empty((self.size, self.size, 3), np.uint8))
        except DamagedStore as error:
            return str(error)
        return None


def picture_problem(value: memoryview) -> str | None:
    """Why a value is no picture of a slide; None if it is."""
    try:
        decode_picture(value, "it")
    except DamagedStore as error:
        return str(error)
    return None
