"""The reader: checksums, steps, resume, shards, disk access, processes and threads."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st

import histopipe
from helpers.commands import with_tensorflow
from helpers.examples import examples
from helpers.paths import TESTS
from helpers.stores import (
    SIDE,
    SPEC,
    a_store,
    columns_of,
    edited,
    flip_a_byte,
    flip_bytes,
    jpegs,
    picture,
)
from histopipe.dataset import tf_data
from histopipe.dataset.batches import PatchBatches
from histopipe.dataset.sampling import BlockShuffled, Order, make_order
from histopipe.dataset.selection import PatchColumn, SampleTable, class_numbers, select, unpack_keys
from histopipe.dataset.tf_data import STEPS_AHEAD, ReadAhead, default_calls
from histopipe.errors import DamagedStore, UsageError
from histopipe.ingestion.patch_source import encode
from histopipe.splits.splits import write_splits
from histopipe.splits.splitting import make_splits
from histopipe.store import data_file, environment
from histopipe.store.format import patch_key
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.tasks.choices import AUGMENTATIONS, EVALUATED, Balance
from histopipe.tiling.spec import TilingSpec

pytestmark = pytest.mark.usefixtures("tensorflow")


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Two stores with three slides, two labels and 31 patches."""
    return [
        a_store(tmp_path / "a.lmdb", {"n1": jpegs(0, 12), "t1": jpegs(20, 7)}),
        a_store(tmp_path / "b.lmdb", {"n2": jpegs(40, 12)}),
    ]


def all_of(dataset: Any) -> list[dict[str, Any]]:
    return [{k: v.numpy() for k, v in batch.items()} for batch in dataset]


def keys_of(dataset: Any) -> list[int]:
    return [int(k) for b in dataset for k, w in zip(b["key"], b["weight"], strict=True) if w > 0]


def test_several_stores_are_one_dataset(two: list[Path], tmp_path: Path) -> None:
    columns: tuple[PatchColumn, ...] = ("slide", "y_l0", "x_l0")
    batches = all_of(histopipe.load_dataset(two, batch_size=8, seed=1, columns=columns))
    assert [b["image"].shape for b in batches] == [(8, SIDE, SIDE, 3)] * 4
    with Store(two[0]) as a, Store(two[1]) as b:
        for batch in batches:
            for i, key in enumerate(batch["key"]):
                ordinal, slide, row = (int(part) for part in unpack_keys(key))
                store = (a, b)[ordinal]
                assert (batch["image"][i] == simplejpeg.decode_jpeg(store.value(slide, row))).all()
                name = str(store.records[slide].id)
                cells = (batch["slide"][i].decode(), batch["x_l0"][i], batch["y_l0"][i])
                assert cells == (name, 10 * row, row)
                assert batch["label"][i] == "nt".index(name[0])
        assert len(set(keys_of(batches))) == len(keys_of(batches)) == len(a) + len(b) == 31
    pictures = [picture(i) for i in range(3)]  # PNG values are read unchanged
    values = [encode(p, TilingSpec(level=0, codec="png")) for p in pictures]
    store_of_png = a_store(tmp_path / "p.lmdb", {"a": values})
    (batch,) = all_of(histopipe.load_dataset(store_of_png, batch_size=3, shuffle=False))
    assert (batch["image"] == pictures).all()


# --- checksums -------------------------------------------------------------------------------------------------------------


def batches_of(store: Store, size: int, **settings: Any) -> PatchBatches:
    """Return the batches of all patches of a store, in order."""
    table = SampleTable(select([store]))
    return PatchBatches([store], table, batch_size=size, order=Order(len(table)), **settings)


@pytest.mark.parametrize("at", [0, 3, -20, -1])
def test_changed_byte_is_reported_with_store_slide_and_patch(two: list[Path], at: int) -> None:
    flip_a_byte(two[0], 1, 3, at)
    message = r"slide t1: patch 3: does not match its checksum"
    with Store(two[0]) as store:
        with pytest.raises(DamagedStore, match=rf"a\.lmdb, {message}; ingest"):
            batches_of(store, 19).load(0)
        if at == -20:
            batches_of(store, 5, check=False).load(3)  # decodes, so only the checksum detects it
            with pytest.raises(Exception, match=message):  # ends the iteration
                list(histopipe.load_dataset(two, batch_size=8, seed=1))


