"""Splits: shares of patients, patches and classes; columns of the labels file; and what refusals suggest."""

from __future__ import annotations

import importlib
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.bags import write_bag
from helpers.fake_training import StagedTrainings
from helpers.paths import GOLDEN
from histopipe.cli.parameters import NumberOr
from histopipe.errors import HistopipeError, NothingToDo, UsageError
from histopipe.runs.task_config import make_config
from histopipe.runs.training_data import opened_sources, splits_and_slides
from histopipe.splits.splits import load_splits, write_splits
from histopipe.splits.splitting import FRACTIONS, make_folds, make_splits
from histopipe.studies.cross_validation import _make_folds, cross_validate
from histopipe.studies.study_settings import FoldSettings
from histopipe.system.output import Progress, use_progress
from histopipe.tasks.choices import EVALUATED, SUBSETS

TOOL: Any = importlib.import_module("simulate_splits")


def cohort(patients: dict[str, str]) -> Any:
    """Return slides of 10 patches, one for each letter, which is its class."""
    return TOOL.Cohort(
        [
            TOOL.Group(f"{patient}-{number}", label, patient, 10)
            for patient, labels in patients.items()
            for number, label in enumerate(labels)
        ]
    )


@pytest.mark.parametrize("seed", [0, 5, 7])
def test_sides_of_a_random_cohort_have_their_shares(seed: int) -> None:
    made = TOOL.random_cohort(seed, 30)
    splits, again = (make_splits([made], split_by="patient", seed=seed) for _ in range(2))
    assert splits.leaks() == []
    shares = dict(reversed(list(TOOL.quantities(splits.slides))))  # the first of each name
    ratios = np.array(shares["patients"]) / FRACTIONS
    assert ratios.min() > 0.75 and ratios.max() < 1.35
    assert (shares["patches"] / FRACTIONS).min() > 0.75
    patients = {(slide.label, slide.patient) for slide in made.records.values()}
    for name, number in Counter(label for label, _ in patients).items():
        assert number < 3 or all(counts[name] for counts in splits.count().values())
    assert sides_of(splits) == sides_of(again)
    folds = make_folds([made], 4, split_by="patient", seed=seed)
    tested = [slide.id for fold in folds for slide in fold.slides_on("test")]
    assert sorted(tested) == sorted(slide.id for slide in splits.slides)
    least = 0.5 / 4 * sum(slide.count for slide in splits.slides)
    assert all(fold.count()["test"].total() > least and not fold.leaks() for fold in folds)


def test_large_patients_and_patients_of_several_classes() -> None:
    """A patient with half of the patches would be in validation or test in three of ten random splits."""
    made = cohort({"large": "ab" * 30, **{f"P{i}": "ab"[i % 2] * 3 for i in range(20)}})
    for seed in range(10):
        splits = make_splits([made], split_by="patient", seed=seed)
        assert {slide.subsets[0] for slide in splits.slides if slide.patient == "large"} == {0}
        assert not list(splits.shortages("patches"))
    made = cohort({f"P{i}": "aab" for i in range(8)} | {f"R{i}": "aac" for i in range(5)})
    counts = make_splits([made], split_by="patient", seed=1).count()
    assert all(counts[side]["c"] for side in EVALUATED)
    folds = make_folds([made], 5, split_by="patient", seed=1)
    assert all(fold.count()["test"]["c"] == 10 for fold in folds)


def test_a_side_with_less_than_half_of_its_share_is_named() -> None:
    made = cohort({"large": "ab" * 40, "P": "ab" * 20, "small": "ab"})
    text = "\n".join(make_splits([made], split_by="patient", seed=1).shortages("patches"))
    assert "20 of 1,220 patches" in text
    assert re.search(r"^test has .*: less than half of its share, 15%", text, re.MULTILINE)
    assert re.search(r"^train has 1 of 3 patients: less than half", text, re.MULTILINE)
    made = cohort({f"P{i}": "ab" * 5 for i in range(6)})
    for split_by in ("patch", "slide"):  # patients are in several subsets
        assert not list(make_splits([made], split_by=split_by, seed=1).shortages("patches"))


MANY = {f"P{i}": "aaa" for i in range(6)}


