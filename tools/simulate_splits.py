"""Measure the shares of patients, patches and classes in each subset of splits of random cohorts.

python tools/simulate_splits.py [--cohorts 200] [--folds 5]

Cohorts have 10 to 500 patients with 1 to 100 slides and two to five classes; 70 % of the slides of a patient have its
main class. The splits by patient of this version ("balanced") are compared with those of earlier versions
("stratified"): each patient has the class of most of its slides, and each class is divided separately.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import HistopipeError, NothingToDo
from histopipe.slides.slide_files import SlideHashes
from histopipe.splits.splits import SampleGroup, SlideSplit, Splits
from histopipe.splits.splitting import FRACTIONS, make_folds, make_splits
from histopipe.tasks.choices import EVALUATED

Shares = dict[str, list[NDArray[np.float64]]]
"""Ratios to the shares of the sides, (3,) each, by quantity."""


@dataclass(frozen=True)
class Group:
    """A slide: a `SampleGroup`."""

    id: str
    label: str | None
    patient: str | None
    planned: int
    site: str | None = None

    @property
    def stored(self) -> int:
        """All patches can be read."""
        return self.planned

    @property
    def scans(self) -> Sequence[SlideHashes]:
        """A hash that no other slide has."""
        return (SlideHashes(content=self.id),)

    @property
    def patch_labels(self) -> Mapping[str, int]:
        """Patches have the class of their slide."""
        return {}


class Cohort:
    """Slides without pixels: a `SampleSource`."""

    path = Path("cohort")
    uuid = "cohort"
    classes: Sequence[str] = ()

    def __init__(self, groups: Sequence[Group]) -> None:
        self.records: Mapping[int, SampleGroup] = dict(enumerate(groups))
        self.complete = self.records

    def index(self, slide: int) -> Mapping[str, NDArray[Any]]:
        """Return checksums of the patches."""
        return {"crc": np.zeros(self.records[slide].planned, np.uint32)}


def random_cohort(seed: int, most_patients: int = 500) -> Cohort:
    """Return a cohort: patients and their slides are log-uniform, patches per slide log-normal."""
    rng = np.random.default_rng(seed)
    patients = int(np.exp(rng.uniform(np.log(10), np.log(most_patients))))
    classes = [f"class {number}" for number in range(rng.integers(2, 6))]
    frequency = 0.9 * rng.dirichlet(np.ones(len(classes))) + 0.1 / len(classes)
    groups = []
    for patient in range(patients):
        main = rng.choice(classes, p=frequency)
        for slide in range(int(np.exp(rng.uniform(0, np.log(101))))):
            label = main if rng.random() < 0.7 else rng.choice(classes, p=frequency)
            count = 1 + int(rng.lognormal(5, 1))
            groups.append(Group(f"P{patient}-{slide}", str(label), f"P{patient}", count))
    return Cohort(groups)


def stratified(splits: Splits, seed: int) -> Splits:
    """Return the split of earlier versions of the same slides."""
    labels: dict[str, Counter[str]] = defaultdict(Counter)
    for slide in splits.slides:
        labels[slide.patient][slide.label] += 1
    strata: dict[str, list[str]] = defaultdict(list)
    for patient, counts in labels.items():
        strata[counts.most_common(1)[0][0]].append(patient)
    sides: dict[str, int] = {}
    for name in splits.classes:
        rest = strata[name]
        if len(rest) < len(EVALUATED):
            raise NothingToDo(f"class {name!r} cannot be split")
        for side in (2, 1):
            size = max(1, round(FRACTIONS[side] * len(strata[name])))
            order = np.random.RandomState(seed + side).permutation(len(rest)).tolist()
            sides |= dict.fromkeys((rest[i] for i in order[:size]), side)
            rest = [rest[i] for i in order[size:]]
        sides |= dict.fromkeys(rest, 0)
    slides = [
        replace(slide, subsets=np.full(slide.count, sides[slide.patient], np.int8))
        for slide in splits.slides
    ]
    return replace(splits, slides=tuple(slides), algorithm="stratified")


def quantities(slides: Sequence[SlideSplit]) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield the shares of patients and patches, in total and of each class, in each subset, (3,)."""
    names = ("", *sorted({slide.label for slide in slides}))
    for name in names:
        some = [slide for slide in slides if name in ("", slide.label)]
        patients = {(int(slide.subsets[0]), slide.patient) for slide in some}
        of_patients = np.bincount([side for side, _ in patients], minlength=3)
        of_patches = np.bincount(
            [slide.subsets[0] for slide in some], [slide.count for slide in some], minlength=3
        )
        suffix = " of a class" if name else ""
        yield f"patients{suffix}", of_patients / of_patients.sum()
        yield f"patches{suffix}", of_patches / of_patches.sum()


def add_shares(ratios: Shares, splits: Splits) -> int:
    """Add the shares of a split, and return its number of leaks."""
    for name, shares in quantities(splits.slides):
        ratios[name].append(shares)
    return len(splits.leaks())


def table(ratios: Shares, fractions: Sequence[float]) -> Iterator[str]:
    """Yield rows of quantities: percentiles 5, 50 and 95 of the share of each side, and how often it is too small."""
    for name, values in ratios.items():
        shares = np.array(values)
        low, median, high = 100 * np.percentile(shares, [5, 50, 95], axis=0)
        cells = [f"{m:.1f} ({a:.1f} to {b:.1f})" for a, m, b in zip(low, median, high, strict=True)]
        small = np.count_nonzero((shares < np.array(fractions) / 2).any(axis=1))
        yield f"| {name} | {' | '.join(cells)} | {small} of {len(values)} |"


def main() -> None:
    """Split the cohorts with both algorithms, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cohorts", type=int, default=200)
    parser.add_argument("--folds", type=int, default=5)
    options = parser.parse_args()
    names = ("stratified", "balanced", "balanced, refused by stratified", "folds")
    shares: dict[str, Shares] = {name: defaultdict(list) for name in names}
    counts: Counter[str] = Counter()
    longest = 0.0
    for seed in range(options.cohorts):
        cohort = random_cohort(seed)
        started = time.process_time()
        try:
            splits = make_splits([cohort], split_by="patient", seed=seed)
        except HistopipeError:
            counts["refused by balanced"] += 1
            continue
        longest, name = max(longest, time.process_time() - started), "balanced"
        try:
            add_shares(shares["stratified"], stratified(splits, seed))
        except NothingToDo:
            counts["refused by stratified only"] += 1
            name = "balanced, refused by stratified"
        counts["leaks of balanced"] += add_shares(shares[name], splits)
        for fold in make_folds([cohort], options.folds, split_by="patient", seed=seed):
            counts["leaks of folds"] += add_shares(shares["folds"], fold)
    test = 1 / options.folds
    train, validation, _ = (fraction / sum(FRACTIONS[:2]) * (1 - test) for fraction in FRACTIONS)
    for name, ratios in shares.items():
        fractions = (train, validation, test) if name == "folds" else FRACTIONS
        print(
            f"\n{name}: share in % of {', '.join(f'{s} ({f:.0%})' for s, f in zip(EVALUATED, fractions, strict=True))}"
        )
        print("\n".join(table(ratios, fractions)))
    print(f"\n{dict(counts)}; longest split {longest:.2f} s of CPU time")


if __name__ == "__main__":
    main()
