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
    """Numbers of slides, patients or patches: `total` is the sum of `excluded`, by reason, and `used`, by side."""

    total: int
    excluded: Mapping[str, int]
    used: Mapping[str, int]

    @property
    def adds_up(self) -> bool:
        """Whether all that were found are used or excluded."""
        return self.total == sum(self.excluded.values()) + sum(self.used.values())

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
    for slide in slides:
        by_patient[slide.patient].append(slide)
    patients = Counter(_common_status(patient_slides) for patient_slides in by_patient.values())
    patches: Counter[tuple[str, str]] = Counter()
    for slide in slides:
        for column, reason in zip(UNUSED, _PATCH_REASONS, strict=True):
            patches[EXCLUDED, reason] += getattr(slide, column)
        for side in SIDES:
            patches[side, ""] += getattr(slide, side)
        if slide.status == EXCLUDED and not sum(getattr(slide, name) for name in COUNTS[2:]):
            patches[EXCLUDED, f"{_EXCLUDED_SLIDE}{slide.reason}"] += (
                slide.planned - slide.unreadable
            )
    counted = {
        "slides": Counter((slide.status, slide.reason) for slide in slides),
        "patients": patients,
        "patches": patches,
    }
    totals = {
        "slides": len(slides), "patients": len(by_patient), "patches": sum(slide.planned for slide in slides),
    }  # fmt: skip
    return {name: _level(totals[name], counts) for name, counts in counted.items()}


def _common_status(slides: Sequence[Participant]) -> tuple[str, str]:
    sides = {
        side for slide in slides if slide.status != EXCLUDED for side in slide.status.split(" and ")
    }
    if sides:
        return " and ".join(side for side in SIDES if side in sides), ""
    return EXCLUDED, max(
        (slide.reason for slide in slides), key=lambda reason: (step_of(reason), reason)
    )


def _level(total: int, counts: Mapping[tuple[str, str], int]) -> FlowLevel:
    excluded = {why: n for (status, why), n in counts.items() if status == EXCLUDED and n}
    used = {status: n for (status, _), n in counts.items() if status != EXCLUDED and n}
    return FlowLevel(
        total,
        dict(sorted(excluded.items(), key=lambda entry: step_of(entry[0]))),
        dict(
            sorted(used.items(), key=lambda entry: list(map(_SIDES.index, entry[0].split(" and "))))
        ),
    )


def flow_to_json(flow: Flow) -> dict[str, Any]:
    """Return a JSON-ready dict."""
    return {
        name: {"found": level.total, "excluded": dict(level.excluded), "used": dict(level.used)}
        for name, level in flow.items()
    }


def flow_from_json(value: Mapping[str, Any]) -> Flow:
    """Create the flow from the result of `flow_to_json`."""
    return {
        name: FlowLevel(int(entry["found"]), dict(entry["excluded"]), dict(entry["used"]))
        for name, entry in value.items()
    }


def leaked_patients(splits: Splits) -> dict[Side, set[str]]:
    """Return the patients on each side who, or copies of whose slides, are also on an earlier side."""
    names = [
        (("patient", slide.patient), ("content", slide.content or slide.id))
        for slide in splits.slides
    ]
    earliest: dict[tuple[str, str], int] = {}
    for slide, slide_names in zip(splits.slides, names, strict=True):
        for name in slide_names:
            sides = slide.sides[slide.sides != DROPPED]
            earliest[name] = int(sides.min(initial=earliest.get(name, len(SIDES))))
    return {
        side: {
            slide.patient
            for slide, slide_names in zip(splits.slides, names, strict=True)
            if len(slide.on(side)) and min(earliest[name] for name in slide_names) < number
        }
        for number, side in enumerate(SIDES)
    }
