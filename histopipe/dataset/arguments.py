"""Arguments of `load_dataset` that are not what they should be, told before anything is opened."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from histopipe.errors import UsageError
from histopipe.store.catalog import parts_of

_MOST = (1 << 40) - 1
"""Of whatever is counted; a seed may be larger."""
_MOST_SEED = (1 << 63) - 1


def check_whole(least: int, **values: Any) -> None:
    """Refuse what is not a whole number from `least` on."""
    for name, value in values.items():
        most = _MOST_SEED if name == "seed" else _MOST
        if type(value) is not int or not least <= value <= most:
            expected = f"a whole number, {least} to {most:,}"
            raise UsageError(name, found=repr(value), expected=expected)


def check_whole_or_none(least: int, **values: Any) -> None:
    """As `check_whole`, but None is allowed."""
    check_whole(least, **{name: value for name, value in values.items() if value is not None})


def shard_of(shard: Any) -> tuple[int, int]:
    """Index and count of a shard."""
    match shard:
        case (int(index), int(count)) if 0 <= index < count and bool not in map(type, shard):
            return index, count
    raise UsageError(
        "shard", found=repr(shard), expected="(index, count), index from 0 to count - 1"
    )


def store_paths(path: Any) -> list[Path]:
    """One path or several, no store twice; a folder of parts stands for these."""
    if isinstance(path, str | Path):
        return parts_of(Path(path))
    parts = list(path) if isinstance(path, Iterable) else []
    if not isinstance(path, Iterable) or not all(isinstance(part, str | Path) for part in parts):
        raise UsageError("path", found=repr(path)[:80], expected="a path, or a list of paths")
    if not parts:
        raise UsageError("no store given")
    paths = [store for part in parts for store in parts_of(Path(part))]
    count = Counter(map(os.path.realpath, paths))
    twice = [real for real, times in count.items() if times > 1]
    if twice:
        raise UsageError("a store is given twice", found=", ".join(twice))
    return paths
