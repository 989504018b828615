"""Probes of features: against scikit-learn, by hand, and the whole command on planted signals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import histopipe
from helpers.bags import write_bag
from helpers.commands import RunCommand, succeed
from helpers.examples import examples
from helpers.trainings import csv_rows
from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.studies.probe import read_probe
from histopipe.studies.probe_data import ProbeData, open_features
from histopipe.studies.probe_models import (
    few_shot_probe,
    linear_probe,
    nearest_of_others,
    neighbour_probe,
    robustness,
)
from histopipe.studies.study_settings import ProbeSettings
from histopipe.tasks.classification import Classification
from histopipe.tasks.predictions import labels_of
from histopipe.tasks.regression import Regression
from histopipe.tasks.survival import Survival

CLASSES = Classification(classes=("a", "b", "c"))
NONE: Any = np.empty(0, np.intp)
SITES, PATIENTS = 4, 48


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices are slow with several threads per test worker. Only loaded libraries are limited."""
    for name in ("sklearn.linear_model", "tensorflow"):
        import_module(name)
    with import_module("threadpoolctl").threadpool_limits(1):
        yield


def some_features(rows: int, seed: int, columns: int = 6) -> Any:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def class_targets(rows: int, seed: int) -> Any:
    labels = np.random.default_rng(seed + 50).permutation(np.arange(rows) % 3)
    return labels[:, None].astype(np.float64)


@given(seed=st.integers(0, 99), count=st.integers(1, 9))
@examples(10)
def test_neighbours_equal_those_of_scikit_learn(seed: int, count: int) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    features, targets = some_features(40, seed), class_targets(40, seed)
    rows: Any = np.split(np.arange(40), [20, 30])
    _, output = neighbour_probe(features, targets, rows, task=CLASSES, count=count)
    mean = features[:30].mean(axis=0)
    reference = KNeighborsClassifier(count, metric="cosine")
    reference.fit(features[:30] - mean, targets[:30, 0])
    np.testing.assert_allclose(output, reference.predict_proba(features[30:] - mean), atol=1e-6)


@given(seed=st.integers(0, 99))
@examples(5)
def test_linear_probes_equal_those_of_scikit_learn(seed: int) -> None:
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.preprocessing import StandardScaler

    features, targets = some_features(60, seed), class_targets(60, seed)
    train, test = np.arange(45), np.arange(45, 60)
    scaled = StandardScaler().fit(features[train]).transform(features)
    # Without validation, the penalty is 100.
    task, output = linear_probe(features, targets, (train, NONE, test), task=CLASSES)
    reference: Any = LogisticRegression(C=0.01, max_iter=1000).fit(scaled[train], targets[train, 0])
    assert task == CLASSES
    np.testing.assert_allclose(output, reference.predict_proba(scaled[test]), atol=1e-3)

    numbers = np.random.default_rng(seed).normal(50, 9, (60, 1))
    _, output = linear_probe(features, numbers, (train, NONE, test), task=Regression(("age",)))
    scale = numbers[train].std()
    reference = Ridge(alpha=100).fit(
        scaled[train], (numbers[train] - numbers[train].mean()) / scale
    )
    expected = reference.predict(scaled[test]).reshape(-1, 1) * scale + numbers[train].mean()
    np.testing.assert_allclose(output, expected, rtol=1e-4)


def test_linear_probe_of_survival_equals_a_cox_regression() -> None:
    survival = pytest.importorskip("sksurv.linear_model")
    from sksurv.util import Surv

    rng, features = np.random.default_rng(2), some_features(80, 2)
    time = rng.exponential(np.exp(-features[:, 0]))
    event = (rng.uniform(size=80) < 0.7).astype(np.float64)
    targets, train, test = np.column_stack([time, event]), np.arange(60), np.arange(60, 80)
    task, output = linear_probe(
        features, targets, (train, NONE, test), task=Survival(("time", "event"))
    )
    assert isinstance(task, Survival) and output.shape == (20, 1 + len(task.grid))
    scaled = (features - features[train].mean(axis=0)) / features[train].std(axis=0)
    # Its loss is a sum over the events, with the standard deviation of a sample.
    scaled *= features[train].std(axis=0) / features[train].std(axis=0, ddof=1)
    reference = survival.CoxPHSurvivalAnalysis(alpha=100, ties="efron")
    reference.fit(scaled[train], Surv.from_arrays(event[train] == 1, time[train]))
    expected = reference.predict(scaled[test])
    np.testing.assert_allclose(np.argsort(output[:, 0]), np.argsort(expected))
    assert np.polyfit(expected, output[:, 0], 1)[0] == pytest.approx(1, abs=0.02)


