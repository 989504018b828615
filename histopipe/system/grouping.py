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
    return grouped_values((key(item), item) for item in items)


def grouped_values(pairs: Iterable[tuple[GroupKey, Item]]) -> dict[GroupKey, list[Item]]:
    """Return the values of each key, both in the order in which they come.

    Example:
        >>> grouped_values([("a", 1), ("b", 1), ("a", 2)])
        {'a': [1, 2], 'b': [1]}
    """
    groups = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return dict(groups)