@pytest.mark.parametrize(
    ("patients", "folds", "expected"),
    [
        (MANY | {"R": "cc", "S": "c"}, 0, "--folds 5"),
        (MANY | {"R": "cc", "S": "c"}, 0, "--fractions 0.82,0.18,0"),
        (MANY | {"R": "ccc"}, 0, "--split-by slide --allow-leaks"),
        (MANY | {"R": "cccc"} | {f"Q{i}": "b" for i in range(4)}, 5, "leave the label 'c' empty"),
    ],
)
def test_a_refusal_names_a_way_that_works(
    patients: dict[str, str], folds: int, expected: str
) -> None:
    def split(made: Any, *, number: int = folds, **options: Any) -> None:
        options = {"split_by": "patient", "seed": 1, **options}
        make_folds([made], number, **options) if number else make_splits([made], **options)

    with pytest.raises(
        NothingToDo, match=r"class 'c' cannot be split: found \d patients?, exp"
    ) as caught:
        split(cohort(patients))
    todo = str(caught.value.todo)
    assert expected in todo and todo.endswith("add slides")
    for way in todo.split(", or ")[:-1]:
        match way.removeprefix("pass ").split():
            case ["--folds", number]:
                split(cohort(patients), number=int(number))
            case ["--fractions", numbers]:
                split(cohort(patients), fractions=tuple(map(float, numbers.split(","))))
            case ["--split-by", split_by, *_]:
                split(cohort(patients), split_by=split_by)
            case _:
                split(cohort({name: each.replace("c", "") for name, each in patients.items()}))


# A column of the labels file

CELLS = dict(
    zip(
        ("n0", "t1", "n2", "t3", "n4", "t5", "n6", "t7", "n8", "t9", "n10", "t11"),
        (
            "Train",
            "training",
            "TRAIN",
            "train",
            "val",
            "Validation",
            "valid",
            "val",
            "test",
            "Testing",
            "",
            "NA",
        ),
        strict=True,
    )
)


