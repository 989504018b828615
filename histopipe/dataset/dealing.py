"""Dealing groups of patches out to training, validation and test: by fractions, or as one fold of a cross-validation."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.splits import SIDES
from histopipe.errors import NothingToDo, UsageError
from histopipe.system.hashing import combine

Group = TypeVar("Group", bound=Hashable)
_TRAIN, _VALIDATION, _TEST = range(len(SIDES))


class Dealing(Protocol):
    """What gives each group a side."""

    @property
    def seed(self) -> int:
        """Decides which goes where."""

    @property
    def fractions(self) -> tuple[float, float, float]:
        """Of train, validation and test."""

    def groups(self, strata: Mapping[str, Sequence[Group]], unit: str) -> dict[Group, int]:
        """A side for each group, each stratum on its own.

        Args:
            strata: groups by label.
            unit: what a group is, for messages.
        """

    def places(self, shuffled: NDArray[np.intp]) -> NDArray[np.int8]:
        """(N,) a side for each place in a shuffled (N,) row of patches."""


@dataclass(frozen=True, slots=True)
class ByFractions:
    """Each side gets its fraction of the groups of every class, one group at least."""

    fractions: tuple[float, float, float]
    seed: int

    def groups(self, strata: Mapping[str, Sequence[Group]], unit: str) -> dict[Group, int]:
        """A side for each group.

        Raises:
            NothingToDo: a stratum has fewer groups than sides.
        """
        sides: dict[Group, int] = {}
        wanted = [number for number, fraction in enumerate(self.fractions) if fraction > 0]
        for label in sorted(strata):
            rest = list(strata[label])
            total = len(rest)
            if total < len(wanted):
                raise _too_few(label, total, unit, len(wanted))
            # Test first, then validation; what is left trains. One group at least for each.
            for number in wanted[:0:-1]:
                size = max(1, round(self.fractions[number] * total))
                size = min(size, len(rest) - wanted.index(number))
                rest, chosen = _drawn(rest, size, int(combine(self.seed, number)))
                sides |= dict.fromkeys(chosen, number)
            sides |= dict.fromkeys(rest, wanted[0])
        return sides

    def places(self, shuffled: NDArray[np.intp]) -> NDArray[np.int8]:
        """(N,) sides."""
        ends = np.round(np.cumsum(self.fractions) * len(shuffled)).astype(int)
        sides = np.searchsorted(ends, shuffled, side="right")
        return np.minimum(sides, _TEST).astype(np.int8)


@dataclass(frozen=True, slots=True)
class ByFolds:
    """One fold: its part of the groups of every class is tested, of the others some validate.

    Attributes:
        fold, folds: which, from 0, of how many.
        shares: of training and validation in what is not tested; the third is not looked at.
        seed: decides which goes where.
    """

    fold: int
    folds: int
    shares: tuple[float, float, float]
    seed: int

    @property
    def fractions(self) -> tuple[float, float, float]:
        """Of train, validation and test."""
        test = 1 / self.folds
        return (1 - self._validating) * (1 - test), self._validating * (1 - test), test

    @property
    def _validating(self) -> float:
        """Share of what is not tested."""
        return self.shares[_VALIDATION] / (self.shares[_TRAIN] + self.shares[_VALIDATION])

    def groups(self, strata: Mapping[str, Sequence[Group]], unit: str) -> dict[Group, int]:
        """A side for each group. A class of few groups may be missing in validation or test, but not in training.

        Raises:
            NothingToDo: a class has a single group.
            UsageError: no class has as many groups as there are folds.
        """
        sides: dict[Group, int] = {}
        tested = self._tested(strata, unit)
        for label in sorted(strata):
            rest = [group for group in strata[label] if group not in tested]
            if not rest:
                raise _too_few(label, len(strata[label]), unit, 2)
            size = min(max(1, round(self._validating * len(rest))), len(rest) - 1)
            if size:
                state = int(combine(self.seed, _VALIDATION, self.fold))
                rest, chosen = _drawn(rest, size, state)
                sides |= dict.fromkeys(chosen, _VALIDATION)
            sides |= dict.fromkeys(rest, _TRAIN)
        return sides | dict.fromkeys(tested, _TEST)

    def _tested(self, strata: Mapping[str, Sequence[Group]], unit: str) -> set[Group]:
        # Late: a third of a second that only making a split needs.
        from sklearn.model_selection import StratifiedKFold

        most = max(len(groups) for groups in strata.values())
        if most < self.folds:
            raise UsageError(
                "--folds", found=self.folds, expected=f"at most {most}: no class has more {unit}s"
            )
        groups = [group for label in sorted(strata) for group in strata[label]]
        labels = [label for label in sorted(strata) for _ in strata[label]]
        parts = StratifiedKFold(self.folds, shuffle=True, random_state=_state(self.seed))
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            # Of a class smaller than the folds: the folds that lack it are told when they are judged.
            chosen = list(parts.split(np.zeros(len(groups)), labels))[self.fold][1]
        return {groups[i] for i in chosen.tolist()}

    def places(self, shuffled: NDArray[np.intp]) -> NDArray[np.int8]:
        """(N,) sides."""
        count = len(shuffled)
        # Where the first fold begins differs, or slides of few patches would all bring theirs to the same folds.
        begin = shuffled[0] / count if count else 0.0
        # In folds, and from the end of the tested one on: what comes next validates.
        behind = ((shuffled + begin) * self.folds / max(count, 1) - self.fold - 1) % self.folds
        tested = behind >= self.folds - 1
        validating = round(self._validating * np.count_nonzero(~tested))
        sides = np.full(count, _TRAIN, np.int8)
        sides[np.argsort(behind, kind="stable")[:validating]] = _VALIDATION
        sides[tested] = _TEST
        return sides


def _drawn(groups: list[Group], size: int, seed: int) -> tuple[list[Group], list[Group]]:
    """What is left, and so many drawn."""
    # Late: a third of a second that only making a split needs.
    from sklearn.model_selection import train_test_split

    rest, chosen = train_test_split(groups, test_size=size, random_state=_state(seed))
    return rest, chosen


def _state(seed: int) -> int:
    """A seed as scikit-learn takes it."""
    return seed & 0x7FFFFFFF


def _too_few(label: str, count: int, unit: str, needed: int) -> NothingToDo:
    """The error for a class that cannot be on every side."""
    return NothingToDo(
        f"class {' '.join(label.split())!r} cannot be split", found=f"{count} {unit}{'s' if count != 1 else ''}",
        expected=f"at least {needed}, so that every side it must be on has one",
        todo="add slides, or split by something smaller (--split-by slide, region or patch)",
    )  # fmt: skip
