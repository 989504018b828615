"""Groups of things that have a key in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
GroupKey = TypeVar("GroupKey", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], GroupKey]) -> dict[GroupKey, list[Item]]:
    """Return the items by their keys, both in the order in which they come.

    Example:
        >>> grouped(["a1", "b1", "a2"], lambda name: name[0])
        {'a': ['a1', 'a2'], 'b': ['b1']}
    """
    groups = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)
