"""Test cross-validation: every patient is tested once, folds fail independently, and folds can be resumed."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk

import histopipe
from helpers.commands import COMMAND, INTERRUPTIBLE, Run, processes_in, run_python, succeed
from helpers.examples import examples
from helpers.fake_training import Failure, StagedTrainings
from helpers.lazy import training
from helpers.runs import without_training
from helpers.stores import a_store, jpegs
from helpers.trainings import faulty_runs
from histopipe.dataset.selection import SampleLocations
from histopipe.errors import HistopipeError, NothingToDo, OutOfMemory, OutOfTime, UsageError
from histopipe.geometry import Micrometres
from histopipe.reports.info import FolderInfo
from histopipe.runs.supervision import Supervision, supervise
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.slides.tables import SlideLabel
from histopipe.splits.assignment import Assignment
from histopipe.splits.labelling import Labelling
from histopipe.splits.splitting import make_folds, make_splits
from histopipe.splits.subsets import SplitBy
from histopipe.store.store import Store
from histopipe.studies.fold_results import CrossValidationResult
from histopipe.studies.study import share_devices

SHARES = (0.7, 0.15, 0.15)
ARGUMENTS = ("--epochs", "2", "--batch-size", "16", "--deterministic")
TIMED = ("seconds", "host_mb", "gpu_mb", "attempts")


# Splits.


@examples(30)
@given(st.lists(st.integers(2, 30), min_size=2, max_size=4), st.integers(2, 8), st.integers(0, 99))
def test_every_unit_is_tested_once_and_classes_are_balanced(
    sizes: list[int], folds: int, seed: int
) -> None:
    """Each unit has one class and 10 patches. Folds without a class that has too few units get more of the others."""
    nearest = 1 if min(sizes) >= folds else 3
    of_class = np.repeat(np.eye(len(sizes), dtype=np.int64) * 10, sizes, axis=0)
    patches = np.hstack([of_class.sum(axis=1, keepdims=True), of_class])
    sides = Assignment(SHARES, seed, folds).assign(patches, len(sizes))
    assert (np.sum(sides == 2, axis=0) == 1).all()
    for of_fold in sides:
        for column, size in enumerate(sizes):
            counts = np.bincount(of_fold[of_class[:, column] > 0], minlength=3)
            assert abs(counts[2] - size / folds) < nearest
            assert counts[0] >= 1  # a class is always trained on
            assert counts[1] >= 1 or counts[0] + counts[1] == 1


@given(st.integers(0, 200), st.integers(2, 8))
def test_every_patch_is_tested_once(count: int, folds: int) -> None:
    places = np.random.default_rng(count).permutation(count)
    sides = Assignment(SHARES, 1, folds).assign_patches(places)
    assert (np.sum([side == 2 for side in sides], axis=0) == 1).all()
    for side in sides:
        assert (side == 2).sum() == pytest.approx(count / folds, abs=1)
        rest = count - (side == 2).sum()
        assert (side == 1).sum() == pytest.approx(0.15 / 0.85 * rest, abs=0.5)


@pytest.mark.parametrize("split_by", ["patient", "slide", "patch"])
def test_folds_of_a_store_cover_it_once_without_leaks(small_store: Path, split_by: SplitBy) -> None:
    with Store(small_store) as store:
        folds = make_folds([store], 4, split_by=split_by, seed=3)
        again = make_folds([store], 4, split_by=split_by, seed=3)
        other = make_folds([store], 4, split_by=split_by, seed=4)
    for place in range(12):
        sides = np.stack([fold.slides[place].subsets for fold in folds])
        assert (np.sum(sides == 2, axis=0) == 1).all()
        np.testing.assert_array_equal(sides, [fold.slides[place].subsets for fold in again])
    for fold in folds:
        assert split_by == "patch" or not fold.leaks()
        assert all(counts[name] for counts in fold.count().values() for name in fold.classes)
    assert any(
        (a.subsets != b.subsets).any()
        for one, two in zip(folds, other, strict=True)
        for a, b in zip(one.slides, two.slides, strict=True)
    )


def test_folds_by_region_keep_their_distance(made_store: Path) -> None:
    with Store(made_store) as store:
        folds = make_folds([store], 3, split_by="region", seed=3, region=Micrometres(500.0))
        records = [store.records[slide.slide] for slide in folds[0].slides]
        corners = [
            np.stack([store.index(slide.slide)["x_l0"], store.index(slide.slide)["y_l0"]], axis=1)
            for slide in folds[0].slides
        ]
    tested = np.concatenate(
        [np.sum([f.slides[i].subsets == 2 for f in folds], axis=0) for i in range(len(records))]
    )
    assert tested.max() == 1 and tested.mean() > 0.3
    for fold in folds:
        for slide, record, corner in zip(fold.slides, records, corners, strict=True):
            width = (record.read_size or 0) * (record.downsample or 0)
            for a in (0, 1, 2):
                here, away = (
                    corner[slide.subsets == a],
                    corner[(slide.subsets != a) & (slide.subsets >= 0)],
                )
                if len(here) and len(away):
                    gaps = np.abs(here[:, None].astype(int) - away[None].astype(int)).max(axis=2)
                    assert gaps.min() >= width


def labels_for(store: Store, rare: int) -> dict[str, SlideLabel]:
    """Return labels with a class of few slides."""
    return {
        record.id: SlideLabel("rare" if i < rare else "ab"[i % 2])
        for i, record in enumerate(store.slides)
    }


def test_rare_class_is_in_the_training_set_of_every_fold(small_store: Path) -> None:
    with Store(small_store) as store:
        folds = make_folds(
            [store], 5, split_by="slide", seed=1, labelling=Labelling(labels=labels_for(store, 2))
        )
        assert (
            sorted(bool(fold.count()["test"]["rare"]) for fold in folds) == [False] * 3 + [True] * 2
        )
        assert all(fold.count()["train"]["rare"] for fold in folds)
        with pytest.raises(NothingToDo, match="class 'rare' cannot be split: found 1 slide"):
            make_folds(
                [store],
                5,
                split_by="slide",
                seed=1,
                labelling=Labelling(labels=labels_for(store, 1)),
            )


# Runs.


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "summary.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def untimed(folder: Path) -> list[dict[str, str]]:
    """Return the summary without columns that differ between equal runs."""
    return [{k: v for k, v in row.items() if k not in TIMED} for row in table(folder)]


@pytest.fixture(scope="module")
def trained_folds(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cross-validation of nightly tests."""
    out = tmp_path_factory.mktemp("folds") / "trained"
    succeed("train", small_store, "--out", out, *ARGUMENTS, "--folds", 3)
    return out


