"""Test `compare`: settings that differ, and confidence intervals of differences."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from sklearn import metrics as sk

from helpers.commands import succeed
from helpers.runs import without_training
from histopipe.errors import DamagedStore, UsageError
from histopipe.predictions.prediction_tables import read_predictions, write_predictions
from histopipe.studies.compare import compare
from histopipe.tasks.intervals import interval_of
from histopipe.tasks.statistics import bootstrap_draws

ARGUMENTS = (
    "--epochs",
    "1",
    "--fractions",
    "0.34,0.33,0.33",
)


@pytest.fixture(scope="module")
def runs(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five runs without a training: b is worse than a, c has another split, and d and e are cross-validations."""
    folder = tmp_path_factory.mktemp("compared")
    for name, (skill, flags) in {
        "a": (0.5, ()),
        "b": (0.2, ("--optimizer", "sgd", "--augment", "none")),
        "c": (0.5, ("--seed", "5")),
        "d": (0.5, ("--folds", "2")),
        "e": (0.5, ("--folds", "2", "--seed", "9")),
    }.items():
        with without_training(), mock.patch("helpers.runs.SKILL", skill):
            succeed("train", small_store, "--out", folder / name, *ARGUMENTS, *flags)
    return folder


def test_differences_and_intervals_equal_a_slow_reference(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (few,) = compare([runs / "a", runs / "b"], resamples=20).differences
    assert {each.interval for metrics in few.values() for each in metrics.values()} == {None}
    monkeypatch.setattr("histopipe.tasks.predictions.FEWEST_PATIENTS", 2)
    comparison = compare([runs / "a", runs / "b"], resamples=300, seed=7)
    assert comparison.settings == {"optimizer": ("adam", "sgd"), "augment": (["flips"], ["none"])}
    assert comparison.splits == (None,)
    (levels,) = comparison.differences
    pooled = {
        f"{level}_{by}" for level in ("slide", "patient") for by in ("mean", "top_k", "majority")
    }
    assert set(levels) == {"patch"} | pooled
    files = [json.loads((runs / name / "metrics.json").read_text())["test"] for name in "ab"]
    for name in ("auc", "f1", "brier"):
        assert levels["patch"][name].value == pytest.approx(
            files[1]["patch"][name] - files[0]["patch"][name], abs=1e-12
        )
    # Slow reference: scikit-learn on each resample of the patients, with the same draws.
    a, b = (read_predictions(runs / name / "predictions.csv")["test"] for name in "ab")
    names = sorted(a.patients)
    patient = np.array([names.index(a.patients[i]) for i in a.patient])
    values = []
    for draw in bootstrap_draws(len(names), 300, 7).astype(int):
        rows = np.repeat(np.arange(len(patient)), draw[patient])
        one_class = len(set(a.label[rows].tolist())) < 2
        values.append(
            np.nan
            if one_class
            else sk.roc_auc_score(b.label[rows], b.output[rows, 1])
            - sk.roc_auc_score(a.label[rows], a.output[rows, 1])
        )
    assert levels["patch"]["auc"].interval == pytest.approx(
        interval_of(np.array(values), len(names)), abs=1e-9
    )


def change_test(run: Path, **columns: Any) -> None:
    """Replace columns of the predictions of the test set."""
    path = run / "predictions.csv"
    sides = read_predictions(path)
    sides["test"] = replace(sides["test"], **columns)
    write_predictions(path, [({"split": side}, each) for side, each in sides.items()])


def test_run_and_its_copy_have_no_difference(runs: Path, tmp_path: Path) -> None:
    """The order of rows has no effect."""
    copy = Path(shutil.copytree(runs / "a", tmp_path / "copy"))
    test = read_predictions(copy / "predictions.csv")["test"]
    order = np.random.default_rng(1).permutation(len(test.slide))
    names = ("slide", "patient", "x_l0", "y_l0", "target", "output")
    change_test(copy, **{name: getattr(test, name)[order] for name in names})
    comparison = compare([runs / "a", copy])
    assert comparison.settings == {}
    for values in comparison.differences[0].values():
        for difference in values.values():
            assert np.abs([difference.value, *(difference.interval or ())]).max() < 1e-9


def test_runs_with_different_test_items_are_not_compared(runs: Path) -> None:
    comparison = compare([runs / "a", runs / "c", runs / "d"])
    assert comparison.differences == ({}, {})
    assert [note.split(":")[0] for note in comparison.notes[0]] == ["patch", "slide", "patient"]
    assert "tested on different items (40 and 120, 40 in common)" in comparison.notes[1][0]
    assert comparison.settings["folds"] == (None, None, 2)
    for text in comparison.splits:
        assert re.fullmatch(
            r"different splits \(balanced and balanced\): \d+ of 12 common slides in other subsets, 0 slides in one split only",
            str(text),
        )


def test_runs_on_different_stores_compare_slides_but_not_patches(
    runs: Path, tmp_path: Path
) -> None:
    """This is the case for the same slides tiled at different scales."""
    copy = Path(shutil.copytree(runs / "b", tmp_path / "copy"))
    splits = json.loads((copy / "splits.json").read_text())
    (copy / "splits.json").write_text(json.dumps(splits | {"stores": ["another"]}))
    comparison = compare([runs / "a", copy])
    assert comparison.notes[0] == ("patches of different stores",)
    assert "slide_mean" in comparison.differences[0] and "patch" not in comparison.differences[0]


@pytest.mark.long(reason="cross-validations of written runs with intervals")
def test_cross_validations_are_compared_over_all_folds(runs: Path, tmp_path: Path) -> None:
    """Both cross-validations test all patches of every slide, but in different folds."""
    copy = Path(shutil.copytree(runs / "e", tmp_path / "e"))
    comparison = compare([runs / "d", copy], resamples=50)
    assert comparison.notes == ((),)
    assert comparison.runs[0].test.finest.count == 120
    assert set(comparison.differences[0]) >= {"patch", "slide_mean", "patient_mean"}
    # A slide with different test patches is a different item.
    moved = read_predictions(copy / "fold-1" / "predictions.csv")["test"].x_l0 + 1
    change_test(copy / "fold-1", x_l0=moved)
    other = compare([runs / "d", copy], resamples=50)
    assert other.differences == ({},)
    assert "slide: tested on different items (12 and 12, 6 in common)" in other.notes[0]
    (copy / "fold-2" / "metrics.json").unlink()
    part = compare([runs / "d", copy], resamples=50)
    assert part.runs[1].notes == ("1 of 2 folds are not finished",)
    assert part.differences == ({},)


def test_output_of_the_command(runs: Path) -> None:
    lines = succeed("compare", runs / "a", runs / "b").splitlines()
    assert ["optimizer", "adam", "sgd"] in [line.split() for line in lines]
    assert f"{runs / 'b'} minus {runs / 'a'}:" in lines
    assert [line for line in lines if line.startswith("  slide mean")]


def test_errors_of_compare(runs: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(runs / "a", tmp_path / "copy"))
    metrics = json.loads((copy / "metrics.json").read_text())
    del metrics["test"]
    (copy / "metrics.json").write_text(json.dumps(metrics))
    for folders, message in {
        (runs / "a",): "expected two or more different runs",
        (runs / "a", runs / "a"): "expected two or more different runs",
        (runs / "a", tmp_path): "no finished run in",
        (runs / "a", copy): "has no test patches",
    }.items():
        with pytest.raises(UsageError, match=message):
            compare(folders)
    (copy / "metrics.json").write_text("{")
    with pytest.raises(DamagedStore, match="is damaged"):
        compare([runs / "a", copy])
