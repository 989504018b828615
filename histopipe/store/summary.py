"""What a store holds, in a shape that prints and serialises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from histopipe.store.format import VERSION
from histopipe.store.store import Store


def summarise(store: Store) -> dict[str, Any]:
    """Counts over all slides, and each slide's record.

    Returns:
        JSON-ready: `patch_labels` counts patches by the class that annotations give them; `states`, `labels`, `mpp_sources` and `routes` count slides (the last three complete ones);
        `patches`, `unreadable` and `patch_bytes` are sums over complete slides.
    """
    complete = list(store.complete.values())
    return {
        "path": str(store.path),
        "version": VERSION,
        "uuid": store.uuid,
        "created": store.created,
        "spec": dict(store.spec),
        "patches": len(store),
        "unreadable": sum(record.unreadable for record in complete),
        "patch_bytes": sum(record.stored_bytes for record in complete),
        "file_bytes": (store.path / "data.mdb").stat().st_blocks * 512,
        "states": dict(Counter(str(record.state) for record in store.slides)),
        "labels": dict(Counter(record.label or "unlabelled" for record in complete)),
        "patch_labels": _sum(record.patch_labels for record in complete),
        "mpp_sources": dict(Counter(record.mpp_source or "unknown" for record in complete)),
        "routes": dict(Counter(record.route or "none" for record in complete)),
        "slides": [record.to_json() for record in store.slides],
    }


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