def test_value_of_another_patch_is_detected(two: list[Path]) -> None:
    def copy(transaction: Any, patches: Any) -> None:
        value = transaction.get(patch_key(0, 2), db=patches)
        transaction.put(patch_key(0, 1), value, db=patches)

    edited(two[0], "patches", copy)
    with Store(two[0]) as store:
        batch = batches_of(store, 19, on_error="skip").load(0)
    assert batch["weight"].tolist() == [1, 0] + [1] * 17


def test_skipped_patches_have_weight_zero_and_are_counted(
    two: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    clean = all_of(histopipe.load_dataset(two, batch_size=8, seed=1))
    flip_a_byte(two[0], 0, 5)
    flip_a_byte(two[1], 0, 2)
    dataset = histopipe.load_dataset(two, batch_size=8, seed=1, on_error="skip", epochs=2)
    batches, bad = all_of(dataset), {5, 1 << 56 | 2}
    assert set(dataset.skipped) == bad
    assert "slide n1: patch 5: does not match its checksum" in dataset.skipped[5]
    for batch, whole in zip(batches, clean, strict=False):
        hit = np.isin(batch["key"], list(bad))
        masks = {"key": hit < 2, "image": ~hit, "weight": ~hit}
        assert all((batch[k][mask] == whole[k][mask]).all() for k, mask in masks.items())
        assert not batch["image"][hit].any() and not batch["weight"][hit].any()
    assert [r.message.startswith("skipped: ") for r in caplog.records] == [True] * 2  # once each


# --- resume and shards -----------------------------------------------------------------------------------------------------


@examples(25)
@given(st.data())
def test_restarts_at_any_step_give_the_same_keys(small_store: Path, data: st.DataObject) -> None:
    """Read some steps, stop at any of them and continue with the next step, like a training that was killed."""
    orders: list[dict[str, Any]] = [{"balance": balance} for balance in get_args(Balance)]
    settings = data.draw(st.sampled_from([*orders, {"shuffle_block": 4}]))
    size = data.draw(st.integers(1, 70))
    with Store(small_store) as store:
        table = SampleTable(select([store]), max_per_slide=8, seed=9)

        def fresh() -> PatchBatches:
            order = make_order(table, seed=9, **settings)
            return PatchBatches([store], table, batch_size=size, order=order)

        steps = min(20, 3 * fresh().steps_per_epoch)
        keys: list[list[int]] = []
        while len(keys) < steps:
            batches = fresh()
            for _ in range(data.draw(st.integers(1, 15))):
                keys.append(batches.locate(len(keys))[0].keys.tolist())
        assert keys[:steps] == [fresh().locate(step)[0].keys.tolist() for step in range(steps)]


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 3},
        {"seed": 3, "balance": "slide", "max_per_slide": 5},
        {"seed": 3, "shuffle_block": 4},
    ],
)
@pytest.mark.parametrize("count", [2, 3])
def test_shards_together_form_one_epoch(
    two: list[Path], settings: dict[str, Any], count: int
) -> None:
    """Also if a shard starts at a later step."""
    arguments = {"batch_size": 4, "epochs": 2, "start_step": 1} | settings
    shards = [
        all_of(histopipe.load_dataset(two, shard=(i, count), **arguments)) for i in range(count)
    ]
    whole = all_of(
        histopipe.load_dataset(two, **arguments | {"batch_size": 4 * count, "start_step": 0})
    )
    # In each step, the batches of the shards in sequence equal the batch of a single reader.
    for parts, batch in zip(zip(*shards, strict=True), whole[1:], strict=True):
        for name, values in batch.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)


