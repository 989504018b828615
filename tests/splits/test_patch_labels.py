"""Training on patch labels from annotations, and filters of patches."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.commands import succeed
from helpers.examples import examples
from helpers.stores import a_store, jpegs
from helpers.trainings import csv_rows
from histopipe import load_dataset
from histopipe.dataset.selection import select
from histopipe.errors import NothingToDo, UsageError
from histopipe.runs.task_config import PatchTrainConfig, make_config
from histopipe.runs.training_data import new_splits, read_labelling
from histopipe.splits.labelling import Labelling, PatchFilter
from histopipe.splits.splits import Splits, read_splits, write_splits
from histopipe.splits.splitting import make_folds, make_splits
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.tasks.choices import SUBSETS, SplitBy

pytestmark = pytest.mark.usefixtures("tensorflow")
BY_ANNOTATION = Labelling(labels_from="annotation")
PATCHES = 40


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """Store of six slides of 40 patches: a third gland, a third stroma, a third unlabelled; one slide has no labels."""
    pictures = jpegs(0, PATCHES, 32)
    path = a_store(tmp_path / "drawn.lmdb", {f"s{i}": pictures for i in range(6)}, patch_size=32)
    with StoreWriter(path) as writer, Store(path) as store:
        assert writer.class_numbers(["stroma", "gland"]) == {"stroma": 0, "gland": 1}
        for number in range(5):
            label = (np.arange(PATCHES, dtype=np.int32) + number) % 3 - 1
            counts = {"stroma": int((label == 0).sum()), "gland": int((label == 1).sum())}
            columns = {"label": label, "tissue": np.linspace(0, 1, PATCHES, dtype=np.float32)}
            writer.put_columns(number, columns, crc=store.index(number)["crc"], patch_labels=counts)
        none = {"label": np.full(PATCHES, -1, np.int32), "tissue": np.full(PATCHES, np.nan)}
        writer.put_columns(5, none, crc=store.index(5)["crc"])
    return path


def test_patches_per_slide_are_the_same_for_all_seeds_and_have_classes(drawn: Path) -> None:
    def used(seed: int, **settings: Any) -> Splits:
        config = make_config(
            {
                "stores": drawn,
                "labels_from": "annotation",
                "split_by": "slide",
                "seed": seed,
                **settings,
            }
        )
        with Store(drawn) as store:
            return new_splits(config, [store], read_labelling(config, [store]))

    some, other, every = (used(seed, patches_per_slide=n) for seed, n in ((1, 7), (2, 7), (1, 0)))
    masks = [np.array([slide.subsets >= 0 for slide in each.slides]) for each in (some, other)]
    np.testing.assert_array_equal(masks[0], masks[1])
    assert (masks[0].sum(axis=1) == 7).all() and (masks[0] != masks[0][0]).any()
    for slide in some.slides:
        assert slide.labels is not None and (slide.labels[slide.subsets >= 0] >= 0).all()
    path = drawn.parent / "splits.json"
    write_splits(some, path)
    assert used(5, patches_per_slide=7, splits=path).count() == some.count()
    write_splits(every, path)
    with pytest.raises(UsageError, match=r"^--patches-per-slide 7: found 26 patches of slide s0"):
        used(5, patches_per_slide=7, splits=path)


def class_of(slide: int, row: int) -> int:
    """Return the class number of a patch. Classes are sorted by name: gland, stroma."""
    return {0: -1, 1: 1, 2: 0}[(row + slide) % 3]


def labelled_patches(
    rows: Iterable[int] = range(PATCHES), labels: Collection[int] = (0, 1)
) -> set[tuple[int, int]]:
    """Return slide and row of the patches that have one of the labels."""
    return {(s, r) for s in range(5) for r in rows if class_of(s, r) in labels}


@pytest.mark.parametrize("split_by", ["patient", "slide", "patch"])
def test_splits_contain_patch_labels(drawn: Path, split_by: SplitBy, tmp_path: Path) -> None:
    file = tmp_path / "splits.json"
    with Store(drawn) as store:
        splits = make_splits([store], split_by=split_by, seed=3, labelling=BY_ANNOTATION)
        assert splits.classes == ("gland", "stroma")
        write_splits(splits, file)
        assert json.loads(file.read_text())["version"] == 2
        again = read_splits(file, [store])
        seen: list[tuple[int, int]] = []
        for side in SUBSETS:
            for part in select([store], splits=again, subset=side):
                assert part.rows is not None
                rows = [(part.slide, row) for row in part.rows.tolist()]
                assert all(class_of(*place) == part.label for place in rows)
                seen += rows
        assert Counter(seen) == Counter(labelled_patches())
        crc = store.index(0)["crc"]
    # Labels of later annotations do not change a run.
    with StoreWriter(drawn) as writer:
        columns = {"label": np.ones(PATCHES, np.int32)}
        writer.put_columns(0, columns, crc=crc, patch_labels={"gland": PATCHES})
    with Store(drawn) as store:
        assert read_splits(file, [store]).count() == again.count() == splits.count()


def test_folds_test_each_patch_once(drawn: Path) -> None:
    with Store(drawn) as store:
        folds = make_folds([store], 5, split_by="slide", seed=1, labelling=BY_ANNOTATION)
        slides = [slide for fold in folds for slide in fold.slides]
        tested = Counter(
            (slide.slide, row) for slide in slides for row in slide.on("test").tolist()
        )
    assert tested == Counter(labelled_patches())


def rows_of(batches: Iterable[Any]) -> list[tuple[int, int, int]]:
    """Return slide, row and label of each patch, without the padding."""
    return [
        (int(key) >> 32, int(key) & 0xFFFFFFFF, int(label))
        for batch in batches
        for key, label, weight in zip(batch["key"], batch["label"], batch["weight"], strict=True)
        if weight > 0
    ]


@pytest.mark.parametrize("balance", ["none", "class", "slide"])
def test_batches_contain_patch_labels(drawn: Path, balance: Any) -> None:
    options: dict[str, Any] = {"batch_size": 16, "seed": 1, "labels_from": "annotation"}
    rows = rows_of(load_dataset(drawn, labelled_only=True, balance=balance, **options))
    assert all(class_of(slide, row) == label for slide, row, label in rows)
    count = Counter(label if balance == "class" else slide for slide, _, label in rows)
    assert len(count) == (2 if balance == "class" else 5)
    assert balance == "none" or max(count.values()) - min(count.values()) <= 1


def test_unlabelled_patches_and_those_of_other_classes_have_label_minus_1(drawn: Path) -> None:
    options: dict[str, Any] = {"batch_size": 16, "seed": 1, "labels_from": "annotation"}
    rows = rows_of(load_dataset(drawn, classes=["gland"], **options))
    glands = len(labelled_patches(labels=[0]))
    assert Counter(label for *_, label in rows) == {0: glands, -1: 6 * PATCHES - glands}


def test_invalid_options_are_refused(drawn: Path, small_store: Path) -> None:
    wrong: tuple[tuple[str, dict[str, Any]], ...] = (
        ("labels_from: found 'nothing'", {"labels_from": "nothing"}),
        (
            "labels: found labels_from='annotation'",
            {"labels_from": "annotation", "labels": {"s0": "a"}},
        ),
    )
    for message, options in wrong:
        with pytest.raises(UsageError, match=message):
            load_dataset(drawn, batch_size=4, seed=1, **options)
    with pytest.raises(UsageError, match="--labels-from: found --mil features"):
        make_config({"mil": "features", "labels_from": "annotation"})
    with Store(small_store) as store, pytest.raises(NothingToDo, match="histopipe annotate STORE"):
        make_splits([store], split_by="slide", seed=1, labelling=BY_ANNOTATION)


@pytest.mark.parametrize("kind", [PatchFilter, PatchTrainConfig])
@pytest.mark.parametrize(
    ("name", "value"), [("min_tissue", 2.0), ("exclude_pen", -1.0), ("min_focus", float("nan"))]
)
def test_invalid_filters_are_refused(kind: Any, name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}: found"):
        kind(**{name: value})


# Filters


@given(st.floats(0, 1), st.floats(0, 100), st.floats(0, 1), st.integers(0, 2**32))
@examples(50)
def test_filter_agrees_with_definition(tissue: float, focus: float, pen: float, seed: int) -> None:
    """Patches that are not measured are left out, if their value counts."""
    rng = np.random.default_rng(seed)
    index: dict[str, Any] = {"crc": np.zeros(50), "length": np.ones(50)}
    for name, scale in {"tissue": 1, "pen": 1, "dark": 1, "focus": 100}.items():
        values = scale * rng.random(50).astype(np.float32)
        index[name] = np.where(rng.random(50) < 0.1, np.nan, values)
    kept = PatchFilter(min_tissue=tissue, min_focus=focus, exclude_pen=pen).fit(index, where="x")
    fit = (tissue == 0) | (index["tissue"] >= tissue)
    fit &= (focus == 0) | (index["focus"] >= focus)
    fit &= (pen == 1) | (index["pen"] <= pen)
    np.testing.assert_array_equal(kept, fit)


def test_filter_applies_to_splits_and_batches(drawn: Path) -> None:
    kept = {r for r in range(PATCHES) if r / (PATCHES - 1) >= 0.5}
    labelling = Labelling(labels_from="annotation", patch_filter=PatchFilter(min_tissue=0.5))
    with Store(drawn) as store:
        splits = make_splits([store], split_by="slide", seed=3, labelling=labelling)
        rows = [(s.slide, r) for s in splits.slides for r in np.flatnonzero(s.subsets >= 0)]
        assert Counter(rows) == Counter(labelled_patches(kept))
    options: dict[str, Any] = {"labels_from": "annotation", "labelled_only": True}
    batches = load_dataset(drawn, batch_size=16, seed=1, min_tissue=0.5, **options)
    assert Counter((s, r) for s, r, _ in rows_of(batches)) == Counter(labelled_patches(kept))


def test_filters_without_values_or_patches_are_refused(drawn: Path) -> None:
    with Store(drawn) as store:
        for settings, message in (
            ({"min_tissue": 0.5}, r"slide s5: tissue has not been measured; ingest it"),
            ({"exclude_pen": 0.5}, "slide s0: pen has not been measured; run `histopipe q"),
        ):
            with pytest.raises(UsageError, match=message):
                select([store], patch_filter=PatchFilter(**settings))
        crcs = {number: store.index(number)["crc"] for number in store.complete}
    with StoreWriter(drawn) as writer:
        for number, crc in crcs.items():
            writer.put_columns(number, {"pen": np.ones(PATCHES, np.float32)}, crc=crc)
    labelling = Labelling(labels_from="annotation", patch_filter=PatchFilter(exclude_pen=0.0))
    message = r"within the bounds: found.*pen=0"
    with Store(drawn) as store, pytest.raises(NothingToDo, match=message):
        make_splits([store], split_by="slide", seed=1, labelling=labelling)


# Reading a store during writing


def test_reader_sees_stable_index_while_columns_are_written(tmp_path: Path) -> None:
    """A reader's view of an index block may be on pages that later transactions use again.

    A new block with more columns may begin on the same page as an old block.
    """
    pictures = jpegs(0, 10, 32) * 250
    assert len(pictures) * 36 > 65536, "the block must be large enough for separate pages"
    path = a_store(tmp_path / "large.lmdb", {"a0": pictures, "b1": pictures}, patch_size=32)
    with StoreWriter(path) as writer, Store(path) as store:
        first = [store.index(slide) for slide in (0, 1)]
        for turn in range(40):
            values = np.full(len(pictures), turn / 99, np.float32)
            labels = {"label": np.full(len(pictures), turn, np.int32)}
            written: list[dict[str, Any]] = [
                {"columns": {("covered", "pen", "dark")[turn % 3]: values}}
            ]
            written += [{"columns": labels, "patch_labels": {}}] * (turn < 12)
            for fields in written:
                writer.put_columns(turn % 2, crc=first[turn % 2]["crc"], **fields)
                with store.reading() as reading:
                    for slide, name in itertools.product((0, 1), ("crc", "y_l0", "length")):
                        assert np.array_equal(reading.column(slide, name), first[slide][name])


# A real slide


@pytest.mark.nightly(reason="trains to a quality")
def test_training_separates_epidermis_from_dermis(data: Path, tmp_path: Path) -> None:
    (tmp_path / "slides").mkdir()
    shutil.copy(data / "slides" / "CMU-1-Small-Region.svs", tmp_path / "slides")
    drawn, store = data / "annotations" / "CMU-1-Small-Region.geojson", tmp_path / "patches.lmdb"
    tiles = ("--patch-size", 64, "--annotations", drawn, "--out", store)
    succeed("ingest", tmp_path / "slides", *tiles)
    labels = (
        "--labels-from",
        "annotation",
        "--split-by",
        "region",
        "--region-um",
        300,
        "--deterministic",
    )
    # Deterministic, else the order of sums varies on a busy machine.
    training = ("--model", "small-cnn", "--epochs", 40, "--patience", 15, "--batch-size", 32)
    out = succeed("train", store, *labels, *training, "--out", tmp_path / "run", "--json")
    assert json.loads(out)["validation"]["patch"]["auc"] > 0.95
    rows = csv_rows(tmp_path / "run" / "predictions.csv")
    assert {row["label"] for row in rows} == {"Dermis", "Epidermis"}


def splits_of(config: PatchTrainConfig, store: Store) -> Splits:
    return new_splits(config, [store], read_labelling(config, [store]))


def test_given_splits_are_compared_with_settings(drawn: Path, tmp_path: Path) -> None:
    path = tmp_path / "splits.json"
    options: dict[str, Any] = {"splits": str(path), "stores": (str(drawn),), "split_by": "slide"}
    with Store(drawn) as store:
        write_splits(make_splits([store], split_by="slide", seed=3, labelling=BY_ANNOTATION), path)
        assert splits_of(PatchTrainConfig(**options, labels_from="annotation"), store).classes
        wrong: dict[str, dict[str, Any]] = {
            "--labels-from slide, expected --labels-from annotation": {},
            "has patches that the filter options exclude: found": {
                "labels_from": "annotation",
                "min_tissue": 0.9,
            },
        }
        for message, settings in wrong.items():
            with pytest.raises(UsageError, match=message):
                splits_of(PatchTrainConfig(**options, **settings), store)
