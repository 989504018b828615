"""Subgroups, the participant flow, and the search for shortcuts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.scores import adds_up, class_predictions
from helpers.stores import RECORD, SPEC, columns_of
from histopipe.errors import UsageError
from histopipe.evaluation.breakdown import (
    Breakdown,
    EvaluatedPredictions,
    break_down,
    find_shortcut,
)
from histopipe.evaluation.evaluate import evaluate
from histopipe.evaluation.subgroups import (
    NoValue,
    check_subgroup,
    groups_of,
    labels_columns,
    subgroups,
)
from histopipe.inference.feature_folders import record_slides
from histopipe.runs.run import Run
from histopipe.runs.task_config import make_config
from histopipe.runs.training_data import opened_sources, splits_and_slides
from histopipe.slides.tables import SlideLabel
from histopipe.splits.labelling import Labelling, PatchFilter
from histopipe.splits.slide_table import (
    Exclusion,
    SlideEntry,
    flow_from_json,
    flow_of,
    flow_to_json,
    read_slide_table,
    table_of,
    with_damaged,
    write_slide_table,
)
from histopipe.splits.splits import write_splits
from histopipe.splits.splitting import make_splits
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.tasks.predictions import EvaluationSettings, Predictions, Thresholds

CLASSES = ("n", "t")

HALF = Thresholds((0.5,))


def cohort(
    seed: int = 1, patients: int = 60, *, confounded: bool = False, slides: int = 1
) -> tuple[tuple[Predictions, dict[str, Thresholds]], list[SlideEntry]]:
    """Return predictions of slides with a good model, and their slides, of three sites."""
    rng = np.random.default_rng(seed)
    label = rng.permutation(np.arange(patients) % 2).astype(np.int32)
    site = label if confounded else rng.integers(0, 3, patients)
    p = 1 / (1 + np.exp(-(2.5 * (label - 0.5) + rng.normal(size=patients))))
    of_slide = np.repeat(np.arange(patients, dtype=np.int32), slides)
    probability = np.stack([1 - p, p], axis=1)[of_slide].astype(np.float32)
    count = patients * slides
    scores = class_predictions(
        CLASSES,
        tuple(f"s{i}" for i in range(count)),
        tuple(f"p{i}" for i in range(patients)),
        np.arange(count, dtype=np.int32),
        of_slide,
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        label[of_slide],
        probability,
        "slide",
    )
    slide_list = [
        SlideEntry(
            slide=f"s{i}",
            patient=f"p{i // slides}",
            site=f"site {site[i // slides]}",
            label=CLASSES[label[i // slides]],
            planned=10,
            test=10,
            measured={"route": "copy"},
            cells={"age": str(40 + i // slides), "scanner": "ab"[i % 2]},
        )
        for i in range(count)
    ]
    return (scores, {"slide_mean": HALF, "patient_mean": HALF}), slide_list


def test_subgroups_are_the_metrics_of_their_patients() -> None:
    """Each group equals an evaluation of its patients alone."""
    (scores, limits), slides = cohort()
    settings = EvaluationSettings(resamples=50)
    (by_site,) = subgroups([(scores, limits)], slides, {"site": None}, settings)
    assert by_site.level == "patient"
    assert sum(group.count for group in by_site.groups) == 60
    for group in by_site.groups:
        alone = scores.rows(np.array([slide.site == group.name for slide in slides]))
        expected = evaluate([(alone, limits)], EvaluationSettings(resamples=0)).patient["mean"]
        for name in ("auc", "sensitivity", "brier", "average_precision"):
            assert group.values[name] == pytest.approx(expected.values[name]), name


def test_differences_are_from_all_other_groups() -> None:
    part, slides = cohort()
    (by_site,) = subgroups([part], slides, {"site": None}, EvaluationSettings(resamples=200))
    total = sum(group.count * (group.values["brier"] or 0) for group in by_site.groups)
    for group in by_site.groups:
        brier, difference = group.values["brier"] or 0, group.differences["brier"]
        rest = (total - group.count * brier) / (60 - group.count)
        assert difference.value == pytest.approx(brier - rest)
        low, high = difference.interval or (0, 0)
        assert low < brier - rest < high


def test_a_planted_difference_is_outside_of_chance() -> None:
    part, slides = cohort(patients=200)
    wrong = np.array([slide.site == "site 1" for slide in slides])
    part[0].output[wrong] = part[0].output[wrong][:, ::-1]
    (by_site,) = subgroups([part], slides, {"site": None}, EvaluationSettings(resamples=200))
    intervals = {group.name: group.differences["auc"].interval for group in by_site.groups}
    _, high = intervals["site 1"] or (0, 0)
    assert high < -0.3


def test_small_groups_are_shown_without_intervals() -> None:
    part, slides = cohort()
    few = [
        dataclasses.replace(slide, site="small" if i < 4 else "large")
        for i, slide in enumerate(slides)
    ]
    (by_site,) = subgroups([part], few, {"site": None}, EvaluationSettings(resamples=50))
    large, small = by_site.groups
    note = "too few patients for an interval: 4 patients"
    assert (small.name, small.count, small.note) == ("small", 4, note)
    assert not small.intervals and small.values["brier"] is not None
    assert large.intervals and large.note == "no difference: only 4 patients in other groups"


@pytest.mark.parametrize(
    ("values", "width", "names"),
    [
        (["41", "49", "50", ""], 10, ["40 to 50", "50 to 60", "missing"]),
        (["10", "9", "9"], None, ["9", "10"]),
        (["b", "a", ""], None, ["a", "b", "missing"]),
        (
            ["656.8", "697.8", "1950.9", "2023"],
            None,
            ["656.8 to 697.8", "697.8 to 1950.9", "1950.9 to 2023"],
        ),
        (["0.1", "0.3", "0.7"], 0.1, ["0.1 to 0.2", "0.3 to 0.4", "0.7 to 0.8"]),
        (["20240101", "20240222"], 10, ["20240100 to 20240110", "20240220 to 20240230"]),
        (["29", "", "", "31", "unknown"], 10, ["20 to 30", "30 to 40", "unknown", "missing"]),
        (["-5", "-15"], 10, ["-20 to -10", "-10 to 0"]),
        (
            ["1"] * 50 + [str(number) for number in range(2, 12)],
            None,
            ["1 to 4.33333", "4.33333 to 7.66667", "7.66667 to 11"],
        ),
        ([str(i) for i in range(31)], None, ["0 to 10", "10 to 20", "20 to 30"]),
        (
            [*map(str, range(31)), "unknown", "1_5", "inf"],
            None,
            ["0 to 10", "10 to 20", "20 to 30", "1_5", "inf", "unknown"],
        ),
    ],
)
def test_values_are_grouped(values: list[str], width: float | None, names: list[str]) -> None:
    assert groups_of(values, width)[0] == names


@given(
    st.lists(
        st.one_of(st.just(""), st.floats(-1e6, 1e6).map(repr), st.text("abc", max_size=2)),
        min_size=1,
    )
)
def test_every_value_is_in_one_group(values: list[str]) -> None:
    names, numbers = groups_of(values)
    assert set(numbers) == set(range(len(names)))
    of_values = [names[number] for number in numbers]
    assert [name == "missing" for name in of_values] == [value == "" for value in values]


def test_groups_without_a_value_are_not_those_of_a_real_value() -> None:
    values: list[str | NoValue] = [
        "missing",
        "several",
        '"missing"',
        "",
        NoValue.SEVERAL,
        "NA",
        "none",
    ]
    names, numbers = groups_of(values)
    assert [names[n] for n in numbers] == [
        '"missing"',
        '"several"',
        '""missing""',
        "missing",
        "several",
        "NA",
        "none",
    ]


def test_runs_of_earlier_versions_have_missing_values(tmp_path: Path) -> None:
    _, slides = cohort()
    cells = [dataclasses.replace(slide, site="NaN", cells={"stain": "none"}) for slide in slides]
    write_slide_table(tmp_path / "slides.csv", cells)
    for na, expected in (("", ("", "")), ('na = ["-"]\n', ("NaN", "none"))):
        (tmp_path / "config.toml").write_text(f"{na}epochs = 1\n")
        assert {(slide.site, slide.cells["stain"]) for slide in Run(tmp_path).slides} == {expected}


def test_level_and_groups_depend_on_the_column() -> None:
    """Columns that vary within patients are compared by slide. Sites are names, also if they are numbers."""
    part, slides = cohort(slides=2)
    changed = [
        dataclasses.replace(
            slide,
            site=str(i // 2 % 12),
            cells={"scanner": "ab"[i % 2], "text": ("several", "x")[i // 2 % 2], "stain": "H&E"},
        )
        for i, slide in enumerate(slides)
    ]
    columns = dict.fromkeys(("route", "site", "scanner", "text", "stain"))
    results = subgroups([part], changed, columns, EvaluationSettings(resamples=20))
    assert [
        (each.column, each.level, [(group.name, group.count) for group in each.groups])
        for each in results
    ] == [
        ("site", "patient", [(name, 5) for name in sorted(map(str, range(12)))]),
        ("scanner", "slide", [("a", 60), ("b", 60)]),
        ("text", "patient", [('"several"', 30), ("x", 30)]),  # "several" is a value of slides here
        ("stain", "patient", [("H&E", 60)]),
    ]
    assert results[-1].groups[0].note == "no difference: no other group"


@pytest.mark.parametrize("negative", [3, 5])
def test_few_cases_that_are_ranked_within_folds_have_no_interval(negative: int) -> None:
    """Group a has enough cases of each class. In the second fold, it has only one class, so its first fold decides."""
    (scores, thresholds), slides = cohort(patients=120)
    first, second = (scores.rows(np.flatnonzero(scores.patient % 2 == i)) for i in (0, 1))
    in_group = np.concatenate(
        [
            first.patient[first.label == 0][:negative],
            first.patient[first.label == 1][:6],
            second.patient[second.label == 0][:11],
        ]
    )
    named = [
        dataclasses.replace(slide, cells={"scanner": "ba"[i in in_group]})
        for i, slide in enumerate(slides)
    ]
    parts = [(first, thresholds), (second, thresholds)]
    (results,) = subgroups(parts, named, {"scanner": None}, EvaluationSettings(resamples=40))
    group = results.groups[0]
    assert (group.name, group.outcomes) == ("a", {"n": 11 + negative, "t": 6})
    assert ("auc" in group.intervals) == (negative == 5)


def test_wrong_subgroups_are_refused() -> None:
    for text in ("age:", "age:x", "age:0", "", "a:b:2", "label", "Status", "route", "Site:10"):
        with pytest.raises(UsageError, match="--subgroup"):
            check_subgroup(text)
    assert labels_columns(["site", "Age:10", "tissue:0.1"]) == ("Age",)
    with pytest.raises(UsageError, match="found 'age' twice"):
        labels_columns(["age", "Age:10"])


def test_quality_of_patients_with_several_slides_is_the_median() -> None:
    part, slides = cohort(slides=2)
    first = part[0].rows(part[0].slide % 2 == 0)
    of_patients = dataclasses.replace(
        first, slides=first.patients, slide=first.patient, level="patient"
    )
    measured = [
        dataclasses.replace(slide, measured={**slide.measured, "focus": f"{i + 0.5}"})
        for i, slide in enumerate(slides)
    ]
    (by_focus,) = subgroups(
        [(of_patients, part[1])], measured, {"focus": None}, EvaluationSettings(resamples=0)
    )
    assert [group.count for group in by_focus.groups] == [20, 20, 20]
    assert by_focus.groups[0].name == "1 to 40.3333"


def test_breakdown_survives_json() -> None:
    part, slides = cohort(confounded=True)
    settings = EvaluationSettings(resamples=20)
    evaluation = evaluate([part], settings)
    evaluated = EvaluatedPredictions({"test": evaluation}, {"test": part[0]}, settings)
    breakdown = break_down(evaluated, slides, ("age:10", "scanner"))
    assert {subgroup.column for subgroup in breakdown.subgroups} == {"site", "age", "scanner"}
    assert Breakdown.from_json(json.loads(json.dumps(breakdown.to_json()))) == breakdown


def test_a_planted_confounder_is_reported() -> None:
    """But not of a model that is clearly better: then, one in four patients has the site of the other label."""
    shortcut = find_shortcut(cohort(confounded=True)[1], model_auc=0.97, seed=1)
    assert shortcut is not None and shortcut.warning
    assert shortcut.auc["site"] > 0.9
    assert "site alone predicts the label with an AUC of" in str(shortcut)
    rng = np.random.default_rng(1)
    slides = [
        SlideEntry(
            slide=f"s{i}",
            patient=f"p{i}",
            label=CLASSES[i % 2],
            train=1,
            site=str(i % 2 if rng.random() < 0.75 else 1 - i % 2),
        )
        for i in range(200)
    ]
    for model_auc, warned in ((0.95, False), (0.75, True)):
        shortcut = find_shortcut(slides, model_auc=model_auc, seed=1)
        assert shortcut is not None and shortcut.p < 0.05
        assert shortcut.warning == warned


@pytest.mark.nightly(reason="hundreds of cohorts")
def test_false_alarms_are_rare() -> None:
    """At most 5 % of 60 random data sets with three columns; `tools/bench_metrics.py` tries 200."""
    alarms = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        slides = [
            SlideEntry(
                slide=f"s{i}",
                patient=f"p{i}",
                label=CLASSES[rng.integers(2)],
                train=1,
                site=str(rng.integers(4)),
                measured={"route": str(rng.integers(2)), "vendor": str(rng.integers(3))},
            )
            for i in range(60)
        ]
        shortcut = find_shortcut(slides, model_auc=0.55, seed=seed)
        alarms += shortcut is not None and shortcut.warning
    assert alarms <= 3


def test_flow_adds_up_and_survives_json(tmp_path: Path) -> None:
    slides = [
        SlideEntry(slide="a", patient="p", planned=10, unreadable=1, filtered=2, train=7),
        SlideEntry(slide="b", patient="p", reason=Exclusion.NO_LABEL, planned=5, unreadable=1),
        SlideEntry(slide="c", patient="q", reason=Exclusion.INGEST_FAILED),
        SlideEntry(slide="d", patient="q", reason=Exclusion.NO_PATCHES),
        SlideEntry(slide="e", patient="r", planned=9, left_out=2, train=4, test=3),
        SlideEntry(slide="f", patient="s", reason=Exclusion.ALL_FILTERED, planned=4, filtered=4),
        SlideEntry(
            slide="g",
            patient="t",
            reason=Exclusion.NO_LABEL,
            planned=3,
            cells={"sex": "f", "status": "1"},
        ),
        SlideEntry(slide="h", patient="u", planned=5, test=5),
    ]
    slides = with_damaged(slides, {"a": {"train": 1}, "e": {"test": 3}, "h": {"test": 5}})
    flow = flow_of(slides)
    assert adds_up(flow)
    assert flow["slides"].excluded == {
        "no label": 2,
        "ingest failed": 1,
        "no patches": 1,
        "all patches filtered out": 1,
        "all patches damaged": 1,
    }
    assert flow["patients"].excluded == {
        "no patches": 1,
        "all patches filtered out": 1,
        "no label": 1,
        "all patches damaged": 1,
    }
    assert flow["patients"].used == {("train",): 2}
    assert flow["patches"].used == {("train",): 10}
    assert flow["patches"].excluded == {
        "unreadable": 2,
        "filtered out": 6,
        "left out by the split": 2,
        "no label": 7,
        "damaged": 9,
    }
    assert flow_from_json(json.loads(json.dumps(flow_to_json(flow)))) == flow
    write_slide_table(tmp_path / "slides.csv", slides)
    read = read_slide_table(tmp_path / "slides.csv")
    assert flow_of(read) == flow
    assert [slide.cells for slide in read if slide.slide == "g"] == [{"sex": "f", "status": "1"}]
    assert [slide.status for slide in read] == [slide.status for slide in slides]
    assert read_slide_table(tmp_path / "none.csv") == []


def write_messy_store(path: Path) -> None:
    """Write slides a to h with five patches and one that is unreadable; b is a copy of a. Others have no patches."""
    values: list[bytes | None] = [None, *([b"value"] * 5)]
    with StoreWriter(path, SPEC) as writer:
        records = {
            name: dataclasses.replace(RECORD, id=name, quickhash="ab" if name in "ab" else name)
            for name in "abcdefghijk"
        }
        numbers = writer.register(list(records.values()))
        for name in "abcdefgh":
            crc = writer.put_patches(numbers[name], range(6), values)
            columns = columns_of(crc, np.array([len(value or b"") for value in values]))
            columns["focus"] = np.array([np.nan, 0, 10, 20, 30, 40])
            done = dataclasses.replace(
                records[name], planned=6, stored=5, unreadable=1, stored_bytes=25
            )
            writer.complete(numbers[name], done, columns, {})
        writer.fail(numbers["i"], records["i"].with_failure("broken"))
        writer.complete(numbers["j"], records["j"], columns_of(np.zeros(0), np.zeros(0)), {})


def test_flow_of_a_messy_store_adds_up(tmp_path: Path) -> None:
    """Failed and pending slides, slides without patches or label, a copy, unreadable patches, and a quality filter."""
    write_messy_store(tmp_path / "s.lmdb")
    labels = {
        name: SlideLabel(label, patient)
        for name, label, patient in (
            ("a", "n", "p1"),
            ("b", "n", "p2"),
            ("c", "n", "p3"),
            ("d", "t", "p4"),
            ("e", None, "p4"),
            ("f", "n", "p5"),
            ("g", "t", "p6"),
            ("h", "n", "p7"),
        )
    }
    labelling = Labelling(labels=labels, patch_filter=PatchFilter(min_focus=20.0))
    with Store(tmp_path / "s.lmdb") as store:
        splits = make_splits(
            [store], split_by="patient", seed=1, labelling=labelling, fractions=(0.5, 0.5, 0.0)
        )
        slides = table_of([store], labelling, splits)
    flow = flow_of(slides)
    assert adds_up(flow)
    assert flow["slides"].total == 11
    assert flow["slides"].excluded == {
        "no label": 1,
        "ingest failed": 1,
        "not ingested": 1,
        "no patches": 1,
    }
    assert flow["patients"].total == 10
    assert sum(flow["patients"].used.values()) == 7
    assert flow["patches"].total == 48
    assert flow["patches"].excluded == {"unreadable": 8, "filtered out": 14, "no label": 5}
    assert sum(flow["patches"].used.values()) == 21
    assert sum(int((slide.subsets >= 0).sum()) for slide in splits.slides) == 21
    assert {slide.slide: slide.copy_of for slide in slides if slide.copy_of} == {"b": "a"}


def test_failed_slide_does_not_replace_another_one_of_its_name(tmp_path: Path) -> None:
    write_messy_store(tmp_path / "s.lmdb")
    with StoreWriter(tmp_path / "t.lmdb", SPEC) as writer:
        record = dataclasses.replace(RECORD, id="a", quickhash="other")
        writer.fail(writer.register([record])["a"], record.with_failure("broken"))
    with Store(tmp_path / "s.lmdb") as first, Store(tmp_path / "t.lmdb") as second:
        slides = table_of([first, second], Labelling())
        record_slides(tmp_path, table_of([first], Labelling()), {"c"})
        record_slides(tmp_path, table_of([second], Labelling()), ())
        name = f"a@{second.uuid[:8]}"
    reasons = {slide.slide: slide.reason for slide in slides}
    assert len(slides) == len(reasons) == 12
    assert (reasons["a"], reasons[name]) == (None, "ingest failed")
    assert {slide.slide: slide.copy_of for slide in slides if slide.copy_of} == {"b": "a"}
    recorded = {slide.slide: slide.reason for slide in read_slide_table(tmp_path / "slides.csv")}
    assert recorded == {
        **{slide: why for slide, why in reasons.items() if slide != name},
        "c": "embedding failed",
        "a@t.lmdb": "ingest failed",
    }


def test_existing_split_needs_no_labels_file(tmp_path: Path) -> None:
    """A fold of a cross-validation that is resumed after its labels file was removed."""
    write_messy_store(tmp_path / "s.lmdb")
    table = tmp_path / "labels.csv"
    table.write_text(
        "slide,label,stage\n"
        + "".join(f"{slide},{'nt'[i % 2]},{i}\n" for i, slide in enumerate("abcdefgh"))
    )
    config = make_config(
        {
            "stores": [str(tmp_path / "s.lmdb")],
            "labels": str(table),
            "subgroup": ("stage",),
            "fractions": (0.5, 0.5, 0.0),
        }
    )
    with opened_sources(config) as sources:
        splits, before = splits_and_slides(config, sources, tmp_path, resume=False)
        write_splits(splits, tmp_path / "splits.json")
        resumed = dataclasses.replace(config, splits=str(tmp_path / "splits.json"))
        assert splits_and_slides(resumed, sources, tmp_path, resume=False)[1] == before
        assert {slide.cells["stage"] for slide in before if slide.label} == set("01234567")
        table.write_text("slide,label,stage,patient\na,n,0,other\n")
        extra = dataclasses.replace(resumed, allow_extra_rows=True)
        with pytest.raises(
            UsageError, match="slide a has another patient than in the split: found other"
        ):
            splits_and_slides(extra, sources, tmp_path, resume=False)
        table.unlink()
        _, after = splits_and_slides(resumed, sources, tmp_path, resume=False)
    assert [(slide.slide, slide.status, slide.label) for slide in after] == [
        (slide.slide, slide.status, slide.label) for slide in before
    ]