@given(seed=st.integers(0, 99), signal=st.sampled_from([0.1, 0.5, 1.5]))
@examples(6)
def test_validation_chooses_the_penalty(seed: int, signal: float) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    features, labels = some_features(90, seed, 30), np.arange(90) % 2
    features[:, 0] += signal * labels
    train, validation, test = np.arange(40), np.arange(40, 70), np.arange(70, 90)
    both = np.arange(70)

    def fitted(rows: Any, asked: Any, penalty: float) -> Any:
        mean, deviation = features[rows].mean(axis=0), features[rows].std(axis=0)
        model = LogisticRegression(C=1 / penalty, max_iter=1000)
        model.fit((features[rows] - mean) / deviation, labels[rows])
        return model.predict_proba((features[asked] - mean) / deviation)

    def area(penalty: float) -> tuple[float, bool]:
        scores = fitted(train, validation, penalty)[:, 1]
        return round(float(roc_auc_score(labels[validation], scores)), 9), penalty == 100

    best = max((1.0, 10.0, 100.0, 1e3, 1e4), key=area)
    targets, task = labels[:, None].astype(np.float64), Classification(classes=("a", "b"))
    _, output = linear_probe(features, targets, (train, validation, test), task=task)
    np.testing.assert_allclose(output, fitted(both, test, best), atol=2e-3)


