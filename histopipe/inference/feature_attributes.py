"""What a feature file says of its slide and its patches, in the words of those who read it."""

from __future__ import annotations

from typing import Any

from histopipe.dataset.splits import patches_crc
from histopipe.slides.scale import MAGNIFICATION_MPP
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store

_USUAL_MAGNIFICATIONS = (80, 60, 40, 20, 10, 5)
_USUAL_WITHIN = 0.15


def slide_facts(store: Store, slide: int) -> dict[str, Any]:
    """Attributes of a feature file: whose patches it is of. A value of None is not written."""
    record = store.records[slide]
    return {
        "slide": record.id,
        "label": record.label,
        "patient": record.patient,
        "site": record.site,
        "content": record.content,
        "store": store.uuid,
        "patches_crc": patches_crc(store, slide),
    }


def coords_facts(record: SlideRecord, store: Store) -> dict[str, Any]:
    """Attributes of the coordinates, named as TRIDENT and CLAM name them.

    CLAM's `patch_level` has patches read from a level as they are, so it is there only where they were.
    """
    facts: dict[str, Any] = {
        "name": record.id,
        "patch_size": store.patch_size,
        "overlap": int(store.spec["overlap"]),
        "level0_width": record.width,
        "level0_height": record.height,
        "savetodir": "",
    }
    if record.read_size and record.downsample:
        facts["patch_size_level0"] = round(record.read_size * record.downsample)
    if record.mpp and record.patch_mpp:
        facts["level0_magnification"] = _magnification(record.mpp)
        facts["target_magnification"] = _magnification(record.patch_mpp)
    if record.level is not None and record.read_size == store.patch_size:
        facts["patch_level"] = record.level
    return facts


def _magnification(mpp: float) -> float:
    """The objective that a scale is usually called by, where there is one."""
    exact = MAGNIFICATION_MPP / mpp
    nearest = min(_USUAL_MAGNIFICATIONS, key=lambda usual: abs(usual - exact))
    return nearest if abs(nearest - exact) <= _USUAL_WITHIN * nearest else exact
