"""Participant flow: numbers of slides, patients and patches, from those found to each side of the split."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from histopipe.dataset.options import SIDES
from histopipe.dataset.participants import COUNTS, EXCLUDED, Participant
from histopipe.dataset.sample_table import unpack_keys
from histopipe.dataset.splits import Splits


@dataclass(frozen=True, slots=True)
class FlowLevel:
    """Numbers of slides, patients or patches: `found` is the sum of `excluded`, by reason, and `used`, by side."""

    found: int
    excluded: Mapping[str, int]
    used: Mapping[str, int]

    @property
    def adds_up(self) -> bool:
        """Whether all that were found are used or excluded."""
        return self.found == sum(self.excluded.values()) + sum(self.used.values())


Flow = Mapping[str, FlowLevel]
"""Levels "slides", "patients" and "patches"."""


def flow_of(slides: Sequence[Participant], skipped: Mapping[str, int] | None = None) -> Flow:
    """Count slides, patients and patches. `skipped`: patches by side that were damaged when they were read.

    A patient is used on the sides of its slides, and excluded if all its slides are.
    """
    by_patient: dict[str, list[Participant]] = defaultdict(list)
    for it in slides:
        by_patient[it.patient].append(it)
    patients = Counter(_common_status(own) for own in by_patient.values())
    patches: Counter[tuple[str, str]] = Counter()
    for it in slides:
        for column, reason in (
            ("unreadable", "unreadable"), ("no_class", "no class"), ("filtered", "filtered out"),
            ("left_out", "left out by the split"),
        ):  # fmt: skip
            patches[EXCLUDED, reason] += getattr(it, column)
        for side in SIDES:
            patches[side, ""] += getattr(it, side)
        if it.status == EXCLUDED and not sum(getattr(it, name) for name in COUNTS[2:]):
            patches[EXCLUDED, f"slide excluded: {it.reason}"] += it.planned - it.unreadable
    for skipped_side, count in (skipped or {}).items():
        patches[skipped_side, ""] -= count
        patches[EXCLUDED, "damaged"] += count
    counted = {
        "slides": Counter((it.status, it.reason) for it in slides),
        "patients": patients,
        "patches": patches,
    }
    totals = {
        "slides": len(slides), "patients": len(by_patient), "patches": sum(it.planned for it in slides),
    }  # fmt: skip
    return {name: _level(totals[name], counts) for name, counts in counted.items()}


def count_by_side(splits: Splits, keys: Iterable[int]) -> Counter[str]:
    """Count patches by side, from their keys (see `unpack_keys`)."""
    split = {(it.store, it.slide): it.sides for it in splits.slides}
    stores, slides, rows = (it.tolist() for it in unpack_keys(np.fromiter(keys, np.int64)))
    places = zip(stores, slides, rows, strict=True)
    return Counter(SIDES[split[store, slide][row]] for store, slide, row in places)


def _common_status(slides: Sequence[Participant]) -> tuple[str, str]:
    sides = {side for it in slides if it.status != EXCLUDED for side in it.status.split(" and ")}
    if sides:
        return " and ".join(side for side in SIDES if side in sides), ""
    reasons = {it.reason for it in slides}
    return EXCLUDED, reasons.pop() if len(reasons) == 1 else "several reasons"


def _level(found: int, counts: Mapping[tuple[str, str], int]) -> FlowLevel:
    order: dict[str, int] = {side: number for number, side in enumerate(SIDES)}
    known = {
        key: counts[key]
        for key in sorted(
            counts, key=lambda it: [order.get(side, 0) for side in it[0].split(" and ")]
        )
        if counts[key]
    }
    return FlowLevel(
        found, {reason: count for (status, reason), count in known.items() if status == EXCLUDED},
        {status: count for (status, _), count in known.items() if status != EXCLUDED},
    )  # fmt: skip


def flow_to_json(flow: Flow) -> dict[str, Any]:
    """Return a JSON-ready dict."""
    return {
        name: {"found": it.found, "excluded": dict(it.excluded), "used": dict(it.used)}
        for name, it in flow.items()
    }


def flow_from_json(value: Mapping[str, Any]) -> Flow:
    """Create the flow from the result of `flow_to_json`."""
    return {
        name: FlowLevel(int(it["found"]), dict(it["excluded"]), dict(it["used"]))
        for name, it in value.items()
    }
