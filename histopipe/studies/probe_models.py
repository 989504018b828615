"""Probes of features: simple models that show what the features know, and how their neighbourhoods look.

Features are (N, D) float32, targets (N, T) float64 as of a task; see `histopipe.tasks.task`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.system.arrays import FloatArray
from histopipe.system.tensorflow import load_quietly
from histopipe.tasks.predictions import Predictions, labels_of
from histopipe.tasks.task import Task

PENALTIES = (1.0, 10.0, 100.0, 1e3, 1e4)
"""Weights of the squared coefficients in a linear probe, of standardised features. Validation chooses one."""
_USUAL = 100.0
"""Penalty without validation, and of equally good ones."""
_FITTED = 20_000
"""Most items that a linear probe is fitted to, and chosen by."""
_MOST_IN_CELL = 250
"""Most items of a class of a site in a comparison of two classes and two sites."""

Items = NDArray[np.intp]
SubsetRows = tuple[Items, Items, Items]
"""Items of training, validation and test."""
Predicted = tuple[Task, FloatArray]
"""The task as predicted, and the outputs of the test rows."""
Probe = Callable[[NDArray[np.float32], FloatArray, SubsetRows], Predicted]
"""Predicts from the features and targets of all items, and the rows of training, validation and test."""


def linear_probe(
    features: NDArray[np.float32], targets: FloatArray, rows: SubsetRows, *, task: Task
) -> Predicted:
    """Predict by a logistic, ridge or Cox regression of standardised features.

    Validation chooses the penalty by the main metric of the task. The last fit is on training and validation.
    """
    from sklearn.preprocessing import StandardScaler  # imported late, so that `--help` is fast

    objective_class = load_quietly("histopipe.training.objectives").objective_class

    def fitted(chosen: Items, penalty: float, asked: Items) -> tuple[Task, Any]:
        scaler = StandardScaler().fit(features[chosen])
        inputs, tested = (scaler.transform(features[each]) for each in (chosen, asked))
        loss = task.linear_loss
        objective = objective_class(task.name, loss).of(
            targets[chosen], loss, classes=len(task.classes)
        )
        kernel, bias = objective.fit_linear(inputs, targets[chosen], penalty)
        objective.fit_baseline((inputs @ kernel + bias)[:, 0], targets[chosen])
        output = np.asarray(objective.activate(tested @ kernel + bias), np.float32)
        return objective.described(task), objective.predictions(output)

    def quality(penalty: float) -> tuple[float, bool]:
        of_task, output = fitted(train, penalty, validation)
        value = of_task.epoch_metrics(targets[validation], output)[next(iter(task.main))]
        return (-np.inf if value is None else value), penalty == _USUAL

    train, validation, test = rows
    train = train[:: -(-len(train) // _FITTED) or 1]
    both = np.concatenate([train, validation[:: -(-len(validation) // _FITTED) or 1]])
    best = max(PENALTIES, key=quality) if len(validation) else _USUAL
    return fitted(both, best, test)


def neighbour_probe(
    features: NDArray[np.float32], targets: FloatArray, rows: SubsetRows, *, task: Task, count: int
) -> Predicted:
    """Predict the mean target of the `count` nearest training items: of classes their shares, of others their mean.

    Features are centred by the training items. Nearest is the largest cosine. Missing targets count as their mean.
    """
    from sklearn.neighbors import KNeighborsRegressor
    from sklearn.preprocessing import normalize

    training = np.concatenate(rows[:2])
    values, mean = targets[training], features[training].mean(axis=0)
    if task.of_classes:
        values = np.eye(len(task.classes))[labels_of(values)]
    values = np.where(np.isfinite(values), values, np.nanmean(values, axis=0))
    # Among features of unit length, those of the largest cosine. The metric "cosine" would need more memory.
    model = KNeighborsRegressor(min(count, len(training)), algorithm="brute")
    model.fit(normalize(features[training] - mean), values)
    return task, model.predict(normalize(features[rows[2]] - mean))


def few_shot_probe(
    features: NDArray[np.float32],
    targets: FloatArray,
    rows: SubsetRows,
    *,
    task: Task,
    patients: NDArray[np.int32],
    shots: int,
    seed: Sequence[int],
) -> Predicted:
    """Predict by the nearest class mean of the features of `shots` training patients per class, drawn by `seed`.

    Source:
        Y. Wang et al., "SimpleShot" (2019): centred features of unit length, and the nearest centroid.
    """
    from scipy.special import softmax
    from sklearn.preprocessing import normalize

    rng, training = np.random.default_rng(seed), np.concatenate(rows[:2])
    labels, drawn = labels_of(targets), []
    for label in range(len(task.classes)):
        of_class = training[labels[training] == label]
        units = np.unique(patients[of_class])
        chosen = rng.choice(units, min(shots, len(units)), replace=False)
        drawn.append(of_class[np.isin(patients[of_class], chosen)])
    mean = features[np.concatenate(drawn)].mean(axis=0)
    centres = np.stack([normalize(features[of_class] - mean).mean(axis=0) for of_class in drawn])
    asked = normalize(features[rows[2]] - mean)
    distance = ((asked[:, None] - centres) ** 2).sum(axis=2, dtype=np.float64)
    return task, softmax(-distance, axis=1)


def nearest_of_others(
    features: NDArray[np.float32], count: int, patients: NDArray[np.int32]
) -> NDArray[np.intp]:
    """Return the rows of the `count` features with the largest cosine that are of other patients, the most similar first.

    -1 fills rows with too few others.
    """
    from sklearn.metrics.pairwise import cosine_similarity

    similarity = cosine_similarity(features)
    similarity[patients[:, None] == patients] = -np.inf
    near = np.argsort(-similarity, axis=1, kind="stable")[:, :count]
    return np.where(np.isfinite(np.take_along_axis(similarity, near, axis=1)), near, -1)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Neighbours of the same class and another site, and of another class and the same site.

    Attributes:
        counts: (P, P) sparse numbers of both kinds, of the patients of items and those of their neighbours, by site of the
            items.
        noise: numbers of both kinds that neighbours at random have, on average.
        compared, left_out: comparisons of two classes at two sites, and those left out, since a class of a site has fewer
            items than an item has neighbours.
    """

    counts: Mapping[int, tuple[Any, Any]]
    noise: FloatArray
    compared: int
    left_out: int

    def index(self, weights: FloatArray, site: int | None = None) -> FloatArray:
        """Return the (R,) robustness index, or that of the items of a site, for (R, P) weights of the patients.

        A pair has the weights of both patients, so that resamples draw the neighbours, too. NaN without neighbours.
        """
        chosen = [both for of_site, both in self.counts.items() if site in (None, of_site)]
        by_class, by_site = (
            sum(
                (np.asarray(((both[kind] @ weights.T) * weights.T).sum(axis=0)) for both in chosen),
                np.zeros(len(weights)),
            )
            for kind in (0, 1)
        )
        with np.errstate(invalid="ignore"):
            return np.asarray(by_class / (by_class + by_site), np.float64)

    @property
    def of_noise(self) -> float:
        """Index of features without any information, of the same design: above a half if patients have both classes."""
        total = float(self.noise.sum())
        return float(self.noise[0]) / total if total else math.nan


