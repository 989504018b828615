"""A store's data.mdb before LMDB sees it: whether it is one, and whole."""

from __future__ import annotations

import struct
from pathlib import Path

from histopipe.errors import DamagedStore


def check_length(data: Path) -> None:
    """Refuse a file shorter than its newest meta page says: reading past its end would be a SIGBUS."""
    length = data.stat().st_size
    with data.open("rb") as file:
        metas = [_meta(file.read(4096))]
        if metas[0] is not None:
            file.seek(metas[0][2])
            metas.append(_meta(file.read(4096)))
    known = [meta for meta in metas if meta is not None]
    if not known:
        raise DamagedStore(f"{data} is no LMDB file", found=f"{length} bytes of something else")
    _, last_page, page_size = max(known)
    if length < (last_page + 1) * page_size:
        raise DamagedStore(
            f"{data} is cut short",
            found=f"{length} bytes",
            expected=f"at least {(last_page + 1) * page_size}",
            todo="copy the store again, or ingest anew (a copy taken during an ingest is no store)",
        )


def _meta(page: bytes) -> tuple[int, int, int] | None:
    """Transaction number, last page and page size of an LMDB meta page (lmdb 0.9, struct MDB_meta)."""
    if len(page) < 152:
        return None
    magic, version = struct.unpack_from("<II", page, 16)
    (page_size,) = struct.unpack_from("<I", page, 40)
    last_page, transaction = struct.unpack_from("<QQ", page, 136)
    if magic != 0xBEEFC0DE or version != 1 or not 256 <= page_size <= 65536:
        return None
    return transaction, last_page, page_size
