"""Slides with features, each with its side of the split or the reason of its exclusion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from histopipe.dataset.options import SIDES
from histopipe.dataset.participants import EXCLUDED, Participant, missing_from
from histopipe.dataset.splits import Splits
from histopipe.features.bags import BagSet


def bag_participants(bags: BagSet, splits: Splits, *, given_splits: bool) -> list[Participant]:
    """Return all slides that have a feature file. `given_splits`: the split comes from a file, which may lack slides."""
    side_of = {
        split.slide: next((side for side in SIDES if len(split.on(side))), "")
        for split in splits.slides
    }
    bag_of = {slide: number for number, bag in bags.bags.items() for slide in bag.slides}
    participants = []
    for slide in bags.found_slides():
        number = bag_of.get(slide.slide)
        if slide.reason:
            participants.append(slide)
        elif number is None or number not in side_of:
            participants.append(
                replace(slide, reason=missing_from(splits, slide, from_file=given_splits))
            )
        else:
            # Joined sets may have fewer patches than the first one.
            rows, side = bags.rows_of(number, slide.slide), side_of[number]
            uncovered = slide.planned - slide.unreadable - rows
            counts: dict[str, Any] = {side: rows} if side else {}
            reason = "" if side else "left out by the split"
            participants.append(replace(
                slide, status=side or EXCLUDED, reason=reason, left_out=uncovered + (0 if side else rows), **counts,
            ))  # fmt: skip
    return participants
