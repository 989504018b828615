"""Folds and splits by site: whole sites, and class shares as near to those of a fold as sites allow."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulate_splits import Cohort, Group

from helpers.examples import examples
from histopipe.errors import NothingToDo
from histopipe.slides.tables import SlideLabel
from histopipe.splits import assignment
from histopipe.splits.assignment import Assignment, optimal_parts
from histopipe.splits.labelling import Labelling
from histopipe.splits.splitting import make_folds, make_splits
from histopipe.tasks.choices import TEST
from histopipe.tasks.registry import make_task


@pytest.fixture(scope="module")
def tool() -> Any:
    return importlib.import_module("simulate_sites")  # late: it loads scikit-learn


def deviation(parts: np.ndarray, slides: np.ndarray, shares: tuple[float, ...]) -> float:
    """The largest deviation of a class from its shares; infinite if a part lacks a class that enough units have."""
    counts = np.stack([slides[parts == part].sum(axis=0) for part in range(len(shares))])
    frequent = (slides > 0).sum(axis=0) >= len(shares)
    if (counts[:, frequent] == 0).any() or (counts[:, 0] == 0).any():
        return np.inf
    return float(
        np.abs(counts[:, 1:] / slides[:, 1:].sum(axis=0) - np.array(shares)[:, None]).max()
    )


@examples(25)
@given(
    sites=st.integers(3, 7),
    shares=st.sampled_from([(0.5, 0.5), (1 / 3,) * 3, (0.7, 0.15, 0.15)]),
    seed=st.integers(0, 10_000),
)
def test_class_shares_are_the_best_of_all_assignments(
    sites: int, shares: tuple[float, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    classes = rng.poisson(rng.choice([1, 4, 12], size=(sites, 1)), size=(sites, 3))
    classes[0] += 1
    slides = np.hstack([classes.sum(axis=1, keepdims=True), classes])
    patches = slides * rng.integers(1, 400, size=(sites, 1))
    every = (np.array(p) for p in itertools.product(range(len(shares)), repeat=sites))
    best = min(deviation(parts, slides, shares) for parts in every)
    parts = optimal_parts(np.hstack([slides, patches]), 3, shares, seed)
    if parts is None:
        assert best == np.inf  # the classes cannot be in all parts
        return
    assert deviation(parts, slides, shares) <= best + 0.05


def test_no_site_is_on_two_sides_of_a_cohort_like_tcga(tool: Any) -> None:
    cohort = tool.site_cohort(1)
    folds, again = (make_folds([cohort], 2, split_by="site", seed=1) for _ in range(2))
    for fold, same in zip(folds, again, strict=True):
        subsets = {(slide.site, int(slide.subsets[0])) for slide in fold.slides}
        assert len(subsets) == len({site for site, _ in subsets}) == 25
        assert [slide.subsets[0] for slide in fold.slides] == [s.subsets[0] for s in same.slides]
        assert not fold.leaks()
    tested = [slide.id for fold in folds for slide in fold.slides_on("test")]
    assert sorted(tested) == sorted(slide.id for slide in folds[0].slides)
    of_classes, of_patches = tool.deviations(folds)
    assert of_classes < 0.03 and of_patches < 0.03
    splits = make_splits([cohort], split_by="site", seed=1)
    assert not splits.leaks() and not list(splits.shortages("patches"))


@pytest.mark.parametrize("columns", [0, 4])
def test_ranges_of_a_target_are_balanced_without_classes(columns: int) -> None:
    """Regression and survival have no classes, but ranges."""
    rng = np.random.default_rng(5)
    slides = rng.integers(1, 9, size=(20, 1 + columns))
    (parts,) = Assignment((0.6, 0.2, 0.2), 1).assign(slides * 50, 0, slides)
    for part, share in enumerate((0.6, 0.2, 0.2)):
        of_part = slides[parts == part].sum(axis=0) / slides.sum(axis=0)
        assert np.abs(of_part - share).max() < 0.06


def test_exchanges_are_used_if_the_programme_ends_without_a_result(
    monkeypatch: pytest.MonkeyPatch, tool: Any
) -> None:
    cohort = tool.site_cohort(2, sites=8, patients=60)
    monkeypatch.setattr(assignment, "_SECONDS", 0.0)
    folds = make_folds([cohort], 3, split_by="site", seed=1)
    assert not any(fold.leaks() for fold in folds)
    assert all((fold.slides_on("test") and fold.slides_on("train")) for fold in folds)


def test_class_of_one_site_is_in_training(tool: Any) -> None:
    amounts = np.array([[9, 9, 0], [8, 8, 0], [7, 7, 0], [6, 0, 6]])
    (parts,) = Assignment((0.6, 0.2, 0.2), 1).assign(amounts * 10, 2, amounts)
    assert parts[3] == 0 and set(parts.tolist()) == {0, 1, 2}
    folds = Assignment((0.8, 0.2, 0.0), 1, 3).assign(amounts * 10, 2, amounts)
    assert ((folds == TEST).sum(axis=0) == 1).all()
    with pytest.raises(NothingToDo, match="class 'class 0' cannot be split"):
        make_splits([tool.site_cohort(1, sites=2, patients=12, classes=2)], split_by="site", seed=1)


def slides_of_sites(**sites: str) -> list[tuple[str, str, str]]:
    """Return a slide of a patient for each letter, its label."""
    return [(label, f"{site}{i}", site) for site, of in sites.items() for i, label in enumerate(of)]


def cohort_of(slides: Sequence[tuple[str, str, str]]) -> Cohort:
    """Return a cohort with a slide for each label, patient and site."""
    return Cohort([Group(f"s{i}", *slide[:2], 5, slide[2]) for i, slide in enumerate(slides)])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "sites",
    [
        {"A": "x" * 40, "B": "xyy", "C": "y" * 40, "D": "y" * 40},
        {"A": "yyyxx", "B": "y" * 11 + "xxx", "C": "y" * 60, "D": "y" * 7},
    ],
)
def test_rare_classes_are_in_each_training_as_exchanges_find(
    sites: dict[str, str], seed: int
) -> None:
    folds = make_folds([cohort_of(slides_of_sites(**sites))], 3, split_by="site", seed=seed)
    assert not any(fold.leaks() for fold in folds)
    assert all(fold.count()["train"]["x"] and fold.count()["train"]["y"] for fold in folds)


def test_site_on_two_sides_by_a_column_is_a_leak() -> None:
    slides = slides_of_sites(A="xyxyxy", B="xyxyxy", C="xyxyxy")
    labels = {
        f"s{i}": SlideLabel(label, patient, site, {"set": ("train", "val", "test")[i // 2 % 3]})
        for i, (label, patient, site) in enumerate(slides)
    }
    labelling = Labelling(labels=labels, split_column="set")
    by_site, by_patient = (
        make_splits([cohort_of(slides)], split_by=unit, seed=1, labelling=labelling)
        for unit in ("site", "patient")
    )
    assert by_site.leaks() == [f"site {site} on train and validation and test" for site in "ABC"]
    assert not by_patient.leaks()


def test_patients_of_several_sites_are_named() -> None:
    """Hospitals may number their patients in the same way."""
    joined = [
        (label, patient[1:], site) for label, patient, site in slides_of_sites(A="xy", B="xy")
    ]
    with pytest.raises(
        NothingToDo, match="found 1 site; sites with a common patient are one: 0, 1"
    ):
        make_splits([cohort_of(joined)], split_by="site", seed=1)
    slides = [*slides_of_sites(A="xxyy", B="xxyy", C="xxyy", D="xxyy"), ("x", "A0", "B")]
    splits = make_splits([cohort_of(slides)], split_by="site", seed=1)
    assert list(splits.shortages("patches"))[-1] == "sites with a common patient are one: A0"


def test_shortage_of_events_is_shown() -> None:
    """One of three sites has no event."""
    slides = slides_of_sites(A="x" * 18 + "yy", B="x" * 18 + "yy", C="y" * 20)
    targets = {"x": {"time": "5", "event": "1"}, "y": {"time": "9", "event": "0"}}
    labels = {
        f"s{i}": SlideLabel(None, patient, site, targets[label])
        for i, (label, patient, site) in enumerate(slides)
    }
    labelling = Labelling(labels=labels, task=make_task("survival", ("time", "event")))
    shares = (0.9, 0.0, 0.1)
    folds = make_folds(
        [cohort_of(slides)], 3, split_by="site", seed=1, labelling=labelling, fractions=shares
    )
    texts = [line for fold in folds for line in fold.shortages("patches")]
    assert [text for text in texts if "test has 0 of 36 slides with event" in text]
