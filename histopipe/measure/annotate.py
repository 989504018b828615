"""Label the patches of a store from annotations, without changing the patches."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.annotations.annotation_files import find_annotations, read_regions, source_text
from histopipe.annotations.rules import AGREED, AnnotationRules, LabelOptions
from histopipe.errors import ExitCode, SlideError, UsageError
from histopipe.geometry import Size
from histopipe.labels.journal import (
    UNSURE,
    is_study,
    raters_of,
    read_labels,
    read_study,
    test_slides,
)
from histopipe.measure.patch_labels import NO_CLASS, PatchLabels, annotation_notes, label_patches
from histopipe.measure.quality import MeasureResult, SlideColumns, measure_slides
from histopipe.store.record import slide_names
from histopipe.store.store import Store
from histopipe.system.output import Progress, counted, default_progress, exit_code_of
from histopipe.system.settings import declared_settings, make_settings, takes

_LABELS_OF = "labels of "
_TURNED = "EXIF orientation"
"""Part of the note of a reader on an image that it turns."""


@dataclass(frozen=True, slots=True, repr=False)
class AnnotateResult(MeasureResult):
    """Result of `annotate`.

    Attributes:
        done: notes on the annotation files of slides labelled now, by slide id.
        patches: number of patches per class, of slides labelled now or before.
        unlabelled: notes on the annotation files of slides in which no patch has a class, by slide id.
        without: ids of complete slides without annotations.
        notes: notes on files that are not used, and on the agreement of raters.
    """

    done: dict[str, list[str]] = field(default_factory=dict)
    patches: dict[str, int] = field(default_factory=dict)
    unlabelled: dict[str, list[str]] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        """0 if no slide failed, 3 if some did, 4 if all did or if no slide is labelled."""
        labelled = len(self.done) + len(self.same)
        return exit_code_of(len(self.failed) + len(self.unlabelled) * (not labelled), labelled)

    def __str__(self) -> str:
        """Number of slides, and number of patches per class."""
        return (
            f"{counted(len(self.done), 'slide')} labelled, {len(self.same)} already labelled, "
            f"{len(self.unlabelled)} without a labelled patch, {len(self.without)} without annotations, {len(self.failed)} failed\n"
            f"patches: {_counts(self.patches) or 'none with a class'}"
        )


@takes(declared_settings(AnnotationRules, LabelOptions))
def annotate(
    store: str | Path,
    annotations: str | Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> AnnotateResult:
    """Label the patches of a store from annotations.

    Slides that already have these labels are skipped. The region of interest is that of the store.

    Args:
        store: the store's folder.
        annotations: folder with files SLIDE.geojson, SLIDE.json, SLIDE.xml or SLIDE.annotations, or one such file; or a folder
            of labels of `histopipe view --journal`.
        workers: number of processes; None means one per core.
        progress: where progress is shown; None chooses bars or lines.
        settings: options by name, as in docs/reference/settings.md and as the flags of `histopipe annotate`.

    Raises:
        UsageError: no file matches a slide, two files match the same slide, or an option is out of range.
        NothingToDo, DamagedStore, MachineShort: the store cannot be used.

    Example:
        >>> annotate("patches.lmdb", "annotations").patches  # doctest: +SKIP
        {'Dermis': 156, 'Epidermis': 148}
    """
    path, folder = Path(store), Path(annotations)
    of_labels = {
        name: settings.pop(name) for name in declared_settings(LabelOptions) if name in settings
    }
    options = make_settings(LabelOptions, of_labels)
    rules = make_settings(AnnotationRules, settings)
    progress = progress or default_progress()
    if options.raters is not None or is_study(folder):
        labels, notes = _labels_of(folder, options)
        notes += _complete_labels(labels, path)
        result = _label_slides(path, labels, workers=workers, progress=progress)
        return replace(result, notes=notes)
    with Store(path) as opened:
        names = slide_names(opened.slides)
        complete = opened.numbers
    files, notes = find_annotations(folder, names)
    result = annotate_slides(path, files, rules, workers=workers, progress=progress)
    notes += [
        f"{file.name} is not used: slide {slide} is not complete"
        for slide, file in sorted(files.items())
        if slide not in complete
    ]
    return replace(result, notes=notes)


def _counts(patches: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in sorted(patches.items()))


def annotate_slides(
    store: Path,
    files: Mapping[str, Path],
    rules: AnnotationRules,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> AnnotateResult:
    """Label the patches of slides from files by slide id.

    The region of interest is that of the store; that of the rules is ignored. Without `progress`, nothing is shown.
    """
    with Store(store) as opened:
        rules = replace(rules, roi=opened.spec.get("roi"))
    outlines = {slide: _OutlineSource(file, rules) for slide, file in files.items()}
    return _label_slides(store, outlines, workers=workers, progress=progress or Progress())


def _label_slides(
    store: Path,
    sources: Mapping[str, _OutlineSource | _LabelSource],
    *,
    workers: int | None,
    progress: Progress,
) -> AnnotateResult:
    """Label the patches of slides from sources by slide id."""
    with Store(store) as opened:
        complete = opened.complete
    result, measures, patches = AnnotateResult(), {}, Counter[str]()
    for number, record in complete.items():
        source = sources.get(record.id)
        if source is None:
            result.without.append(record.id)
        elif record.patch_labels and source.text == record.annotations:
            result.same.append(record.id)
            patches.update(record.patch_labels)
        else:
            measures[number] = source.columns
    for record, slide_columns in measure_slides(
        store,
        measures,
        result.failed,
        title="annotate",
        progress=progress,
        seconds=3600.0,
        workers=workers,
    ):
        labelled = result.done if slide_columns.record_fields["patch_labels"] else result.unlabelled
        removed = _counts(record.patch_labels) if labelled is result.unlabelled else ""
        labelled[record.id] = [
            *slide_columns.record_fields["annotation_notes"],
            *([f"its earlier classes were removed: {removed}"] if removed else []),
        ]
        patches.update(slide_columns.record_fields["patch_labels"])
    for record in complete.values():
        if record.id in result.failed and record.patch_labels:
            result.failed[record.id] += (
                f"; its earlier classes are kept: {_counts(record.patch_labels)}"
            )
    return replace(result, patches=dict(patches))


@dataclass(frozen=True, slots=True)
class _OutlineSource:
    """The annotation file of a slide."""

    file: Path
    rules: AnnotationRules

    @property
    def text(self) -> str:
        """What the labels depend on; empty if the file cannot be read, which `columns` reports."""
        try:
            return source_text(self.file, self.rules)
        except (OSError, UsageError):
            return ""

    def columns(self, store: Path, slide: int) -> SlideColumns:
        """Label the patches of a slide. This is a `SlideMeasure`."""
        file, rules = self.file, self.rules
        with Store(store) as opened:
            record, index = opened.records[slide], opened.index(slide)
        if rules.frame == "stored" and not record.orientation and _TURNED in " ".join(record.notes):
            raise SlideError(
                f"--frame stored: {record.id} was ingested by a version that did not record its orientation",
                todo="ingest it again (--force), or leave --frame out: outlines are those of the turned image",
            )
        regions = read_regions(
            file,
            rules,
            size=Size(record.width, record.height),
            bounds=record.frame_bounds,
            orientation=record.orientation or 1,
        )
        labels = label_patches(
            regions.outlines,
            index["x_l0"],
            index["y_l0"],
            record.side_l0,
            threshold=rules.annotation_threshold,
        )
        record_fields = {
            "annotations": source_text(file, rules),
            "annotation_notes": annotation_notes(file, regions, labels),
            "patch_labels": labels.counts(),
        }
        return SlideColumns(index["crc"], {"covered": labels.covered}, record_fields, labels)


@dataclass(frozen=True, slots=True)
class _LabelSource:
    """The labels of a slide's patches by corner, of one rater or of all, and the CRC of the patches."""

    rater: str
    labels: Mapping[tuple[int, int], str]
    crc: int | None

    @property
    def text(self) -> str:
        """What the labels depend on."""
        digest = zlib.crc32(repr(sorted(self.labels.items())).encode())
        return f"{_LABELS_OF}{self.rater}, crc32 {digest:08x}"

    def columns(self, store: Path, slide: int) -> SlideColumns:
        """Label the patches of a slide. This is a `SlideMeasure`."""
        from histopipe.splits.splits import patches_crc  # imported late: `ingest` needs no labels

        with Store(store) as opened:
            record, index = opened.records[slide], opened.index(slide)
            if self.crc is not None and patches_crc(opened, slide) != self.crc:
                raise SlideError(
                    f"{record.id} has other patches than those that were labelled",
                    todo="use the store with which they were labelled",
                )
        classes = tuple(sorted({*self.labels.values()}))
        numbers = {name: number for number, name in enumerate(classes)}
        corners = zip(index["x_l0"].tolist(), index["y_l0"].tolist(), strict=True)
        label = np.array(
            [numbers.get(self.labels.get(at, ""), NO_CLASS) for at in corners], np.int32
        )
        labels = PatchLabels(classes, label, (label >= 0).astype(np.float32))
        notes = [] if labels.counts() else ["no patch has a class"]
        record_fields = {
            "annotations": self.text,
            "annotation_notes": notes,
            "patch_labels": labels.counts(),
        }
        return SlideColumns(index["crc"], {"covered": labels.covered}, record_fields, labels)


