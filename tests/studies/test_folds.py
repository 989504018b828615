"""Test cross-validation: every patient is tested once, folds fail independently, and folds can be resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
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
from helpers.commands import COMMAND, RunCommand, succeed
from helpers.examples import examples
from helpers.fake_training import Failure, StagedTrainings
from helpers.lazy import training
from helpers.runs import without_training
from helpers.stores import a_store, jpegs
from helpers.trainings import csv_rows, interrupt
from histopipe.dataset.selection import SampleLocations
from histopipe.diagnostics.info import FolderInfo
from histopipe.errors import HistopipeError, NothingToDo, OutOfMemory, OutOfTime, UsageError
from histopipe.geometry import Micrometres
from histopipe.runs.supervision import Supervision
from histopipe.slides.tables import SlideLabel
from histopipe.splits.assignment import Assignment
from histopipe.splits.labelling import Labelling
from histopipe.splits.splits import Splits
from histopipe.splits.splitting import make_folds, make_splits
from histopipe.store.store import Store
from histopipe.studies.fold_results import CrossValidationResult
from histopipe.system.tensorflow import share_devices
from histopipe.tasks.choices import SplitBy

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
        folds, again, other = (
            make_folds([store], 4, split_by=split_by, seed=seed) for seed in (3, 3, 4)
        )
    sides, same, different = (
        np.array([[slide.subsets for slide in fold.slides] for fold in each])
        for each in (folds, again, other)
    )
    assert (np.sum(sides == 2, axis=0) == 1).all()
    np.testing.assert_array_equal(sides, same)
    assert (sides != different).any()
    for fold in folds:
        assert split_by == "patch" or not fold.leaks()
        assert all(counts[name] for counts in fold.count().values() for name in fold.classes)


def test_folds_by_region_keep_their_distance(made_store: Path) -> None:
    with Store(made_store) as store:
        folds = make_folds([store], 3, split_by="region", seed=3, region=Micrometres(500.0))
        records = [store.records[slide.slide] for slide in folds[0].slides]
        indices = [store.index(slide.slide) for slide in folds[0].slides]
    tested = np.sum(
        [np.concatenate([slide.subsets == 2 for slide in fold.slides]) for fold in folds], axis=0
    )
    assert tested.max() == 1 and tested.mean() > 0.3
    for fold in folds:
        for slide, record, index in zip(fold.slides, records, indices, strict=True):
            corners = np.stack([index["x_l0"], index["y_l0"]], axis=1).astype(int)
            gaps = np.abs(corners[:, None] - corners).max(axis=2)
            a, b = slide.subsets[:, None], slide.subsets
            apart = gaps[(a != b) & (a >= 0) & (b >= 0)]
            assert (apart >= (record.read_size or 0) * (record.downsample or 0)).all()


def test_rare_class_is_in_the_training_set_of_every_fold(small_store: Path) -> None:
    def folds_of(rare: int) -> tuple[Splits, ...]:
        labels = {
            record.id: SlideLabel("rare" if i < rare else "ab"[i % 2])
            for i, record in enumerate(store.slides)
        }
        return make_folds([store], 5, split_by="slide", seed=1, labelling=Labelling(labels=labels))

    with Store(small_store) as store:
        counts = [fold.count() for fold in folds_of(2)]
        assert sorted(bool(count["test"]["rare"]) for count in counts) == [False] * 3 + [True] * 2
        assert all(count["train"]["rare"] for count in counts)
        with pytest.raises(NothingToDo, match="class 'rare' cannot be split: found 1 slide"):
            folds_of(1)


# Runs.


def untimed(folder: Path) -> list[dict[str, str]]:
    """Return the summary without columns that differ between equal runs."""
    rows = csv_rows(folder / "summary.csv")
    return [{k: v for k, v in row.items() if k not in TIMED} for row in rows]


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of three folds."""
    return [json.loads((folder / f"fold-{n}" / "metrics.json").read_text()) for n in (1, 2, 3)]


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
    assert "within folds" in output
    return out


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StagedTrainings]:
    """Replace the trainings of folds: they write the same files as those of `whole`, or fail."""

    def replaced(**failures: list[Failure]) -> StagedTrainings:
        fake = StagedTrainings({name.replace("_", "-"): each for name, each in failures.items()})
        monkeypatch.setattr("histopipe.runs.supervision.supervise", fake)
        monkeypatch.setattr("histopipe.system.tensorflow.count_gpus", lambda: 0)
        return fake

    return replaced


