"""What LMDB's own verifier says of a file: it walks the pages in Python too, written by others than our walk."""

from __future__ import annotations

from pathlib import Path

from lmdb.verify import VerifyError, verify


def lmdb_faults(store: Path) -> list[str]:
    """What `lmdb.verify` finds; of a million patches it takes seconds."""
    try:
        return [str(fault) for fault in verify(str(store), subdir=True)]  # type: ignore[no-untyped-call]
    except VerifyError as error:
        return [str(error)]