def test_invalid_arguments_are_refused(two: list[Path]) -> None:
    other = a_store(two[0].with_name("c.lmdb"), {"x": jpegs(0, 1, 32)}, patch_size=32)
    cases: list[tuple[str, dict[str, Any]]] = [
        (r"a\.lmdb: 16, .*c\.lmdb: 32, expected one size", {"path": [two[0], other]}),
        ("no store given", {"path": []}),
        ("path: found None", {"path": None}),
        ("path: found .1.", {"path": [1]}),
        (r"a store is given twice: found \S+a\.lmdb$", {"path": [two[0], two[0]]}),
        ("has no seed", {"shuffle": True, "seed": None}),
        ("shard: found .2, 2., expected .index, count.", {"shard": (2, 2)}),
        ("shard: found .0.5, 2.", {"shard": (0.5, 2)}),
        ("shard: found None", {"shard": None}),
        *(
            (
                f"{name.replace('_', '.')}: found {re.escape(repr(value))}, expected "
                "(a whole number|[01] or more|from [01] to)",
                {name: value},
            )
            for name, values in {
                "batch_size": (0, 2.5, "4", None, True),
                "epochs": (0, 1.5, 10**18),
                "start_step": (-1, "1"),
                "prefetch": (-1, None),
                "parallel_calls": (0, -1, 1.5),
                "read_ahead": (-1, 1.5, True),
                "seed": (-1, 1.5, 2**64, "a"),
                "max_per_slide": (0, 1.5),
                "shuffle_block": (0, "a"),
            }.items()
            for value in values
        ),
        ("start_step: found 17, expected 0 to 16", {"start_step": 17}),
        ("subset='test' requires splits", {"subset": "test"}),
        ("labels: found {}", {"labels": {}}),
        ("classes: found .., expected", {"classes": []}),
        ("classes: found 5", {"classes": 5}),
        ("on_error: found 'ignore'", {"on_error": "ignore"}),
        (
            "columns: found .'colour'., expected a list, each item 'x_l0' or 'y_l0' or 'slide'",
            {"columns": ["colour"]},
        ),
        ("labels of slides that are not in the stores: found nobody", {"labels": {"nobody": "x"}}),
        ("a name is given twice", {"classes": ["n", "n"]}),
        ("numbers: found .0, 2., expected 0, 1, 2", {"classes": {"n": 0, "t": 2}}),
        ("classes: found 'nt', expected a list", {"classes": "nt"}),
        ("columns: found 'slide', expected a list", {"columns": "slide"}),
        ("does not exist", {"splits": two[0] / "none.json"}),
        ("columns: found .'slide'., expected none", {"columns": ["slide"], "as_supervised": True}),
        (
            "as_supervised: found 1 slide without a label of the classes",
            {"classes": ["n"], "as_supervised": True},
        ),
    ]
    for message, wrong in cases:
        with pytest.raises(UsageError, match=message):
            histopipe.load_dataset(**dict[str, Any](path=two, batch_size=2, seed=1) | wrong)
    assert all_of(histopipe.load_dataset(two, batch_size=2, seed=1, start_step=16)) == []
    with (
        pytest.warns(FutureWarning, match="subset="),
        pytest.raises(UsageError, match="subset='test' requires splits"),
    ):
        histopipe.load_dataset(two, batch_size=2, seed=1, **{"side": "test"})  # type: ignore[arg-type]
    for wrong in ({"side": "bogus"}, {"side": "test", "subset": "validation"}):
        with pytest.warns(FutureWarning), pytest.raises(UsageError, match="side: found"):
            histopipe.load_dataset(two, batch_size=2, seed=1, **wrong)  # type: ignore[arg-type]


# --- selection and labels --------------------------------------------------------------------------------------------------


