"""The classifier of labels, its queue, and the agreement of raters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import cohen_kappa_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from histopipe.features.feature_file import features_at, writing
from histopipe.labels.agreement import agreed_labels, cohens_kappa, disagreements
from histopipe.labels.journal import UNSURE, PatchPlace
from histopipe.labels.learner import (
    ORDERS,
    LinearClassifier,
    QueueOrder,
    contradictions,
    fit_classifier,
    held_out_metrics,
    predict_file,
    queue,
    sample_features,
)

RNG = np.random.default_rng(4)


@pytest.mark.parametrize("present", [(0, 1), (0, 2), (0, 1, 2)])
def test_classifier_is_a_logistic_regression_of_standardised_features(
    present: tuple[int, ...],
) -> None:
    classes = RNG.choice(present, 60)
    features = RNG.normal(5, [1, 20, 0.1, 3], (60, 4)) + classes[:, None] * [1, 5, 0, 0]
    features[:, 2] = 7.0  # constant
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, class_weight="balanced"))
    p = model.fit(features, classes).predict_proba(features)
    output = fit_classifier(features.astype(np.float32), classes, 3).predict(features)
    np.testing.assert_allclose(output[:, list(present)], p, atol=1e-3)
    np.testing.assert_allclose(output.sum(axis=1), 1, atol=1e-5)


def test_features_of_other_scale_do_not_overflow() -> None:
    features = np.array([[1e4, -1e4], [-1e4, 1e4]], np.float32)
    model = LinearClassifier(np.eye(2, dtype=np.float32), np.zeros(2, np.float32))
    np.testing.assert_allclose(model.predict(features), np.eye(2))


def test_queue_orders() -> None:
    features = np.array([[0.1], [3], [-3], [0], [9], [-9]], np.float32)
    model = LinearClassifier(np.array([[-1.0, 1.0]], np.float32), np.zeros(2, np.float32))
    rows = np.array([5, 0, 2, 1])  # 3 and 4 are labelled

    def first(order: QueueOrder, count: int = 2, of_class: int = 0) -> Any:
        return queue(order, features, rows, count, classifier=model, of_class=of_class).tolist()

    assert first("uncertain") == [0, 2]
    assert first("certain") == [5, 2]
    assert first("certain", of_class=1) == [1, 0]
    assert first("random") == [5, 0]
    assert first("random", 9) == [5, 0, 2, 1]
    assert get_args(QueueOrder) == ORDERS


def test_far_patches_are_unlike_the_labels_and_each_other() -> None:
    angles = np.array([0, 0.02, np.pi / 2, np.pi / 2 + 0.02, np.pi])
    features = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    rows = np.array([1, 2, 3, 4])
    chosen = queue("far", features, rows, 3, references=features[:1]).tolist()
    assert chosen[:2] in ([4, 2], [4, 3])
    assert queue("far", features, rows, 9, references=features[:0]).tolist() == rows.tolist()
    assert sorted(queue("far", features, rows, 9, references=features[:1]).tolist()) == [1, 2, 3, 4]


def test_contradicted_labels_are_found_by_other_patients() -> None:
    classes = np.arange(80) % 2
    features = RNG.normal(0, 0.3, (80, 5)) + classes[:, None]
    groups = np.repeat(np.arange(8), 10)
    wrong = [3, 57]
    labels = classes.copy()
    labels[wrong] = 1 - labels[wrong]
    p = contradictions(features, labels, groups)
    assert sorted(np.argsort(p)[:2].tolist()) == wrong
    assert np.isnan(contradictions(features, labels, np.zeros(80, np.int64))).all()


def test_metrics_have_intervals_from_five_patients_on() -> None:
    label = np.tile([0, 1], 30)
    output = np.stack([1 - label * 0.8 - 0.1, label * 0.8 + 0.1], axis=1).astype(np.float32)
    for patients, has in ((4, False), (6, True)):
        metrics = held_out_metrics("ab", label, output, np.arange(60) % patients)
        assert metrics.balanced_accuracy == metrics.auc == 1
        assert ("balanced_accuracy" in metrics.intervals) == has


def test_features_of_files(tmp_path: Path) -> None:
    path = tmp_path / "slide.h5"
    features = RNG.normal(size=(50, 3)).astype(np.float32)
    features[7] = np.nan
    corners = np.stack([np.arange(50) * 64, np.full(50, 128)], axis=1)
    with writing(path, 50, 3, "float32") as writer:
        writer.append(features, corners)
        writer.finish({}, {"name": "slide"})
    asked = np.array([[640, 128], [0, 128], [5, 5], [640, 128]])
    np.testing.assert_array_equal(features_at(path, asked)[[0, 1, 3]], features[[10, 0, 10]])
    assert np.isnan(features_at(path, asked)[2]).all()
    places, values = sample_features(path, 20, 1)
    rows = places[:, 0] // 64
    assert 19 <= len(rows) == len({*rows.tolist()}) <= 20
    np.testing.assert_allclose(values, features[rows], atol=2e-3)
    assert 7 not in sample_features(path, 99, 1)[0][:, 0] // 64
    model = LinearClassifier(np.zeros((3, 2), np.float32), np.zeros(2, np.float32))
    predicted, p = predict_file(path, model)
    np.testing.assert_array_equal(predicted, corners)
    assert np.isnan(p[7]).all()
    np.testing.assert_array_equal(np.delete(p, 7, axis=0), 0.5)


Rated = dict[PatchPlace, str]
LABELS = st.dictionaries(
    st.integers(0, 15).map(lambda x: (f"s{x % 6}", x, 0)),
    st.sampled_from(["a", "b", UNSURE]),
)


@settings(max_examples=100, deadline=None)
@given(first=LABELS, second=LABELS)
def test_agreement_of_two_raters(first: Rated, second: Rated) -> None:
    result = cohens_kappa(first, second, "ab", lambda slide: slide, resamples=50)
    both = [p for p in first.keys() & second.keys() if UNSURE not in (first[p], second[p])]
    assert result.patches == len(both)
    assert result.patients == len({patch[0] for patch in both})
    pairs = [[labels[patch] for patch in both] for labels in (first, second)]
    if len({*pairs[0], *pairs[1]}) < 2:
        assert result.kappa is None
    else:
        assert result.kappa == pytest.approx(cohen_kappa_score(*pairs))
    assert result.interval is None or result.patients >= 5
    differing = disagreements({"x": first, "y": second})
    assert {*differing} == {p for p in first.keys() & second.keys() if first[p] != second[p]}
    agreed = agreed_labels({"x": first, "y": second})
    assert not agreed.keys() & differing.keys()
    assert agreed == {
        patch: name
        for labels in (first, second)
        for patch, name in labels.items()
        if name != UNSURE and patch not in differing
    }


def test_kappa_has_an_interval_by_patient() -> None:
    patches: list[PatchPlace] = [(f"s{n % 10}", n, 0) for n in range(200)]
    names = RNG.choice(["a", "b"], 200)
    other = np.where(RNG.random(200) < 0.15, RNG.choice(["a", "b"], 200), names)
    first, second = ({p: str(n) for p, n in zip(patches, of, strict=True)} for of in (names, other))
    result = cohens_kappa(first, second, "ab", lambda slide: slide)
    assert result.interval is not None
    assert result.kappa is not None
    assert result.interval[0] < result.kappa < result.interval[1]