def test_folder_holds_a_run_per_fold_and_a_summary(whole: Path) -> None:
    rows = csv_rows(whole / "summary.csv")
    assert [row["fold"] for row in rows] == ["1", "2", "3", "mean", "sd", "within folds", "pooled"]
    summary, each = json.loads((whole / "summary.json").read_text()), metrics_of(whole)
    for number, (row, metrics) in enumerate(zip(rows, each, strict=False), 1):
        assert row["status"] == "done" and int(row["best_epoch"]) == metrics["best_epoch"]
        assert float(row["patch_auc"]) == metrics["test"]["patch"]["auc"]
        assert float(row["host_mb"]) > 100 and float(row["seconds"]) > 0
        assert summary["folds"][number - 1]["metrics"]["test"] == metrics["test"]
        of_fold = (whole / f"fold-{number}" / "splits.json").read_bytes()
        assert (whole / "splits" / f"fold-{number}.json").read_bytes() == of_fold
    briers = [metrics["test"]["slide"]["mean"]["brier"] for metrics in each]
    assert [float(row["slide_mean_brier"]) for row in rows[3:5]] == pytest.approx(
        [np.mean(briers), np.std(briers, ddof=1)], abs=1e-12
    )
    info = histopipe.info(whole)
    assert isinstance(info, FolderInfo)
    assert (info.kind, info.facts["folds"]) == ("cross-validation", "3, 3 finished")


def test_pooled_metrics_cover_all_predictions(whole: Path) -> None:
    rows = csv_rows(whole / "predictions.csv")
    assert len(rows) == 120 == len({(row["slide"], row["x_l0"], row["y_l0"]) for row in rows})
    assert {row["fold"] for row in rows} == {"1", "2", "3"}
    truth = [row["label"] == "t" for row in rows]
    p = [np.float32(row["p_t"]) for row in rows]
    pooled = json.loads((whole / "summary.json").read_text())["pooled"]
    assert pooled["patch"]["auc"] == pytest.approx(sk.roc_auc_score(truth, p), abs=1e-9)
    assert pooled["slide"]["mean"]["count"] == 12
    low, high = pooled["patch"]["intervals"]["auc"]
    assert low < pooled["patch"]["auc"] < high
    folds = [metrics["test"]["patch"]["confusion"] for metrics in metrics_of(whole)]
    np.testing.assert_array_equal(pooled["patch"]["confusion"], np.sum(folds, axis=0))
    # Within folds, areas have the weight of their pairs; other metrics are those of all test sets.
    within = json.loads((whole / "summary.json").read_text())["within_folds"]["patch"]
    areas = [metrics["test"]["patch"]["auc"] for metrics in metrics_of(whole)]
    pairs = [np.prod(np.sum(confusion, axis=1)) for confusion in folds]
    assert within["auc"] == pytest.approx(np.average(areas, weights=pairs))
    assert (within["brier"], within["confusion"]) == (
        pooled["patch"]["brier"],
        pooled["patch"]["confusion"],
    )
    result = histopipe.compare([whole, whole / "fold-1"]).runs[0].test.patch
    assert result is not None and result.auc == within["auc"]


@pytest.mark.nightly(
    reason="kills of two new processes; test_failed_folds_do_not_affect_other_folds_and_can_be_resumed shows how folds are resumed"
)
def test_twice_killed_run_equals_uninterrupted_run(
    run: RunCommand, small_store: Path, trained_folds: Path, tmp_path: Path
) -> None:
    """The command is killed first during the training of a fold, then between two folds."""
    arguments = (str(small_store), *ARGUMENTS, "--folds", "3", "--save-minutes", "1e-9")
    command, killed = [*COMMAND, "train", *arguments, "--out", "killed"], tmp_path / "killed"
    for ready in ("fold-1/resume.npz", "fold-2/metrics.json"):
        child = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
        while child.poll() is None and not (killed / ready).exists():
            time.sleep(0.005)
        assert child.poll() is None, f"it ended before {ready}"
        child.kill()
        child.wait()
        command = [*COMMAND, "train", "--resume", "--out", "killed"]
    finished = (killed / "fold-1" / "metrics.json").stat().st_mtime_ns
    done = run("train", "--resume", "--out", "killed")
    assert done.returncode == 0, done.stderr
    assert "fold 1/3" not in done.stderr  # finished before: skipped
    assert (killed / "fold-1" / "metrics.json").stat().st_mtime_ns == finished
    assert untimed(killed) == untimed(trained_folds)
    predictions = [path.read_bytes() for path in sorted(killed.glob("fold-*/predictions.csv"))]
    assert predictions == [
        path.read_bytes() for path in sorted(trained_folds.glob("fold-*/predictions.csv"))
    ]


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