def test_labels_and_classes(two: list[Path], tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("slide,label\nn2,b\nt1,a\n")
    cases: tuple[tuple[dict[str, Any], dict[str, int]], ...] = (
        ({}, {"n1": 0, "t1": 1, "n2": 0}),
        ({"classes": ["t", "n"]}, {"n1": 1, "t1": 0, "n2": 1}),
        ({"classes": {"t": 0, "n": 0}}, {"n1": 0, "t1": 0, "n2": 0}),
        ({"classes": ["t"]}, {"n1": -1, "t1": 0, "n2": -1}),
        ({"classes": ["t"], "labelled_only": True}, {"t1": 0}),
        ({"labels": {"n1": "x", "t1": "y"}}, {"n1": 0, "t1": 1, "n2": -1}),
        ({"labels": table, "labelled_only": True}, {"t1": 0, "n2": 1}),
    )
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "columns": ["slide"]}
    for settings, expected in cases:
        labels = {
            (slide.decode(), int(label))
            for batch in all_of(histopipe.load_dataset(two, **options, **settings))
            for slide, label in zip(batch["slide"], batch["label"], strict=True)
        }
        assert labels == set(expected.items())
    assert class_numbers(None, ["b", "a", "b"]) == {"a": 0, "b": 1}


# Keras warns of every tf.data.Dataset that it does not shuffle itself.


@pytest.mark.parametrize("split_by", ["slide", "patch"])
def test_sides_of_a_split_cover_all_patches(
    small_store: Path, tmp_path: Path, split_by: Any
) -> None:
    file, seen = tmp_path / "splits.json", list[int]()
    with Store(small_store) as store:
        splits = make_splits([store], split_by=split_by, seed=3)
    write_splits(splits, file)
    for subset in EVALUATED:
        options: dict[str, Any] = {"batch_size": 64, "seed": 1, "subset": subset}
        keys = keys_of(histopipe.load_dataset(small_store, splits=file, **options))
        assert len(keys) == splits.count()[subset].total()
        seen += keys
    assert len(seen) == len(set(seen)) == 120


# --- processes and threads -------------------------------------------------------------------------------------------------


FORKS = """
import os, sys, histopipe
from pathlib import Path
from histopipe.dataset.sampling import Order
from histopipe.dataset.batches import PatchBatches
from histopipe.dataset.selection import SampleTable
from histopipe.dataset.selection import select
from histopipe.store import environment
from histopipe.store.store import Store

def fork(child):
    pid = os.fork()
    if pid == 0:
        status = 9
        try:
            child()
            status = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

def refused(call):
    try:
        call()
    except histopipe.HistopipeError as error:
        print(error, flush=True)
    else:
        raise AssertionError("not refused")

def read():
    assert batches.load(1)["image"].sum() == expected
    again = Store(path)
    assert again.value(0, 1) == store.value(0, 1)
    again.close()
    assert batches.load(2)["key"].tolist() == [8, 9, 10, 11]

def load():
    list(histopipe.load_dataset(path, batch_size=4, seed=1))  # to the end: no read is in progress

def child():
    read()
    load()  # TensorFlow did not run in the parent
    fork(grandchild)

def grandchild():
    read()
    refused(load)  # TensorFlow ran in the parent

path = Path(sys.argv[1])
store = Store(path)
batches = PatchBatches([store], SampleTable(select([store])), batch_size=4, order=Order(19))
expected = batches.load(1)["image"].sum()
fork(child)
read()
with environment._registry_lock:  # as if another thread opened a store
    fork(read)
with store.reading() as reading:
    fork(lambda: refused(lambda: store.value(0, 0)))
    assert len(reading.value(0, 0)) > 0  # the child did not affect its parent
"""


def test_forked_process_reopens_the_store_or_is_refused(two: list[Path]) -> None:
    done = with_tensorflow(FORKS, two[0])
    assert done.returncode == 0, done.stderr
    after_tensorflow, in_a_read = done.stdout.splitlines()
    assert "TensorFlow ran before this process was forked" in after_tensorflow
    assert "get_context('spawn')" in after_tensorflow
    assert "it was in use when the process was forked" in in_a_read


def run_threads(count: int, work: Callable[[], None]) -> None:
    """Run a function in several threads at a time. Raise the first error."""
    with ThreadPoolExecutor(count) as pool:
        for end in [pool.submit(work) for _ in range(count)]:
            end.result()


