"""`annotate` with labels of raters, on a synthetic store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from histopipe import annotate
from histopipe.errors import UsageError
from histopipe.labels.journal import UNSURE, Journal, LabelStudy, open_study, write_subsets
from histopipe.splits.splits import patches_crc
from histopipe.store.store import Store

CLASSES = ("tumour", "stroma")


@pytest.fixture
def store(small_store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_store, tmp_path / "patches.lmdb"))


def write_labels(folder: Path, store: Path, rater: str, names: list[str | None]) -> None:
    """Label the first patches of the first slide; None is no label."""
    with Store(store) as opened:
        record, index = opened.records[0], opened.index(0)
        crcs = {record.id: patches_crc(opened, 0)}
    open_study(folder, ["p", "q"], classes=CLASSES)
    with Journal(folder, rater, CLASSES) as journal:
        for row, name in enumerate(names):
            place = [record.id, int(index["x_l0"][row]), int(index["y_l0"][row])]
            if name is not None:
                act = {"act": "label", "class": name, "patches": [place], "crcs": crcs}
                journal.add({"id": str(row), **act})


def labels_of(store: Path, slide: int = 0) -> list[str | None]:
    with Store(store) as opened:
        return [
            None if number < 0 else opened.classes[number]
            for number in opened.index(slide)["label"].tolist()
        ]


def test_labels_of_one_and_of_all_raters(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "labels"
    before = labels_of(store, 1)
    write_labels(folder, store, "anna", ["tumour", "stroma", UNSURE, "tumour"])
    result = annotate(store, folder)
    assert result.patches == {"tumour": 2, "stroma": 1}
    assert result.notes == ["1 label unsure: no class"]
    assert labels_of(store)[:5] == ["tumour", "stroma", None, "tumour", None]
    assert labels_of(store, 1) == before
    assert annotate(store, folder, raters="anna").same == [*result.done]

    write_labels(folder, store, "ben", ["tumour", "tumour", "stroma", None, "stroma"])
    result = annotate(store, folder, raters="agreed")
    assert labels_of(store)[:6] == ["tumour", None, None, "tumour", "stroma", None]
    assert result.notes == [
        "1 label unsure: no class",
        "2 disagreements of raters: no class",
        "2 patches with a label of one rater only, which is taken (--raters NAME)",
    ]
    annotate(store, folder, raters="ben")
    assert labels_of(store)[:6] == ["tumour", "tumour", "stroma", None, "stroma", None]
    with Store(store) as opened:
        covered = opened.index(0)["covered"]
        assert str(opened.records[0].annotations).startswith("labels of ben, crc32 ")
    np.testing.assert_array_equal(covered[:6], [1, 1, 1, 0, 1, 0])


def test_labels_of_held_out_patients_that_were_not_drawn_have_no_class(
    store: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "labels"
    write_labels(folder, store, "anna", ["tumour", "stroma", "tumour"])
    path = folder / "anna.jsonl"
    acts = [json.loads(line) for line in path.read_text().splitlines()]
    acts[1]["offered"] = acts[1]["patches"]
    path.write_text("".join(json.dumps(act) + "\n" for act in acts))
    slide = acts[0]["patches"][0][0]
    with Store(store) as opened:
        patients = {record.id: record.id for record in opened.slides}
    write_subsets(folder, LabelStudy(CLASSES, held_out=(slide,)), patients)
    result = annotate(store, folder)
    assert labels_of(store)[:4] == [None, "stroma", None, None]
    assert result.notes == [
        "2 labels of held-out patients, not of patches drawn at random: no class (--held-out all)"
    ]
    assert annotate(store, folder, held_out="all").notes == []
    assert labels_of(store)[:4] == ["tumour", "stroma", "tumour", None]
    write_subsets(folder, LabelStudy(CLASSES, training=(slide,)), patients)
    assert annotate(store, folder).notes == []
    with pytest.raises(UsageError, match="held_out"):
        annotate(store, folder, held_out="none")  # type: ignore[arg-type]


def test_slides_without_labels_lose_those_of_other_raters_only(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "labels"
    write_labels(folder, store, "anna", ["tumour", "stroma"])
    annotate(store, folder)
    # Ben has labelled another slide.
    with Store(store) as opened:
        record, index = opened.records[1], opened.index(1)
        crcs = {record.id: patches_crc(opened, 1)}
        place = [record.id, int(index["x_l0"][0]), int(index["y_l0"][0])]
    with Journal(folder, "ben", CLASSES) as journal:
        journal.add(
            {"id": "1", "act": "label", "class": "tumour", "patches": [place], "crcs": crcs}
        )
    result = annotate(store, folder, raters="ben")
    assert {*labels_of(store)} == {None}
    assert labels_of(store, 1)[:2] == ["tumour", None]
    assert result.patches == {"tumour": 1}
    path = folder / "ben.jsonl"
    path.write_text(path.read_text().replace(record.id, "absent"))
    with pytest.raises(UsageError, match=r"no slide of .* has labels of the raters: found absent"):
        annotate(store, folder, raters="ben")


def test_undone_labels_leave_earlier_classes(store: Path, tmp_path: Path) -> None:
    """A slide without any label left counts as one that was never labelled."""
    folder = tmp_path / "labels"
    write_labels(folder, store, "anna", ["tumour"])
    with Store(store) as opened:
        record, index = opened.records[1], opened.index(1)
        crcs = {record.id: patches_crc(opened, 1)}
        place = [record.id, int(index["x_l0"][0]), int(index["y_l0"][0])]
    with Journal(folder, "anna", CLASSES) as journal:
        act = {"act": "label", "class": "tumour", "patches": [place], "crcs": crcs}
        journal.add({"id": "other", **act})
        assert record.id in annotate(store, folder).done
        journal.add({"id": "undo", "act": "undo"})
        journal.add({"id": "more", **act, "class": UNSURE})
        assert record.id in annotate(store, folder).unlabelled
        journal.add({"id": "back", "act": "undo"})
    result = annotate(store, folder)
    assert record.id in result.without and record.id not in result.unlabelled
    assert labels_of(store)[0] == "tumour"


def test_an_annotation_file_may_have_the_name_of_the_file_of_labels(
    store: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "outlines"
    folder.mkdir()
    (folder / "labels.json").write_text('{"type": "FeatureCollection", "features": []}')
    with pytest.raises(UsageError, match="no annotation file has the name of a slide"):
        annotate(store, folder)


def test_wrong_raters_and_other_patches_are_refused(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "labels"
    write_labels(folder, store, "anna", ["tumour"])
    with pytest.raises(UsageError, match="has no rater 'eve': found anna"):
        annotate(store, folder, raters="eve")
    with pytest.raises(UsageError, match=r"labels\.json"):
        annotate(store, tmp_path / "none", raters="anna")
    before, path = labels_of(store), folder / "anna.jsonl"
    act = json.loads(path.read_text())
    path.write_text(json.dumps({**act, "crcs": dict.fromkeys(act["crcs"], 5)}) + "\n")
    (reason,) = annotate(store, folder).failed.values()
    assert "other patches than those that were labelled" in reason
    assert labels_of(store) == before