def test_failed_folds_do_not_affect_other_folds_and_can_be_resumed(
    run: RunCommand,
    small_store: Path,
    whole: Path,
    tmp_path: Path,
    staged: Callable[..., StagedTrainings],
) -> None:
    failures = ("not done within 45 s", "not even single patches fit")
    fake = staged(fold_1=[OutOfTime(failures[0])], fold_2=[OutOfMemory(failures[1])])
    arguments = ("--folds", 3, "--fold-timeout", "45s", "--parallel-folds", 2)
    done = run("train", small_store, "--out", "cv", *ARGUMENTS, *arguments)
    assert done.returncode == 3, done.stderr
    rows = csv_rows(tmp_path / "cv" / "summary.csv")
    assert [row["status"] for row in rows[:3]] == ["failed", "failed", "done"]
    for row, failure in zip(rows, failures, strict=False):
        assert failure in row["reason"]
        assert f"fold {row['fold']}: {row['reason']}" in done.stdout
        assert int(row["attempts"]) == 1 and not row["host_mb"]
    assert rows[-1]["fold"] == "pooled" and rows[-1]["patch_auc"]
    succeed("train", "--resume", "--out", tmp_path / "cv", *arguments[2:])
    assert untimed(tmp_path / "cv") == untimed(whole)
    assert sorted(fake.attempts) == ["fold-1", "fold-1", "fold-2", "fold-2", "fold-3"]
    assert sorted(fake.resumed) == ["fold-1", "fold-2"]


def test_retries_depend_on_the_failure(
    run: RunCommand,
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
    flags = ("--folds", 3, "--retries", 1, "--fold-timeout", "45s", "--parallel-folds", 2)
    done = run("train", small_store, "--out", "cv", *ARGUMENTS, *flags)
    assert done.returncode == 3, done.stderr
    assert "not done within 45 s; retry 1 of 1" in done.stderr
    rows = csv_rows(tmp_path / "cv" / "summary.csv")
    assert [row["attempts"] for row in rows[:3]] == ["2", "2", "1"]
    assert "the loss of epoch 1 is not finite" in rows[2]["reason"]
    assert untimed(tmp_path / "cv")[:2] == untimed(whole)[:2]
    assert sorted(fake.resumed) == ["fold-1", "fold-2"]


@pytest.mark.nightly(reason="an interrupt of a new process")
def test_interrupt_ends_every_fold_and_resume_continues(
    small_store: Path, trained_folds: Path, tmp_path: Path
) -> None:
    arguments = ("train", small_store, "--out", "cv", *ARGUMENTS, "--folds", 3)
    errors = interrupt(
        (*arguments, "--parallel-folds", 2, "--devices", "cpu"),
        {"fold-1": "gradients:4:wait", "fold-2": "gradients:4:wait"},
        ["cv/fold-1/config.toml", "cv/fold-2/config.toml"],
        tmp_path,
    )
    assert "continue with `histopipe train --resume --out cv`" in errors
    assert [row["status"] for row in csv_rows(tmp_path / "cv/summary.csv")[:3]] == ["not done"] * 3
    succeed("train", "--resume", "--out", tmp_path / "cv")
    assert untimed(tmp_path / "cv") == untimed(trained_folds)


# Wrong commands.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--folds", 1), "--folds: found 1, expected 2 or more"),
        (("--folds", 7), "expected at most 6, the patients of the largest class"),
        (("--folds", 3, "--splits", "x.json"), "--splits and --folds exclude each other"),
        (("--retries", 2), "--retries: found no --folds"),
        (("--folds", 3, "--fold-timeout", "soon"), "write 2h, 90m, 45s"),
        (("--folds", 3, "--model", "nonsense"), "nonsense"),
        (("--folds", 3, "--positive", "x"), "--positive: found 'x'"),
    ],
)
def test_wrong_settings_are_reported_before_anything_is_written(
    run: RunCommand, small_store: Path, tmp_path: Path, flags: Sequence[object], message: str
) -> None:
    done = run("train", small_store, "--out", "cv", *flags)
    assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / "cv").exists()


def test_resume_with_other_settings_is_rejected(run: RunCommand, whole: Path) -> None:
    for flags, message in (
        (("--resume", "--folds", 5), "found --folds 5, expected 3"),
        (("--resume", "--model", "resnet50"), "found --model"),
        (("--folds", 3), "is not empty"),
    ):
        done = run("train", "--out", whole, *flags)
        assert done.returncode == 2 and message in done.stderr


