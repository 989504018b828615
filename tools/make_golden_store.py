"""Create the committed golden store of a format version. Run it once per version; later versions must read the store.

python tools/make_golden_store.py tests/golden/store-v1
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np

from histopipe.geometry import Mpp
from histopipe.ingestion.patch_source import encode
from histopipe.store.record import SlideRecord
from histopipe.store.writer import StoreWriter
from histopipe.tiling.spec import TilingSpec

PATCH = 16


def main() -> None:
    """Create two complete slides, one of them with an unreadable patch, and a failed slide."""
    path = Path(sys.argv[1])
    spec = TilingSpec(patch_size=PATCH, mpp=Mpp(0.5))
    with StoreWriter(path, spec) as writer:
        records = [
            SlideRecord(
                id=name, path=f"slides/{name}.svs", resolved_path=f"/slides/{name}.svs", label=label
            )
            for name, label in (("a", "normal"), ("b/c", "tumour"), ("bad", None))
        ]
        writer.register(records)
        _complete(writer, 0, records[0], spec, patches=5, lost=())
        _complete(writer, 1, records[1], spec, patches=3, lost=(1,))
        writer.fail(2, records[2].with_failure("slides/bad.svs cannot be opened"))
    (path / "lock.mdb").unlink()


def _complete(
    writer: StoreWriter,
    number: int,
    record: SlideRecord,
    spec: TilingSpec,
    *,
    patches: int,
    lost: tuple[int, ...],
) -> None:
    values = [None if i in lost else encode(colour(number, i), spec) for i in range(patches)]
    crc = writer.put_patches(number, range(len(values)), values)
    x = np.arange(patches) * PATCH
    length = np.array([len(value or b"") for value in values])
    filled = np.full(patches, np.nan)
    columns = {
        "x_l0": x,
        "y_l0": x * 2,
        "x_level": x,
        "y_level": x * 2,
        "tissue": np.ones(patches),
        "focus": filled,
        "length": length,
        "crc": crc,
        "label": np.full(patches, -1),
    }
    record = dataclasses.replace(
        record,
        planned=patches,
        stored=patches - len(lost),
        unreadable=len(lost),
        stored_bytes=int(length.sum()),
        width=512,
        height=512,
        mpp=0.5,
        mpp_source="properties",
        patch_mpp=0.5,
        level=0,
        downsample=1.0,
        read_size=PATCH,
        stride=PATCH,
        patient=record.id,
        resampling="none",
        route="openslide",
        size_bytes=1000,
        mtime_ns=1_700_000_000_000_000_000,
    )
    writer.complete(number, record, columns, {"thumb": values[0] or b""})


def colour(slide: int, patch: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return a patch of one colour: red is 40 × slide number, green is 20 × patch number."""
    return np.full((PATCH, PATCH, 3), (40 * slide, 20 * patch, 100), np.uint8)


if __name__ == "__main__":
    main()
