"""Shares, settings and names as text, for facts of a run."""

from __future__ import annotations

from collections.abc import Mapping

from histopipe.splits.subsets import Subset

SUBSET_NAMES: Mapping[Subset, str] = {
    "train": "training",
    "validation": "validation",
    "test": "test",
}


def plain(value: object) -> str:
    """Return a setting as text: `a, b` of a list, `a = 1, b = 2` of a mapping."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {plain(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return str(value)


def percent(share: float) -> str:
    """Return a share as a percentage, such as `50 %`."""
    return f"{100 * share:.3g} %"
