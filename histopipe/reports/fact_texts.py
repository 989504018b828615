"""Lists of names and counts as text, for facts of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MOST = 12
"""Most names in a list."""


def listed(names: Sequence[object], most: int = MOST) -> str:
    """Return names, separated by commas; the number of those after the first `most`."""
    texts = [str(it) for it in names]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def counted_names(counts: Mapping[str, int]) -> str:
    """Return counts with their names: `3 site A, 5 site B`."""
    return listed([f"{count:,} {name}" for name, count in counts.items()])
