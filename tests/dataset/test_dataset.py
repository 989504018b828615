"""Order, tables, batches and splits: pure functions and their properties."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.csgraph import connected_components

from helpers.examples import examples
from helpers.stores import RECORD, SPEC, columns_of, one_slide
from histopipe.dataset.batches import PatchBatches, ReusedMemory
from histopipe.dataset.sampling import Order, make_order
from histopipe.dataset.selection import (
    SampleLocations,
    SampleRows,
    SampleTable,
    select,
    unpack_keys,
)
from histopipe.errors import DamagedStore, NothingToDo, UnknownVersion, UsageError
from histopipe.geometry import Micrometres
from histopipe.slides.slide_files import SlideHashes, copy_groups, copy_names
from histopipe.slides.tables import SlideLabel
from histopipe.splits.assignment import Assignment
from histopipe.splits.labelling import Labelling
from histopipe.splits.slide_table import table_of
from histopipe.splits.splits import DROPPED, read_splits, write_splits
from histopipe.splits.splitting import make_folds, make_splits
from histopipe.store.record import describe_copies
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.arrays import aligned_empty
from histopipe.tasks.choices import EVALUATED, SplitBy


@given(
    st.lists(
        st.tuples(st.integers(0, 126), st.integers(0, 2**24 - 1), st.integers(0, 2**32 - 1)),
        min_size=1,
    )
)
def test_keys_are_unpacked_to_their_parts(parts: list[tuple[int, int, int]]) -> None:
    stores, slides, rows = np.array(parts, np.int64).T
    keys = SampleLocations(stores, slides, rows, np.zeros(len(parts), np.int32)).keys
    assert (keys >= 0).all()
    np.testing.assert_array_equal(unpack_keys(keys), [stores, slides, rows])


@given(st.lists(st.lists(st.integers(0, 50), unique=True), min_size=1, max_size=6), st.booleans())
def test_table_numbers_samples_in_the_order_of_slides(
    slides: list[list[int]], chosen: bool
) -> None:
    parts = [
        SampleRows(i % 2, i, len(rows), i, np.array(sorted(rows), np.int32) if chosen else None)
        for i, rows in enumerate(slides)
    ]
    if not any(slides):
        with pytest.raises(NothingToDo):
            SampleTable(parts)
        return
    table = SampleTable(parts)
    samples = table.locate(np.arange(len(table)))
    located = np.stack([samples.stores, samples.slides, samples.rows, samples.labels], axis=1)
    assert located.tolist() == [
        [i % 2, i, row, i]
        for i, rows in enumerate(slides)
        for row in (sorted(rows) if chosen else range(len(rows)))
    ]


@pytest.fixture
def store(made_store: Path) -> Any:
    with Store(made_store) as opened:
        yield opened


def batches_of(store: Store, *, seed: int | None, **kwargs: Any) -> PatchBatches:
    table = SampleTable(select([store], labelled_only=True))
    return PatchBatches([store], table, order=make_order(table, seed=seed), **kwargs)


def epoch_keys(batches: PatchBatches, epoch: int) -> list[int]:
    steps = np.arange(batches.steps_per_epoch) + epoch * batches.steps_per_epoch
    parts = itertools.product(steps.tolist(), range(batches.replicas))
    located = [batches.locate(step, replica) for step, replica in parts]
    return [key for samples, weight in located for key in samples.keys[weight > 0].tolist()]


@examples(30)
@given(st.integers(4, 120), st.integers(0, 5), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_epoch_has_every_patch_once_for_any_number_of_replicas(
    small_store: Path, size: int, epoch: int, replicas: int, shuffle: bool, step: int
) -> None:
    """Replicas have the rows of the batch, also in the padding of the last batch: batch normalization uses it."""
    with Store(small_store) as store:
        seed = 5 if shuffle else None
        single = batches_of(store, batch_size=size, seed=seed)
        many = batches_of(store, batch_size=size, seed=seed, replicas=replicas)
        one = epoch_keys(single, epoch)
        assert one == epoch_keys(many, epoch)
        assert len(one) == len(set(one)) == len(store)
        whole, weights = single.locate(step)
        parts = [many.locate(step, replica) for replica in range(replicas)]
    assert len(whole.keys) == size
    np.testing.assert_array_equal(np.concatenate([part.keys for part, _ in parts]), whole.keys)
    np.testing.assert_array_equal(np.concatenate([weight for _, weight in parts]), weights)
    sizes = [len(part.keys) for part, _ in parts]
    assert max(sizes) - min(sizes) <= 1


def test_batch_smaller_than_the_replicas_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="batch_size: found 2, expected 3 or more"):
        batches_of(store, batch_size=2, seed=1, replicas=3)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([(2, 3), (70, 70, 3), (0, 4)])), max_size=60
    )
)
def test_memory_is_used_again_only_when_nothing_refers_to_it(
    events: list[tuple[int, tuple[int, ...]]],
) -> None:
    memory, kept = ReusedMemory(), dict[int, tuple[Any, int]]()
    for number, (place, shape) in enumerate(events):
        array = memory.empty(shape)
        assert array.shape == shape and array.dtype == np.uint8
        assert array.size == 0 or array.ctypes.data % 64 == 0
        array[...] = number
        # Different ways to refer to the memory: a view of a view, a buffer, a tensor.
        reference = (array, array[..., 1:].T[:1], array.data, array.view("i1"))[number % 4]
        kept[place] = reference, number  # frees the array that was kept there before
        del array
        for value, written in kept.values():
            assert (np.asarray(value) == np.int8(written)).all()


def test_memory_is_used_again() -> None:
    a, b = aligned_empty((3, 5, 5, 3)), aligned_empty((3, 5, 5, 3))
    assert a.ctypes.data % 64 == b.ctypes.data % 64 == 0 and not np.shares_memory(a, b)
    memory, addresses = ReusedMemory(), set()
    for _ in range(10):
        pair = memory.empty((9, 9)), memory.empty((9, 9))
        addresses |= {array.ctypes.data for array in pair}
        del pair
    assert len(addresses) == 2
    held = [memory.empty((9, 9)) for _ in range(30)]
    assert len({array.ctypes.data for array in held}) == 30
    assert len(memory._buffers) == 24
    del held
    memory.empty((9, 9))
    assert len(memory._buffers) == 5  # the one taken, and four free ones


def test_patch_that_is_not_an_image_is_reported_with_its_row(tmp_path: Path) -> None:
    one_slide(tmp_path / "s.lmdb", [b"no image", b"\xff\xd8no jpeg"]).close()
    with Store(tmp_path / "s.lmdb") as store:
        batches = PatchBatches([store], SampleTable(select([store])), batch_size=1, order=Order(2))
        for step in (0, 1):
            with pytest.raises(
                DamagedStore, match=f"slide a: patch {step}: the image cannot be decoded"
            ):
                batches.load(step)


def test_unreadable_patches_are_never_drawn(golden: Path) -> None:
    with Store(golden) as store:
        table = SampleTable(select([store], classes=["normal", "tumour"], labelled_only=True))
        batches = PatchBatches([store], table, batch_size=3, order=Order(7, 1))
        keys = epoch_keys(batches, 0)
    assert len(table) == len(set(keys)) == 7
    assert 1 << 32 | 1 not in keys


REGION = Micrometres(400.0)  # patches have 64 µm, and keep 64 µm from another side


@pytest.mark.parametrize("split_by", ["patient", "slide", "region", "patch"])
def test_split_is_written_and_read_back(store: Store, tmp_path: Path, split_by: SplitBy) -> None:
    splits, same = (
        make_splits([store], split_by=split_by, seed=3, region=REGION) for _ in range(2)
    )
    counts = splits.count()
    assert all(counts[side][name] for side in EVALUATED for name in splits.classes)
    dropped = sum(int((slide.subsets == DROPPED).sum()) for slide in splits.slides)
    assert sum(c.total() for c in counts.values()) + dropped == len(store)
    assert (dropped > 0) == (split_by == "region")
    write_splits(splits, tmp_path / "splits.json")
    for again in (read_splits(tmp_path / "splits.json", [store]), same):
        for a, b in zip(splits.slides, again.slides, strict=True):
            np.testing.assert_array_equal(a.subsets, b.subsets)


@examples(25)
@given(st.integers(0, 1000), st.integers(3, 6))
def test_patients_are_on_one_side(small_store: Path, seed: int, patients: int) -> None:
    with Store(small_store) as store:
        labelling = Labelling(
            labels={
                record.id: SlideLabel(record.label, f"{record.label}-{i // 2 % patients}")
                for i, record in enumerate(store.slides)
            }
        )
        splits = make_splits([store], split_by="patient", seed=seed, labelling=labelling)
    assert len(splits.slides) == 12 and splits.leaks() == []


def store_with_copies(
    path: Path, names: Sequence[str], copies: Collection[str], **hashes: str
) -> Path:
    """Write slides of two patches, one per patient. `copies` are copies of one slide. `hashes` are pixel hashes."""
    with StoreWriter(path, SPEC) as writer:
        for number, name in enumerate(names):
            record = dataclasses.replace(
                RECORD,
                id=name,
                label=name[0],
                patient=name,
                quickhash="same" if name in copies else name,
                pixel_hash=hashes.get(name),
                planned=2,
                stored=2,
            )
            writer.register([record])
            crc = writer.put_patches(number, [0, 1], [b"x", b"y"])
            writer.complete(number, record, columns_of(crc, np.ones(2)), {})
    return path


PINNED: dict[SplitBy, str] = {
    "patch": "01 01 10 10 01 10 10 10 10 10 01 01",
    "slide": "00 00 00 11 11 11 11 00 11 11 00 00",
}
"""Sides of the patches of the slides `NAMES`. A change of the algorithm needs another name in `splits.json`."""
NAMES = [f"{c}{i}" for c in "ab" for i in range(6)]


def test_slides_of_one_quickhash_with_different_pixels_are_no_copies(tmp_path: Path) -> None:
    hashes = {name: f"pixels of {name.replace('5', '4')}" for name in NAMES}
    with Store(store_with_copies(tmp_path / "s.lmdb", NAMES, NAMES, **hashes)) as store:
        splits = make_splits([store], split_by="slide", seed=1)
        slides = table_of([store], Labelling(), splits)
        notes = [note.partition(" of ")[0] for note in describe_copies(store.slides)]
    assert {s.slide: s.copy_of for s in slides if s.copy_of} == {"a5": "a4", "b5": "b4"}
    assert notes == ["a4, a5 are copies", "b4, b5 are copies"]
    assert len({slide.content for slide in splits.slides}) == 10 and len(splits.slides) == 12
    assert splits.leaks() == []


def test_copies_across_stores_of_two_versions_are_found(tmp_path: Path) -> None:
    """The second store has a hash of pixels. Slides of the first one are compared by their quickhash."""
    hashes = {name: name for name in NAMES}
    with (
        Store(store_with_copies(tmp_path / "old.lmdb", NAMES, ())) as first,
        Store(store_with_copies(tmp_path / "new.lmdb", NAMES, (), **hashes)) as second,
    ):
        splits = make_splits([first, second], split_by="slide", seed=1)
        slides = table_of([first, second], Labelling(), splits)
        notes = describe_copies([*first.slides, *second.slides])
    sides = [int(slide.subsets[0]) for slide in splits.slides]
    assert sides[:12] == sides[12:] and splits.leaks() == []
    assert [slide.copy_of for slide in slides[12:]] == [slide.slide for slide in slides[:12]]
    assert len(notes) == 12
    assert notes[0].startswith("a0, a0 may be copies of one slide: they have the same quickhash")


def test_copies_stay_together_and_splits_of_a_seed_stay_the_same(tmp_path: Path) -> None:
    copies = ("a0", "a1", "b5")
    with Store(store_with_copies(tmp_path / "s.lmdb", NAMES, copies)) as store:
        for seed in range(20):
            splits = make_splits([store], split_by="slide", seed=seed)
            assert splits.leaks() == []
            assert len({s.subsets[0] for s in splits.slides if s.id in copies}) == 1
        for split_by, expected in PINNED.items():
            splits = make_splits([store], split_by=split_by, seed=3, fractions=(0.5, 0.5, 0))
            names = ["same" if name in copies else name for name in NAMES]
            assert [slide.content for slide in splits.slides] == names
            sides = ("".join(map(str, slide.subsets.tolist())) for slide in splits.slides)
            assert " ".join(sides) == expected


KINDS = st.sampled_from([None, "1", "2"])


@examples(200)
@given(
    st.lists(
        st.lists(st.tuples(KINDS, KINDS, KINDS), min_size=1, max_size=2), min_size=1, max_size=9
    )
)
def test_groups_of_copies_are_the_unions_of_pairs(
    bags: list[list[tuple[str | None, str | None, str | None]]],
) -> None:
    """Expected is the definition, on every pair of slides of all versions, with and without bags of several slides."""
    slides = [
        [
            SlideHashes(*(text and kind + text for kind, text in zip("ctp", scan, strict=True)))
            for scan in bag
        ]
        for bag in bags
    ]
    pairs = list(itertools.combinations(range(len(slides)), 2))
    level0, linked = np.zeros((2, len(slides), len(slides)), bool)
    for i, j in pairs:
        for a, b in itertools.product(slides[i], slides[j]):
            both = [
                (getattr(a, kind), getattr(b, kind))
                for kind in ("tile_hash", "pixel_hash")
                if getattr(a, kind) and getattr(b, kind)
            ]
            level0[i, j] |= bool(both) and all(x == y for x, y in both)
            linked[i, j] |= not both and a.content is not None and a.content == b.content
    copies, groups = (
        connected_components(links, directed=False)[1] for links in (level0, level0 | linked)
    )
    names = copy_names(slides)
    for name, bag in zip(names, slides, strict=True):
        assert name is not None or not any(any(dataclasses.astuple(scan)) for scan in bag)
    numbers = [i if name is None else name for i, name in enumerate(names)]
    groupings: list[Sequence[Any]] = [*copy_groups(slides), numbers]
    for actual, expected in zip(groupings, (copies, groups, groups), strict=True):
        for i, j in pairs:
            assert (actual[i] == actual[j]) == (expected[i] == expected[j])


def test_regions_of_two_sides_are_a_patch_width_apart(store: Store) -> None:
    splits = make_splits([store], split_by="region", seed=3, region=REGION)
    for slide in splits.slides:
        index, record = store.index(slide.slide), store.records[slide.slide]
        assert record.read_size is not None and record.mpp is not None
        width, square = record.read_size, REGION / record.mpp
        centres = np.stack([index["x_l0"], index["y_l0"]], axis=1).astype(int) + width / 2
        kept = slide.subsets != DROPPED
        for i in np.flatnonzero(kept):
            # Squares of other sides are at least a patch width away.
            other_centres = centres[kept & (slide.subsets != slide.subsets[i])]
            corners = np.floor(other_centres / square) * square
            near = np.clip(centres[i], corners, corners + square)
            assert (abs(near - centres[i]).max(axis=1) - width / 2 >= width - 1).all()


@pytest.mark.parametrize(
    ("label", "message", "options"),
    [
        ("same", r"fewer than two classes: found labels same.*labels\.csv", {}),
        ("ab", "class 'a' cannot be split: found 2 patients, expected at least 3", {}),
        (
            None,
            r"splitting by region leaves no '\w+' patch for \w+; .*--region-um",
            {"split_by": "region", "region": Micrometres(100.0)},
        ),
    ],
)
def test_too_few_classes_patients_or_patches_are_refused(
    store: Store, label: str | None, message: str, options: dict[str, Any]
) -> None:
    labels: dict[str, SlideLabel] = {
        record.id: SlideLabel("ab"[i >= 2] if label == "ab" else label or record.label)
        for i, record in enumerate(store.slides)
    }
    options = {"split_by": "patient", "labelling": Labelling(labels=labels), **options}
    with pytest.raises(NothingToDo, match=message):
        make_splits([store], seed=3, **options)


def test_message_names_copies_that_make_a_class_too_small(tmp_path: Path) -> None:
    """Four patients have class a. Three of them have the same slide under different ids."""
    names = ["a0", "a1", "a2", "a3", *(f"b{i}" for i in range(6))]
    copies = r"copies of one slide count as one and stay in one subset: a0 = a1 = a3\)"
    one = Labelling(labels={n: SlideLabel(n[0], "one" if n < "a4" else n) for n in names})
    cases: tuple[tuple[str, SplitBy, Labelling], ...] = (
        (rf"class 'a' cannot be split: found 2 patients \({copies}, exp", "patient", Labelling()),
        (rf"found 2 slides \({copies}", "slide", Labelling()),
        (r"found 1 patient, expected", "patient", one),  # not due to copies
    )
    with Store(store_with_copies(tmp_path / "s.lmdb", names, ("a0", "a1", "a3"))) as store:
        for message, split_by, labelling in cases:
            with pytest.raises(NothingToDo, match=message):
                make_splits([store], split_by=split_by, seed=1, labelling=labelling)
        with pytest.raises(UsageError, match=r"at most 6, the slides of the largest class$"):
            make_folds([store], 8, split_by="slide", seed=1)


@examples(30)
@given(st.lists(st.integers(3, 40), min_size=1, max_size=4), st.integers(0, 1000))
def test_every_class_is_on_every_side(sizes: list[int], seed: int) -> None:
    """Each unit has one class and 10 patches."""
    of_class = np.repeat(np.eye(len(sizes), dtype=np.int64) * 10, sizes, axis=0)
    patches = np.hstack([of_class.sum(axis=1, keepdims=True), of_class])
    (sides,) = Assignment((0.7, 0.15, 0.15), seed).assign(patches, len(sizes))
    for column, size in enumerate(sizes):
        counts = np.bincount(sides[of_class[:, column] > 0], minlength=3)
        assert counts.min() >= 1
        assert max(abs(counts[1:] - max(1, 0.15 * size))) < 2


def test_split_that_does_not_match_the_store_is_refused(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "splits.json"
    write_splits(make_splits([store], split_by="patient", seed=3), path)
    good = json.loads(path.read_text())
    slide = good["slides"][0]
    for change, error, message in (
        ({"version": 4}, UnknownVersion, "version 4"),
        ({"stores": ["other"]}, DamagedStore, "belongs to other stores"),
        (
            {"slides": [slide | {"crc": 1}]},
            DamagedStore,
            "does not match .*splits.json: found different patches",
        ),
        (
            {"slides": [slide | {"slide": 77}]},
            DamagedStore,
            "no complete slide with this number",
        ),
        ({"slides": [{}]}, DamagedStore, "is damaged"),
        ({"classes": 3}, DamagedStore, "is damaged"),
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(error, match=message):
            read_splits(path, [store])
    path.write_text("{")
    with pytest.raises(DamagedStore, match="is damaged"):
        read_splits(path, [store])
    with pytest.raises(UsageError, match="does not exist"):
        read_splits(tmp_path / "none", [store])
