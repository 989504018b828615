"""A classifier that learns from labelled patches, by the features of an encoder; and which patches to label next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.features.feature_file import read_coords, read_features, read_header
from histopipe.tasks.classification import Classification
from histopipe.tasks.metrics import Metrics, metrics_of
from histopipe.tasks.predictions import Predictions
from histopipe.tasks.statistics import bootstrap_draws

FEWEST_LABELS = 10
"""Fewest labels from which a classifier learns."""
MOST_CANDIDATES = 200_000
"""Most patches, drawn at random, of which the next ones to label are chosen."""
_PENALTY = 100.0
"""Weight of the squared coefficients of standardised features, against the sum of the losses; as of probes."""
_BLOCK = 8192
_REFERENCES, _FAR = 512, 20_000
"""Most labelled patches, and most candidates, whose distances are computed."""

QueueOrder = Literal["far", "random", "uncertain", "certain", "contradicted"]
ORDERS: tuple[QueueOrder, ...] = ("far", "random", "uncertain", "certain", "contradicted")
"""Ways to choose the next patches, the best one first, by measurement (docs/design/labelling.md)."""


@dataclass(frozen=True, slots=True)
class LinearClassifier:
    """Logistic regression: probabilities softmax(features · kernel + bias); kernel (D, C), bias (C,), float32.

    Standardisation of the features is part of both.
    """

    kernel: NDArray[np.float32]
    bias: NDArray[np.float32]

    def predict(self, features: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return (N, C) probabilities of (N, D) features; NaN for features that are not finite."""
        outputs = np.empty((len(features), len(self.bias)), np.float32)
        for start in range(0, len(features), _BLOCK):
            rows = slice(start, start + _BLOCK)
            logits = features[rows].astype(np.float32) @ self.kernel + self.bias
            exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
            outputs[rows] = exponents / exponents.sum(axis=1, keepdims=True)
        return outputs


def fit_classifier(
    features: NDArray[np.floating], classes: NDArray[np.integer], count: int
) -> LinearClassifier:
    """Fit a regularised logistic regression to (N, D) features of (N,) classes, of which at least two of `count` occur.

    Classes have the same weight, however many labels they have. A class without a label has the probability 0.
    """
    from sklearn.linear_model import LogisticRegression  # imported late: in worker processes only

    values = features.astype(np.float64)
    mean, scale = values.mean(axis=0), values.std(axis=0)
    scale = np.where(scale > 1e-6, scale, 1.0)
    model = LogisticRegression(C=1 / _PENALTY, class_weight="balanced", max_iter=200)
    model.fit((values - mean) / scale, classes)
    coefficients, intercepts = model.coef_, model.intercept_
    if len(model.classes_) == 2:  # one row, of the second class
        coefficients = np.concatenate([-coefficients, coefficients]) / 2
        intercepts = np.concatenate([-intercepts, intercepts]) / 2
    kernel, bias = np.zeros((features.shape[1], count)), np.full(count, -np.inf)
    kernel[:, model.classes_] = (coefficients / scale).T
    bias[model.classes_] = intercepts - coefficients @ (mean / scale)
    return LinearClassifier(kernel.astype(np.float32), bias.astype(np.float32))


def contradictions(
    features: NDArray[np.floating], classes: NDArray[np.integer], groups: NDArray[np.integer]
) -> NDArray[np.float32]:
    """Return (N,) probabilities of the labelled classes, by classifiers of other groups, such as patients; NaN for none."""
    result = np.full(len(classes), np.nan, np.float32)
    count = int(classes.max()) + 1
    numbers = np.unique(groups, return_inverse=True)[1] % 5
    for fold in np.unique(numbers).tolist():
        test = numbers == fold
        if len(np.unique(classes[~test])) > 1:
            model = fit_classifier(features[~test], classes[~test], count)
            result[test] = model.predict(features[test])[np.arange(test.sum()), classes[test]]
    return result