def test_few_patients_are_drawn_by_class_and_compared_with_the_means_of_classes() -> None:
    features, targets = some_features(30, 4), class_targets(30, 4)
    patients = (np.arange(30) // 2).astype(np.int32)
    labels, train, test = targets[:, 0].astype(int), np.arange(24), np.arange(24, 30)
    rows = train, NONE, test
    _, output = few_shot_probe(
        features, targets, rows, task=CLASSES, patients=patients, shots=2, seed=[1, 0]
    )
    rng, support = np.random.default_rng([1, 0]), []
    for label in range(3):
        units = sorted({patients[row] for row in train if labels[row] == label})
        chosen = rng.choice(units, 2, replace=False)
        support.append([row for row in train if labels[row] == label and patients[row] in chosen])
    mean = features[np.concatenate(support)].mean(axis=0)

    def unit(rows: Any) -> Any:
        moved = features[rows] - mean
        return moved / np.linalg.norm(moved, axis=1, keepdims=True)

    centres = np.stack([unit(rows).mean(axis=0) for rows in support])
    for row, shares in zip(test, output, strict=True):
        distance = ((unit([row]) - centres) ** 2).sum(axis=1)
        np.testing.assert_allclose(shares, np.exp(-distance) / np.exp(-distance).sum(), rtol=1e-4)


def test_nearest_are_never_of_the_same_patient_and_in_order() -> None:
    features = some_features(600, 3)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    patients = np.random.default_rng(3).integers(0, 30, 600).astype(np.int32)
    near = nearest_of_others(features, 7, patients)
    similarity = unit @ unit.T
    similarity[patients[:, None] == patients] = -np.inf
    np.testing.assert_array_equal(near, np.argsort(-similarity, axis=1)[:, :7])
    alone = nearest_of_others(features[:3], 2, np.array([1, 1, 2], np.int32))
    assert alone.tolist() == [[2, -1], [2, -1], [0, 1]] or alone.tolist()[0] == [2, -1]


@given(seed=st.integers(0, 99))
@examples(8)
def test_robustness_index_equals_that_of_a_loop_over_pairs(seed: int) -> None:
    """Two classes at two sites with ten items of each, of two patients per site who have both classes."""
    rng, features = np.random.default_rng(seed), some_features(40, seed, 3)
    labels, sites = (np.repeat(np.arange(4), 10) // 2).astype(np.int32), np.arange(40) // 10 % 2
    patients = (2 * sites + rng.permutation(np.arange(40) % 2)).astype(np.int32)
    counts = robustness(features, labels, sites.astype(np.int32), patients, 5, seed=1)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    weights = rng.integers(0, 3, (4, 4)).astype(float)
    both, random = np.zeros((3, 2, 4)), np.zeros(2)
    for item in range(40):
        strangers = np.flatnonzero(patients != patients[item])
        near = strangers[np.argsort(-(unit[strangers] @ unit[item]), kind="stable")[:5]]
        for other in range(40):
            alike, same_place = labels[other] == labels[item], sites[other] == sites[item]
            if alike == same_place or patients[other] == patients[item]:
                continue
            random[int(same_place)] += 5 / len(strangers)
            if other in near:
                pair = weights[:, patients[item]] * weights[:, patients[other]]
                both[sites[item], int(same_place)] += pair
    both[2] = both[0] + both[1]
    with np.errstate(invalid="ignore"):
        expected = both[:, 0] / both.sum(axis=1)
    for site, values in zip((0, 1, None), expected, strict=True):
        np.testing.assert_allclose(counts.index(weights, site), values)
    assert counts.of_noise == pytest.approx(random[0] / random.sum())


@pytest.mark.parametrize(("patients", "noise"), [(1, 1.0), (2, 2 / 3), (5, 5 / 9), (400, 0.5)])
def test_index_of_noise_is_above_a_half_if_few_patients_have_both_classes(
    patients: int, noise: float
) -> None:
    """Items of the same patient are no neighbours, so that items of the same site are missing."""
    rng, count = np.random.default_rng(patients), 1600
    labels, sites = np.arange(count) % 2, np.arange(count) // 2 % 2
    of_site = np.arange(count) // 4 % patients
    of_noise, index = 0.0, []
    for seed in range(3):
        counts = robustness(
            rng.normal(size=(count, 8)).astype(np.float32),
            labels.astype(np.int32),
            sites.astype(np.int32),
            (patients * sites + of_site).astype(np.int32),
            20,
            seed=seed,
        )
        of_noise = counts.of_noise
        index.append(counts.index(np.ones((1, 2 * patients)))[0])
    assert of_noise == pytest.approx(noise, abs=0.01)
    assert np.mean(index) == pytest.approx(of_noise, abs=0.02)


def test_robustness_is_of_balanced_designs() -> None:
    """Of noise it is a half, however unequal classes and sites are. A class of a site with few items is left out."""
    rng = np.random.default_rng(5)
    labels, sites = (rng.choice(3, 3000, p=p).astype(np.int32) for p in ([0.7, 0.2, 0.1],) * 2)
    sites[labels == 0] = 0  # class 0 has site 0 only, so that it is in no design
    patients = np.arange(3000, dtype=np.int32)
    counts = robustness(some_features(3000, 6), labels, sites, patients, 10, seed=1)
    assert counts.index(np.ones((1, 3000)))[0] == pytest.approx(0.5, abs=0.02)
    assert (counts.compared, counts.left_out) == (3, 0)
    fewest = min(int(((labels == 2) & (sites == site)).sum()) for site in (1, 2))
    counts = robustness(some_features(3000, 6), labels, sites, patients, fewest + 1, seed=1)
    assert counts.left_out >= 1


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three feature sets of 48 patients with one or two slides, of a class and a site."""
    folder, rng = tmp_path_factory.mktemp("probed"), np.random.default_rng(0)
    rows = ["slide,label,patient,site,age,time,event"]
    for number in range(PATIENTS):
        label, site = number % 2, number // 2 % SITES
        age, time = 50 + 8 * label + rng.normal(), rng.exponential(4 - 3.5 * label) + 0.1
        for scan in range(1 + number % 3 // 2):
            name = f"s{number}-{scan}"
            rows.append(f"{name},{'ab'[label]},p{number},h{site},{age:.1f},{time:.3f},1")
            for kind, of_class, of_site in (("good", 1.5, 0), ("sitely", 0.6, 3), ("noise", 0, 0)):
                values = rng.normal(size=(30, 8))
                values[:, 0] += of_class * (2 * label - 1)
                values[:, 1 + site] += of_site
                write_bag(folder / kind / f"{name}.h5", values.astype(np.float32))
    (folder / "labels.csv").write_text("\n".join(rows))
    return folder


def scores(result: Any, probe: str) -> dict[str, Any]:
    return {score.features: score for score in result.scores if score.probe == probe}


@pytest.mark.long(reason="all probes of three feature sets")
def test_probes_find_planted_signals_and_sites(sets: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "labels": sets / "labels.csv",
        "shots": (4,),
        "draws": 3,
        "resamples": 100,
    }
    folders, out = [sets / name for name in ("good", "sitely", "noise")], tmp_path / "probe"
    result = histopipe.probe(folders, out=out, **options)
    assert (result.patients, result.sets["good"]["bytes_per_patch"]) == (PATIENTS, 32)
    for probe in ("linear", "20 neighbours", "4 per class", "other sites"):
        of_probe = scores(result, probe)
        assert of_probe["good"].values["auc"] > 0.9, probe
        assert of_probe["noise"].values["auc"] < 0.75, probe
        low, high = of_probe["noise"].differences["auc"].interval
        assert low < of_probe["noise"].differences["auc"].value < high < 0
        assert not of_probe["good"].differences
    of_site = scores(result, "site")
    assert of_site["sitely"].values["balanced_accuracy"] > 0.9
    assert of_site["good"].values["balanced_accuracy"] < 0.5
    index = {name: score.values for name, score in scores(result, "robustness index").items()}
    assert index["good"]["robustness_index"] > 0.7
    assert index["sitely"]["worst_site"] <= index["sitely"]["robustness_index"] < 0.4
    assert index["noise"]["robustness_index"] == pytest.approx(0.5, abs=0.05)
    assert json.loads((out / "probe.json").read_text()) == result.to_json()
    assert len(csv_rows(out / "probe.csv")) == sum(len(score.values) for score in result.scores)
    page = histopipe.report(out).file.read_text()
    for text in ("4 per class", "other sites", "robustness index", "the worst site is h", "<svg"):
        assert text in page
    assert read_probe(out) == result
    assert "  (probes)" in str(histopipe.info(out))
    (out / "probe.json").write_text("{}")
    with pytest.raises(DamagedStore):
        histopipe.report(out)
    # The same again, to the last digit.
    again = histopipe.probe(sets / "good", out=tmp_path / "a", **options)
    assert scores(again, "4 per class")["good"] == scores(result, "4 per class")["good"]


@pytest.mark.parametrize(
    "task",
    [
        {"task": "regression", "target": ("age",)},
        {"task": "survival", "time": "time", "event": "event"},
        {"bag": "patient"},
    ],
    ids=["regression", "survival", "patients"],
)
def test_probes_of_other_tasks_and_of_patients(sets: Path, tmp_path: Path, task: Any) -> None:
    result = histopipe.probe(
        [sets / "noise", sets / "good"],
        labels=sets / "labels.csv",
        out=tmp_path / "probe",
        shots=(2,),
        draws=2,
        resamples=50,
        **task,
    )
    linear = scores(result, "linear")
    main = next(iter(linear["good"].values))
    assert linear["good"].differences[main].interval[0] > 0
    assert linear["good"].values[main] > {"r2": 0.5, "c_index": 0.6, "auc": 0.9}[main]
    assert bool(scores(result, "20 neighbours")) == (task.get("task") != "survival")
    assert any("81 to 91 %" in note for note in result.notes) == (main != "r2")
    if task.get("bag"):
        assert result.items == result.patients == PATIENTS


def test_patches_are_probed_by_the_classes_of_outlines(tmp_path: Path) -> None:
    """Twelve slides of 10 by 10 patches; the left half is tumour."""
    rng, places = np.random.default_rng(1), 512 * np.indices((10, 10)).reshape(2, -1).T
    squares = {"stroma": (2560, 0, 5120, 5000), "tumour": (0, 0, 2560, 5120)}
    features = [
        {
            "type": "Feature",
            "geometry": {
                "type": "Polygon",
                "coordinates": [[(a, b), (c, b), (c, d), (a, d), (a, b)]],
            },
            "properties": {"classification": {"name": name}},
        }
        for name, (a, b, c, d) in squares.items()
    ]
    content = json.dumps({"type": "FeatureCollection", "features": features})
    sets, outlines = [tmp_path / "good", tmp_path / "noise"], tmp_path / "outlines"
    outlines.mkdir()
    for number in range(12):
        (outlines / f"s{number}.geojson").write_text(content)
        for folder, strength in zip(sets, (2.0, 0.0), strict=True):
            values = rng.normal(size=(100, 6)).astype(np.float32)
            values[places[:, 0] < 2560, 2] += strength
            write_bag(folder / f"s{number}.h5", values, places)
    options: dict[str, Any] = {
        "annotations": str(outlines),
        "shots": (1,),
        "draws": 3,
        "resamples": 100,
        "folds": 3,
        "out": tmp_path / "probe",
    }
    result = histopipe.probe(sets, **options)
    assert (result.items, result.patients) == (1200, 12)
    for probe in ("linear", "20 neighbours", "1 per class"):
        of_probe = scores(result, probe)
        assert of_probe["good"].values["auc"] > 0.85, probe
        assert of_probe["noise"].values["auc"] == pytest.approx(0.5, abs=0.08), probe
        assert of_probe["noise"].differences["auc"].interval[1] < 0
    with pytest.raises(UsageError, match="--permutations: found a patient with several targets"):
        histopipe.probe(sets[0], **options, permutations=5)
    write_bag(sets[1] / "s3.h5", np.ones((4, 6), np.float32), places[:4])
    with pytest.raises(UsageError, match=r"found other patches of s3, expected those of .*good"):
        histopipe.probe(sets, **options)
    with pytest.raises(UsageError, match="--annotations: found --bag patient"):
        histopipe.probe(sets[0], **options, bag="patient")


def test_all_slides_are_tested_and_a_class_per_site_has_no_index(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is that of tested patches. Two sites with one class each leave nothing to compare."""
    rows = csv_rows(sets / "labels.csv")
    labels = [
        "slide,label,patient,site",
        *("{slide},{label},{patient},{label}".format(**row) for row in rows),
    ]
    (tmp_path / "labels.csv").write_text("\n".join(labels))
    options: dict[str, Any] = {"labels": tmp_path / "labels.csv", "shots": (1,), "draws": 2}
    first = histopipe.probe(sets / "good", out=tmp_path / "p", resamples=50, **options)
    assert "good: no two sites have neighbours of two classes" in first.notes
    assert scores(first, "robustness index")["good"].values["robustness_index"] is None
    monkeypatch.setattr("histopipe.studies.probe_data._ASKED", 10)
    again = histopipe.probe(sets / "good", out=tmp_path / "p", resamples=50, **options)
    assert scores(again, "linear") == scores(first, "linear")


@pytest.mark.long(reason="probes of ten labellings of three feature sets")
def test_p_values_are_of_labels_exchanged_within_sites(sets: Path, tmp_path: Path) -> None:
    """A signal has the lowest p, noise none; so have features of the site if labels differ between sites."""
    options: dict[str, Any] = {"shots": (1,), "draws": 2, "resamples": 20, "neighbours": 5}
    rows = csv_rows(sets / "labels.csv")
    # Three of four patients of a site have one label: the site alone predicts it.
    labels = ["slide,label,patient,site"]
    for row in rows:
        number, site = int(row["patient"][1:]), int(row["site"][1:])
        label = "ab"[(site % 2) ^ (number % 12 // 2 == 3)]
        labels.append(f"{row['slide']},{label},{row['patient']},{row['site']}")
    (tmp_path / "labels.csv").write_text("\n".join(labels))
    names, folders = ("good", "noise"), [sets / "good", sets / "noise"]
    result = histopipe.probe(
        folders, labels=sets / "labels.csv", out=tmp_path / "p", permutations=9, **options
    )
    linear = {name: scores(result, "linear")[name] for name in names}
    assert linear["good"].p == 1 / 10 and (linear["noise"].p or 0) > 0.1
    assert "p: 9 permutations of the labels among the patients of a site" in result.notes
    assert read_probe(tmp_path / "p") == result and "0.100" in str(result)
    of_sites = histopipe.probe(
        sets / "sitely",
        labels=tmp_path / "labels.csv",
        out=tmp_path / "q",
        permutations=9,
        **options,
    )
    confounded = scores(of_sites, "linear")["sitely"]
    assert confounded.values["auc"] > 0.6 and (confounded.p or 0) > 0.1
    loss = scores(of_sites, "other sites")["sitely"].less_linear["auc"]
    assert loss.value is not None and loss.interval is not None and loss.interval[1] < 0.1


def test_exchanged_patients_keep_their_sites_and_all_items(sets: Path) -> None:
    opened = {"good": open_features(sets / "good", {"labels": str(sets / "labels.csv")})}
    data = ProbeData.of(opened, ProbeSettings())
    names, sites = data.sites
    before = [np.bincount(labels_of(data.blank.target)[sites == n]) for n in range(len(names))]
    target, folds = data.permuted(1)
    assert (target != data.blank.target).any() and len(folds) == 5
    of_patient: dict[int, float] = {}
    for patient, value in zip(data.blank.patient.tolist(), target[:, 0].tolist(), strict=True):
        assert of_patient.setdefault(patient, value) == value
    tested = np.sort(np.concatenate([test for *_, test in folds]))
    assert tested.tolist() == list(range(len(data.blank)))
    patients = [np.unique(data.blank.patient[sites == n]) for n in range(len(names))]
    for of_site in patients:
        first = [np.flatnonzero(data.blank.patient == p)[0] for p in of_site]
        assert sorted(target[first, 0]) == sorted(data.blank.target[first, 0])
    again, _ = data.permuted(1)
    assert (again == target).all() and (data.permuted(2)[0] != target).any() and before


def test_slides_that_a_set_lacks_are_left_out(sets: Path, tmp_path: Path) -> None:
    some, none = tmp_path / "some", tmp_path / "none"
    some.mkdir()
    for path in sorted((sets / "good").glob("*.h5"))[3:]:
        (some / path.name).symlink_to(path)
    options: dict[str, Any] = {
        "labels": sets / "labels.csv",
        "shots": (1,),
        "draws": 2,
        "resamples": 50,
        "allow_extra_rows": True,
    }
    result = histopipe.probe([sets / "good", some], out=tmp_path / "p", **options)
    assert "left out: 3 labelled bags that a feature set lacks" in result.notes
    of_some = [score for score in result.scores if score.probe in ("linear", "4 neighbours")]
    assert {d.value for score in of_some for d in score.differences.values()} == {0}
    write_bag(none / "other.h5", np.ones((3, 8), np.float32))
    with pytest.raises(NothingToDo, match="no labelled slide in common"):
        histopipe.probe([sets / "good", none], out=tmp_path / "q", **options)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (["good", "good"], {}, r"FEATURES: .*expected folders with different names"),
        (["good"], {"epochs": 3}, "unknown options: found epochs"),
        (["good"], {"shots": (0,)}, "--shots"),
        (["good"], {"out": __file__}, "cannot create or write to"),
    ],
)
def test_wrong_settings_of_a_probe_are_refused(
    sets: Path, tmp_path: Path, names: list[str], settings: dict[str, Any], message: str
) -> None:
    options = {"labels": sets / "labels.csv", "out": tmp_path / "p", **settings}
    with pytest.raises(UsageError, match=message):
        histopipe.probe([sets / name for name in names], **options)


def test_command_of_probes(sets: Path, tmp_path: Path, run: RunCommand) -> None:
    command = ("probe", sets / "good", "--labels", sets / "labels.csv", "--shots")
    done = run(*command, "1,x")
    assert done.returncode == 2 and "write 1,2,4" in done.stderr
    flags = ("--draws", 2, "--resamples", 20, "--out", tmp_path / "p", "--json")
    assert json.loads(succeed(*command, 1, *flags))["patients"] == PATIENTS
