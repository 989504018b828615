"""Lists, shares and names as text, for facts of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from histopipe.dataset.options import Side

MOST = 12
"""Most names in a list."""
SIDE_NAMES: Mapping[Side, str] = {"train": "training", "validation": "validation", "test": "test"}


def listed(names: Sequence[object], most: int = MOST, *, last: str = "and") -> str:
    """Return names as `a, b and c`; the number of those after the first `most`."""
    texts = [str(it) for it in names]
    if len(texts) > most:
        texts = [*texts[:most], f"{len(texts) - most} more"]
    return (
        f" {last} ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)
    )


def plain(value: object) -> str:
    """Return a setting as text: `a, b` of a list, `a = 1, b = 2` of a mapping."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {plain(it)}" for name, it in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return str(value)


def percent(share: float) -> str:
    """Return a share as a percentage, such as `50 %`."""
    return f"{100 * share:.3g} %"
