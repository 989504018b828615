"""Slides that were ingested again, back in their places in a store, with all that was known of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.maintenance.damage import PLACES, Columns, Damage
from histopipe.store.claims import Claims
from histopipe.store.format import (
    INDEX,
    INDEX_COLUMNS,
    META,
    PATCHES,
    SLIDES,
    STAINS,
    THUMBNAILS,
    seal,
    slide_key,
    unseal,
)
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.store.transfer import Transfer, renumbered
from histopipe.store.writer import StoreWriter
from histopipe.tiling.spec import TilingSpec

_OF_CLASSES = ("label", "covered")
_MEASURED = (*_OF_CLASSES, "focus", "pen", "dark")
_MADE_ANEW = {META, SLIDES, PATCHES, INDEX, THUMBNAILS}


@dataclass(slots=True)
class PutBack:
    """Puts back what can be.

    First all that the store still knows of a slide is written into the copy beside it; only then is the slide restarted. So
    nothing is lost if this is killed in between: the copy has it.

    Args:
        target: the store.
        beside: a store of the slides that were ingested again.
        damage: of the target.

    Attributes:
        done: ids by number of the slides that are back.
        left: why slides are not, by id.
        twins: numbers of slides whose records are lost, with the id under which the store has the same patches.
        notes: what a person should know.
    """

    target: Path
    beside: Path
    damage: Damage
    done: dict[int, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    twins: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Put back every slide that has a place."""
        spec = self.damage.spec
        if spec is None:
            return
        if (self.beside / "data.mdb").exists():
            with StoreWriter(self.beside, spec) as writer, Store(self.beside) as made:
                places = self._places(made)
                with Store(self.target) as store:
                    for number, place in places.items():
                        self._complete_copy(store, Transfer(made, writer), number, place)
            self._copy_back(places, spec)
        with Store(self.target) as store:
            self._find_twins(store)

    def _places(self, made: Store) -> dict[int, int]:
        """The place of each slide that was ingested again, of those that have one."""
        found: dict[int, int] = {}
        for number, record in made.complete.items():
            place = self.damage.place_of(made, number)
            if place is None or place in found.values():
                continue  # of an earlier repair, or never in the store
            before = self.damage.records.get(place)
            if before is not None and before.content not in (None, record.content):
                self.left[record.id] = f"{record.path} is another scan by now"
            elif before is not None and before.planned and record.unreadable > before.unreadable:
                self.left[record.id] = (
                    f"{record.unreadable} patches of {record.path} cannot be read, {before.unreadable} before"
                )
            else:
                found[number] = place
        return found

    def _complete_copy(self, store: Store, transfer: Transfer, number: int, place: int) -> None:
        """Write into the copy of a slide what the store knows of it: what was said, measured, fitted, and added later."""
        made, index = transfer.source.records[number], transfer.source.index(number)
        before = self.damage.records.get(place)
        keep = _measured(self._old_index(store, place), index, len(store.classes))
        if made.annotations is not None:
            keep = {name: column for name, column in keep.items() if name not in _OF_CLASSES}
        record = made
        if before is not None:
            record = self._said(before, made, keep)
        if "label" in keep:
            keep["label"] = renumbered(keep["label"], store.classes, transfer.target)
        transfer.target.complete(
            number, record, {**index, **keep}, transfer.pictures(number),
            self._further(store, place, number),
        )  # fmt: skip

    def _old_index(self, store: Store, place: int) -> Columns | None:
        if place in self.damage.lost:
            return self.damage.lost[place].columns
        try:
            return store.index(place)
        except DamagedStore:
            return None

    def _said(self, before: SlideRecord, made: SlideRecord, keep: Columns) -> SlideRecord:
        """The record with what a person has said of the slide, and what goes with the columns that are kept."""
        said = ["patient", "label", "site", "mpp_source", "unknown"]
        if "label" in keep:
            said += ["annotations", "annotation_notes", "patch_labels"]
        if "focus" in keep:
            said += ["quality"]
        notes = list(made.notes)
        if before.annotations is not None and made.annotations is None and "label" not in keep:
            gone = "the classes of its patches are gone: `histopipe annotate` gives them anew"
            notes.append(gone)
            self.notes.append(f"{made.id}: {gone}")
        return replace(made, notes=notes, **{name: getattr(before, name) for name in said})

    def _further(self, store: Store, place: int, number: int) -> dict[tuple[bytes, bytes], bytes]:
        """How the slide is stained, and what a later version holds of it, under the copy's number."""
        found = {}
        for database in store.databases - _MADE_ANEW:
            for key, value in store.entries(database, place):
                new = slide_key(number) + key[len(slide_key(place)) :]
                if database == STAINS:
                    try:
                        value = seal(new, unseal(key, value, where="stain"))  # noqa: PLW2901
                    except DamagedStore:
                        continue  # told as such
                found[database, new] = value
        return found

    def _copy_back(self, places: dict[int, int], spec: TilingSpec) -> None:
        with (
            Store(self.beside) as made,
            StoreWriter(self.target, spec) as writer,
            Claims(self.target) as claims,
        ):
            now = writer.records()
            for number, place in places.items():
                record, lost = made.records[number], self.damage.lost.get(place)
                before = lost.record if lost else self.damage.records[place]
                if now.get(place) != before or not claims.take(place):
                    self.left[record.id] = "it was changed meanwhile"
                    continue
                if lost:
                    # Under its name it is known again if this is killed before it is complete.
                    before = replace(before, id=record.id, path=record.path, resolved_path=record.resolved_path)  # fmt: skip
                    self.notes.append(
                        f"the record of {record.id} was lost: give its label again (histopipe ingest --labels)"
                    )
                writer.restart(place, before)
                Transfer(made, writer).copy(number, place)
                self.done[place] = record.id

    def _find_twins(self, store: Store) -> None:
        """Of slides whose records are lost: whether they were ingested anew since then."""
        for number, lost in self.damage.lost.items():
            if number not in self.done:
                same = (n for n in store.complete if lost.has_patches_of(store, n))
                twin = next(same, None)
                if twin is not None:
                    self.twins[number] = store.records[twin].id


def _measured(old: Columns | None, new: Columns, classes: int) -> dict[str, NDArray[Any]]:
    """What was measured of patches or decided over them, if they are cut as before; a later version's columns too."""
    if old is None or not all(np.array_equal(old[name], new[name]) for name in PLACES):
        return {}
    keep = {name: c for name, c in old.items() if name in _MEASURED or name not in INDEX_COLUMNS}
    labels = keep["label"]
    if len(labels) and not -1 <= labels.min() <= labels.max() < classes:  # their names are lost
        return {name: c for name, c in keep.items() if name not in _OF_CLASSES}
    return keep