def _complete_labels(labels: dict[str, _LabelSource], store: Path) -> list[str]:
    """Add slides whose earlier labels of raters are removed. Return notes on other slides.

    Raises:
        UsageError: no slide of the store has labels.
    """
    with Store(store) as opened:
        records = {record.id: record for record in opened.complete.values()}
    absent = sorted(labels.keys() - records.keys())
    if not labels.keys() & records.keys():
        raise UsageError(
            f"no slide of {store} has labels of the raters",
            found=", ".join(absent[:3]) or "no label",
            expected="the store with which the patches were labelled",
        )
    kept = []
    for slide, record in records.items():
        if slide not in labels and record.patch_labels:
            if str(record.annotations).startswith(_LABELS_OF):
                labels[slide] = _LabelSource("", {}, None)
            else:
                kept.append(slide)
    notes = []
    if absent:
        notes.append(f"labels of slides that are not in the store: {_first(absent)}")
    if kept:
        notes.append(f"slides without labels of the raters keep earlier classes: {_first(kept)}")
    return notes


def _first(slides: Sequence[str]) -> str:
    return ", ".join(slides[:3]) + ", …" * (len(slides) > 3)


def _labels_of(folder: Path, options: LabelOptions) -> tuple[dict[str, _LabelSource], list[str]]:
    """Return the labels of a folder by slide, and notes on them.

    Raises:
        UsageError: there is no such rater, or two raters labelled other patches of a slide.
    """
    from histopipe.labels.agreement import agreed_labels, disagreements

    names, study = raters_of(folder), read_study(folder)
    raters = options.raters or (names[0] if len(names) == 1 else AGREED)
    chosen = names if raters == AGREED else [raters]
    by_rater = {name: read_labels(folder, name, study.classes) for name in chosen}
    labels = {name: of_rater.labels for name, of_rater in by_rater.items()}
    crcs: dict[str, int] = {}
    for of_rater in by_rater.values():
        for slide, crc in of_rater.crcs.items():
            if crcs.setdefault(slide, crc) != crc:
                raise UsageError(f"{folder}: raters labelled different patches of {slide}")
    # Not of slides whose labels were all removed or undone: they keep earlier classes.
    corners: dict[str, dict[tuple[int, int], str]] = {
        slide: {} for each in by_rater.values() for slide in crcs if each.by_slide[slide]
    }
    offered = {patch for of_rater in by_rater.values() for patch in of_rater.offered}
    test, chosen_ones = test_slides(folder) if options.held_out == "offered" else set[str](), 0
    for (slide, x, y), name in agreed_labels(labels).items():
        if slide in test and (slide, x, y) not in offered:
            chosen_ones += 1
        else:
            corners[slide][x, y] = name
    unsure = sum(name == UNSURE for each in labels.values() for name in each.values())
    single = [*Counter(patch for each in labels.values() for patch in each).values()].count(1)
    notes = [
        *[f"{counted(unsure, 'label')} {UNSURE}: no class"] * bool(unsure),
        *[f"{counted(len(disagreements(labels)), 'disagreement')} of raters: no class"]
        * (len(chosen) > 1),
        *[
            f"{counted(single, 'patch')} with a label of one rater only, which is taken (--raters NAME)"
        ]
        * bool(len(chosen) > 1 and single),
        *[
            f"{counted(chosen_ones, 'label')} of held-out patients, not of patches drawn at random: no class (--held-out all)"
        ]
        * bool(chosen_ones),
    ]
    return {
        slide: _LabelSource(raters, each, crcs[slide]) for slide, each in corners.items()
    }, notes
