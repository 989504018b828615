"""The batches themselves: a pure function from a step to pixels, in numpy. TensorFlow comes in `loader`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from histopipe.dataset.order import Permutation
from histopipe.dataset.table import PatchTable, pack_keys
from histopipe.errors import DamagedStore, UsageError
from histopipe.store.store import Store

_ALIGNMENT = 64
_JPEG_START = b"\xff\xd8"


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, or one replica's part of it.

    Attributes:
        image: (B, H, W, 3) uint8 RGB.
        label: (B,) int32, -1 for none.
        weight: (B,) float32, 0 for the rows that only fill the batch up.
        key: (B,) int64.
    """

    image: NDArray[np.uint8]
    label: NDArray[np.int32]
    weight: NDArray[np.float32]
    key: NDArray[np.int64]


class Batches:
    """Batches of a table of patches, in an order fixed by the seed.

    Args:
        stores: where the patches are.
        table: which patches.
        batch_size: patches a step, over all replicas.
        seed: decides the order; None reads in the table's order.
        replicas: parts that each step's batch is given out in.

    Raises:
        UsageError: a size is not positive.

    Example:
        >>> batches = Batches(stores, table, batch_size=64, seed=1)  # doctest: +SKIP
        >>> batches.load(step=0).image.shape  # doctest: +SKIP
        (64, 256, 256, 3)
    """

    def __init__(
        self,
        stores: Sequence[Store],
        table: PatchTable,
        *,
        batch_size: int,
        seed: int | None,
        replicas: int = 1,
    ) -> None:
        if batch_size < 1:
            raise UsageError("batch_size", found=batch_size, expected="1 or more")
        self.stores, self.table = stores, table
        self.batch_size, self.seed, self.replicas = batch_size, seed, replicas
        self.patch_size = stores[0].patch_size
        self.steps_per_epoch = -(-len(table) // batch_size)
        self.rows_per_replica = -(-batch_size // replicas)

    def keys_and_labels(
        self, step: int, replica: int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        """Keys, labels and weights of a step without reading a pixel."""
        epoch, step = divmod(step, self.steps_per_epoch)
        row = replica * self.rows_per_replica + np.arange(self.rows_per_replica)
        place = step * self.batch_size + row
        real = (row < self.batch_size) & (place < len(self.table))
        # The order goes on into rows of weight 0: real pixels keep batch statistics sane.
        place %= len(self.table)
        if self.seed is not None:
            place = Permutation(len(self.table), self.seed, epoch)(place)
        stores, slides, rows, labels = self.table.locate(place)
        return pack_keys(stores, slides, rows), labels, real.astype(np.float32)

    def load(self, step: int, replica: int = 0) -> Batch:
        """A step's batch.

        Args:
            step: counted from the first step of the first epoch; epochs follow one another.
            replica: which part of it.

        Raises:
            DamagedStore: a patch is missing or cannot be decoded.
        """
        keys, labels, weights = self.keys_and_labels(step, replica)
        images = aligned_empty((len(keys), self.patch_size, self.patch_size, 3))
        order = np.argsort(keys)  # LMDB's order: neighbours on disk are read together
        stores = keys >> 56
        for ordinal in np.unique(stores):
            store = self.stores[ordinal]
            with store.values() as read:
                for i in order[stores[order] == ordinal]:
                    slide, row = int(keys[i] >> 32) & 0xFFFFFF, int(keys[i] & 0xFFFFFFFF)
                    _decode(read(slide, row), images[i], store, slide, row)
        return Batch(images, labels, weights, keys)


def aligned_empty(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """A new uint8 array at a multiple of 64 bytes, which TensorFlow takes over without a copy."""
    size = int(np.prod(shape))
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].reshape(shape)


def _decode(value: memoryview, out: NDArray[np.uint8], store: Store, slide: int, row: int) -> None:
    """Decode a JPEG or PNG file into (H, W, 3) uint8."""
    try:
        if value[:2] == _JPEG_START:
            # Not strict: a copied tile may be damaged inside, and then shows what OpenSlide, too, makes of it.
            pixels = simplejpeg.decode_jpeg(value, colorspace="RGB", buffer=out, strict=False)
        else:
            with Image.open(io.BytesIO(value)) as image:
                pixels = np.asarray(image.convert("RGB"))
                out[:] = pixels
        size = pixels.shape
    except (ValueError, OSError) as error:
        raise DamagedStore(
            _where(store, slide, row), found=str(error), expected="an image of the patch size"
        ) from error
    if size != out.shape:
        raise DamagedStore(_where(store, slide, row), found=size, expected=out.shape)


def _where(store: Store, slide: int, row: int) -> str:
    return f"{store.path}, slide {store.records[slide].id}: patch {row} cannot be decoded"
