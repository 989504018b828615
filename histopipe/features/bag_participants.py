"""Slides with features, each with its side of the split or the reason of its exclusion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from histopipe.dataset.options import SIDES
from histopipe.dataset.participants import Participant
from histopipe.dataset.splits import Splits
from histopipe.features.bags import BagSet


def bag_participants(bags: BagSet, splits: Splits, *, given_splits: bool) -> list[Participant]:
    """Return all slides that have a feature file. `given_splits`: the split comes from a file, which may lack slides."""
    side_of = {
        it.slide: next((side for side in SIDES if len(it.on(side))), "") for it in splits.slides
    }
    bag_of = {slide: number for number, bag in bags.bags.items() for slide in bag.slides}
    missing = (
        "not in the given split" if given_splits else "no target" if splits.targets else "no label"
    )
    found = []
    for slide in bags.found_slides():
        name = slide.slide
        number = bag_of.get(name)
        if name in bags.empty:
            found.append(slide)
            continue
        rows = 0 if number is None else bags.rows_of(number, name)
        own = replace(slide, planned=rows)
        if number is None or number not in side_of:
            found.append(replace(own, reason=missing))
        elif side_of[number]:
            side = side_of[number]
            counts: dict[str, Any] = {side: rows}
            found.append(replace(own, status=side, **counts))
        else:
            found.append(replace(own, reason="left out by the split", left_out=rows))
    return found
