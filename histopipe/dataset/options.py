"""Options of a dataset: their choices, and checks, which raise a `UsageError`.

The module imports nothing slow, since `--help` lists the choices.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from histopipe.errors import UsageError

Balance = Literal["none", "class", "slide", "patient"]
Augmentation = Literal["flips", "crop", "stain", "colour"]
StainNorm = Literal["none", "reinhard", "macenko"]
PatchColumn = Literal["x_l0", "y_l0", "slide"]

AUGMENTATIONS: tuple[Augmentation, ...] = get_args(Augmentation)
"""Augmentations, in the order in which they are applied."""

_MAX_COUNT = (1 << 40) - 1
_MAX_SEED = (1 << 63) - 1


def check_whole(least: int, **values: Any) -> None:
    """Check that arguments are whole numbers of at least `least`. A `seed` has a higher maximum."""
    for name, value in values.items():
        most = _MAX_SEED if name == "seed" else _MAX_COUNT
        if type(value) is not int or not least <= value <= most:
            raise UsageError(
                name, found=repr(value), expected=f"a whole number, {least} to {most:,}"
            )


def check_whole_or_none(least: int, **values: Any) -> None:
    """Check as `check_whole`, and allow None."""
    check_whole(least, **{name: value for name, value in values.items() if value is not None})


def check_shard(shard: Any) -> tuple[int, int]:
    """Check a shard, and return its index and count."""
    match shard:
        case (int(index), int(count)) if 0 <= index < count and bool not in map(type, shard):
            return index, count
    raise UsageError(
        "shard", found=repr(shard), expected="(index, count), index from 0 to count - 1"
    )
