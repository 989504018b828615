"""Create splits: by patient, site or slide, by region of a slide, by patch, or from a column of the labels file."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import HistopipeError, NothingToDo, UsageError
from histopipe.geometry import Micrometres
from histopipe.slides.slide_files import connected
from histopipe.splits.assignment import Assignment, copies_note, mark_patches
from histopipe.splits.labelling import Labelling, candidates, given_parts
from histopipe.splits.splits import (
    DROPPED,
    SampleSource,
    SlideSplit,
    Splits,
    joined_sites_note,
)
from histopipe.store.record import SlideRecord
from histopipe.system.grouping import grouped
from histopipe.system.hashing import combine
from histopipe.system.output import counted, message
from histopipe.tasks.choices import EVALUATED, TEST, TRAIN, VALIDATION, SplitBy, Subset

FRACTIONS = (0.7, 0.15, 0.15)
REGION = Micrometres(250.0)
"""Default side of the squares of a split by region."""
_MAX_WAYS = 3
"""Maximum number of flags that a refusal lists."""


def make_splits(
    stores: Sequence[SampleSource],
    *,
    split_by: SplitBy,
    seed: int,
    labelling: Labelling | None = None,
    fractions: tuple[float, float, float] = FRACTIONS,
    region: Micrometres = REGION,
) -> Splits:
    """Split the labelled slides of stores. The same seed gives the same split.

    Each subset gets its fraction of units, patches and classes, as far as the units allow. `region` is the side of the
    squares for split_by="region". If the labelling has a split column without validation, it is drawn from training.

    Raises:
        NothingToDo: there are fewer than two classes, or a class is too small to be in every subset.
        UsageError: a slide has no site, for "site", no mpp, for "region", or a wrong cell in the split column.
    """
    labelling, assignment = labelling or Labelling(), Assignment(fractions, seed)
    classes, slides = candidates(stores, labelling)
    return _Plan(stores, labelling, classes, slides, split_by, assignment, region).make()[0]


def make_folds(
    stores: Sequence[SampleSource],
    folds: int | Literal["column"],
    *,
    split_by: SplitBy,
    seed: int,
    labelling: Labelling | None = None,
    fractions: tuple[float, float, float] = FRACTIONS,
    region: Micrometres = REGION,
) -> tuple[Splits, ...]:
    """Return a split for each fold of a cross-validation. Every patch that is not left out is in exactly one test set.

    The first two fractions divide the units that are not in the test set into training and validation. With "column",
    the split column of the labelling has the fold of each slide.

    Raises:
        NothingToDo: a class is too small to be in training and test.
        UsageError: there are fewer units than folds, or the split column has another number of folds.
    """
    labelling = labelling or Labelling()
    classes, slides = candidates(stores, labelling)
    if labelling.split_column is not None:
        count = len(np.unique(given_parts(slides, stores, labelling, folds=True)))
        if count < 2 or folds not in ("column", count):
            raise UsageError(
                f"--folds {folds}",
                found=f"{counted(count, 'fold')} in column {labelling.split_column}",
                expected="--folds column, and a column with two or more folds",
            )
        folds = count
    elif folds == "column":
        raise UsageError("--folds column", found="no --split-column", expected="its name")
    assignment = Assignment(fractions, seed, int(folds))
    return _Plan(stores, labelling, classes, slides, split_by, assignment, region).make()


@dataclass(frozen=True, slots=True)
class _Plan:
    """Labelled slides, and how they are to be split."""

    stores: Sequence[SampleSource]
    labelling: Labelling
    classes: tuple[str, ...]
    slides: Sequence[SlideSplit]
    split_by: SplitBy
    assignment: Assignment
    region: Micrometres
    by_programme: bool = True
    """Divide sites by the integer programme. Exchanges find splits that it does not: it balances no numbers of sites."""

    def make(self) -> tuple[Splits, ...]:
        """Return the split, or that of each fold. A refusal lists flags with which the slides can be split."""
        try:
            return self._make()
        except NothingToDo as error:
            with suppress(HistopipeError):
                if self.split_by == "site":
                    return replace(self, by_programme=False)._make()
            ways = self._ways() if self.labelling.split_column is None else ()
            raise NothingToDo(
                error.what,
                found=error.found,
                expected=error.expected,
                todo=", or ".join([*islice(ways, _MAX_WAYS), error.todo or "add slides"]),
            ) from None

    def _make(self) -> tuple[Splits, ...]:
        subsets: Any
        if self.labelling.split_column is not None:
            subsets, algorithm = self._by_column()
        else:
            methods = {"patch": self._by_patch, "region": self._by_region}
            subsets = methods.get(self.split_by, self._by_group)()
            algorithm = "random" if self.split_by == "patch" else "balanced"
        return tuple(self._checked(each, algorithm) for each in subsets)

    def _checked(self, subsets: Any, algorithm: str) -> Splits:
        """Return the splits with the subsets of each slide, or refuse them: a subset of a slide, or (N,) of its patches."""
        task, column = self.labelling.task, self.labelling.split_column
        train, validation, test = (
            self.assignment.fractions
            if column is None
            else (np.bincount(subsets, minlength=3) / len(subsets)).tolist()
        )
        splits = Splits(
            self.split_by,
            self.assignment.seed,
            (train, validation, test),
            tuple(store.uuid for store in self.stores),
            self.classes,
            tuple(
                replace(
                    slide, subsets=np.where(slide.subsets == DROPPED, DROPPED, each).astype(np.int8)
                )
                for slide, each in zip(self.slides, subsets, strict=True)
            ),
            task_name=task.name,
            targets=() if task.by_class else task.columns,
            covariates=self.labelling.covariates,
            algorithm=algorithm,
            column=column,
        )
        # Folds and given splits may lack a class, except for training.
        lenient, counts = self.assignment.folds > 0 or column is not None, splits.count()
        for subset, share in zip(EVALUATED, splits.fractions, strict=True):
            may_lack = subset != "train" and (lenient or not share)
            if not may_lack or (share and not counts[subset].total()):
                _refuse_missing(splits, subset, counts[subset])
        return splits

    def _ways(self) -> Iterator[str]:
        """Yield flags or changes with which the slides can be split."""
        assignment, share = self.assignment, round(self.assignment.without_test[VALIDATION], 2)
        by_label = self.labelling.task.of_classes and self.labelling.labels_from == "slide"
        options: list[dict[str, dict[str, Any]]] = [
            {
                f"pass --folds {number}": {"assignment": replace(assignment, folds=number)}
                for number in (5, 3, 2)
                if number < (assignment.folds or 6)
            },
            {
                f"pass --fractions {1 - share:g},{share:g},0": {
                    "assignment": replace(assignment, shares=(1 - share, share, 0.0))
                }
                for _ in range(not assignment.folds and share > 0)
            },
            {
                f"leave the label {name!r} empty": {
                    "classes": tuple(label for label in self.classes if label != name),
                    "slides": [slide for slide in self.slides if slide.label != name],
                }
                for name in self.classes
                if by_label and len(self.classes) > 2
            },
            {"pass --split-by patient": {"split_by": "patient"}},
            {"pass --split-by region": {"split_by": "region"}},
            {"pass --split-by slide --allow-leaks": {"split_by": "slide"}},
        ]
        for group in options:
            for text, changes in group.items():
                with suppress(HistopipeError):
                    replace(self, by_programme=False, **changes)._make()
                    yield text
                    break

    def _by_column(self) -> tuple[list[NDArray[np.int64]], str]:
        """Return the subset of each slide, (N,) for each fold, and how subsets were assigned."""
        folds, algorithm = self.assignment.folds, "given"
        parts = given_parts(self.slides, self.stores, self.labelling, folds=folds > 0)
        fold_subsets = (
            [np.where(parts == part, TEST, TRAIN) for part in np.unique(parts)]
            if folds
            else [parts]
        )
        for fold, subsets in enumerate(fold_subsets):
            rows = np.flatnonzero(subsets == TRAIN).tolist()
            if VALIDATION not in subsets and len(rows) and self.assignment.without_test[VALIDATION]:
                seed, algorithm = int(combine(self.assignment.seed, fold)), "balanced"
                training = replace(
                    self,
                    slides=[self.slides[row] for row in rows],
                    assignment=Assignment(self.assignment.without_test, seed),
                )
                (subsets[rows],) = training._by_group()
        if not folds and algorithm == "balanced":
            message(
                f"column {self.labelling.split_column} has no validation: "
                f"{counted(int((parts == VALIDATION).sum()), 'training slide')} drawn for it at random, by {self.split_by}"
            )
        return fold_subsets, algorithm

    def _by_patch(self) -> list[tuple[NDArray[np.int8], ...]]:
        """Return random subsets of the patches of each slide, for each fold. Copies of one slide get the same subsets."""
        seeds = ([self.assignment.seed, *(s.content or s.id).encode()] for s in self.slides)
        subsets = [
            self.assignment.assign_patches(np.random.default_rng(seed).permutation(slide.count))
            for slide, seed in zip(self.slides, seeds, strict=True)
        ]
        return list(zip(*subsets, strict=True))

    def _by_region(self) -> list[list[NDArray[np.int8]]]:
        """Return the subsets of the patches of each slide, for each fold, by the square that contains their centre.

        Patches within a patch width of another subset are left out.
        """
        marks, classes = self._marks()
        squares = [_squares(slide, self.stores[slide.store], self.region) for slide in self.slides]
        # Copies of one slide have the same squares.
        keys = [slide.content or f"{slide.store}/{slide.id}" for slide in self.slides]
        patches: dict[tuple[str, int, int], NDArray[np.int64]] = {}
        for slide, key, (position, _), row in zip(self.slides, keys, squares, marks, strict=True):
            fit = slide.subsets != DROPPED
            places, place_of = np.unique(position[fit], axis=0, return_inverse=True)
            counts = np.zeros((len(places), len(row)), np.int64)
            np.add.at(counts, place_of.ravel(), mark_patches(slide, row)[fit])
            for (x, y), count in zip(places.tolist(), counts, strict=True):
                patches[key, x, y] = patches.get((key, x, y), 0) + count
        folds = self._assign(np.array(list(patches.values())), classes, self.slides).tolist()
        return [
            [
                _subsets_apart(key, position, nearby, subsets)
                for key, (position, nearby) in zip(keys, squares, strict=True)
            ]
            for subsets in (dict(zip(patches, of_fold, strict=True)) for of_fold in folds)
        ]

    def _by_group(self) -> NDArray[np.int8]:
        """Return the subset of each slide, (N,) for each fold: that of its patient, site or slide."""
        missing = [slide.id for slide in self.slides if slide.site is None]
        if self.split_by == "site" and missing:
            raise UsageError(
                "--split-by site",
                found=f"{counted(len(missing), 'slide')} without a site, such as {missing[0]}",
                expected="a site for every slide",
                todo="add a column site to the labels file; with --bag patient, each patient needs one site",
            )
        patients = [slide.patient for slide in self.slides]
        # The first column has the name of the unit. A patient of several sites joins these.
        columns = {
            "slide": [[f"{slide.store}/{slide.id}" for slide in self.slides]],
            "site": [[str(slide.site) for slide in self.slides], patients],
        }.get(self.split_by, [patients])
        groups = connected(*columns, [slide.content for slide in self.slides])
        units = np.unique(groups, return_inverse=True)[1]
        marks, classes = self._marks()
        patches = np.zeros((units.max() + 1, marks.shape[1]), np.int64)
        slides = patches.copy()
        for slide, unit, row in zip(self.slides, units, marks, strict=True):
            marked = mark_patches(slide, row)
            patches[unit] += marked.sum(axis=0)
            slides[unit] += marked.any(axis=0)
        names_of_units = Counter(
            unit for unit, _ in set(zip(units.tolist(), columns[0], strict=True))
        )
        joined = [
            slide
            for slide, unit in zip(self.slides, units.tolist(), strict=True)
            if names_of_units[unit] > 1
        ]
        of_sites = slides if self.split_by == "site" and self.by_programme else None
        return self._assign(patches, classes, joined, of_sites)[:, units]

    def _marks(self) -> tuple[NDArray[np.bool_], int]:
        """Return (N, 1 + C + R) marks of slides: always, with each class, in each range of a target; and C."""
        names, needed, ranges = self.labelling.task.names_to_balance(
            self.classes, [(slide.label, slide.target) for slide in self.slides]
        )
        marks = [[True, *(name in of_slide for name in (*needed, *ranges))] for of_slide in names]
        return np.array(marks, np.bool_), len(needed)

    def _assign(
        self,
        patches: NDArray[np.int64],
        classes: int,
        joined: Sequence[SlideSplit],
        slides: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int8]:
        """Return the subset of each unit, (U,) for each fold, from its patches and classes as for `balanced_parts`.

        `joined` are slides that may be in one unit because they are copies.
        """
        assignment, needed, by = self.assignment, self.assignment.needed, self.split_by
        most, what = len(patches), "the units of the split"
        if self.labelling.task.of_classes and self.labelling.split_column is None:
            units = np.count_nonzero(patches[:, 1:], axis=0).tolist()
            for name, count in zip(self.classes, units, strict=True):
                if count < needed:
                    raise NothingToDo(
                        f"class {name!r} cannot be split",
                        found=counted(count, by)
                        + copies_note(
                            [slide for slide in joined if slide.label == name], self.slides
                        )
                        + f"; {joined_sites_note(self.slides)}".rstrip("; ") * (by == "site"),
                        expected=f"at least {needed}, one for each subset that needs the class",
                        todo="add slides",
                    )
            most, what = max(units), f"the {by}s of the largest class"
        if assignment.folds > most:
            raise UsageError("--folds", found=assignment.folds, expected=f"at most {most}, {what}")
        return assignment.assign(patches, classes, slides)


def part_of_training(splits: Splits, share: float, rest: int = DROPPED) -> Splits:
    """Return splits with a share of the training patients of each label, at least one; the patches of others are in `rest`.

    A larger share contains a smaller one. The label of a patient is that of most of the training patches. Patients with
    copies of one slide stay together.
    """
    if share >= 1:
        return splits
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    slides = splits.slides_on("train")
    groups = connected([s.patient for s in slides], [s.content for s in slides])
    first = {group: slide.patient for group, slide in zip(groups[::-1], slides[::-1], strict=True)}
    unit_of = {slide.patient: first[group] for group, slide in zip(groups, slides, strict=True)}
    for slide in slides:
        counts[unit_of[slide.patient]][slide.label] += len(slide.on("train"))
    by_label = grouped(
        sorted(counts),
        lambda patient: max(sorted(counts[patient]), key=counts[patient].__getitem__),
    )
    draw, kept = np.random.default_rng(splits.seed), set[str]()
    for label in sorted(by_label):
        patients = draw.permutation(by_label[label]).tolist()
        kept |= {*patients[: math.ceil(share * len(patients) - 1e-9)]}
    parts = (
        slide
        if unit_of.get(slide.patient) in kept
        else replace(slide, subsets=np.where(slide.subsets == TRAIN, rest, slide.subsets))
        for slide in splits.slides
    )
    return replace(splits, slides=tuple(parts))


def _refuse_missing(splits: Splits, subset: Subset, counts: Counter[str]) -> None:
    """Check that a subset has patches of every class. Patches near another subset may have been left out."""
    task = splits.task
    by = f"splitting by {splits.split_by if splits.column is None else splits.column}"
    if not task.of_classes:
        if not counts.total():
            raise NothingToDo(f"{by} leaves no slide for {subset}", todo="add slides")
        if subset != "test":
            task.check(splits.targets_on(subset), f"split by {splits.split_by}, {subset}")
        return
    for name in splits.classes:
        if not counts[name]:
            raise NothingToDo(
                f"{by} leaves no {name!r} patch for {subset}"
                + copies_note(
                    [slide for slide in splits.slides if slide.label == name], splits.slides
                ),
                todo="add slides, use smaller patches, or change "
                + ("--split-by" if splits.column is None else "the column")
                + (" or increase --region-um" if splits.split_by == "region" else ""),
            )


def _subsets_apart(
    key: str,
    position: NDArray[np.int64],
    nearby: Sequence[NDArray[np.int64]],
    subsets: Mapping[tuple[str, int, int], int],
) -> NDArray[np.int8]:
    """Return the subsets of the patches of a slide, `DROPPED` for those near another subset."""
    # A square without patches is in no subset, so patches need no distance from it.
    patch_subsets, *near_subsets = (
        np.array([subsets.get((key, x, y), DROPPED) for x, y in squares.tolist()], np.int8)
        for squares in (position, *nearby)
    )
    mixed = np.any([(near != patch_subsets) & (near != DROPPED) for near in near_subsets], axis=0)
    return np.where(mixed, DROPPED, patch_subsets).astype(np.int8)


def _squares(
    slide: SlideSplit, store: SampleSource, region: Micrometres
) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return the square of each patch's centre, (N, 2), and the squares of points within a patch width of the patch.

    A patch with its margin is three patch widths wide. It is covered with a grid of points that are close enough to
    meet every square that it touches.
    """
    record = store.records[slide.slide]
    if (
        not isinstance(record, SlideRecord)  # bags have no position on a slide
        or not record.mpp
        or not record.read_size
        or not record.downsample
    ):
        raise UsageError(
            f"slide {slide.id} has no mpp",
            todo="ingest it with --default-mpp, or use another --split-by",
        )
    index = store.index(slide.slide)
    side = region / record.mpp  # level-0 pixels
    width = record.read_size * record.downsample
    corners = np.stack([index["x_l0"], index["y_l0"]], axis=1).astype(np.float64)
    position = np.floor((corners + width / 2) / side).astype(np.int64)
    offsets = np.linspace(-width, 2 * width, max(4, int(np.ceil(3 * width / side)) + 1))
    return position, [
        np.floor((corners + np.array([dx, dy])) / side).astype(np.int64)
        for dx in offsets
        for dy in offsets
    ]
