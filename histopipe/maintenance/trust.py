"""A store from a stranger, looked at before LMDB may open it."""

from __future__ import annotations

from pathlib import Path

from histopipe.errors import DamagedStore
from histopipe.maintenance.finding import some
from histopipe.maintenance.verify import Told, verify


def check_untrusted(store: Path, *, told: Told = lambda *_: None) -> None:
    """Refuse a store that is not whole. LMDB's engine, which takes files at their word, does not see it before.

    Both walks of its pages have to agree on it: `histopipe verify`'s and `lmdb.verify`. What is in the store may still be
    wrong, as in any file that a stranger has made; but nothing in it can make a reader follow a path, leave a folder, or
    take more memory than its size and its patch size account for.

    Raises:
        NothingToDo: there is no store.
        DamagedStore, UnknownVersion: something is wrong with it.
    """
    findings = [finding.what for finding in verify(store, untrusted=True, told=told).findings]
    if findings:
        raise DamagedStore(
            f"{store} is not to be trusted", found=f"{len(findings)} findings: {some(findings)}"[:500],
            todo="see `histopipe verify --untrusted`",
        )  # fmt: skip
