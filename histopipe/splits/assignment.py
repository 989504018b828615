"""Assignment of units to training, validation and test: by fractions, or as the folds of a cross-validation.

A unit is a group of patches that a split keeps together: a patient, a site, a slide, or a square of a slide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.splits.splits import DROPPED, SlideSplit
from histopipe.system.grouping import grouped
from histopipe.system.hashing import combine
from histopipe.tasks.choices import TEST, TRAIN, VALIDATION

_MISSING = 1e4
"""Cost of a part that lacks a class: more than that of any other difference."""
_FLOOR = 0.02
"""Added to ratios of shares, so that the cost of an empty part is finite."""
_ROUNDING = 1e-12
"""Largest sum of shares that is zero but for rounding."""
_LEAST_GAIN = 1e-3
"""Smallest improvement for which units are exchanged."""
_MAX_EXCHANGES, _MAX_MOVED, _MAX_SWAPPED = 300, 1000, 250
"""Maximum number of exchanges, and numbers of random units of which one may move, or two may change places."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of units to subsets by their shares; or of each of several `folds` to test once.

    With folds, the first two shares divide the units that are not in the test set into training and validation.
    """

    shares: tuple[float, float, float]
    seed: int
    folds: int = 0

    @property
    def fractions(self) -> tuple[float, float, float]:
        """Fractions of train, validation and test, of all units."""
        if not self.folds:
            return self.shares
        train, validation, _ = self.without_test
        test = 1 / self.folds
        return train * (1 - test), validation * (1 - test), test

    @property
    def without_test(self) -> tuple[float, float, float]:
        """Shares of training and validation in the units that are not in the test set, and 0."""
        both = self.shares[TRAIN] + self.shares[VALIDATION]
        return self.shares[TRAIN] / both, self.shares[VALIDATION] / both, 0.0

    @property
    def needed(self) -> int:
        """Number of units that a class needs, to be in each subset; with folds, to be in training and test."""
        return 2 if self.folds else sum(share > 0 for share in self.shares)

    def assign(
        self,
        patches: NDArray[np.int64],
        classes: int,
        slides: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int8]:
        """Return the subset of each unit, (U,) for each fold; see `balanced_parts`, and with `slides` `optimal_parts`."""

        def divide(rows: Any, shares: Sequence[float], seed: int) -> NDArray[np.int64]:
            if slides is not None:
                parts = optimal_parts(np.hstack([slides, patches])[rows], classes, shares, seed)
                if parts is not None:
                    return parts
            return balanced_parts(patches[rows], classes, shares, seed)

        if not self.folds:
            return divide(slice(None), self.shares, self.seed).astype(np.int8)[None]
        parts = divide(slice(None), [1 / self.folds] * self.folds, self.seed)
        subsets = np.full((self.folds, len(parts)), TEST, np.int8)
        for fold, of_fold in enumerate(subsets):
            rest, seed = parts != fold, int(combine(self.seed, fold))
            of_fold[rest] = divide(rest, self.without_test, seed)
        return subsets

    def assign_patches(self, shuffled: NDArray[np.intp]) -> list[NDArray[np.int8]]:
        """Return the subsets of the patches of one slide, (N,) for each fold, from a permutation (N,)."""
        if self.folds:
            return [self._in_fold(fold, shuffled) for fold in range(self.folds)]
        ends = np.round(np.cumsum(self.shares) * len(shuffled)).astype(int)
        return [np.minimum(np.searchsorted(ends, shuffled, side="right"), TEST).astype(np.int8)]

    def _in_fold(self, fold: int, shuffled: NDArray[np.intp]) -> NDArray[np.int8]:
        count = len(shuffled)
        # Start the first fold at a random place. Otherwise all slides with few patches would use the same folds.
        begin = shuffled[0] / count if count else 0.0
        # Distance from the end of the test fold, in folds. The patches that follow it are for validation.
        distance = ((shuffled + begin) * self.folds / max(count, 1) - fold - 1) % self.folds
        is_test = distance >= self.folds - 1
        count_validation = round(self.without_test[VALIDATION] * np.count_nonzero(~is_test))
        subsets = np.full(count, TRAIN, np.int8)
        subsets[np.argsort(distance, kind="stable")[:count_validation]] = VALIDATION
        subsets[is_test] = TEST
        return subsets


def balanced_parts(
    patches: NDArray[np.int64], classes: int, shares: Sequence[float], seed: int
) -> NDArray[np.int64]:
    """Return the part of each unit, (U,). Each part gets its share of units and patches, in total and of each class.

    The largest units are assigned first. Then one unit moves to another part, or two units change places, as long as
    that improves the balance. `patches` are (U, 1 + C + R): all patches of a unit, those of each of C `classes`, which
    each part should have, and those in each of R ranges of a target.
    """
    used = np.flatnonzero(shares)
    balance = _PartCost(patches, 1 + classes, np.array(shares)[used] / sum(shares), seed)
    for _ in range(_MAX_EXCHANGES):
        if not balance.exchange():
            break
    return used[balance.parts].astype(np.int64)


_NODES, _SECONDS, _TIME_LIMIT = 100, 60.0, 1
"""Limits of the search for an optimum. More nodes hardly improve it. The time is for machines that are far slower: a
result by then, with this status of SciPy, would depend on the machine."""
_MOST_CHOICES = 1000
"""Units times parts. With more, exchanges come near to the optimum, and the programme takes minutes."""
_WEIGHT_OF_CLASSES, _WEIGHT_OF_PATCHES, _WEIGHT_OF_CHANCE = 50.0, 0.25, 1e-3


def optimal_parts(
    amounts: NDArray[np.int64], classes: int, shares: Sequence[float], seed: int
) -> NDArray[np.int64] | None:
    """Return the part of each unit, (U,), by an integer programme; None if it finds none in time, or of too many units.

    It is for few large units, such as sites, where exchanges of one or two units end far from the optimum. The largest
    deviation of a class from its shares is minimised first, then the sum of all deviations. `amounts` are (U, 2 Q):
    numbers of slides, then of patches, each as in `balanced_parts`. A class in as many units as parts is in each part.

    Source:
        F. M. Howard et al., The impact of site-specific digital histology signatures on deep learning model accuracy and
        bias, Nature Communications 12 (2021): sites in one fold each. They minimise the squared deviations of the classes.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # imported late: takes 0.3 s

    used, (units, quantities) = np.flatnonzero(shares), amounts.shape
    share, parts, columns = np.array(shares)[used] / sum(shares), len(used), quantities // 2
    if units * parts > _MOST_CHOICES:
        return None
    totals = amounts.sum(axis=0)
    sums = np.kron((amounts / np.maximum(totals, 1)).T, np.eye(parts))
    weights = np.repeat([1.0, _WEIGHT_OF_PATCHES], columns)
    weights[columns + 1 :] /= max(1, columns - 1)
    # Variables: whether a unit is in a part; the deviation of each quantity in each part; the largest one of a class.
    size, deviations = units * parts, quantities * parts
    each, largest = np.eye(deviations), np.zeros((deviations, 1))
    target = np.outer(totals > 0, share).ravel()
    rows = np.arange(deviations).reshape(quantities, parts)[1 : classes + 1].ravel()
    frequent = [0, *(n for n in range(1, classes + 1) if np.count_nonzero(amounts[:, n]) >= parts)]
    wide = ((0, 0), (0, deviations + 1))
    constraints = [
        LinearConstraint(np.pad(np.kron(np.eye(units), np.ones((1, parts))), wide), 1, 1),
        LinearConstraint(np.hstack([sums, -each, largest]), -np.inf, target),
        LinearConstraint(np.hstack([sums, each, largest]), target, np.inf),
        LinearConstraint(np.hstack([0 * sums, each, largest - 1])[rows], -np.inf, 0),
        LinearConstraint(
            np.pad(np.kron((amounts[:, frequent] > 0).T, np.eye(parts)), wide), 1, np.inf
        ),
    ]
    costs = (
        np.random.RandomState(seed & 0x7FFFFFFF).uniform(0, _WEIGHT_OF_CHANCE, size),
        np.outer(weights, 1 / share / parts).ravel(),
        [_WEIGHT_OF_CLASSES],
    )
    result = milp(
        np.concatenate(costs),
        constraints=constraints,
        bounds=Bounds(0, np.append(np.ones(size), np.full(deviations + 1, np.inf))),
        integrality=np.append(np.ones(size), np.zeros(deviations + 1)),
        options={"node_limit": _NODES, "time_limit": _SECONDS, "mip_rel_gap": 0.01},
    )
    if result.x is None or result.status == _TIME_LIMIT:
        return None
    return np.asarray(used[result.x[:size].reshape(units, parts).argmax(axis=1)], np.int64)