def test_threads_share_one_environment_until_its_last_use(two: list[Path]) -> None:
    with Store(two[0]) as store:
        batches = batches_of(store, 19)
        expected = batches.load(0)["image"].copy()

        def work() -> None:
            for _ in range(50):
                assert (batches.load(0)["image"] == expected).all()
                with Store(two[0]) as other:
                    assert len(other) == 19

        run_threads(8, work)
        with store.reading() as reading:
            value = reading.value(0, 0)
            store.close()  # while a view of it is in use
            assert bytes(value[:2]) == b"\xff\xd8"
        with pytest.raises(UsageError, match="is closed; open it again"):
            batches.load(0)
        store._opened.users += 1  # the `with` block decrements it


def test_ingest_during_reading(tmp_path: Path) -> None:
    """A reader sees only the slides that were complete when it opened the store."""
    path = a_store(tmp_path / "s.lmdb", {"a1": jpegs(0, 6)})
    before = iter(histopipe.load_dataset(path, batch_size=2, shuffle=False, epochs=3))
    keys = [next(before)["key"].numpy().tolist()]
    code = (
        "import pickle, sys, dataclasses\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from helpers.stores import *\n"
        "with StoreWriter(Path(sys.argv[1]), SPEC) as writer:\n"
        "    number = writer.register([dataclasses.replace(RECORD, id='half')])['half']\n"
        "    writer.put_patches(number, range(300), jpegs(50, 300))\n"
        "a_store(Path(sys.argv[1]), {'b1': jpegs(90, 40)})\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path), str(TESTS)], check=True, timeout=120)
    keys += [batch["key"].numpy().tolist() for batch in before]
    assert keys == [[0, 1], [2, 3], [4, 5]] * 3
    after = keys_of(histopipe.load_dataset(path, batch_size=8, seed=1))
    # Slide number 1 is incomplete.
    assert sorted(after) == [*range(6), *(2 << 32 | row for row in range(40))]


def test_slide_replaced_during_reading_is_detected(tmp_path: Path) -> None:
    path, values = a_store(tmp_path / "s.lmdb", {"a1": jpegs(0, 6)}), jpegs(70, 6)
    with StoreWriter(path, SPEC) as writer, Store(path) as store:
        batches = batches_of(store, 6)
        batches.load(0)
        writer.restart(0, store.records[0])
        with pytest.raises(DamagedStore, match="slide a1: its index is missing"):
            batches.load(0)
        crc = writer.put_patches(0, range(6), values)
        columns = columns_of(crc, np.array([len(v) for v in values]))
        writer.complete(0, dataclasses.replace(store.records[0], planned=6, stored=6), columns, {})
        for other in range(8):  # reuses the pages of the old index
            writer.put_patches(9, range(100 * other, 100 * other + 100), jpegs(0, 100))
        with pytest.raises(DamagedStore, match="slide a1: its patches were replaced"):
            batches.load(0)


# --- disk access -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Values of 1 to 12 pages, and smaller ones that are stored in pages of the keys."""
    path = tmp_path_factory.mktemp("large") / "s.lmdb"
    rng = np.random.default_rng(1)
    sizes = [*rng.integers(5_000, 48_000, 300).tolist(), *[900] * 40]
    a_store(path, {"a": [rng.bytes(size) for size in sizes], "b": [rng.bytes(9000)] * 20})
    with Store(path) as store:
        yield store


def test_extents_are_the_file_positions_of_the_values(large: Store) -> None:
    """Compare with the bytes of the file, read without LMDB."""
    data = (large.path / "data.mdb").read_bytes()
    values = {row: large.value(0, row) for row in range(300)}
    pages = {row: -(-(len(value) + 16) // 4096) * 4096 for row, value in values.items()}
    with large.reading() as reading:
        for row in (*range(0, 300, 7), 299):
            ((offset, length),) = reading.extents([(0, row)]).tolist()
            assert data[offset + 16 : offset + 16 + len(values[row])] == values[row]
            assert length == pages[row]
        assert reading.extents([(0, 320)]).tolist() == []  # in a page of the keys
        assert reading.extents([(0, 999), (7, 7)]).tolist() == []  # not in the store
        joined = reading.extents([(0, row) for row in range(300)])
    assert len(joined) < 20  # neighbours are adjacent in the file
    assert joined[:, 1].sum() == sum(pages.values()) and (np.diff(joined[:, 0]) > 0).all()


def requested(
    store: Store, order: Order, ahead: int | None, loaded: Iterable[int], end: int
) -> list[range]:
    """Load steps of a dataset of `end` steps. Return the steps that were requested."""
    batches = PatchBatches([store], SampleTable(select([store])), batch_size=8, order=order)
    with (
        mock.patch.object(batches, "load", return_value={}),
        mock.patch.object(batches, "advise") as advise,
    ):
        reader = ReadAhead(batches, [0], end, ahead)
        for step in loaded:
            reader.load(step, 0)
        reader._thread.submit(int).result()  # wait for all requests
        reader.close()
    return [call.args[0] for call in advise.call_args_list]


@pytest.mark.parametrize(
    ("ahead", "loaded", "end", "expected"),
    [
        (5, range(3, 40), 40, [*range(4, 40)]),
        (0, range(3, 40), 40, []),
        (5, [*range(30), *range(4)], 30, [*range(1, 30), *range(1, 9)]),  # a second iteration
    ],
)
def test_steps_are_requested_once_and_in_advance(
    large: Store, ahead: int, loaded: Iterable[int], end: int, expected: list[int]
) -> None:
    parts = requested(large, Order(360), ahead, loaded, end)
    assert list(itertools.chain(*parts)) == expected


def test_blocks_are_requested_by_window(large: Store) -> None:
    order = BlockShuffled(360, 1, 4)
    assert order.window == 64
    first = requested(large, order, 2, range(45), 45)[:3]
    assert first == [range(1, 8), range(8, 16), range(16, 24)]


def test_steps_are_requested_only_while_batches_wait_for_the_disk(
    large: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Major page faults of a thread are its waits. After the last one, requests continue for 256 steps."""
    once = itertools.chain([0, 0, 0, 1], itertools.repeat(1))  # in step 1
    for faults, expected in (
        (itertools.repeat(0), range(0)),
        (itertools.count(), range(2, 400)),
        (once, range(3, 256 + 1 + STEPS_AHEAD)),
    ):
        monkeypatch.setattr(tf_data, "_major_faults", partial(next, faults))
        parts = requested(large, Order(360, 1), None, range(400), 400)
        assert list(itertools.chain(*parts)) == [*expected]


def unused_dataset(path: Path) -> None:
    """Leave a dataset that only the garbage collector can delete."""
    cycle: list[Any] = [histopipe.load_dataset(path, batch_size=4, seed=1)]
    cycle.append(cycle)
    next(iter(cycle[0]))


def test_dataset_that_is_no_longer_used_does_not_prevent_writing(two: list[Path]) -> None:
    gc.disable()
    try:
        unused_dataset(two[0])
        environment.open_environment(two[0], write=True).close()
    finally:
        gc.enable()


@pytest.mark.timeout(60)
def test_garbage_collection_while_opening_does_not_deadlock(
    two: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector closes the stores of a deleted dataset. It may run while the lock is held."""

    def collecting(data: Path) -> None:
        gc.collect()
        data_file.check_length(data)

    monkeypatch.setattr(environment, "check_length", collecting)
    for _ in range(3):
        unused_dataset(two[0])
        Store(two[1]).close()
    Store(two[1]).close()  # opening a store closes those of deleted datasets
    assert not {str(path) for path in two} & set(environment._registry)


def test_iterator_keeps_its_stores_open(two: list[Path]) -> None:
    plain = iter(histopipe.load_dataset(two, batch_size=4, seed=1, epochs=3))
    mapped = iter(
        histopipe.load_dataset(two, batch_size=4, seed=1, epochs=3).map(lambda b: b["key"])
    )
    gc.collect()
    assert [b["key"].numpy().tolist() for b in plain] == [b.numpy().tolist() for b in mapped]


def test_store_is_identified_by_its_absolute_path(
    two: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open by a relative path, and change the working folder before closing."""
    monkeypatch.chdir(two[0].parent)
    with Store(Path(two[0].name)) as store:
        monkeypatch.chdir("/")
        assert store.advise([(0, 0)]) == 0  # small values are in pages of the keys
    assert str(two[0]) not in environment._registry


def test_more_stores_than_would_fit_with_maps_for_writing(tmp_path: Path) -> None:
    paths = [a_store(tmp_path / f"{i}.lmdb", {f"s{i}": jpegs(i, 2)}) for i in range(20)]
    keys = keys_of(histopipe.load_dataset(paths, batch_size=7, seed=1))
    assert sorted(keys) == sorted(i << 56 | row for i in range(20) for row in (0, 1))
    with Store(paths[0]) as store:  # a map of 16 TiB for each would leave no address space
        assert store._environment.handle.info()["map_size"] == data_file._READ_MAP


def test_file_larger_than_its_map_is_mapped_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four threads read while another process makes the file larger than their map."""
    path = a_store(tmp_path / "s.lmdb", {"a1": jpegs(0, 20)})
    monkeypatch.setattr(data_file, "_READ_MAP", 1 << 20)
    monkeypatch.setattr(data_file, "_READ_ROOM", 1)
    code = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from helpers.stores import *\n"
        "for i in range(8):\n"
        "    a_store(Path(sys.argv[1]), {f'b{i}': [bytes(100_000)] * 20})\n"
    )
    with Store(path) as store:
        batches = batches_of(store, 20)
        expected = batches.load(0)["image"].copy()
        writer = subprocess.Popen([sys.executable, "-c", code, str(path), str(TESTS)])

        def work() -> None:
            while writer.poll() is None:
                assert (batches.load(0)["image"] == expected).all()

        run_threads(4, work)
        assert writer.returncode == 0
        assert store._opened.generation > 3


LEAK = r"""
import gc, re, sys
import histopipe
from pathlib import Path
from statistics import median
from histopipe.dataset.sampling import Order
from histopipe.dataset.batches import PatchBatches
from histopipe.dataset.selection import SampleTable
from histopipe.dataset.selection import select
from histopipe.dataset.tf_data import BatchFeed
from histopipe.store.store import Store

def growth(store, leaking):
    kept, memory = [], []
    table = SampleTable(select([store]))
    for epoch in range(15):
        batches = PatchBatches([store], table, batch_size=32, order=Order(len(table), 1))
        feed, steps = BatchFeed(batches), min(8, batches.steps_per_epoch)
        first = epoch * batches.steps_per_epoch
        for batch in feed.dataset(first, first + steps):
            if leaking:
                kept.append(batch)
        feed.settle()
        gc.collect()
        status = Path("/proc/self/status").read_text()
        memory.append(int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) / 1024)
    return median(memory[11:]) - median(memory[4:8])

with Store(Path(sys.argv[1])) as store:
    print(growth(store, False), growth(store, True))
dataset = histopipe.load_dataset(sys.argv[1], batch_size=16, seed=1, epochs=50)
unfinished = iter(dataset)
for _ in range(3):
    next(unfinished)
"""


@pytest.mark.nightly(reason="measures memory in a new process with TensorFlow")
def test_epochs_do_not_leak_and_exit_during_iteration_does_not_hang(made_store: Path) -> None:
    """Compare anonymous memory of epochs 5 to 8 with that of the last four, in MB. Eighty batches take 126 MB.

    The program then exits during an iteration, which must not hang.
    """
    done = subprocess.run(
        [sys.executable, "-c", LEAK, str(made_store)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    normal, leaking = map(float, done.stdout.split())
    assert leaking > 40
    assert normal < 6


def test_worker_requests_only_its_part(large: Store) -> None:
    batches = batches_of(large, 16, replicas=2)
    both, one = (batches.advise(range(3, 9), parts) for parts in ([0, 1], [1]))
    assert 0 < one < 0.6 * both


# --- Keras -----------------------------------------------------------------------------------------------------------------


def test_default_calls_by_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, calls in {1: 1, 2: 2, 4: 5, 8: 10, 16: 20}.items():
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert default_calls() == calls


def test_batches_that_are_kept_never_change(small_store: Path) -> None:
    dataset = histopipe.load_dataset(small_store, batch_size=8, seed=1)
    kept = [batch["image"] for _ in range(3) for batch in dataset]
    images = [image.numpy().copy() for image in kept]
    for _ in range(3):
        assert (all_of(dataset)[0]["image"] == images[0]).all()
    for image, before in zip(kept, images, strict=True):
        assert (image.numpy() == before).all()


# Keras converts tensors in a way that numpy warns of.
def keras_fits_on_a_supervised_dataset(*two: str) -> None:
    import keras  # imported late: it is slow

    dense = keras.layers.Dense(2, activation="softmax")
    model = keras.Sequential([keras.Input((SIDE, SIDE, 3)), keras.layers.Flatten(), dense])
    model.compile("sgd", "sparse_categorical_crossentropy")
    once = histopipe.load_dataset(two, batch_size=8, seed=1, as_supervised=True)
    assert model.fit(once, verbose=0).params["steps"] == once.steps_per_epoch == 4
    arguments: dict[str, Any] = {"batch_size": 8, "seed": 1, "epochs": 3}
    several = histopipe.load_dataset(two, as_supervised=True, **arguments)
    losses = model.fit(several, epochs=3, steps_per_epoch=4, verbose=0).history["loss"]
    assert len(losses) == 3 and np.isfinite(losses).all()
    for values, batch in zip(several, histopipe.load_dataset(two, **arguments), strict=True):
        for value, name in zip(values, ("image", "label", "weight"), strict=True):
            assert (value.numpy() == batch[name].numpy()).all()


def trainings_skip_damaged_patches(store: str, folder: str) -> None:
    """Also with the stain of each slide normalized."""
    path, out = Path(store), Path(folder)
    histopipe.stains(path)
    with Store(path) as opened:
        rows = {(n, row) for n, record in opened.complete.items() for row in range(record.planned)}
    flip_bytes(path, [(0, 3), (0, 4)])
    settings: dict[str, Any] = {"split_by": "patch", "batch_size": 16, "in_process": True}
    settings |= {"on_error": "skip", "epochs": 1, "stain_norm": "macenko"}
    augmented: dict[str, Any] = {"balance": "class", "augment": AUGMENTATIONS}
    histopipe.train(path, out=out / "r2", max_per_slide=500, **augmented, **settings)
    histopipe.train(out=out / "r2", resume=True, epochs=2, in_process=True)
    assert json.loads((out / "r2" / "metrics.json").read_text())["skipped"] == 2
    flip_bytes(path, sorted(rows - {(0, 3), (0, 4)}))
    with pytest.raises(DamagedStore, match="every patch is damaged"):
        histopipe.train(path, out=out / "r3", **settings)


@pytest.mark.long(reason="four trainings in one process")
def test_keras_and_trainings(two: list[Path], small_store: Path, tmp_path: Path) -> None:
    """In a fork that has loaded Keras: a model fits on a supervised dataset, and trainings skip damaged patches."""
    copy = shutil.copytree(small_store, tmp_path / "patches.lmdb")
    code = (
        "import sys, test_reader as tests\n"
        "tests.keras_fits_on_a_supervised_dataset(*sys.argv[3:])\n"
        "tests.trainings_skip_damaged_patches(*sys.argv[1:3])\n"
    )
    done = with_tensorflow(code, copy, tmp_path, *two)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("2 damaged patches were skipped") == 2