FOLDS = {name: str(i // 4) for i, name in enumerate(CELLS)}


@pytest.fixture
def split(small_store: Path, tmp_path: Path) -> Callable[..., Any]:
    """Function that returns splits and participants, from the cells of a column and settings."""

    def run(cells: dict[str, str], patients: int = 12, folds: Any = 0, **settings: Any) -> Any:
        rows = [
            f"{name},{name[0]},P{i % patients},{cell}"
            for i, (name, cell) in enumerate(cells.items())
        ]
        table = tmp_path / "labels.csv"
        table.write_text("\n".join(["slide,label,patient,Set", *rows]) + "\n")
        values = {"stores": [str(small_store)], "labels": str(table), "split_column": "Set"}
        config = make_config(values | settings)
        with use_progress(Progress()), opened_sources(config) as sources:
            if folds:
                return _make_folds(config, FoldSettings(folds=folds))
            return splits_and_slides(config, sources, tmp_path, resume=False)

    return run


def sides_of(splits: Any) -> dict[str, str]:
    return {slide.id: SUBSETS[slide.subsets[0]] for slide in splits.slides}


def test_column_gives_the_sides(split: Callable[..., Any], tmp_path: Path) -> None:
    splits, slides = split(CELLS)
    assert list(sides_of(splits).values()) == ["train"] * 4 + ["validation"] * 4 + ["test"] * 2
    reasons = {slide.slide: slide.reason for slide in slides if slide.reason}
    assert reasons == dict.fromkeys(("n10", "t11"), "no value in the split column")
    write_splits(splits, tmp_path / "splits.json")
    again, same = split(CELLS, splits=str(tmp_path / "splits.json"))
    assert splits.algorithm == again.algorithm == "given"
    assert (again.column, sides_of(again)) == ("Set", sides_of(splits))
    assert [slide.reason for slide in same] == [slide.reason for slide in slides]


def test_missing_validation_is_drawn_from_training_patients(split: Callable[..., Any]) -> None:
    cells = dict.fromkeys(CELLS, "train") | {"n8": "test", "t9": "test"}
    splits, _ = split(cells, patients=6, split_by="patient", allow_leaks=True)
    assert splits.algorithm == "balanced"
    assert {slide.id for slide in splits.slides_on("test")} == {"n8", "t9"}
    drawn = {slide.patient for slide in splits.slides_on("validation")}
    assert drawn and not drawn & {slide.patient for slide in splits.slides_on("train")}


def test_fold_numbers_of_a_column(split: Callable[..., Any]) -> None:
    folds = split(FOLDS, folds="column")
    for number, fold in enumerate(folds):
        tested = {slide.id for slide in fold.slides_on("test")}
        assert tested == {name for name, cell in FOLDS.items() if cell == str(number)}
        assert all(counts.total() for counts in fold.count().values())
    assert [sides_of(fold) for fold in split(FOLDS, folds=3)] == [sides_of(fold) for fold in folds]


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (
            {"t3": "testA"},
            {},
            "row of slide t3, column Set: found 'testA', expected train, training, validation",
        ),
        (
            {"t3": "1"},
            {"folds": "column"},
            "row of slide n0, column Set: found 'Train', and 8 rows more",
        ),
        (
            dict.fromkeys(CELLS, "test"),
            {},
            "splitting by Set leaves no 'n' patch for train; .* or change the column",
        ),
        (
            {},
            {"split_by": "region"},
            "--split-column Set has a subset for each slide: found --split-by region",
        ),
        (
            {"n8": "test", "t9": "test"} | dict.fromkeys(("n0", "t1", "n2", "t3"), "train"),
            {"patients": 6},
            r"the split leaks: .*P2 on .*correct column Set, or pass --allow-leaks",
        ),
        (FOLDS, {"folds": "column", "patients": 6}, "the split leaks"),
        (FOLDS, {"folds": 5}, "found 3 folds in column Set, expected --folds column"),
        (FOLDS, {"folds": 0}, "found '0'"),
        ({}, {"labels": None}, "--split-column: found Set, but no --labels"),
        ({}, {"split_column": "slide"}, "column slide: found its use for values"),
        ({}, {"split_column": "other"}, "wrong header: .* expected slide,label,other"),
        ({}, {"split_column": None, "folds": "column"}, "--folds column: found no --split-column"),
    ],
)
def test_wrong_columns_are_refused(
    split: Callable[..., Any], change: dict[str, str], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(HistopipeError, match=message):
        split(CELLS | change, **settings)


def test_column_and_another_file_of_splits_exclude_each_other(
    split: Callable[..., Any], tmp_path: Path
) -> None:
    write_splits(split(CELLS, split_column=None)[0], tmp_path / "splits.json")
    with pytest.raises(UsageError, match="is not from --split-column Set; leave one of them out"):
        split(CELLS, splits=str(tmp_path / "splits.json"))


def test_column_of_bags(tmp_path: Path) -> None:
    cells = ["train", "train", "validation", "validation", "test", ""]
    table, features = tmp_path / "labels.csv", tmp_path / "features"
    rows = [f"s{i},{'ab'[i % 2]},P{i // 2},{cell}" for i, cell in enumerate(cells)]
    table.write_text("\n".join(["slide,label,patient,Set", *rows]))
    for i in range(6):
        write_bag(features / f"s{i}.h5", np.ones((3, 4), np.float32))
    settings = {"mil": [str(features)], "labels": str(table), "split_column": "Set"}
    config = make_config(settings)
    with use_progress(Progress()), opened_sources(config) as sources:
        splits, slides = splits_and_slides(config, sources, tmp_path, resume=False)
    assert list(sides_of(splits).values()) == cells[:-1]
    assert [slide.reason for slide in slides] == [None] * 5 + ["no value in the split column"]
    table.write_text(table.read_text().replace(",b,", ",a,"))
    with (
        pytest.raises(UsageError, match="patient P2: found slides with Set empty and test"),
        opened_sources(make_config(settings | {"bag": "patient"})),
    ):
        pass


def test_number_of_folds_is_a_number_or_column() -> None:
    kind = NumberOr("column")
    assert [kind.convert(text, None, None) for text in ("column", "5")] == ["column", 5]
    with pytest.raises(Exception, match="'colum' is neither a whole number nor column"):
        kind.convert("colum", None, None)


# Earlier versions


def test_folds_of_an_earlier_version_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fold was not trained. It is trained on the split that the earlier version wrote."""
    shutil.copytree(GOLDEN / "2026-11-25", tmp_path, dirs_exist_ok=True)
    folder, fake = tmp_path / "folds", StagedTrainings({})
    (folder / "fold-2" / "metrics.json").unlink()
    before = {path.name: path.read_bytes() for path in (folder / "splits").iterdir()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("histopipe.runs.supervision.supervise", fake)
    monkeypatch.setattr("histopipe.system.tensorflow.count_gpus", lambda: 0)
    cross_validate(out=folder, resume=True, progress=Progress())
    assert fake.attempts == ["fold-2"]
    assert {path.name: path.read_bytes() for path in (folder / "splits").iterdir()} == before
    assert load_splits(folder / "splits" / "fold-2.json").algorithm == "stratified"