class _PartCost:
    """Parts of units, which start with the largest unit, and the cost of their differences from the shares.

    The cost of a part is the weighted sum of log²(ratio to its share) over numbers of units and of patches. Squared
    differences would accept a nearly empty part for a smaller excess elsewhere.
    """

    def __init__(
        self, patches: NDArray[np.int64], needed: int, shares: NDArray[np.float64], seed: int
    ) -> None:
        self._rng, self._shares = np.random.RandomState(seed & 0x7FFFFFFF), shares
        amounts = np.hstack([patches > 0, patches]).astype(np.float64)  # (U, 2 Q)
        totals, columns = amounts.sum(axis=0), patches.shape[1]
        # A range of a target with too few units for the smallest part would change its share of units.
        weights = (totals[:columns] * shares.min() >= 1) * 0.5 / max(1, columns - needed)
        weights[1:needed], weights[0] = 0.5 / max(1, needed - 1), 1.0
        self._weights, self._needed = np.tile(weights, 2) * (totals > 0), slice(0, needed)
        self._loads = amounts / np.maximum(totals, 1)
        # A class with a single unit is needed in the largest part, for training. Of equal parts the first has priority.
        self._missing = _MISSING * (shares + np.linspace(0.01, 0, len(shares)))
        self._sums = np.zeros((len(shares), 2 * columns))
        self.parts = np.zeros(len(amounts), np.int64)
        sizes = self._loads @ self._weights * np.exp(self._rng.uniform(0, 0.5, len(amounts)))
        for unit in np.argsort(-sizes, kind="stable").tolist():
            gains = self._cost(self._sums + self._loads[unit]) - self._cost(self._sums)
            self._move(unit, _least(gains[None])[2])

    def _move(self, unit: int, part: int) -> None:
        self._sums[part] += self._loads[unit]
        self.parts[unit] = part

    def exchange(self) -> bool:
        """Make the best of the compared exchanges; return False if none improves the balance."""
        chosen = self._rng.permutation(len(self.parts))[:_MAX_MOVED]
        loads, parts, costs = self._loads[chosen], self.parts[chosen], self._cost(self._sums)
        leaving = self._cost(self._sums[parts] - loads, parts) - costs[parts]
        gains = self._cost(self._sums + loads[:, None]) - costs + leaving[:, None]
        gains[np.arange(len(chosen)), parts] = 0.0
        best, unit, part = _least(gains)
        changes = [(chosen[unit], part)]
        loads, parts = loads[:_MAX_SWAPPED], parts[:_MAX_SWAPPED]
        sums = (self._sums[parts] - loads)[:, None] + loads
        gains = self._cost(sums, parts[:, None]) - costs[parts][:, None]
        gains = np.where(parts[:, None] == parts, 0.0, gains + gains.T)
        least, unit, other = _least(gains)
        if least < best:
            best, changes = least, [(chosen[unit], parts[other]), (chosen[other], parts[unit])]
        for unit, part in changes if best < -_LEAST_GAIN else ():
            self._sums[self.parts[unit]] -= self._loads[unit]
            self._move(unit, part)
        return best < -_LEAST_GAIN

    def _cost(self, sums: NDArray[np.float64], part: Any = slice(None)) -> NDArray[np.float64]:
        """Return the cost (...) of parts (...) with (..., 2 Q) shares of all amounts; of all parts (..., S, 2 Q)."""
        ratios = np.maximum(sums, 0) / self._shares[part][..., None]
        absent = (sums[..., self._needed] < _ROUNDING) @ np.sign(self._weights[self._needed])
        logs = np.log((ratios + _FLOOR) / (1 + _FLOOR))
        return np.asarray(logs**2 @ self._weights + absent * self._missing[part])