def held_out_metrics(
    classes: Sequence[str],
    label: NDArray[np.integer],
    output: NDArray[np.float32],
    patient: NDArray[np.integer],
    *,
    resamples: int = 1000,
) -> Metrics:
    """Return the metrics of (N, C) probabilities of held-out patches, with intervals by patient; see `metrics_of`."""
    names, numbers = np.unique(patient, return_inverse=True)
    numbers, place = numbers.astype(np.int32), np.zeros(len(label), np.int64)
    texts = tuple(map(str, names.tolist()))
    predictions = Predictions(
        Classification(classes=tuple(classes)),
        texts,
        texts,
        numbers,
        numbers,
        place,
        place,
        label.astype(np.float64)[:, None],
        output,
    )
    return metrics_of(predictions, draws=bootstrap_draws(len(names), resamples, 1))


def queue(
    order: QueueOrder,
    features: NDArray[np.floating],
    rows: NDArray[np.integer],
    count: int,
    *,
    classifier: LinearClassifier | None = None,
    of_class: int = 0,
    references: NDArray[np.floating] | None = None,
) -> NDArray[np.integer]:
    """Return the first `count` of the candidates `rows`, (M,) in random order, of (N, D) features.

    Args:
        order: "uncertain": both best classes are equally probable; "certain": the class `of_class` is most probable;
            "far": the largest distance to the nearest of the references, one after the other; "random".
        features: of all candidates.
        rows: those to choose from.
        count: most rows that are returned.
        classifier: needed for "uncertain" and "certain".
        of_class: number of the class for "certain".
        references: (R, D) features of the labelled patches, for "far".
    """
    if order in ("uncertain", "certain") and classifier is not None:
        # Of all candidates, block by block: rows of a large array would be copied at once.
        p = classifier.predict(features)[rows]
        best = np.sort(p, axis=1)
        value = best[:, -1] - best[:, -2] if order == "uncertain" else -p[:, of_class]
        return rows[np.argsort(np.nan_to_num(value, nan=np.inf), kind="stable")[:count]]
    if order != "far" or references is None or not len(references) or not len(rows):
        return rows[:count]
    rows = rows[:_FAR]
    values = _directions(features[rows])
    nearest = (values @ _directions(references[-_REFERENCES:]).T).max(axis=1)
    chosen: list[int] = []
    while len(chosen) < min(count, len(rows)):
        chosen.append(int(nearest.argmin()))
        nearest = np.maximum(nearest, values @ values[chosen[-1]])
        nearest[chosen] = np.inf
    return rows[chosen]


def _directions(features: NDArray[np.floating]) -> NDArray[np.float32]:
    values = features.astype(np.float32)
    return np.asarray(values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12))


def sample_features(
    path: Path, count: int, seed: int
) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Read at most `count` random patches of a feature file: (N, 2) corners, and (N, D) features, which are finite.

    Raises:
        DamagedStore: the file cannot be read.
    """
    header = read_header(path)
    corners = read_coords(header)
    if corners is None:
        return np.empty((0, 2), np.int32), np.empty((0, header.dimension), np.float16)
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.permutation(header.rows)[:count])
    values = read_features(header, rows)
    finite = np.isfinite(values).all(axis=1)
    # float16 has the largest number 65504.
    return corners[rows[finite]].astype(np.int32), values[finite].clip(-6e4, 6e4).astype(np.float16)


def predict_file(
    path: Path, classifier: LinearClassifier
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return (N, 2) corners and (N, C) probabilities of all patches of a feature file.

    Raises:
        UsageError: its features have another length than those of the classifier.
        DamagedStore: the file cannot be read.
    """
    header = read_header(path)
    if header.dimension != len(classifier.kernel):
        raise UsageError(
            f"{path}: the length of its features",
            found=header.dimension,
            expected=len(classifier.kernel),
        )
    corners = read_coords(header)
    if corners is None:
        return np.empty((0, 2), np.int64), np.empty((0, len(classifier.bias)), np.float32)
    return corners, classifier.predict(read_features(header))