@pytest.fixture(scope="module")
def whole(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-validation without a training."""
    out = tmp_path_factory.mktemp("folds") / "whole"
    with without_training():
        output = succeed("train", small_store, "--out", out, *ARGUMENTS, "--folds", 3)
    assert "all folds together" in output
    return out


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StagedTrainings]:
    """Replace the trainings of folds: they write the same files as those of `whole`, or fail."""

    def replaced(**failures: list[Failure]) -> StagedTrainings:
        named = {name.replace("_", "-"): list(each) for name, each in failures.items()}
        fake = StagedTrainings(named)
        monkeypatch.setattr("histopipe.studies.study.supervise", fake)
        monkeypatch.setattr("histopipe.studies.study.count_gpus", lambda: 0)
        return fake

    return replaced


def test_folder_holds_a_run_per_fold_and_a_summary(whole: Path) -> None:
    rows = table(whole)
    assert [row["fold"] for row in rows] == ["1", "2", "3", "mean", "sd", "pooled"]
    summary = json.loads((whole / "summary.json").read_text())
    each = []
    for number, row in enumerate(rows[:3], 1):
        metrics = json.loads((whole / f"fold-{number}" / "metrics.json").read_text())
        assert row["status"] == "done" and int(row["best_epoch"]) == metrics["best_epoch"]
        assert float(row["patch_auc"]) == metrics["test"]["patch"]["auc"]
        assert float(row["host_mb"]) > 100 and float(row["seconds"]) > 0
        assert summary["folds"][number - 1]["metrics"]["test"] == metrics["test"]
        each.append(metrics["test"]["slide"]["mean"]["brier"])
        splits = f"splits/fold-{number}.json"
        assert (whole / splits).read_text() == (
            whole / f"fold-{number}" / "splits.json"
        ).read_text()
    assert float(rows[3]["slide_mean_brier"]) == pytest.approx(np.mean(each), abs=1e-12)
    assert float(rows[4]["slide_mean_brier"]) == pytest.approx(np.std(each, ddof=1), abs=1e-12)
    info = histopipe.info(whole)
    assert isinstance(info, FolderInfo)
    assert (info.kind, info.facts["folds"]) == ("cross-validation", "3, 3 finished")


def test_pooled_metrics_cover_all_predictions(whole: Path) -> None:
    with (whole / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 120 == len({(row["slide"], row["x_l0"], row["y_l0"]) for row in rows})
    assert {row["fold"] for row in rows} == {"1", "2", "3"}
    truth = [row["label"] == "t" for row in rows]
    p = [np.float32(row["p_t"]) for row in rows]
    pooled = json.loads((whole / "summary.json").read_text())["pooled"]
    assert pooled["patch"]["auc"] == pytest.approx(sk.roc_auc_score(truth, p), abs=1e-9)
    assert pooled["slide"]["mean"]["count"] == 12
    low, high = pooled["patch"]["intervals"]["auc"]
    assert low < pooled["patch"]["auc"] < high
    folds = [
        json.loads((whole / f"fold-{n}" / "metrics.json").read_text())["test"]["patch"]["confusion"]
        for n in (1, 2, 3)
    ]
    np.testing.assert_array_equal(pooled["patch"]["confusion"], np.sum(folds, axis=0))


@pytest.mark.nightly(
    reason="three trainings in a new process; test_pooled_metrics_cover_all_predictions shows the command"
)
def test_python_function_equals_the_command_without_tensorflow(
    trained_folds: Path, small_store: Path, tmp_path: Path
) -> None:
    code = (
        "import sys, histopipe\n"
        "r = histopipe.cross_validate(sys.argv[1], out='cv', folds=3, epochs=2, batch_size=16,\n"
        "    deterministic=True, parallel_folds=2, devices='cpu')\n"
        "print(len(r.folds), r.failed, r.pooled.patch.auc, 'tensorflow' in sys.modules)\n"
    )
    done = run_python(code, small_store, cwd=tmp_path)
    assert untimed(tmp_path / "cv") == untimed(trained_folds)
    auc = json.loads((trained_folds / "summary.json").read_text())["pooled"]["patch"]["auc"]
    assert done.stdout.split() == ["3", "()", str(auc), "False"]
    # Parallel folds write their lines to separate files.
    assert "epoch 1/2" not in done.stderr
    assert "epoch 1/2" in (tmp_path / "cv" / "logs" / "fold-3.log").read_text()


@pytest.mark.nightly(
    reason="kills of two new processes; test_failed_folds_do_not_affect_other_folds_and_can_be_resumed shows how folds are resumed"
)
def test_twice_killed_run_equals_uninterrupted_run(
    run: Run, small_store: Path, trained_folds: Path, tmp_path: Path
) -> None:
    """The command is killed first during the training of a fold, then between two folds."""
    arguments = (str(small_store), *ARGUMENTS, "--folds", "3", "--save-minutes", "1e-9")
    command = [*COMMAND, "train", *arguments, "--out", "killed"]
    for ready in ("fold-1/resume.npz", "fold-2/metrics.json"):
        child = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
        while child.poll() is None and not (tmp_path / "killed" / ready).exists():
            time.sleep(0.005)
        assert child.poll() is None, f"it ended before {ready}"
        child.kill()
        child.wait()
        command = [*COMMAND, "train", "--resume", "--out", "killed"]
    finished = (tmp_path / "killed" / "fold-1" / "metrics.json").stat().st_mtime_ns
    done = run("train", "--resume", "--out", "killed")
    assert done.returncode == 0, done.stderr
    assert "fold 1/3" not in done.stderr  # finished before: skipped
    assert (tmp_path / "killed" / "fold-1" / "metrics.json").stat().st_mtime_ns == finished
    assert untimed(tmp_path / "killed") == untimed(trained_folds)
    for number in (1, 2, 3):
        one, two = (folder / f"fold-{number}" for folder in (tmp_path / "killed", trained_folds))
        assert (one / "predictions.csv").read_bytes() == (two / "predictions.csv").read_bytes()


@pytest.mark.long(reason="the ingest of a shared store")
def test_parts_train_their_folds_and_join(
    staged: Callable[..., StagedTrainings], small_store: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "parts"
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 16, "deterministic": True, "folds": 3}

    def part(**options: Any) -> CrossValidationResult:
        return histopipe.cross_validate(small_store, out=out, **(settings | options))

    staged(fold_2=[OutOfMemory("wrong")])
    assert [fold.folder.name for fold in part(part="1/2").folds] == ["fold-1", "fold-3"]
    with pytest.raises(UsageError, match="fold-2 is not done: found no part did it"):
        part(join=True)
    assert [fold.reason for fold in part(part="2/2").folds] == ["wrong"]
    assert not (out / "summary.csv").exists()
    assert [fold.reason for fold in part(join=True).folds] == [None, "wrong", None]
    staged()
    assert part(part="2/2").folds[0].result
    joined = part(join=True)
    assert not joined.failed and part(join=True).to_json() == joined.to_json()
    assert (out / "predictions.csv").read_bytes() == (whole / "predictions.csv").read_bytes()
    with pytest.raises(UsageError, match="is a cross-validation with other settings"):
        part(part="1/2", learning_rate=0.5)


@pytest.mark.nightly(reason="a hanging training")
def test_hanging_training_and_its_children_end_at_the_time_limit(
    small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "hanging"

    def clock() -> float:
        """Return the time, an hour ahead when the training hangs."""
        return time.monotonic() + 3600 * hanging.exists()

    monkeypatch.setattr(
        "histopipe.runs.supervision.time", SimpleNamespace(monotonic=clock, time=time.time)
    )
    monkeypatch.setattr("histopipe.runs.supervision._GRACE_SECONDS", 1.0)
    monkeypatch.setenv("HISTOPIPE_TEST_FAULT", f"gradients:2:hang-with-child:{hanging}")
    monkeypatch.chdir(tmp_path)
    config = PatchTrainConfig(stores=(str(small_store),), split_by="slide", epochs=1, batch_size=16)
    with pytest.raises(OutOfTime, match="not done within 600 s"):
        supervise(config, tmp_path / "run", watch=Supervision(seconds=600.0))
    monkeypatch.undo()  # this process must not be in the folder either
    assert processes_in(tmp_path) == []


def test_failed_folds_do_not_affect_other_folds_and_can_be_resumed(
    run: Run,
    small_store: Path,
    whole: Path,
    tmp_path: Path,
    staged: Callable[..., StagedTrainings],
) -> None:
    failures: dict[str, HistopipeError] = {
        "fold_1": OutOfTime("not done within 45 s"),
        "fold_2": OutOfMemory("not even single patches fit"),
    }
    fake = staged(**{name: [failure] for name, failure in failures.items()})
    arguments = ("--folds", 3, "--fold-timeout", "45s", "--parallel-folds", 2)
    done = run("train", small_store, "--out", "cv", *ARGUMENTS, *arguments)
    assert done.returncode == 3, done.stderr
    rows = table(tmp_path / "cv")
    assert [row["status"] for row in rows[:3]] == ["failed", "failed", "done"]
    for row, failure in zip(rows, failures.values(), strict=False):
        assert failure.what in row["reason"]
        assert f"fold {row['fold']}: {row['reason']}" in done.stdout
        assert int(row["attempts"]) == 1 and not row["host_mb"]
    assert rows[-1]["fold"] == "pooled" and rows[-1]["patch_auc"]
    done = run("train", "--resume", "--out", "cv", "--fold-timeout", "10m", "--parallel-folds", 2)
    assert done.returncode == 0, done.stderr
    assert untimed(tmp_path / "cv") == untimed(whole)
    assert sorted(fake.attempts) == ["fold-1", "fold-1", "fold-2", "fold-2", "fold-3"]
    assert sorted(fake.resumed) == ["fold-1", "fold-2"]


def test_retries_depend_on_the_failure(
    run: Run,
    small_store: Path,
    whole: Path,
    tmp_path: Path,
    staged: Callable[..., StagedTrainings],
) -> None:
    """A crash and a time limit are retried, and the retry resumes. Wrong settings are not retried."""

    def late(watch: Supervision) -> HistopipeError:
        return OutOfTime(f"not done within {watch.seconds:.0f} s")

    fake = staged(
        fold_1=[HistopipeError("the training failed")],
        fold_2=[late],
        fold_3=[UsageError("the loss of epoch 1 is not finite")],
    )
    done = run(
        "train",
        small_store,
        "--out",
        "cv",
        *ARGUMENTS,
        "--folds",
        3,
        "--retries",
        1,
        "--fold-timeout",
        "45s",
        "--parallel-folds",
        2,
    )
    assert done.returncode == 3, done.stderr
    assert "not done within 45 s; retry 1 of 1" in done.stderr
    assert [row["attempts"] for row in table(tmp_path / "cv")[:3]] == ["2", "2", "1"]
    assert "the loss of epoch 1 is not finite" in table(tmp_path / "cv")[2]["reason"]
    assert untimed(tmp_path / "cv")[:2] == untimed(whole)[:2]
    assert sorted(fake.resumed) == ["fold-1", "fold-2"]


@pytest.mark.nightly(reason="an interrupt of a new process")
def test_interrupt_ends_every_fold_and_resume_continues(
    run: Run, small_store: Path, trained_folds: Path, tmp_path: Path
) -> None:
    command = [
        *INTERRUPTIBLE,
        "train",
        str(small_store),
        "--out",
        "cv",
        *ARGUMENTS,
        "--folds",
        "3",
        "--parallel-folds",
        "2",
        "--devices",
        "cpu",
    ]
    environment = faulty_runs(
        {"fold-1": "gradients:4:wait", "fold-2": "gradients:4:wait"}, tmp_path
    )
    child = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment
    )
    logs = [tmp_path / "cv" / f"fold-{fold}" / "config.toml" for fold in (1, 2)]
    while child.poll() is None and not all(log.exists() for log in logs):
        time.sleep(0.02)
    time.sleep(1.0)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 130, errors
    assert "continue with `histopipe train --resume --out cv`" in errors
    assert processes_in(tmp_path) == []
    assert {row["status"] for row in table(tmp_path / "cv")[:3]} == {"not done"}
    done = run("train", "--resume", "--out", "cv")
    assert done.returncode == 0, done.stderr
    assert untimed(tmp_path / "cv") == untimed(trained_folds)


FLAT = """
import sys
from pathlib import Path
from histopipe.studies import cross_validation as cv

def resident_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

original, sizes = cv._train_fold, []

def measured(*arguments):
    outcome = original(*arguments)
    sizes.append(resident_mb())
    return outcome

cv._train_fold = measured
cv.cross_validate(sys.argv[1], out=sys.argv[2], folds=6, epochs=1, split_by="patch", parallel_folds=2, devices='cpu', resamples=0)
print(*sizes)
"""


@pytest.mark.nightly(reason="six trainings")
def test_folds_do_not_increase_memory_of_the_parent(small_store: Path, tmp_path: Path) -> None:
    done = run_python(FLAT, small_store, tmp_path / "cv", cwd=tmp_path)
    sizes = [float(size) for size in done.stdout.split()]
    assert len(sizes) == 6
    assert max(sizes[2:]) - sizes[2] < 3, sizes


# Wrong commands.


def wrong(run: Run, *arguments: object) -> str:
    done = run("train", *arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_wrong_settings_are_reported_before_anything_is_written(
    run: Run, small_store: Path, tmp_path: Path
) -> None:
    assert "--folds: found 1, expected 2 or more" in wrong(run, small_store, "--folds", 1)
    assert "expected at most 6, the patients of the largest class" in wrong(
        run, small_store, "--folds", 7, "--out", "cv"
    )
    assert "--splits and --folds exclude each other" in wrong(
        run, small_store, "--folds", 3, "--splits", "x.json"
    )
    assert "--retries: found no --folds" in wrong(run, small_store, "--retries", 2)
    assert "write 2h, 90m, 45s" in wrong(run, small_store, "--folds", 3, "--fold-timeout", "soon")
    assert "nonsense" in wrong(run, small_store, "--folds", 3, "--model", "nonsense", "--out", "cv")
    assert not (tmp_path / "cv").exists()
    assert "--positive: found 'x'" in wrong(
        run, small_store, "--folds", 3, "--positive", "x", "--out", "cv"
    )
    assert not (tmp_path / "cv").exists()


def test_resume_with_other_settings_is_rejected(run: Run, whole: Path) -> None:
    assert "found --folds 5, expected 3" in wrong(run, "--resume", "--out", whole, "--folds", 5)
    assert "found --model" in wrong(run, "--resume", "--out", whole, "--model", "resnet50")
    assert "is not empty" in wrong(run, "--out", whole, "--folds", 3)


def test_resume_with_other_evaluation_settings_evaluates_all_folds_again(
    run: Run, whole: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "cv"))
    done = run(
        "train", "--resume", "--out", folder, "--positive", "n", "--threshold", "sensitivity:0.9"
    )
    assert done.returncode == 0, done.stderr
    assert "starts" not in done.stderr and "resumes" not in done.stderr
    for number in (1, 2, 3):
        metrics = json.loads((folder / f"fold-{number}" / "metrics.json").read_text())
        before = json.loads((whole / f"fold-{number}" / "metrics.json").read_text())
        assert metrics["validation"]["patch"]["sensitivity"] >= 0.9
        assert metrics["test"]["patch"]["auc"] == pytest.approx(before["test"]["patch"]["auc"])
        assert metrics["histopipe"] == before["histopipe"]
    folds = [
        json.loads((folder / f"fold-{n}" / "metrics.json").read_text())["test"]["patch"][
            "confusion"
        ]
        for n in (1, 2, 3)
    ]
    pooled = json.loads((folder / "summary.json").read_text())["pooled"]["patch"]
    np.testing.assert_array_equal(pooled["confusion"], np.sum(folds, axis=0))
    assert pooled["sensitivity"] == pytest.approx(pooled["confusion"][0][0] / 60)
    again = run("train", "--resume", "--out", folder, "--positive", "t", "--threshold", "youden")
    assert again.returncode == 0, again.stderr
    assert untimed(folder) == untimed(whole)


@pytest.mark.parametrize("damage", ["killed", "empty", "missing"])
def test_damaged_fold_is_trained_again(
    run: Run, whole: Path, tmp_path: Path, damage: str, staged: Callable[..., StagedTrainings]
) -> None:
    """The command was killed before the fold had a configuration, or predictions are empty or missing."""
    folder = Path(shutil.copytree(whole, tmp_path / "cv"))
    fold = folder / "fold-2"
    if damage == "killed":
        shutil.rmtree(fold)
        fold.mkdir()
        for name in ("splits.json", "part-splits.json", "part-config.toml"):
            (fold / name).write_text("{")
    elif damage == "empty":
        (fold / "predictions.csv").write_text("")
    else:
        (fold / "predictions.csv").unlink()
    fake = staged()
    done = run("train", "--resume", "--out", folder)
    assert done.returncode == 0, done.stderr
    assert fake.attempts == ["fold-2"]
    assert untimed(folder) == untimed(whole)
    assert (fold / "predictions.csv").read_bytes() == (
        whole / "fold-2" / "predictions.csv"
    ).read_bytes()


def test_incomplete_splits_of_a_killed_command_are_replaced(
    run: Run,
    small_store: Path,
    whole: Path,
    tmp_path: Path,
    staged: Callable[..., StagedTrainings],
) -> None:
    staged()
    (tmp_path / "cv" / "splits").mkdir(parents=True)
    (tmp_path / "cv" / "part-config.toml").touch()
    (tmp_path / "cv" / "splits" / "fold-1.json").write_text("{")
    done = run("train", small_store, "--out", "cv", *ARGUMENTS, "--folds", 3)
    assert done.returncode == 0, done.stderr
    assert untimed(tmp_path / "cv") == untimed(whole)


def test_slides_with_the_same_name_in_two_stores_stay_separate(tmp_path: Path) -> None:
    paths = [
        a_store(
            tmp_path / f"{name}.lmdb",
            {"n1": jpegs(0, 8, 32), f"t{name}": jpegs(8, 16, 32)},
            patch_size=32,
        )
        for name in "ab"
    ]
    with Store(paths[0]) as a, Store(paths[1]) as b:
        splits = make_splits([a, b], split_by="patch", seed=1)
        rows = np.repeat(np.arange(4), 2)
        zeros = np.zeros(8, np.int64)
        samples = SampleLocations(np.tile([0, 1], 4), zeros, rows, zeros.astype(np.int32))
        predicted = training.outputs.SampleOutputs(
            samples, np.full((8, 2), 0.5, np.float32), loss=0.0
        )
        setup: Any = SimpleNamespace(
            splits=splits,
            _sources=[a, b],
            objective=training.objective.ClassObjective(2),
            level="patch",
        )
        setup._targets_of = partial(training.training_setup.PatchTraining._targets_of, setup)
        predictions = training.training_setup.PatchTraining.predictions(setup, predicted)
        assert predictions.slides == (f"n1@{a.uuid[:8]}", f"n1@{b.uuid[:8]}")
        assert predictions.slide.tolist() == [0] * 4 + [1] * 4
        assert predictions.x_l0.tolist() == a.index(0)["x_l0"][:4].tolist() * 2


def test_recorded_configuration_repeats_the_cross_validation(
    run: Run, whole: Path, tmp_path: Path, staged: Callable[..., StagedTrainings]
) -> None:
    staged()
    done = run("train", "--config", whole / "config.toml", "--out", "again", "--json")
    assert done.returncode == 0, done.stderr
    assert untimed(tmp_path / "again") == untimed(whole)
    result: dict[str, Any] = json.loads(done.stdout)
    assert [fold["status"] for fold in result["folds"]] == ["done"] * 3


def test_share_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("histopipe.studies.study.count_gpus", lambda: 5)
    assert share_devices("auto", 1) == ["auto"]
    assert share_devices("auto", 2) == ["gpu:0,2,4", "gpu:1,3"]
    assert share_devices("gpu", 5) == [f"gpu:{n}" for n in range(5)]
    assert share_devices("gpu:3,4", 2) == ["gpu:3", "gpu:4"]
    assert share_devices("cpu:2", 3) == ["cpu:2"] * 3
    with pytest.raises(UsageError, match="--parallel-folds: found 3, expected at most one"):
        share_devices("gpu:3,4", 3)
    monkeypatch.setattr("histopipe.studies.study.count_gpus", lambda: 0)
    assert share_devices("auto", 3) == ["auto"] * 3
