"""Journals keep every act that was confirmed, and no other, in any order of acts."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from histopipe.errors import DamagedStore, MachineShort, UsageError
from histopipe.labels.journal import (
    STUDY,
    SUBSETS,
    UNSURE,
    Journal,
    LabelStudy,
    PatchPlace,
    open_study,
    raters_of,
    read_labels,
    write_subsets,
)

CLASSES = ("tumour", "stroma")
CRCS = {"a": 7}
PATCHES: list[PatchPlace] = [(slide, x, 0) for slide in ("a", "b") for x in range(3)]

ACTS = st.one_of(
    st.tuples(
        st.sampled_from([*CLASSES, UNSURE, None]),
        st.lists(st.sampled_from(PATCHES), min_size=1, max_size=4),
    ),
    st.sampled_from(["undo", "redo"]),
    st.tuples(st.just("mark"), st.sampled_from(["a", "b"]), st.booleans()),
)


def as_act(number: int, act: Any) -> dict[str, Any]:
    """Return an act of `ACTS` as a request."""
    if isinstance(act, str):
        return {"id": str(number), "act": act}
    if act[0] == "mark":
        return {"id": str(number), "act": "mark", "slide": act[1], "marked": act[2]}
    name, patches = act
    places = [*map(list, patches)]
    crcs = {slide: 7 for slide, *_ in patches}
    return {"id": str(number), "act": "label", "class": name, "patches": places, "crcs": crcs}


def expected(acts: list[Any]) -> dict[PatchPlace, str]:
    """Return the labels after acts, by a list of all states."""
    states: list[dict[PatchPlace, str]] = [{}]
    at = 0
    for act in acts:
        if act == "undo":
            at -= 1
        elif act == "redo":
            at += 1
        elif act[0] != "mark":
            name, patches = act
            labels = {patch: label for patch, label in states[at].items() if patch not in patches}
            if name is not None:
                labels |= dict.fromkeys(patches, name)
            states, at = [*states[: at + 1], labels], at + 1
    return states[at]


def possible(acts: list[Any]) -> list[Any]:
    """Return acts without those that would have nothing to undo or redo."""
    kept: list[Any] = []
    undo = redo = 0
    for act in acts:
        if (act == "undo" and not undo) or (act == "redo" and not redo):
            continue
        if act[0] == "mark":
            kept.append(act)
            continue
        change = {"undo": (-1, 1), "redo": (1, -1)}.get(act) if isinstance(act, str) else None
        undo, redo = (undo + 1, 0) if change is None else (undo + change[0], redo + change[1])
        kept.append(act)
    return kept


@settings(max_examples=60, deadline=None)
@given(acts=st.lists(ACTS, max_size=12), data=st.data())
def test_labels_are_those_of_all_acts_also_after_a_restart_and_a_torn_line(
    tmp_path_factory: pytest.TempPathFactory, acts: list[Any], data: st.DataObject
) -> None:
    folder, acts = tmp_path_factory.mktemp("labels"), possible(acts)
    restart = data.draw(st.sets(st.integers(0, len(acts))))
    journal = Journal(folder, "anna", CLASSES)
    for number, act in enumerate(acts):
        if number in restart:
            journal.close()
            torn = data.draw(st.binary(max_size=30)).replace(b"\n", b"")
            with journal.path.open("ab") as file:
                file.write(torn)
            journal = Journal(folder, "anna", CLASSES)
        before = dict(journal.labels)
        changed = journal.add(as_act(number, act))
        assert {*changed} >= {
            patch for patch in PATCHES if journal.labels.get(patch) != before.get(patch)
        }
        assert journal.add(as_act(number, act)) == []  # a repeated request
    assert journal.count == len(acts)
    journal.close()
    last_marks = {act[1]: act[2] for act in acts if act[0] == "mark"}
    with Journal(folder, "anna", CLASSES) as again:
        for labels in (journal, again, read_labels(folder, "anna", CLASSES)):
            assert labels.labels == expected(acts)
            assert +labels.by_slide == Counter(slide for slide, *_ in expected(acts))
            assert labels.marks == {slide for slide, marked in last_marks.items() if marked}
        assert again.can_undo == journal.can_undo
        assert again.can_redo == journal.can_redo


def test_marks_are_no_part_of_undo_and_redo(tmp_path: Path) -> None:
    acts = [("tumour", PATCHES[:2]), ("mark", "a", True), "undo", ("mark", "b", True), "redo"]
    with Journal(tmp_path, "anna", CLASSES) as journal:
        for number, act in enumerate(acts):
            journal.add(as_act(number, act))
        assert journal.labels == dict.fromkeys(PATCHES[:2], "tumour")
        assert journal.marks == {"a", "b"}


def test_raters_have_journals_of_their_own(tmp_path: Path) -> None:
    label = {"id": "1", "act": "label", "class": "tumour", "patches": [["a", 1, 2]], "crcs": CRCS}
    with Journal(tmp_path, "anna", CLASSES) as anna, Journal(tmp_path, "ben", CLASSES) as ben:
        anna.add(label)
        ben.add({**label, "class": "stroma"})
        with pytest.raises(UsageError, match="the journal of anna is open in another viewer"):
            Journal(tmp_path, "anna", CLASSES)
    assert raters_of(tmp_path) == ["anna", "ben"]
    names = {name: read_labels(tmp_path, name, CLASSES).labels for name in ("anna", "ben")}
    assert names == {"anna": {("a", 1, 2): "tumour"}, "ben": {("a", 1, 2): "stroma"}}
    with pytest.raises(UsageError, match="has no rater 'eve'"):
        read_labels(tmp_path, "eve", CLASSES)


@pytest.mark.parametrize("rater", ["", "../anna", "a/b", "agreed", ".hidden", "x" * 41, "a b"])
def test_names_of_raters_are_names_of_files(tmp_path: Path, rater: str) -> None:
    with pytest.raises(UsageError, match="--rater"):
        Journal(tmp_path, rater, CLASSES)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("")
    (tmp_path / "anna.jsonl").symlink_to(tmp_path / "secret")
    (tmp_path / "ben.jsonl").symlink_to(tmp_path / "new")
    (tmp_path / "eve.jsonl").mkdir()
    for rater in ("anna", "ben", "eve"):
        with pytest.raises(UsageError, match="is no journal"):
            Journal(tmp_path, rater, CLASSES)
    assert raters_of(tmp_path) == []
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("change", ["remove", "replace", "append"])
def test_a_journal_that_another_program_changes_takes_no_acts(tmp_path: Path, change: str) -> None:
    act = {"id": "1", "act": "label", "class": "tumour", "patches": [["a", 1, 2]], "crcs": CRCS}
    with Journal(tmp_path, "anna", CLASSES) as journal:
        journal.add(act)
        content = journal.path.read_bytes()
        if change == "append":
            with journal.path.open("ab") as file:
                file.write(b"x")
        else:
            journal.path.unlink()
        if change == "replace":
            journal.path.write_bytes(content)
        with pytest.raises((MachineShort, FileNotFoundError)):
            journal.add({**act, "id": "2"})
        assert journal.count == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"act": "draw"}, "expected an id, and label, mark, undo or redo"),
        ({"act": "undo"}, "there is nothing to undo"),
        ({"act": "redo"}, "there is nothing to redo"),
        ({"act": "mark"}, "mark: found"),
        ({"act": "mark", "slide": "a", "marked": 1}, "mark: found"),
        ({"act": "mark", "slide": 1, "marked": True}, "mark: found"),
        ({"id": ""}, "expected an id"),
        ({"id": 5}, "expected an id"),
        ({"class": "fat"}, "class: found fat"),
        ({"patches": []}, "patches: expected a list of 1 to 100,000"),
        ({"patches": [["a", 1.5, 2]]}, "patches: found"),
        ({"patches": [["a", 1]]}, "patches: found"),
        ({"patches": [["a", True, 2]]}, "patches: found"),
        ({"crcs": {"a": "x"}}, "crcs: found"),
        ({"crcs": {}}, "crcs: found none, expected those of a"),
        ({"patches": [["a", 10**30, 2]]}, "patches: found"),
        ({"offered": [["a", "b"]]}, "patches: found"),
        ({"id": "b\ud800"}, "expected an id"),
    ],
)
def test_wrong_acts_are_refused_and_not_written(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    right = {"id": "1", "act": "label", "class": "tumour", "patches": [["a", 1, 2]], "crcs": CRCS}
    with Journal(tmp_path, "anna", CLASSES) as journal:
        with pytest.raises(UsageError, match=reason):
            journal.add(right | change)
        assert (journal.path.stat().st_size, journal.labels) == (0, {})
        journal.add(right)
        # The number and the time are those of the journal.
        journal.add(right | {"id": "2", "number": 99, "time": "never"})
    lines = [json.loads(line) for line in (tmp_path / "anna.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == [1, 2]
    assert lines[1]["time"].startswith("20")


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[1], lines[0]],
        lambda lines: [lines[0], lines[0]],
        lambda lines: [lines[0], lines[1].replace('"2"', '"1"')],
        lambda lines: [lines[0], "\x00" * 20],
        lambda lines: [lines[0], lines[1].replace("tumour", "other")],
        lambda lines: [lines[0], "[" * 100_000],
        lambda lines: [lines[0], "5"],
    ],
)
def test_damaged_lines_are_named_and_kept(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "anna.jsonl"
    with Journal(tmp_path, "anna", CLASSES) as journal:
        for number in (1, 2):
            journal.add(
                {
                    "id": str(number),
                    "act": "label",
                    "class": "tumour",
                    "patches": [["a", number, 2]],
                    "crcs": CRCS,
                }
            )
    lines = damage(path.read_text().splitlines())
    path.write_text("\n".join(lines) + "\n")
    before = path.read_bytes()
    with pytest.raises(DamagedStore, match=r"anna\.jsonl, line [12], cannot be read"):
        Journal(tmp_path, "anna", CLASSES)
    assert path.read_bytes() == before


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with Journal(tmp_path, "anna", CLASSES) as journal:
        act = {"id": "1", "act": "label", "class": "tumour", "patches": [["a", 1, 2]], "crcs": CRCS}
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        with pytest.raises(MachineShort, match="no space"):
            journal.add(act)
        monkeypatch.undo()
        assert (journal.path.read_bytes(), journal.labels) == (b"", {})
        journal.add(act)
    assert read_labels(tmp_path, "anna", CLASSES).count == 1


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    seed=st.integers(0, 100),
)
def test_patients_are_assigned_once(counts: list[int], seed: int) -> None:
    study, patients = LabelStudy(CLASSES, seed), list[str]()
    for step, count in enumerate(counts):
        before = study
        patients += [f"{step}-{number}" for number in range(count)]
        study = study.with_patients(patients)
        assert sorted((*study.held_out, *study.training, *study.divided)) == sorted(patients)
        assert {*before.held_out} <= {*study.held_out}
        assert {*before.training} <= {*study.training}
        assert before.divided in {(), study.divided}
    first = next((count for count in counts if count), 0)
    assert bool(study.divided) == (first == 1)
    if len(counts) == 1 and first > 1:
        assert len(study.held_out) == -(-3 * first // 10)
        assert study.training


def test_of_one_patient_regions_are_held_out() -> None:
    study = LabelStudy(CLASSES).with_patients(["p"])
    places = [(x * 50.0, y * 50.0) for x in range(40) for y in range(40)]
    held_out = [study.is_held_out("p", *place) for place in places]
    assert 0.15 < sum(held_out) / len(places) < 0.45
    # All patches of a region are on the same side.
    regions: dict[tuple[float, float], set[bool]] = {}
    for (x, y), is_held_out in zip(places, held_out, strict=True):
        regions.setdefault((x // 250, y // 250), set()).add(is_held_out)
    assert all(len(sides) == 1 for sides in regions.values())


def test_subsets_of_slides_are_those_of_their_patients(tmp_path: Path) -> None:
    study = LabelStudy(CLASSES, held_out=("p", "r"), training=("q",))
    write_subsets(tmp_path, study, {"s1": "p", "s3": "q", "s2": "p"})
    rows = (tmp_path / SUBSETS).read_text().split()
    assert rows == ["slide,patient,subset", "s1,p,test", "s2,p,test", "s3,q,train"]
    write_subsets(tmp_path / "none", LabelStudy(CLASSES, divided=("p",)), {"s1": "p"})
    assert not (tmp_path / "none").exists()


def test_classes_of_a_folder_can_only_grow(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--classes: found none"):
        open_study(tmp_path, ["p", "q"])
    study = open_study(tmp_path, ["p", "q"], classes=CLASSES, seed=3)
    assert open_study(tmp_path, ["p", "q"]) == study
    assert open_study(tmp_path, ["p", "q"], seed=9) == study
    wrong = ("stroma", "tumour"), ("tumour",), ("tumour", UNSURE), tuple("abcdefghij")
    for classes in (*wrong, (*CLASSES, "a\x1b[31m"), (*CLASSES, "b\ud800"), (*CLASSES, "")):
        with pytest.raises(UsageError, match="--classes"):
            open_study(tmp_path, ["p", "q"], classes=classes)
    assert open_study(tmp_path, ["p"], classes=(*CLASSES, "fat")).classes == (*CLASSES, "fat")
    (tmp_path / STUDY).write_text("{}")
    with pytest.raises(UsageError, match=r"labels\.json cannot be used"):
        open_study(tmp_path, ["p"])


def test_an_act_counts_when_its_line_is_on_the_disk(tmp_path: Path) -> None:
    """When the disk confirms, the line is written, and the label does not count yet; if it fails, nothing has changed."""
    seen: list[tuple[int, bytes]] = []
    with Journal(tmp_path, "anna", CLASSES) as journal:

        def confirm(fd: int) -> None:
            seen.append((len(journal.labels), journal.path.read_bytes()))

        with mock.patch("histopipe.labels.journal.os.fsync", confirm):
            journal.add(as_act(1, ("tumour", PATCHES[:1])))
        ((labels, content),) = seen
        assert labels == 0 and content == journal.path.read_bytes() and len(journal.labels) == 1
        with (
            mock.patch("histopipe.labels.journal.os.fsync", side_effect=OSError(5, "I/O error")),
            pytest.raises(OSError, match="I/O error"),
        ):
            journal.add(as_act(2, ("stroma", PATCHES[1:2])))
        assert journal.path.read_bytes() == content and len(journal.labels) == 1
