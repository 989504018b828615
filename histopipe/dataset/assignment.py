"""Assignment of units to training, validation and test: by fractions, or as one fold of a cross-validation.

A unit is what a split keeps together: a patient, a site, a slide, or a square of a slide.
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
    """Give each side its fraction of the units of every class, and at least one unit."""

    fractions: tuple[float, float, float]
    seed: int

    def assign(
        self, strata: Mapping[str, Sequence[Unit]], kind: str, notes: Mapping[str, str]
    ) -> dict[Unit, int]:
        """Assign a side to each unit of strata by label. Messages name the kind of unit, and have a note by label.

        Raises:
            NothingToDo: a stratum has fewer units than sides.
        """
        sides: dict[Unit, int] = {}
        wanted = [number for number, fraction in enumerate(self.fractions) if fraction > 0]
        for label in sorted(strata):
            rest = list(strata[label])
            total = len(rest)
            if total < len(wanted):
                raise _too_few(label, total, kind, len(wanted), notes)
            # Test first, then validation; the rest trains. At least one unit for each.
            for number in wanted[:0:-1]:
                size = max(1, round(self.fractions[number] * total))
                size = min(size, len(rest) - wanted.index(number))
                rest, chosen = _drawn(rest, size, int(combine(self.seed, number)))
                sides |= dict.fromkeys(chosen, number)
            sides |= dict.fromkeys(rest, wanted[0])
        return sides

    def assign_patches(self, shuffled: NDArray[np.intp]) -> NDArray[np.int8]:
        """Return the sides of the patches of one slide, (N,) int8, from a permutation (N,)."""
        ends = np.round(np.cumsum(self.fractions) * len(shuffled)).astype(int)
        sides = np.searchsorted(ends, shuffled, side="right")
        return np.minimum(sides, _TEST).astype(np.int8)


@dataclass(frozen=True, slots=True)
class AssignByFolds:
    """Assign one fold, counted from 0: its part of every class to test, some of the others to validation.

    The first two `shares` are those of training and validation in what is not tested.
    """

    fold: int
    folds: int
    shares: tuple[float, float, float]
    seed: int

    @property
    def fractions(self) -> tuple[float, float, float]:
        """Fractions of train, validation and test, of all units."""
        test = 1 / self.folds
        return (1 - self._validating) * (1 - test), self._validating * (1 - test), test

    @property
    def _validating(self) -> float:
        """Share of validation in the units that are not tested."""
        return self.shares[_VALIDATION] / (self.shares[_TRAIN] + self.shares[_VALIDATION])

    def assign(
        self, strata: Mapping[str, Sequence[Unit]], kind: str, notes: Mapping[str, str]
    ) -> dict[Unit, int]:
        """Assign as `AssignByFractions`. A class of few units may be missing in validation or test, not in training.

        Raises:
            NothingToDo: a class has a single unit.
            UsageError: no class has as many units as there are folds.
        """
        sides: dict[Unit, int] = {}
        tested = self._tested(strata, kind, notes)
        for label in sorted(strata):
            rest = [unit for unit in strata[label] if unit not in tested]
            if not rest:
                raise _too_few(label, len(strata[label]), kind, 2, notes)
            size = min(max(1, round(self._validating * len(rest))), len(rest) - 1)
            if size:
                rest, chosen = _drawn(rest, size, int(combine(self.seed, _VALIDATION, self.fold)))
                sides |= dict.fromkeys(chosen, _VALIDATION)
            sides |= dict.fromkeys(rest, _TRAIN)
        return sides | dict.fromkeys(tested, _TEST)

    def _tested(
        self, strata: Mapping[str, Sequence[Unit]], kind: str, notes: Mapping[str, str]
    ) -> set[Unit]:
        # Late: loading it takes a second, and only a cross-validation needs it.
        from sklearn.model_selection import StratifiedKFold

        largest = max(strata, key=lambda label: len(strata[label]))
        if len(strata[largest]) < self.folds:
            raise UsageError(
                "--folds", found=self.folds,
                expected=f"at most {len(strata[largest])}: no class has more {kind}s{notes.get(largest, '')}",
            )  # fmt: skip
        units = [unit for label in sorted(strata) for unit in strata[label]]
        labels = [label for label in sorted(strata) for _ in strata[label]]
        parts = StratifiedKFold(self.folds, shuffle=True, random_state=self.seed & _SEEDS)
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            # Of a class with fewer units than folds: the evaluation reports the folds that lack it.
            chosen = list(parts.split(np.zeros(len(units)), labels))[self.fold][1]
        return {units[i] for i in chosen.tolist()}

    def assign_patches(self, shuffled: NDArray[np.intp]) -> NDArray[np.int8]:
        """Assign as `AssignByFractions`."""
        count = len(shuffled)
        # The first fold begins elsewhere in each slide; else slides of few patches would all have theirs in the same folds.
        begin = shuffled[0] / count if count else 0.0
        # Distance from the end of the tested fold, in folds: the patches that follow it validate.
        behind = ((shuffled + begin) * self.folds / max(count, 1) - self.fold - 1) % self.folds
        tested = behind >= self.folds - 1
        validating = round(self._validating * np.count_nonzero(~tested))
        sides = np.full(count, _TRAIN, np.int8)
        sides[np.argsort(behind, kind="stable")[:validating]] = _VALIDATION
        sides[tested] = _TEST
        return sides


Assignment = AssignByFractions | AssignByFolds


def merge_small_strata(
    strata: Mapping[str, Collection[Sortable]], slides: Sequence[SlideSplit]
) -> dict[str, list[Sortable]]:
    """Return sorted strata; where patches have classes of their own, strata with fewer units than sides become one.

    A slide class with so few units cannot be on every side. A patch class may still be in many units, and the most frequent
    class of few: whether each side has patches of it is checked after the assignment.
    """
    ordered = {name: sorted(strata[name]) for name in sorted(strata)}
    small = [name for name, units in ordered.items() if len(units) < len(SIDES)]
    if not small or all(slide.labels is None for slide in slides):
        return ordered
    together = [unit for name in small for unit in ordered.pop(name)]
    if ordered and len(together) < len(SIDES):
        largest = max(ordered, key=lambda name: len(ordered[name]))
        together += ordered.pop(largest)
        small.append(largest)
    # Class names have no line break, so this name is none of theirs.
    return {**ordered, " or\n".join(sorted(small)): sorted(together)}


def copies_note(own: Sequence[SlideSplit], slides: Sequence[SlideSplit]) -> str:
    """Return a note for messages on slides that are too few: which copies they have among all slides; often empty."""
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


def _drawn(units: list[Unit], size: int, seed: int) -> tuple[list[Unit], list[Unit]]:
    """Return the rest and the units drawn, as scikit-learn's `train_test_split`, which takes a second to load."""
    order = np.random.RandomState(seed & _SEEDS).permutation(len(units)).tolist()
    return [units[i] for i in order[size:]], [units[i] for i in order[:size]]


def _too_few(
    label: str, count: int, kind: str, needed: int, notes: Mapping[str, str]
) -> NothingToDo:
    return NothingToDo(
        f"class {' '.join(label.split())!r} cannot be split", found=f"{count} {kind}{'s' if count != 1 else ''}{notes.get(label, '')}",
        expected=f"at least {needed}, so that every side it must be on has one",
        todo="add slides, or split by something smaller (--split-by slide, region or patch)",
    )  # fmt: skip