def _least(gains: NDArray[np.float64]) -> tuple[float, int, int]:
    """Return the least number of (N, M), rounded so that machines agree on the first of equal ones, and its place."""
    rounded = np.round(gains, 9)
    row, column = divmod(int(rounded.argmin()), gains.shape[1])
    return float(rounded[row, column]), row, column


def mark_patches(slide: SlideSplit, marks: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return (N, 1 + C) marks of the patches of a slide, of its annotated classes or else its `marks`; false if left out."""
    used = (slide.subsets != DROPPED)[:, None]
    if slide.labels is not None:
        return np.hstack([used, used & (slide.labels[:, None] == np.arange(len(marks) - 1))])
    return np.asarray(used & marks, np.bool_)


def copies_note(subset: Sequence[SlideSplit], slides: Sequence[SlideSplit]) -> str:
    """Return a note for messages: the copies among all slides of the slides in `subset`; empty if there are none."""
    copies = grouped(slides, lambda slide: slide.content)
    contents = sorted({slide.content for slide in subset if slide.content})
    ids = (sorted({slide.id for slide in copies.get(content, ())}) for content in contents)
    sets = [names for names in ids if len(names) > 1]
    texts = [" = ".join(names[:4]) + (" = …" if names[4:] else "") for names in sets[:3]]
    rest = f"; and {len(sets) - 3} more" if sets[3:] else ""
    note = f" (copies of one slide count as one and stay in one subset: {'; '.join(texts)}{rest})"
    return note if sets else ""
