"""Participant flow: numbers of slides, patients and patches, from those found to each side of the split."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from histopipe.dataset.options import SIDES, Side
from histopipe.dataset.participants import COUNTS, EXCLUDED, NOT_A_CLASS, UNUSED, Participant
from histopipe.dataset.splits import DROPPED, Splits

READ, LABELLED, SELECTED = range(3)
"""Steps at which slides and patches are excluded: no pixels, no label, not selected."""
_OF_READING = {
    "ingest failed", "prediction failed", "embedding failed", "no features", "not ingested", "no patches",
    "no readable patch", "unreadable",
}  # fmt: skip
_OF_LABELS = {NOT_A_CLASS, "no label", "no target", "no class", "no patch with a class"}
_EXCLUDED_SLIDE = "slide excluded: "
_PATCH_REASONS = ("unreadable", "no class", "filtered out", "left out by the split", "damaged")
"""Reasons of patches, in the order of `UNUSED`."""
_SIDES: Sequence[str] = SIDES


def step_of(reason: str) -> int:
    """Return the step of a reason of exclusion: `READ`, `LABELLED` or `SELECTED`."""
    bare = reason.removeprefix(_EXCLUDED_SLIDE)
    return READ if bare in _OF_READING else LABELLED if bare in _OF_LABELS else SELECTED


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

    def excluded_at(self, step: int) -> dict[str, int]:
        """Return the exclusions of a step, by reason."""
        return {reason: n for reason, n in self.excluded.items() if step_of(reason) == step}


Flow = Mapping[str, FlowLevel]
"""Levels "slides", "patients" and "patches"."""


def flow_of(slides: Sequence[Participant]) -> Flow:
    """Count slides, patients and patches.

    A patient is used on the sides of its slides, and excluded if all its slides are, for the reason of the slide that
    came furthest.
    """
    by_patient: dict[str, list[Participant]] = defaultdict(list)
    for it in slides:
        by_patient[it.patient].append(it)
    patients = Counter(_common_status(own) for own in by_patient.values())
    patches: Counter[tuple[str, str]] = Counter()
    for it in slides:
        for column, reason in zip(UNUSED, _PATCH_REASONS, strict=True):
            patches[EXCLUDED, reason] += getattr(it, column)
        for side in SIDES:
            patches[side, ""] += getattr(it, side)
        if it.status == EXCLUDED and not sum(getattr(it, name) for name in COUNTS[2:]):
            patches[EXCLUDED, f"{_EXCLUDED_SLIDE}{it.reason}"] += it.planned - it.unreadable
    counted = {
        "slides": Counter((it.status, it.reason) for it in slides),
        "patients": patients,
        "patches": patches,
    }
    totals = {
        "slides": len(slides), "patients": len(by_patient), "patches": sum(it.planned for it in slides),
    }  # fmt: skip
    return {name: _level(totals[name], counts) for name, counts in counted.items()}


def _common_status(slides: Sequence[Participant]) -> tuple[str, str]:
    sides = {side for it in slides if it.status != EXCLUDED for side in it.status.split(" and ")}
    if sides:
        return " and ".join(side for side in SIDES if side in sides), ""
    return EXCLUDED, max((it.reason for it in slides), key=lambda it: (step_of(it), it))


def _level(found: int, counts: Mapping[tuple[str, str], int]) -> FlowLevel:
    excluded = {why: n for (status, why), n in counts.items() if status == EXCLUDED and n}
    used = {status: n for (status, _), n in counts.items() if status != EXCLUDED and n}
    return FlowLevel(
        found,
        dict(sorted(excluded.items(), key=lambda it: step_of(it[0]))),
        dict(sorted(used.items(), key=lambda it: list(map(_SIDES.index, it[0].split(" and "))))),
    )


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


def leaked_patients(splits: Splits) -> dict[Side, set[str]]:
    """Return the patients on each side who, or copies of whose slides, are also on an earlier side."""
    names = [(("patient", it.patient), ("content", it.content or it.id)) for it in splits.slides]
    earliest: dict[tuple[str, str], int] = {}
    for slide, own in zip(splits.slides, names, strict=True):
        for name in own:
            sides = slide.sides[slide.sides != DROPPED]
            earliest[name] = int(sides.min(initial=earliest.get(name, len(SIDES))))
    return {
        side: {
            slide.patient
            for slide, own in zip(splits.slides, names, strict=True)
            if len(slide.on(side)) and min(earliest[name] for name in own) < number
        }
        for number, side in enumerate(SIDES)
    }