def robustness(  # noqa: PLR0917 - columns of one table
    features: NDArray[np.float32],
    labels: NDArray[np.int32],
    sites: NDArray[np.int32],
    patients: NDArray[np.int32],
    count: int,
    seed: int,
) -> Neighbours:
    """Count the neighbours that share the class but not the site, and the site but not the class.

    Each two classes at each two sites are compared alone, with equal numbers of items of the four kinds, drawn by `seed`:
    neighbours are those of the largest cosine, of other patients.

    Source:
        J. Kömen et al., "Towards robust foundation models for digital pathology" (2026): the index is SO / (SO + OS), of
        all neighbours of same class and other site, and other class and same site, in balanced 2 by 2 designs.
    """
    from scipy.sparse import coo_array  # imported late, so that `--help` is fast

    rng, size_of_all = np.random.default_rng(seed), int(patients.max(initial=0)) + 1
    pairs: dict[int, tuple[list[Any], list[Any]]] = {}
    noise, compared, left_out = np.zeros(2), 0, 0
    cells = {
        (label, site): np.flatnonzero((labels == label) & (sites == site))
        for label in np.unique(labels[labels >= 0]).tolist()
        for site in np.unique(sites[sites >= 0]).tolist()
    }
    by_class, by_site = (sorted({key[place] for key in cells}) for place in (0, 1))
    for of_class in itertools.combinations(by_class, 2):
        for of_site in itertools.combinations(by_site, 2):
            four = [cells[key] for key in itertools.product(of_class, of_site)]
            size = min(_MOST_IN_CELL, *map(len, four))
            rows = np.concatenate([rng.choice(cell, size, replace=False) for cell in four])
            if not size:
                continue
            compared += 1
            if size < count:
                left_out += 1
                continue
            of_rows = patients[rows]
            near = nearest_of_others(features[rows], count, of_rows)
            other = rows[near]
            alike = labels[other] == labels[rows, None]
            same_place = sites[other] == sites[rows, None]
            for kind, of_kind in enumerate((alike & ~same_place, ~alike & same_place)):
                item, place = np.nonzero(of_kind & (near >= 0))
                codes = of_rows[item].astype(np.int64) * size_of_all + patients[other[item, place]]
                for site in of_site:
                    lists = pairs.setdefault(site, ([], []))
                    lists[kind].append(codes[sites[rows[item]] == site])
            noise += _random_neighbours(of_rows, size, count)
    counts = {
        site: tuple(
            coo_array(
                (number.astype(np.float64), (codes // size_of_all, codes % size_of_all)),
                shape=(size_of_all, size_of_all),
            ).tocsr()
            for codes, number in (
                np.unique(np.concatenate(of_kind), return_counts=True) for of_kind in lists
            )
        )
        for site, lists in pairs.items()
    }
    return Neighbours(counts, noise, compared, left_out)


def _random_neighbours(patients: NDArray[np.int32], size: int, count: int) -> FloatArray:
    """Return the mean numbers of both kinds among `count` random neighbours of other patients, in all, (2,).

    Of 4 `size` items: class 1 at site 1, class 1 at site 2, class 2 at site 1, class 2 at site 2.
    """
    cell = np.repeat(np.arange(4), size)
    _, unit = np.unique(patients, return_inverse=True)
    of_patients = np.bincount(4 * unit + cell, minlength=4 * (unit.max() + 1)).reshape(-1, 4)[unit]
    others_left = np.maximum(4 * size - of_patients.sum(axis=1), 1)
    share = np.minimum(count, others_left) / others_left
    items = np.arange(4 * size)
    return np.array([((size - of_patients[items, cell ^ way]) * share).sum() for way in (1, 2)])


def crossed(
    probe: Probe, features: NDArray[np.float32], blank: Predictions, folds: Sequence[SubsetRows]
) -> list[Predictions]:
    """Return the predictions of the test rows of each fold. `blank` has the targets of all rows."""
    predicted = []
    for rows in folds:
        task, output = probe(features, blank.target, rows)
        predicted.append(replace(blank.rows(rows[2]), task=task, output=output))
    return predicted
