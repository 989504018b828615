"""Giving the patches of a store the classes that are drawn on their slides, without touching a pixel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from histopipe.annotations.folder import find_annotations
from histopipe.annotations.patch_labels import label_patches
from histopipe.annotations.regions import read_regions, source_text
from histopipe.annotations.rules import AnnotationRules, Origin
from histopipe.errors import UsageError
from histopipe.geometry import PointL0, RegionL0, Size
from histopipe.measure.columns import Measured, measure_slides
from histopipe.slides.tables import SlideNames
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store

_SECONDS = 3600.0

Told = Callable[[str, str], None]
"""Called with the id of each slide, and why if it failed."""


@dataclass(slots=True)
class Annotated:
    """What annotations came to.

    Attributes:
        patches: by class, over all slides labelled now or before.
        done: slides labelled now, by id, with what was noted of their files.
        same: ids of slides that had these labels already.
        without: ids of complete slides that no file is of.
        failed: why, by id.
        notes: on files that are of no slide.
    """

    patches: dict[str, int] = field(default_factory=dict)
    done: dict[str, list[str]] = field(default_factory=dict)
    same: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def count(self, patch_labels: Mapping[str, int]) -> None:
        """Add a slide's patches by class."""
        for name, number in patch_labels.items():
            self.patches[name] = self.patches.get(name, 0) + number


@dataclass(frozen=True, slots=True)
class LabelSlide:
    """A task: the labels of one slide's patches, from one file."""

    file: Path
    rules: AnnotationRules

    def __call__(self, store: Path, slide: int) -> Measured:
        """As `Task`.

        Raises:
            UsageError: the file cannot be used.
        """
        with Store(store) as opened:
            record, index = opened.records[slide], opened.index(slide)
        left, top, width, height = record.bounds or (0, 0, record.width, record.height)
        regions = read_regions(
            self.file, self.rules, size=Size(record.width, record.height),
            bounds=RegionL0(PointL0(left, top), Size(width, height)),
        )  # fmt: skip
        side = (record.read_size or 0) * (record.downsample or 0)
        labels = label_patches(
            regions, index["x_l0"], index["y_l0"], side, threshold=self.rules.threshold
        )
        facts = {
            "annotations": source_text(self.file, self.rules),
            "annotation_notes": regions.told(self.file),
            "patch_labels": labels.counts(),
        }
        return Measured(index["crc"], {"covered": labels.covered}, facts, labels)


def annotate(
    store: str | Path,
    annotations: str | Path,
    *,
    threshold: float = 0.5,
    unclassified: str | None = None,
    origin: Origin = "auto",
) -> Annotated:
    """Give the patches of a store the classes that are drawn on their slides; those of slides that no file is of stay.

    Args:
        store: its folder.
        annotations: a folder of files `SLIDE.geojson` (QuPath) or `SLIDE.xml` (ASAP, Aperio ImageScope), or one such file.
        threshold: least share of a patch, above 0 to 1, that its class covers.
        unclassified: class of outlines that have none, which are left out otherwise.
        origin: where coordinates begin: at the corner of the scanned "bounds", or at the "slide"'s level 0; "auto" goes by the
            tool that wrote them.

    Raises:
        UsageError: no file is of a slide, two are of one, or a setting is out of range.
        NothingToDo, DamagedStore, MachineShort: the store cannot be used.

    Example:
        >>> annotate("patches.lmdb", "annotations").patches  # doctest: +SKIP
        {'Dermis': 156, 'Epidermis': 148}
    """
    rules = AnnotationRules(threshold=threshold, unclassified=unclassified, origin=origin)
    return annotate_store(Path(store), Path(annotations), rules)


def annotate_store(
    store: Path,
    annotations: Path,
    rules: AnnotationRules,
    *,
    told: Told | None = None,
    workers: int | None = None,
) -> Annotated:
    """As `annotate`.

    Args:
        store: its folder.
        annotations: the files.
        rules: how outlines become labels; a region of interest is the store's own.
        told: hears of each slide as it is done, and why if it failed.
        workers: processes.
    """
    with Store(store) as opened:
        names = SlideNames(record.id for record in opened.slides)
        complete = {record.id for record in opened.complete.values()}
    files = find_annotations(annotations, names)
    result = label_slides(store, files.by_slide, rules, told=told, workers=workers)
    result.notes.extend(files.notes)
    result.notes.extend(
        f"{file.name} is of slide {slide}, which is not complete"
        for slide, file in sorted(files.by_slide.items())
        if slide not in complete
    )
    return result


def label_slides(
    store: Path,
    files: Mapping[str, Path],
    rules: AnnotationRules,
    *,
    only: Collection[str] | None = None,
    told: Told | None = None,
    workers: int | None = None,
) -> Annotated:
    """As `annotate_store`, with files by slide id; `only` these slides, or all."""
    with Store(store) as opened:
        complete = {
            number: record
            for number, record in opened.complete.items()
            if only is None or record.id in only
        }
        rules = replace(rules, roi=opened.spec.get("roi"))
    result, tasks = Annotated(), {}
    for number, record in complete.items():
        file = files.get(record.id)
        if file is None:
            result.without.append(record.id)
        elif _is_same(record, file, rules):
            result.same.append(record.id)
            result.count(record.patch_labels)
        else:
            tasks[number] = LabelSlide(file, rules)

    def hear(slide: int, found: Measured | None, reason: str) -> None:
        name = complete[slide].id
        if found is None:
            result.failed[name] = reason
        else:
            result.done[name] = found.facts["annotation_notes"]
            result.count(found.facts["patch_labels"])
        if told is not None:
            told(name, reason)

    measure_slides(store, tasks, told=hear, seconds=_SECONDS, workers=workers)
    return result


def _is_same(record: SlideRecord, file: Path, rules: AnnotationRules) -> bool:
    """Whether a slide has these labels already: a reader need not see its index written anew."""
    if record.annotations is None:
        return False
    try:
        return record.annotations == source_text(file, rules)
    except (OSError, UsageError):
        return False  # told by who reads it


def as_json(result: Annotated) -> dict[str, Any]:
    """For a program."""
    return {name: getattr(result, name) for name in Annotated.__slots__}
