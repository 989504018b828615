"""LabelPage in the viewer: acts are on the disk before the answer, wrong requests change nothing, and labels are learned."""

from __future__ import annotations

import asyncio
import csv
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from helpers.inline import PicklingWorkers
from helpers.viewed import SLIDE, Notes, fetch, viewing
from histopipe.errors import UsageError
from histopipe.features.feature_file import writing
from histopipe.features.feature_sets import record_encoder
from histopipe.labels.journal import LabelStudy, read_labels, read_study
from histopipe.labels.learner import LinearClassifier, predict_file
from histopipe.store.store import Store
from histopipe.viewer.label_page import _predicted
from histopipe.viewer.learning import Learning
from histopipe.viewer.view import Viewer

CLASSES = ("Dermis", "Epidermis")
SESSIONS: dict[str, str] = {}


@pytest.fixture(scope="module", autouse=True)
def _without_workers() -> Iterator[None]:
    with mock.patch("histopipe.viewer.layers.WorkerPool", PicklingWorkers):
        yield


@pytest.fixture(scope="module")
def index(viewed: Path) -> dict[str, NDArray[Any]]:
    with Store(viewed / "patches.lmdb") as store:
        return dict(store.index(0))


@pytest.fixture(scope="module")
def features(index: dict[str, NDArray[Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features that show the class of most patches."""
    folder, rng = tmp_path_factory.mktemp("features"), np.random.default_rng(3)
    label = np.where(index["label"] < 0, 0.5, index["label"])
    values = rng.normal(0, 0.5, (len(label), 6)) + label[:, None] * [2, 0, 0, 1, 0, 0]
    record_encoder(folder, {"encoder": "planted", "dimension": 6})
    with writing(folder / f"{SLIDE}.h5", len(label), 6, "float32") as writer:
        writer.append(values.astype(np.float32), np.stack([index["x_l0"], index["y_l0"]], axis=1))
        writer.finish({}, {"name": SLIDE})
    return folder


@contextmanager
def view_labels(
    viewed: Path, journal: Path, rater: str = "anna", **options: Any
) -> Iterator[Viewer]:
    options = {"journal": journal, "rater": rater, "classes": CLASSES, **options}
    with viewing(viewed / "patches.lmdb", **options) as viewer:
        SESSIONS[viewer.url] = ask(viewer, "labels")["session"]
        yield viewer


def ask(viewer: Viewer, path: str) -> Any:
    status, body, _ = fetch(viewer, path)
    assert status == 200, body
    return json.loads(body)


def post(viewer: Viewer, act: Any, **headers: str) -> tuple[int, Any]:
    if isinstance(act, dict) and viewer.url in SESSIONS:
        act = {"session": SESSIONS[viewer.url], **act}
    body = act if isinstance(act, bytes) else json.dumps(act).encode()
    headers = {"content_type": "application/json", **headers}
    status, answer, _ = fetch(viewer, "labels", method="POST", body=body, **headers)
    return status, json.loads(answer) if answer[:1] in (b"{", b"[") else answer


def label(ident: str, name: str | None, *patches: tuple[int, int, int]) -> dict[str, Any]:
    return {"id": ident, "act": "label", "class": name, "patches": patches}


def mark(ident: str, slide: Any, marked: Any = True) -> dict[str, Any]:
    return {"id": ident, "act": "mark", "slide": slide, "marked": marked}


def labels_of(viewer: Viewer) -> NDArray[np.float32]:
    return np.frombuffer(fetch(viewer, "slides/0/labels")[1], "<f4")


def until(viewer: Viewer, version: int) -> Any:
    """Return the state when the classifier has learned from all labels."""
    end = time.monotonic() + 30
    while (state := ask(viewer, "labels"))["version"] <= version or state["learning"]:
        assert time.monotonic() < end
        time.sleep(0.02)
    return state


def test_labels_of_a_table_are_added_once(
    viewed: Path, features: Path, index: dict[str, NDArray[Any]], tmp_path: Path
) -> None:
    """Those of patches that the rater has never labelled; a wrong row adds nothing."""
    table, folder = tmp_path / "labels.csv", tmp_path / "journal"
    places = [f"{SLIDE},{x},{y}" for x, y in zip(index["x_l0"], index["y_l0"], strict=True)]

    def write(header: str, *rows: str) -> dict[str, Any]:
        table.write_text("\n".join([header, *rows]) + "\n")
        return {"import_labels": table}

    with view_labels(viewed, folder) as viewer:
        corners = [(0, int(x), int(y)) for x, y in zip(index["x_l0"], index["y_l0"], strict=True)]
        post(viewer, label("1", "Epidermis", corners[0], corners[1]))
        post(viewer, label("2", None, corners[1]))
    cases: list[tuple[tuple[str, ...], str]] = [
        (("slide,x_l0,y_l0", places[2]), "labels.csv: columns: found slide, x_l0, y_l0, expected"),
        (("slide,x_l0,y_l0,class", f"{places[2]},Dermis", f"{places[3]},Fat"), "line 3: found Fat"),
        (("slide,x_l0,y_l0,class", f"{SLIDE},1,x,Dermis"), "found Dermis at 1, nan"),
        (("slide,x_l0,y_l0,class", f"{SLIDE},-5,0,Dermis"), "the corner of a patch"),
    ]
    for rows, reason in cases:
        with pytest.raises(UsageError, match=reason), view_labels(viewed, folder, **write(*rows)):
            pass
        assert read_labels(folder, "anna", CLASSES).count == 2
    lines = [f"{place},Dermis" for place in places[:4]]
    lines += [f"{places[4]},unsure", f"{places[5]},", "absent,0,0,Fat"]
    options = write("slide,x_l0,y_l0,predicted", *lines)
    with view_labels(viewed, tmp_path / "j", "run", import_labels=viewed / "run") as viewer:
        of_run = labels_of(viewer)
    everywhere = write("slide,x_l0,y_l0,class", *(f"{place},Dermis" for place in places))
    with view_labels(viewed, tmp_path / "k", features=features, **everywhere) as viewer:
        until(viewer, 0)
        while not ask(viewer, "labels")["loaded"]:
            time.sleep(0.02)
        # Nothing is left to label, but held-out patches measure only when they are offered.
        items = ask(viewer, "queue?order=random&count=24")
        assert len(items) == 24 and all(each["offered"] for each in items)
        chosen = [(0, each["x"], each["y"]) for each in items]
        post(viewer, {**label("9", "Epidermis", *chosen), "offered": chosen})
        again = [(0, each["x"], each["y"]) for each in ask(viewer, "queue?order=random&count=24")]
        assert again and not {*again} & {*chosen}
        assert len(read_labels(tmp_path / "k", "anna", CLASSES).offered) == 24
    options = write("slide,x_l0,y_l0,predicted", *lines)
    with (viewed / "run" / "predictions.csv").open() as file:
        names = {(row["x_l0"], row["y_l0"]): row["predicted"] for row in csv.DictReader(file)}
    predicted = [names.get((str(x), str(y))) for _, x, y in corners]
    assert any(predicted)
    assert of_run.tolist() == pytest.approx(
        [np.nan if name is None else CLASSES.index(name) for name in predicted], nan_ok=True
    )
    for _ in range(2):
        with view_labels(viewed, folder, **options) as viewer:
            assert labels_of(viewer)[:6].tolist() == pytest.approx(
                [1, np.nan, 0, 0, 2, np.nan], nan_ok=True
            )
        assert read_labels(folder, "anna", CLASSES).count == 4


def test_acts_are_in_the_journal_and_in_the_layer(
    viewed: Path, index: dict[str, NDArray[Any]], tmp_path: Path
) -> None:
    corners = [(0, int(x), int(y)) for x, y in zip(index["x_l0"], index["y_l0"], strict=True)]
    with view_labels(viewed, tmp_path) as viewer:
        assert ask(viewer, "slides")["labelling"]
        assert np.isnan(labels_of(viewer)).all()
        steps: list[tuple[dict[str, Any], list[Any]]] = [
            (label("1", "Epidermis", corners[3], corners[5]), [None, 1, 1]),
            (label("2", "unsure", corners[5]), [None, 1, 2]),
            (label("3", None, corners[3]), [None, None, 2]),
            ({"id": "4", "act": "undo"}, [None, 1, 2]),
            ({"id": "5", "act": "undo"}, [None, 1, 1]),
            ({"id": "6", "act": "redo"}, [None, 1, 2]),
        ]
        for number, (act, expected) in enumerate(steps, 1):
            status, answer = post(viewer, act)
            assert (status, answer["acts"]) == (200, number)
            values = labels_of(viewer)
            assert [None if np.isnan(values[row]) else values[row] for row in (0, 3, 5)] == expected
            for _, x, y, value in answer["changed"]:
                row = corners.index((0, x, y))
                assert value == (None if np.isnan(values[row]) else values[row])
            in_file = read_labels(tmp_path, "anna", CLASSES)
            assert in_file.count == number
            assert post(viewer, act)[1]["changed"] == []  # it was written before
        assert answer["counts"] == [0, 1, 1]
        assert (answer["undo"], answer["redo"]) == (True, True)
        assert fetch(viewer, "slides/0/learned")[0] == 404
    with view_labels(viewed, tmp_path) as viewer:
        np.testing.assert_array_equal(labels_of(viewer), values)
        assert ask(viewer, "labels")["acts"] == 6


def test_marks_and_numbers_of_labels_of_slides(
    viewed: Path, index: dict[str, NDArray[Any]], tmp_path: Path
) -> None:
    corners = [(0, int(x), int(y)) for x, y in zip(index["x_l0"], index["y_l0"], strict=True)]
    steps: list[tuple[dict[str, Any], dict[str, int], list[int]]] = [
        (label("1", "Dermis", *corners[:3]), {"0": 3}, []),
        (mark("2", 1), {"0": 3}, [1]),
        ({"id": "3", "act": "undo"}, {}, [1]),
        (mark("4", 0), {}, [0, 1]),
        ({"id": "5", "act": "redo"}, {"0": 3}, [0, 1]),
        (label("6", None, corners[1], corners[5]), {"0": 2}, [0, 1]),
        (mark("7", 1, marked=False), {"0": 2}, [0]),
    ]
    # The second slide has no store: it can be marked, not labelled.
    slides = tmp_path / "slides"
    slides.mkdir()
    (slides / "second.svs").symlink_to(viewed / "slides" / f"{SLIDE}.svs")
    options = {"journal": tmp_path / "labels", "rater": "anna", "classes": CLASSES}
    for restart in (False, True):
        with viewing(viewed / "patches.lmdb", slides, **options) as viewer:
            SESSIONS[viewer.url] = ask(viewer, "labels")["session"]
            for act, labelled, marked in () if restart else steps:
                assert post(viewer, act)[0] == 200
                assert ask(viewer, "labelled") == {"labelled": labelled, "marked": marked}
            assert ask(viewer, "labelled") == {"labelled": {"0": 2}, "marked": [0]}
    acts = [json.loads(line) for line in (tmp_path / "labels/anna.jsonl").read_text().splitlines()]
    assert [act["slide"] for act in acts if act["act"] == "mark"] == ["second", SLIDE, "second"]


def test_wrong_requests_are_refused_and_change_nothing(
    viewed: Path, index: dict[str, NDArray[Any]], tmp_path: Path
) -> None:
    place = (0, int(index["x_l0"][0]), int(index["y_l0"][0]))
    good = label("1", "Dermis", place)
    with view_labels(viewed, tmp_path) as viewer:
        cases: list[tuple[int, Any]] = [
            (400, b"nothing"),
            (409, good | {"session": "another"}),
            (400, good | {"patches": [[*place[:2], place[2] + 0.5]]}),
            (400, good | {"offered": 5}),
            (400, b"[" * 50_000),
            (400, {}),
            (400, []),
            (400, {"id": "1", "act": "label"}),
            (400, {"id": 1, "act": "undo"}),
            (400, {"id": "1", "act": "undo"}),
            (400, {"id": "1", "act": "../label"}),
            (400, {"id": "1", "act": ["undo"]}),
            (400, {"id": ["1"], "act": "undo"}),
            (400, good | {"class": "fat"}),
            (400, good | {"class": ["Dermis"]}),
            (400, good | {"patches": []}),
            (400, good | {"patches": [[0, 1]]}),
            (400, good | {"patches": "all"}),
            (404, good | {"patches": [[0, 1, 1]]}),
            (404, good | {"patches": [[9, *place[1:]]]}),
            (404, good | {"patches": [[-1, *place[1:]]]}),
            (400, good | {"patches": [[0, 2**70, 0]]}),
            (413, b" " * (9 << 20)),
            (409, mark("1", 0) | {"session": "another"}),
            *((400, mark("1", number)) for number in (-1, True, 0.0, "0", "../anna", None, [0])),
            *((404, mark("1", number)) for number in (1, 2**70)),
            *((400, mark("1", 0, marked)) for marked in (1, "true", None)),
            (400, {"id": "1", "act": "mark"}),
        ]
        for expected, act in cases:
            status, answer = post(viewer, act)
            assert status == expected, (act if len(str(act)) < 300 else "", answer)
        assert post(viewer, good, content_type="text/plain")[0] == 415
        assert post(viewer, good, origin="http://evil.example")[0] == 403
        assert post(viewer, good, host="evil.example")[0] == 403
        assert fetch(viewer, "pass", method="POST", origin="http://evil.example")[0] == 403
        wrong = f"//{viewer.token[:-1]}/labels"
        assert fetch(viewer, wrong, method="POST", body=json.dumps(good).encode())[0] == 403
        for path in (
            "queue",
            "queue?order=best",
            "queue?order=random&count=-1",
            "queue?order=random&class=x",
        ):
            assert fetch(viewer, path)[0] == 400, path
        assert fetch(viewer, "queue?order=random&class=7")[0] == 404
        for rater in ("", "eve", "../anna", "%2e%2e%2fanna"):
            assert fetch(viewer, f"disagreements?rater={rater}")[0] == 400, rater
        wrong = f"//{viewer.token[:-1]}/labelled"
        assert [fetch(viewer, path)[0] for path in (wrong, "labelled/x")] == [403, 404]
        assert fetch(viewer, "labelled", origin="http://evil.example")[0] == 403
        assert fetch(viewer, "labelled", method="POST", body=b"{}")[0] == 405
        assert ask(viewer, "labelled") == {"labelled": {}, "marked": []}
        assert ask(viewer, "labels")["acts"] == 0
        assert (tmp_path / "anna.jsonl").read_bytes() == b""
        assert post(viewer, good)[0] == 200
    with viewing(viewed / "patches.lmdb") as viewer:
        assert not ask(viewer, "slides")["labelling"]
        assert fetch(viewer, "labels")[0] in (307, 404)
        assert fetch(viewer, "labelled")[0] == 404
        assert post(viewer, good)[0] in (307, 404, 405)


@settings(max_examples=60, deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["id", "act", "class", "patches", "slide", "marked"]),
        inner | st.sampled_from(["label", "mark"]),
        max_size=5,
    ),
    max_leaves=12,
))  # fmt: skip
def test_any_act_is_answered(fuzzed: Viewer, act: Any) -> None:
    assert post(fuzzed, act)[0] in (200, 400, 404)


@pytest.fixture(scope="module")
def fuzzed(viewed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    with view_labels(viewed, tmp_path_factory.mktemp("labels")) as viewer:
        yield viewer


@pytest.mark.long(reason="five rounds of labels")
def test_a_classifier_learns_and_is_measured_on_held_out_regions(
    viewed: Path, features: Path, index: dict[str, NDArray[Any]], tmp_path: Path
) -> None:
    class_of = {
        (int(x), int(y)): CLASSES[number] if number >= 0 else "unsure"
        for x, y, number in zip(index["x_l0"], index["y_l0"], index["label"], strict=True)
    }
    with view_labels(viewed, tmp_path, features=features) as viewer:
        state, seen = until(viewer, 0), set[tuple[int, int]]()
        while not state["loaded"]:
            state = ask(viewer, "labels")
        assert (state["learned"], state["candidates"]) == (False, len(index["x_l0"]))
        assert (
            fetch(viewer, "pass", method="POST")[0] == 404 and ask(viewer, "pass")["slides"] == {}
        )
        for order in ("random", "uncertain", "far", "certain", "random"):
            items = ask(viewer, f"queue?order={order}&class=1&count=24")
            places = [(item["x"], item["y"]) for item in items]
            assert len(places) == 24 and not {*places} & seen
            # Each fourth patch is of the held-out part, and has no prediction, which could bias the label.
            assert all("predicted" not in item for item in items[3::4])
            if state["learned"]:
                assert sum("predicted" in item for item in items) == 18
            for x, y in places:
                act = label(f"{x} {y}", class_of[x, y], (0, x, y))
                act["offered"] = act["patches"]  # only those of the held-out part are
                assert post(viewer, act)[0] == 200
            seen |= {*places}
            state = until(viewer, state["version"])
        accuracy = state["accuracy"]
        journal = read_labels(tmp_path, "anna", CLASSES)
        offered = journal.offered
        assert len(offered) == 30
        assert accuracy["by_region"] and accuracy["patients"] == 1
        assert accuracy["patches"] == sum(journal.labels[p] != "unsure" for p in offered)
        value, interval = accuracy["metrics"]["auc"]
        assert value > 0.9 and interval is None
        study = read_study(tmp_path)
        with Store(viewed / "patches.lmdb") as store:
            mpp = store.records[0].mpp or 0.0
        classes, p = np.frombuffer(fetch(viewer, "slides/0/learned")[1], "<f4").reshape(2, -1)
        # There are no predictions in the held-out part.
        held_out = np.array([study.is_held_out(SLIDE, x * mpp, y * mpp) for x, y in class_of])
        np.testing.assert_array_equal(np.isnan(classes), held_out)
        labelled = (index["label"] >= 0) & ~held_out
        assert (classes[labelled] == index["label"][labelled]).mean() > 0.9
        assert np.nanmin(p) >= 0.5
        # Held-out patches never train, and only those that were offered measure.
        learning = viewer._labelling._learning  # type: ignore[union-attr]
        train, test = learning._labelled()
        assert len(train) > 20 and not any(learning.is_held_out(*patch) for patch in train)
        assert {*test} <= offered and all(learning.is_held_out(*patch) for patch in test)
        # All slides at once.
        assert fetch(viewer, "pass", method="POST")[0] == 200
        while (progress := ask(viewer, "labels")["pass"])["running"]:
            time.sleep(0.02)
        assert (progress["slides"], progress["of"]) == (1, 1)
        assert learning._classifier is not None
        _, every = predict_file(features / f"{SLIDE}.h5", learning._classifier)
        expected = {**dict(zip(CLASSES, map(pytest.approx, every.mean(axis=0)), strict=True))}
        predicted = CLASSES[int(every.mean(axis=0).argmax())]
        assert ask(viewer, "pass")["slides"] == {SLIDE: {**expected, "predicted": predicted}}
        # A wrong label is found.
        x, y = next(
            place
            for place in seen
            if class_of[place] == "Dermis" and (SLIDE, *place) not in offered
        )
        post(viewer, label("wrong", "Epidermis", (0, x, y)))
        until(viewer, state["version"])
        contradicted = ask(viewer, "queue?order=contradicted")
        assert (x, y) in [(item["x"], item["y"]) for item in contradicted]


def test_features_of_other_patches_are_named(viewed: Path, tmp_path: Path) -> None:
    folder, notes = tmp_path / "features", Notes()
    folder.mkdir()
    record_encoder(folder, {"encoder": "planted", "dimension": 2})
    with writing(folder / f"{SLIDE}.h5", 3, 2, "float32") as writer:
        writer.append(np.ones((3, 2), np.float32), np.array([[1, 1], [2, 2], [3, 3]]))
        writer.finish({}, {"name": SLIDE})
    with view_labels(viewed, tmp_path / "j", features=folder, progress=notes) as viewer:
        end = time.monotonic() + 30
        while not (state := ask(viewer, "labels"))["loaded"]:
            assert time.monotonic() < end
        assert state["candidates"] == 0
        assert ask(viewer, "queue?order=far") == []
    assert notes.messages == [f"{SLIDE}: no candidates: its features are of other patches"]


def test_an_unreadable_feature_file_concerns_its_labels_only(
    viewed: Path, index: dict[str, NDArray[Any]], tmp_path: Path
) -> None:
    folder, notes = tmp_path / "features", Notes()
    folder.mkdir()
    (folder / f"{SLIDE}.h5").write_bytes(b"no HDF5 file")
    place = (0, int(index["x_l0"][0]), int(index["y_l0"][0]))
    with view_labels(viewed, tmp_path / "j", features=folder, progress=notes) as viewer:
        state = until(viewer, 0)
        assert post(viewer, label("1", "Dermis", place))[0] == 200
        state = until(viewer, state["version"])
        while not state["loaded"]:
            state = ask(viewer, "labels")
        assert not state["learned"]
    texts = " ".join(notes.messages)
    assert "no candidates" in texts and "nothing is learned from its labels" in texts


def test_two_raters_at_once(viewed: Path, index: dict[str, NDArray[Any]], tmp_path: Path) -> None:
    corners = [(0, int(x), int(y)) for x, y in zip(index["x_l0"], index["y_l0"], strict=True)]
    with view_labels(viewed, tmp_path) as anna, view_labels(viewed, tmp_path, "ben") as ben:
        assert ask(ben, "labels")["raters"] == ["anna", "ben"]
        for row in range(20):
            name = CLASSES[row % 2]
            post(anna, label(str(row), name, corners[row]))
            post(ben, label(str(row), "Dermis" if row == 5 else name, corners[row]))
        agreement = ask(anna, "disagreements?rater=ben")
        assert agreement["patches"] == 20
        assert agreement["kappa"] == pytest.approx(0.9)
        assert agreement["interval"] is None  # one patient
        assert "expected at least 5" in agreement["notes"][0]
        (row,) = agreement["list"]
        assert (row["x"], row["y"]) == corners[5][1:]
        assert row["labels"] == {"anna": "Epidermis", "ben": "Dermis"}
        with (
            pytest.raises(UsageError, match="open in another viewer"),
            view_labels(viewed, tmp_path),
        ):
            pass


def test_a_folder_that_cannot_be_written_is_named(viewed: Path, tmp_path: Path) -> None:
    refused = PermissionError(13, "Permission denied")
    with (
        mock.patch("histopipe.viewer.label_page.write_subsets", side_effect=refused),
        pytest.raises(UsageError, match=r"cannot create or write to .*labels.*Permission denied"),
        view_labels(viewed, tmp_path / "labels"),
    ):
        pass


def test_wrong_options_and_other_patches_are_explained(viewed: Path, tmp_path: Path) -> None:
    store, slides = viewed / "patches.lmdb", viewed / "slides"
    for paths, options, reason in (
        ((store,), {"journal": tmp_path / "j"}, "--journal and --rater"),
        ((store,), {"rater": "anna"}, "--journal and --rater"),
        ((store,), {"journal": tmp_path / "j", "rater": "anna"}, "--classes: found none"),
        ((store,), {"journal": tmp_path / "j", "rater": "../x", "classes": CLASSES}, "--rater"),
        ((slides,), {"journal": tmp_path / "j", "rater": "x", "classes": CLASSES}, "no store"),
    ):
        with pytest.raises(UsageError, match=reason), viewing(*paths, **options):
            pass
    folder = tmp_path / "labels"
    with view_labels(viewed, folder) as viewer:
        with Store(store) as opened:
            x, y = (int(opened.index(0)[name][0]) for name in ("x_l0", "y_l0"))
        post(viewer, label("1", "Dermis", (0, x, y)))
    path = folder / "anna.jsonl"
    act = json.loads(path.read_text())
    path.write_text(json.dumps({**act, "crcs": {SLIDE: 1}}) + "\n")
    with pytest.raises(UsageError, match="other patches of CMU"), view_labels(viewed, folder):
        pass
    with pytest.raises(UsageError, match="no rater"):
        read_labels(folder, "ben", CLASSES)


@pytest.mark.parametrize(
    ("patients", "second_of", "has_metrics"),
    [(6, "abcdef", True), (4, "abcd", False), (6, "ab", True), (6, "a", False)],
)
def test_an_accuracy_needs_five_patients_and_two_of_each_class(
    patients: int, second_of: str, has_metrics: bool
) -> None:
    names = "abcdef"[:patients]
    learning = Learning.__new__(Learning)
    learning._study = LabelStudy(CLASSES, held_out=tuple(names))
    entries = {name: SimpleNamespace(record=None, id=name) for name in names}
    learning._entries = entries  # type: ignore[assignment]
    learning._classifier = LinearClassifier(
        np.array([[-1.0, 1.0]], np.float32), np.zeros(2, np.float32)
    )
    patches = [(name, x, 0) for name in names for x in (0, 1) if x == 0 or name in second_of]
    numbers = np.array([x for _, x, _ in patches])
    features = (2 * numbers - 1.0)[:, None].astype(np.float32)
    features[0] = 1  # the first patch is wrong
    result = learning._measured(patches, features, numbers)
    assert result["patches_by_class"] == [patients, len(second_of)]
    assert result["right_by_class"] == [patients - 1, len(second_of)]
    assert bool(result["metrics"]) == has_metrics
    if has_metrics:
        value, (low, high) = result["metrics"]["balanced_accuracy"]
        assert value == pytest.approx(1 - 1 / patients / 2)
        assert low < value <= high


def test_all_slides_but_those_of_held_out_patients_are_predicted(tmp_path: Path) -> None:
    """A slide whose features cannot be read ends nothing."""
    learning, notes = Learning.__new__(Learning), list[str]()
    learning._study = LabelStudy(CLASSES, held_out=("b",))
    entries: Any = {name: SimpleNamespace(record=None, id=name) for name in "abcd"}
    learning._entries = entries
    learning.files = {name: tmp_path / f"{name}.h5" for name in entries}
    learning._message = notes.append
    features: dict[str, list[float]] = {"a": [1, 1, np.nan], "b": [1], "d": [-3]}
    for name, values in features.items():
        with writing(learning.files[name], len(values), 1, "float32") as writer:
            rows = np.array(values, np.float32)[:, None]
            writer.append(rows, np.arange(2 * len(rows)).reshape(-1, 2))
            writer.finish({}, {"name": name})

    class Here:
        async def in_worker(self, function: Any, *arguments: Any) -> Any:
            return function(*arguments)

    learning._slides = Here()  # type: ignore[assignment]
    model = LinearClassifier(np.array([[-1.0, 1.0]], np.float32), np.zeros(2, np.float32))
    asyncio.run(learning._predict_all(model))
    p = float(1 / (1 + np.exp(-2)))
    assert learning.means["a"] == {
        "Dermis": pytest.approx(1 - p),
        "Epidermis": pytest.approx(p),
        "predicted": "Epidermis",
    }
    assert learning.means["d"]["predicted"] == "Dermis" and [*learning.means] == ["a", "d"]
    assert learning._passed == 4 and len(notes) == 1 and notes[0].startswith("c: not predicted")


def test_a_map_has_the_patches_with_values_of_their_layers(
    viewed: Path, features: Path, index: dict[str, NDArray[Any]], tmp_path: Path
) -> None:
    with viewing(viewed / "patches.lmdb", features=features) as viewer:
        points = map_of(viewer)
        slide, x, y, u, v = points
        assert (slide == 0).all() and np.isfinite([u, v]).all()
        order = np.lexsort((x, y)), np.lexsort((index["x_l0"], index["y_l0"]))
        for name, values in (("x_l0", x), ("y_l0", y)):
            np.testing.assert_array_equal(values[order[0]], index[name][order[1]])
        values = np.frombuffer(fetch(viewer, "map?layer=label")[1], "<f4")
        expected = np.where(index["label"] >= 0, index["label"], np.nan)
        np.testing.assert_array_equal(values[order[0]], expected[order[1]])
        # The features show the class of most patches.
        classes = [np.array([u, v])[:, values == number].mean(axis=1) for number in (0, 1)]
        assert np.linalg.norm(classes[0] - classes[1]) > 1
        assert np.isnan(np.frombuffer(fetch(viewer, "map?layer=mine")[1], "<f4")).all()
        for path in ("map/tsne", "map/../map/pca", "map/pca/x"):
            assert fetch(viewer, path)[0] == 404, path
        assert fetch(viewer, "map/pca", origin="http://evil.example")[0] == 403
    with viewing(viewed / "patches.lmdb") as viewer:
        assert fetch(viewer, "map/pca")[0] == 404
        assert fetch(viewer, "map?layer=label")[:2] == (200, b"")
    with view_labels(viewed, tmp_path, features=features) as viewer:
        map_of(viewer)
        post(viewer, label("1", "Epidermis", (0, int(x[3]), int(y[3]))))
        mine = np.frombuffer(fetch(viewer, "map?layer=mine")[1], "<f4")
        assert mine[3] == 1 and np.isnan(np.delete(mine, 3)).all()
        assert np.isnan(np.frombuffer(fetch(viewer, "map?layer=learned")[1], "<f4")).all()
        learning = viewer._labelling._learning  # type: ignore[union-attr]
        zeros = np.zeros((6, 2), np.float32)
        learning._classifier = LinearClassifier(zeros, np.array([0, 1], np.float32))
        learned = np.frombuffer(fetch(viewer, "map?layer=learned")[1], "<f4")
        places = zip(x.tolist(), y.tolist(), strict=True)
        held_out = np.array([learning.is_held_out(SLIDE, *place) for place in places])
        np.testing.assert_array_equal(learned, np.where(held_out, np.nan, 1))


def map_of(viewer: Viewer) -> NDArray[np.float32]:
    """Return (5, N) slide, corner and place of the patches on the map."""
    end = time.monotonic() + 30
    while (answer := fetch(viewer, "map/pca"))[0] == 202:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert answer[0] == 200, answer
    return np.frombuffer(answer[1], "<f4").reshape(5, -1)


def test_patches_without_a_prediction_get_no_label(tmp_path: Path) -> None:
    scores = SimpleNamespace(
        output=np.array([[0.2, 0.8], [np.nan, np.nan], [0.9, 0.1]]),
        x_l0=np.array([0, 1, 2]),
        y_l0=np.zeros(3, int),
    )
    source = SimpleNamespace(classes=CLASSES, slide_ids=lambda: ["a"], of_slide=lambda _: scores)
    with mock.patch("histopipe.viewer.label_page.open_source", lambda _: source):
        names = [name for _, name, *_ in _predicted(tmp_path)]
    assert names == ["Epidermis", "", "Dermis"]
