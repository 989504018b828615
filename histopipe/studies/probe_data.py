"""The items that probes of several feature sets have in common: bags, or patches with a class each; and their folds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.annotation_files import find_annotations, read_regions
from histopipe.annotations.rules import AnnotationRules
from histopipe.dataset.bags import Bag, BagSet, read_bag
from histopipe.errors import HistopipeError, NothingToDo, UsageError
from histopipe.geometry import PointL0, RegionL0, Size
from histopipe.measure.patch_labels import PatchLabels, label_patches
from histopipe.runs.config import TrainConfig
from histopipe.runs.task_config import make_config
from histopipe.runs.training_data import (
    opened_sources,
    read_labelling,
    refuse_leaks,
    split_options,
)
from histopipe.slides.slide_files import SlideNames
from histopipe.slides.tables import SlideLabel
from histopipe.splits.labelling import Labelling
from histopipe.splits.splits import SlideSplit, Splits
from histopipe.splits.splitting import make_folds
from histopipe.studies.probe_models import SubsetRows
from histopipe.studies.study_settings import ProbeSettings
from histopipe.system.arrays import FloatArray
from histopipe.system.grouping import grouped
from histopipe.system.hashing import combine, permuted
from histopipe.system.output import Progress
from histopipe.system.table_cells import refuse_unclear_event
from histopipe.tasks.choices import EVALUATED, EvaluationLevel
from histopipe.tasks.classification import Classification
from histopipe.tasks.predictions import Predictions
from histopipe.tasks.task import Task

_READ = 16_384
"""Patches read at once: memory does not grow with the size of a slide."""
_DRAWN, _ASKED, _DRAW, _EXCHANGED = 100_000, 10_000, 307, 811
"""Most patches of a feature set that are used, and that are tested; and the purpose of the random numbers that draw them,
and of those that exchange labels."""
_FLOAT: np.dtype[Any] = np.dtype(np.float32)


Opened = tuple[TrainConfig, BagSet, Labelling]


def open_features(folder: Path, settings: Mapping[str, Any]) -> Opened:
    """Open a feature set, with the settings of a training on it."""
    refuse_unclear_event(settings.get("event"))
    config = make_config({"mil": (str(folder),), **settings})
    with opened_sources(config) as sources:
        return config, cast(BagSet, sources[0]), read_labelling(config, sources)


@dataclass(frozen=True, slots=True)
class ProbeData:
    """The items that all feature sets have: bags, or patches with a class each.

    Attributes:
        sets: the feature sets by name.
        config: settings of a training on the first one.
        slides: the bags as of a split.
        owner: (N,) bag of each item.
        patches: rows of the items in each bag; None if an item is the mean of a bag.
        blank: targets, patients and places of the items, without outputs.
        folds, site_folds: rows of training, validation and test: by the chosen units, and by sites.
        missing: number of labelled bags that a set lacks.
        how: options with which the folds were drawn.
    """

    sets: Mapping[str, BagSet]
    config: TrainConfig
    slides: tuple[SlideSplit, ...]
    owner: NDArray[np.intp]
    patches: Sequence[NDArray[np.int64]] | None
    blank: Predictions
    folds: Sequence[SubsetRows]
    site_folds: Sequence[SubsetRows]
    missing: int
    how: Mapping[str, Any]

    @classmethod
    def of(cls, opened: Mapping[str, Opened], options: ProbeSettings) -> ProbeData:
        """Return the items of all sets, in the folds of the first set."""
        config, first, labelling = next(iter(opened.values()))
        folds, sets = options.folds, {name: bags for name, (_, bags, _) in opened.items()}
        labels: Mapping[str, PatchLabels] = {}
        if options.annotations is not None:
            if getattr(config, "bag", "slide") != "slide":
                raise UsageError("--annotations", found="--bag patient", expected="--bag slide")
            labels = _patch_labels(Path(options.annotations), sets)
            labelling = replace(labelling, labels=_most_frequent(labels, first))
        how = split_options(config, labelling)
        splits = make_folds([first], folds, **how)
        for each in splits:
            refuse_leaks(each, config)
        everywhere = set.intersection(*({*bags.by_id} for bags in sets.values()))
        slides = tuple(slide for slide in splits[0].slides if slide.id in everywhere)
        if not slides:
            raise NothingToDo("the feature sets have no labelled slide in common")
        sites, by_site = {slide.site for slide in slides} - {None, ""}, tuple[Splits, ...]()
        if len(sites) > 1:
            with suppress(HistopipeError):  # too few sites have a class
                count = min(5 if folds == "column" else folds, len(sites))
                by_site = make_folds([first], count, **{**how, "split_by": "site"})
        owner, patches, blank = _items(splits[0], slides, labels, config, first)
        most = len(owner) if patches is None else _ASKED // len(splits)
        return cls(
            sets,
            config,
            slides,
            owner,
            patches,
            blank,
            [_rows(each, everywhere, owner, most) for each in splits],
            [_rows(each, everywhere, owner, most) for each in by_site],
            len(splits[0].slides) - len(slides),
            {**how, "folds": folds},
        )

    def permuted(self, number: int) -> tuple[FloatArray, Sequence[SubsetRows]]:
        """Return (N, T) targets that the patients of each site have exchanged at random, and folds drawn with these.

        Raises:
            UsageError: a patient has items with several targets.
        """
        blank, rng = self.blank, np.random.default_rng([self.config.seed, _EXCHANGED, number])
        target = np.full((len(blank.patients), blank.target.shape[1]), np.nan)
        target[blank.patient] = blank.target
        if not np.array_equal(target[blank.patient], blank.target, equal_nan=True):
            raise UsageError(
                "--permutations",
                found="a patient with several targets",
                expected="one of each patient: only patients can be exchanged",
            )
        of_patients = grouped(self.slides, lambda slide: slide.patient)
        sites = {name: max(s.site or "" for s in slides) for name, slides in of_patients.items()}
        source = np.arange(len(blank.patients))
        for members in grouped(source.tolist(), lambda n: sites[blank.patients[n]]).values():
            source[members] = rng.permutation(members)
        partner = {name: blank.patients[n] for name, n in zip(blank.patients, source, strict=True)}
        labelling: Labelling = self.how["labelling"]
        bags = next(iter(self.sets.values()))
        records = {name: labelling.label_of(bag) for name, bag in bags.by_id.items()}
        labels = dict(records)
        for slide in self.slides:
            before, other = records[slide.id], records[of_patients[partner[slide.patient]][0].id]
            columns = {c: other.cells[c] for c in labelling.task.columns if c in other.cells}
            labels[slide.id] = replace(before, label=other.label, cells={**before.cells, **columns})
        labels = {name: replace(label, keeps_label=False) for name, label in labels.items()}
        how = {**self.how, "labelling": replace(labelling, labels=labels)}
        splits = make_folds([bags], **how | {"seed": int(rng.integers(2**31))})
        most = len(self.owner) if self.patches is None else _ASKED // len(splits)
        folds = [
            _rows(each, {slide.id for slide in self.slides}, self.owner, most) for each in splits
        ]
        return target[source][blank.patient], folds

    @property
    def sites(self) -> tuple[tuple[str, ...], NDArray[np.int32]]:
        """Names of the sites, and the (N,) site of each item; -1 for none."""
        names = sorted({slide.site for slide in self.slides if slide.site})
        numbers = [names.index(slide.site) if slide.site else -1 for slide in self.slides]
        return tuple(names), np.array(numbers, np.int32)[self.owner]

    def features(self, bags: BagSet, progress: Progress) -> NDArray[np.float32]:
        """Return the (N, D) features of the items: of patches, or means of bags."""
        features = np.zeros((len(self.owner), bags.dimension), np.float32)
        with progress.bar(f"reading {bags.path.name}", unit="bags", total=len(self.slides)) as bar:
            for place, bag in enumerate(_bags_of(bags, self.slides)):
                total = np.zeros(bags.dimension)
                if self.patches is not None:
                    features[self.owner == place] = read_bag(bag, _FLOAT, self.patches[place])
                for begin in range(0, bag.rows if self.patches is None else 0, _READ):
                    rows = np.arange(begin, min(bag.rows, begin + _READ))
                    total += read_bag(bag, _FLOAT, rows).sum(axis=0, dtype=np.float64)
                if self.patches is None:
                    features[place] = total / bag.rows
                bar.advance(1)
        return features

    def drawn(self, bags: BagSet) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
        """Return features of some patches, as many of each patient if possible, and the item of each."""
        of_bags = _bags_of(bags, self.slides)
        all_rows = [np.arange(bag.rows) for bag in of_bags]
        chosen = [np.sort(rows) for rows in _drawn_rows(self.slides, all_rows, self.config.seed)]
        features = [read_bag(bag, _FLOAT, rows) for bag, rows in zip(of_bags, chosen, strict=True)]
        return np.concatenate(features), np.repeat(np.arange(len(chosen)), [*map(len, chosen)])


def _items(
    splits: Splits,
    slides: Sequence[SlideSplit],
    labels: Mapping[str, PatchLabels],
    config: TrainConfig,
    bags: BagSet,
) -> tuple[NDArray[np.intp], Sequence[NDArray[np.int64]] | None, Predictions]:
    """Return bag of each item, rows of patches if items are patches, and what is labelled of the items."""
    owner, patches = np.arange(len(slides)), None
    task: Task = splits.task
    target = np.array([splits.target(slide) for slide in slides], np.float64)
    corners = np.zeros((len(slides), 2), np.int64)
    if labels:
        of_slides = [labels[slide.id] for slide in slides]
        labelled = [np.flatnonzero(each.label >= 0) for each in of_slides]
        patches = [
            rows[np.sort(chosen)]
            for rows, chosen in zip(
                labelled, _drawn_rows(slides, labelled, config.seed), strict=True
            )
        ]
        owner = np.repeat(owner, [len(rows) for rows in patches])
        task = Classification(
            classes=tuple(sorted({name for each in of_slides for name in each.counts()}))
        )
        numbers = {name: number for number, name in enumerate(task.classes)}
        target = np.concatenate(
            [e.numbered(numbers)[rows] for e, rows in zip(of_slides, patches, strict=True)]
        )[:, None]
        corners = np.concatenate(
            [_corners(bag)[rows] for bag, rows in zip(_bags_of(bags, slides), patches, strict=True)]
        )
    patients, patient = np.unique([slide.patient for slide in slides], return_inverse=True)
    level: EvaluationLevel = "patch" if labels else getattr(config, "bag", "slide")
    return (
        owner,
        patches,
        Predictions(
            task,
            tuple(slide.id for slide in slides),
            tuple(patients.tolist()),
            slide=owner.astype(np.int32),
            patient=patient.astype(np.int32)[owner],
            x_l0=corners[:, 0],
            y_l0=corners[:, 1],
            target=target.astype(np.float64),
            output=np.zeros((len(owner), 1)),
            level=level,
        ),
    )


def _patch_labels(folder: Path, sets: Mapping[str, BagSet]) -> dict[str, PatchLabels]:
    """Return the classes of the patches of each slide that has outlines.

    Raises:
        UsageError: outlines cannot be read, or the sets have other patches.
    """
    first, *rest = sets.values()
    files, _ = find_annotations(folder, SlideNames(first.by_id))
    labels = {}
    for name, file in files.items():
        bag = first.by_id[name]
        corners, header = _corners(bag), bag.parts[0].headers[0]
        side, geometry = header.side, json.loads(header.text("geometry") or "{}")
        left, top, *size = (
            geometry.get("scan") or geometry.get("bounds") or (0, 0, *(corners.max(axis=0) + side))
        )
        regions = read_regions(
            file,
            AnnotationRules(),
            size=Size(geometry.get("width", size[0]), geometry.get("height", size[1])),
            bounds=RegionL0(PointL0(left, top), Size(*size)),
            orientation=geometry.get("orientation", 1),
        )
        threshold = AnnotationRules().annotation_threshold
        x, y = corners.T
        labels[name] = label_patches(regions.outlines, x, y, side, threshold=threshold)
        for other in rest:
            same = other.by_id.get(name)
            if same is not None and not np.array_equal(_corners(same), corners):
                raise UsageError(
                    f"--annotations: {other.path}",
                    found=f"other patches of {name}",
                    expected=f"those of {first.path}",
                )
    return labels


def _most_frequent(labels: Mapping[str, PatchLabels], bags: BagSet) -> dict[str, SlideLabel]:
    """Return the most frequent class of the patches of each slide, so that folds are balanced."""
    classes = {
        name: max(counts, key=lambda key: (counts[key], key))
        for name, of_slide in labels.items()
        if (counts := of_slide.counts())
    }
    if len(set(classes.values())) < 2:  # nothing to balance, but a split needs two names
        classes = {name: f"{number % 2}" for number, name in enumerate(classes)}
    return {
        name: SlideLabel(label, bags.by_id[name].patient, bags.by_id[name].site)
        for name, label in classes.items()
    }


def _corners(bag: Bag) -> NDArray[np.int64]:
    corners = bag.parts[0].corners()
    if corners is None or not bag.parts[0].headers[0].side:
        raise UsageError(
            f"--annotations: {bag.parts[0].headers[0].path}",
            found=bag.parts[0].headers[0].unplaced or "an unknown side of patches",
            expected="both in coords",
        )
    return corners


def _bags_of(bags: BagSet, slides: Sequence[SlideSplit]) -> list[Bag]:
    return [bags.by_id[slide.id] for slide in slides]


def _drawn_rows(
    slides: Sequence[SlideSplit], rows: Sequence[NDArray[Any]], seed: int
) -> list[NDArray[np.int64]]:
    """Return places of some of the rows of each bag, as many of each patient if possible."""
    of_patient = Counter(slide.patient for slide in slides)
    each = _DRAWN // len(of_patient)
    counts = [
        min(len(of_bag), max(1, each // of_patient[slide.patient]))
        for slide, of_bag in zip(slides, rows, strict=True)
    ]
    return [
        permuted(np.arange(count), max(1, len(of_bag)), combine(seed, _DRAW, place))
        for place, (count, of_bag) in enumerate(zip(counts, rows, strict=True))
    ]


def _rows(
    splits: Splits, everywhere: Collection[str], owner: NDArray[np.intp], most: int
) -> SubsetRows:
    """Return the items of each subset; of tested patches, `most`."""
    slides = [slide for slide in splits.slides if slide.id in everywhere]
    train, validation, test = (
        np.flatnonzero(np.array([len(slide.on(subset)) > 0 for slide in slides])[owner])
        for subset in EVALUATED
    )
    return train, validation, test[:: -(-len(test) // most) or 1]
