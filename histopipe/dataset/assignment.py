"""Assignment of units to training, validation and test: by fractions, or as one fold of a cross-validation.

A unit is a group of patches that a split keeps together: a patient, a site, a slide, or a square of a slide.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import SIDES
from histopipe.dataset.splits import SlideSplit
from histopipe.errors import NothingToDo, UsageError
from histopipe.system.hashing import combine

Unit = TypeVar("Unit", bound=Hashable)
Sortable = TypeVar("Sortable", int, tuple[str, int, int])
_TRAIN, _VALIDATION, _TEST = range(len(SIDES))
_SEEDS = 0x7FFFFFFF
"""Largest seed for scikit-learn."""


@dataclass(frozen=True, slots=True)
class AssignByFractions:
    """Assign to each side its fraction of the units of every class, and at least one unit."""

    fractions: tuple[float, float, float]
    seed: int

    def assign(
        self, strata: Mapping[str, Sequence[Unit]], kind: str, notes: Mapping[str, str]
    ) -> dict[Unit, int]:
        """Return the side of each unit. `strata` are units by label; `kind` and `notes` (by label) are for messages.

        Raises:
            NothingToDo: a stratum has fewer units than sides.
        """
        sides: dict[Unit, int] = {}
        used = [number for number, fraction in enumerate(self.fractions) if fraction > 0]
        for label in sorted(strata):
            rest = list(strata[label])
            total = len(rest)
            if total < len(used):
                raise _too_few(label, total, kind, len(used), notes)
            # Draw test first, then validation, with at least one unit each. All other units are for training.
            for number in used[:0:-1]:
                size = max(1, round(self.fractions[number] * total))
                size = min(size, len(rest) - used.index(number))
                rest, chosen = _draw(rest, size, int(combine(self.seed, number)))
                sides |= dict.fromkeys(chosen, number)
            sides |= dict.fromkeys(rest, used[0])
        return sides

    def assign_labels(self, labels: NDArray[np.bool_]) -> NDArray[np.int8]:
        """Return the side of each unit, (U,), with an equal share of each of (U, L) labels on every side."""
        return assign_labels(labels, self.fractions, self.seed).astype(np.int8)

    def assign_patches(self, shuffled: NDArray[np.intp]) -> NDArray[np.int8]:
        """Return the sides of the patches of one slide, (N,) int8, from a permutation (N,)."""
        ends = np.round(np.cumsum(self.fractions) * len(shuffled)).astype(int)
        sides = np.searchsorted(ends, shuffled, side="right")
        return np.minimum(sides, _TEST).astype(np.int8)


@dataclass(frozen=True, slots=True)
class AssignByFolds:
    """Assign one fold, counted from 0, to test, and a share of the other units to validation, both per class.

    The first two `shares` divide the units that are not in the test set into training and validation.
    """

    fold: int
    folds: int
    shares: tuple[float, float, float]
    seed: int

    @property
    def fractions(self) -> tuple[float, float, float]:
        """Fractions of train, validation and test, of all units."""
        test = 1 / self.folds
        return (1 - self._validation_share) * (1 - test), self._validation_share * (1 - test), test

    @property
    def _validation_share(self) -> float:
        """Share of validation in the units that are not in the test set."""
        return self.shares[_VALIDATION] / (self.shares[_TRAIN] + self.shares[_VALIDATION])

    def assign(
        self, strata: Mapping[str, Sequence[Unit]], kind: str, notes: Mapping[str, str]
    ) -> dict[Unit, int]:
        """Return the side of each unit. A small class may be missing from validation or test, but not from training.

        Raises:
            NothingToDo: a class has a single unit.
            UsageError: no class has as many units as there are folds.
        """
        sides: dict[Unit, int] = {}
        test_units = self._test_units(strata, kind, notes)
        for label in sorted(strata):
            rest = [unit for unit in strata[label] if unit not in test_units]
            if not rest:
                raise _too_few(label, len(strata[label]), kind, 2, notes)
            size = min(max(1, round(self._validation_share * len(rest))), len(rest) - 1)
            if size:
                rest, chosen = _draw(rest, size, int(combine(self.seed, _VALIDATION, self.fold)))
                sides |= dict.fromkeys(chosen, _VALIDATION)
            sides |= dict.fromkeys(rest, _TRAIN)
        return sides | dict.fromkeys(test_units, _TEST)

    def assign_labels(self, labels: NDArray[np.bool_]) -> NDArray[np.int8]:
        """Return the side of each unit, (U,), with an equal share of each of (U, L) labels on every side.

        Raises:
            UsageError: there are fewer units than folds.
        """
        if len(labels) < self.folds:
            raise UsageError(
                "--folds",
                found=self.folds,
                expected=f"at most {len(labels)}, the units of the split",
            )
        folds = assign_labels(labels, [1 / self.folds] * self.folds, self.seed)
        sides = np.full(len(labels), _TEST, np.int8)
        rest = np.flatnonzero(folds != self.fold)
        shares = (1 - self._validation_share, self._validation_share)
        sides[rest] = assign_labels(labels[rest], shares, int(combine(self.seed, self.fold)))
        return sides

    def _test_units(
        self, strata: Mapping[str, Sequence[Unit]], kind: str, notes: Mapping[str, str]
    ) -> set[Unit]:
        # Imported late: it takes a second, and only a cross-validation needs it.
        from sklearn.model_selection import StratifiedKFold

        largest = max(strata, key=lambda label: len(strata[label]))
        if len(strata[largest]) < self.folds:
            raise UsageError(
                "--folds", found=self.folds,
                expected=f"at most {len(strata[largest])}, the {kind}s of the largest class{notes.get(largest, '')}",
            )  # fmt: skip
        units = [unit for label in sorted(strata) for unit in strata[label]]
        labels = [label for label in sorted(strata) for _ in strata[label]]
        parts = StratifiedKFold(self.folds, shuffle=True, random_state=self.seed & _SEEDS)
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            # It warns of classes with fewer units than folds. The evaluation reports folds without a class.
            chosen = list(parts.split(np.zeros(len(units)), labels))[self.fold][1]
        return {units[i] for i in chosen.tolist()}

    def assign_patches(self, shuffled: NDArray[np.intp]) -> NDArray[np.int8]:
        """Return the sides of the patches of one slide, (N,) int8, from a permutation (N,)."""
        count = len(shuffled)
        # Start the first fold at a random place. Otherwise all slides with few patches would use the same folds.
        begin = shuffled[0] / count if count else 0.0
        # Distance from the end of the test fold, in folds. The patches that follow it are for validation.
        distance = ((shuffled + begin) * self.folds / max(count, 1) - self.fold - 1) % self.folds
        is_test = distance >= self.folds - 1
        count_validation = round(self._validation_share * np.count_nonzero(~is_test))
        sides = np.full(count, _TRAIN, np.int8)
        sides[np.argsort(distance, kind="stable")[:count_validation]] = _VALIDATION
        sides[is_test] = _TEST
        return sides


Assignment = AssignByFractions | AssignByFolds


def assign_labels(
    labels: NDArray[np.bool_], shares: Sequence[float], seed: int
) -> NDArray[np.int64]:
    """Return the part of each of (U, L) units with several labels. Each part gets its share of units and of each label.

    Source:
        K. Sechidis, G. Tsoumakas and I. Vlahavas, "On the stratification of multi-label data" (2011), iterative
        stratification: the rarest label is divided first.
    """
    rng = np.random.RandomState(seed & _SEEDS)
    count = len(labels)
    wanted = np.array(shares, np.float64) / sum(shares)
    room = wanted * count
    wanted_labels = wanted[:, None] * labels.sum(axis=0)
    parts = np.full(count, -1, np.int64)
    while (parts < 0).any():
        left = labels[parts < 0].sum(axis=0)
        present = np.flatnonzero(left)
        rarest = present[left[present].argmin()] if len(present) else None
        members = np.flatnonzero((parts < 0) & (True if rarest is None else labels[:, rarest]))
        for unit in rng.permutation(members).tolist():
            # The part that lacks most of the label; among equal ones, that with most room.
            lack = room if rarest is None else wanted_labels[:, rarest]
            best = np.flatnonzero(np.isclose(lack, lack.max()) & (wanted > 0))
            best = best[np.isclose(room[best], room[best].max())]
            part = int(best[rng.randint(len(best))])
            parts[unit] = part
            room[part] -= 1
            wanted_labels[part] -= labels[unit]
    return parts


def merge_small_strata(
    strata: Mapping[str, Collection[Sortable]], slides: Sequence[SlideSplit]
) -> dict[str, list[Sortable]]:
    """Sort the strata. If labels are per patch, or with targets, merge the strata with fewer units than sides.

    With labels per slide, a class with so few units cannot be on every side. With labels per patch, units of other
    strata may have the class too. After the assignment, each side is checked.
    """
    ordered = {name: sorted(strata[name]) for name in sorted(strata)}
    small = [name for name, units in ordered.items() if len(units) < len(SIDES)]
    if not small or all(slide.labels is None and slide.target is None for slide in slides):
        return ordered
    together = [unit for name in small for unit in ordered.pop(name)]
    if ordered and len(together) < len(SIDES):
        largest = max(ordered, key=lambda name: len(ordered[name]))
        together += ordered.pop(largest)
        small.append(largest)
    # Class names have no line break, so this name differs from all of them.
    return {**ordered, " or\n".join(sorted(small)): sorted(together)}


def merge_ranges(
    strata: Mapping[str, Sequence[Unit]], smallest_share: float
) -> dict[str, list[Unit]]:
    """Merge neighbouring ranges of times or numbers if their units are too few for the smallest share of a side.

    Each side gets at least one unit of each stratum: with six events in two ranges, a third of the events each. Events
    and the censored stay apart.
    """
    merged: dict[str, list[Unit]] = {}
    for kind in dict.fromkeys(name.split()[0] for name in strata):
        names = [name for name in sorted(strata) if name.split()[0] == kind]
        most = max(1.0, smallest_share * sum(len(strata[name]) for name in names))
        parts = max(it for it in (1, 2, len(names)) if it <= min(most, len(names)))
        for some in np.array_split(np.array(names, object), parts):
            merged[" or\n".join(some)] = [unit for name in some for unit in strata[name]]
    return merged


def copies_note(own: Sequence[SlideSplit], slides: Sequence[SlideSplit]) -> str:
    """Return a note for messages: the copies among all slides of the slides in `own`; empty if there are none."""
    ids: dict[str, set[str]] = defaultdict(set)
    for slide in slides:
        if slide.content is not None:
            ids[slide.content].add(slide.id)
    sets = [
        sorted(ids[c]) for c in sorted({s.content for s in own if s.content}) if len(ids[c]) > 1
    ]
    if not sets:
        return ""
    shown = [" = ".join(names[:4]) + (" = …" if names[4:] else "") for names in sets[:3]]
    more = f"; and {len(sets) - 3} more" if sets[3:] else ""
    return f" (copies of one slide count as one and stay on one side: {'; '.join(shown)}{more})"


def _draw(units: list[Unit], size: int, seed: int) -> tuple[list[Unit], list[Unit]]:
    """Return the remaining and the drawn units, as scikit-learn's `train_test_split` does, which is slow to import."""
    order = np.random.RandomState(seed & _SEEDS).permutation(len(units)).tolist()
    return [units[i] for i in order[size:]], [units[i] for i in order[:size]]


def _too_few(
    label: str, count: int, kind: str, needed: int, notes: Mapping[str, str]
) -> NothingToDo:
    return NothingToDo(
        f"class {' '.join(label.split())!r} cannot be split", found=f"{count} {kind}{'s' if count != 1 else ''}{notes.get(label, '')}",
        expected=f"at least {needed}, one for each side that needs the class",
        todo="add slides, or split by smaller units (--split-by slide, region or patch)",
    )  # fmt: skip