def test_resume_with_other_evaluation_settings_evaluates_all_folds_again(
    run: RunCommand, whole: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "cv"))
    resume = ("train", "--resume", "--out", folder)
    done = run(*resume, "--positive", "n", "--threshold", "sensitivity:0.9")
    assert done.returncode == 0, done.stderr
    assert "starts" not in done.stderr and "resumes" not in done.stderr
    each = metrics_of(folder)
    for metrics, before in zip(each, metrics_of(whole), strict=True):
        assert metrics["validation"]["patch"]["sensitivity"] >= 0.9
        assert metrics["test"]["patch"]["auc"] == pytest.approx(before["test"]["patch"]["auc"])
        assert metrics["histopipe"] == before["histopipe"]
    pooled = json.loads((folder / "summary.json").read_text())["pooled"]["patch"]
    confusion = np.sum([metrics["test"]["patch"]["confusion"] for metrics in each], axis=0)
    np.testing.assert_array_equal(pooled["confusion"], confusion)
    assert pooled["sensitivity"] == pytest.approx(confusion[0][0] / 60)
    succeed(*resume, "--positive", "t", "--threshold", "youden")
    assert untimed(folder) == untimed(whole)


@pytest.mark.parametrize(
    ("removed", "written"),
    [
        ("*", dict.fromkeys(("splits.json", "part-splits.json", "part-config.toml"), "{")),
        ("predictions.csv", {"predictions.csv": ""}),
        ("predictions.csv", {}),
    ],
    ids=["killed", "empty", "missing"],
)
def test_damaged_fold_is_trained_again(
    whole: Path,
    tmp_path: Path,
    removed: str,
    written: dict[str, str],
    staged: Callable[..., StagedTrainings],
) -> None:
    """The command was killed before the fold had a configuration, or predictions are empty or missing."""
    folder = Path(shutil.copytree(whole, tmp_path / "cv"))
    for path in (folder / "fold-2").glob(removed):
        path.unlink()
    for name, content in written.items():
        (folder / "fold-2" / name).write_text(content)
    fake, predictions = staged(), Path("fold-2", "predictions.csv")
    succeed("train", "--resume", "--out", folder)
    assert fake.attempts == ["fold-2"]
    assert untimed(folder) == untimed(whole)
    assert (folder / predictions).read_bytes() == (whole / predictions).read_bytes()


def test_incomplete_splits_of_a_killed_command_are_replaced(
    small_store: Path, whole: Path, tmp_path: Path, staged: Callable[..., StagedTrainings]
) -> None:
    staged()
    (tmp_path / "splits").mkdir()
    (tmp_path / "part-config.toml").touch()
    (tmp_path / "splits" / "fold-1.json").write_text("{")
    succeed("train", small_store, "--out", tmp_path, *ARGUMENTS, "--folds", 3)
    assert untimed(tmp_path) == untimed(whole)


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
        zeros = np.zeros(8, np.int64)
        samples = SampleLocations(
            np.tile([0, 1], 4), zeros, np.repeat(np.arange(4), 2), zeros.astype(np.int32)
        )
        setup: Any = SimpleNamespace(
            splits=make_splits([a, b], split_by="patch", seed=1),
            _sources=[a, b],
            objective=training.objective.ClassObjective(2),
            level="patch",
        )
        kind = training.patch_training.PatchTraining
        setup._targets_of = partial(kind._targets_of, setup)
        predictions = kind.predictions(
            setup,
            training.outputs.SampleOutputs(samples, np.full((8, 2), 0.5, np.float32), loss=0.0),
        )
        assert predictions.slides == (f"n1@{a.uuid[:8]}", f"n1@{b.uuid[:8]}")
        assert predictions.slide.tolist() == [0] * 4 + [1] * 4
        assert predictions.x_l0.tolist() == a.index(0)["x_l0"][:4].tolist() * 2


def test_recorded_configuration_repeats_the_cross_validation(
    whole: Path, tmp_path: Path, staged: Callable[..., StagedTrainings]
) -> None:
    staged()
    out = succeed("train", "--config", whole / "config.toml", "--out", tmp_path / "again", "--json")
    assert untimed(tmp_path / "again") == untimed(whole)
    assert [fold["status"] for fold in json.loads(out)["folds"]] == ["done"] * 3


@pytest.mark.parametrize(
    ("gpus", "devices", "trainings", "expected"),
    [
        (5, "auto", 1, ["auto"]),
        (5, "auto", 2, ["gpu:0,2,4", "gpu:1,3"]),
        (5, "gpu", 5, [f"gpu:{n}" for n in range(5)]),
        (5, "gpu:3,4", 2, ["gpu:3", "gpu:4"]),
        (5, "cpu:2", 3, ["cpu:2"] * 3),
        (0, "auto", 3, ["auto"] * 3),
    ],
)
def test_share_devices(
    gpus: int, devices: str, trainings: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("histopipe.system.tensorflow.count_gpus", lambda: gpus)
    assert share_devices(devices, trainings) == expected


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="--parallel-folds: found 3, expected at most one"):
        share_devices("gpu:3,4", 3)
