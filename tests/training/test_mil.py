"""Multiple-instance learning: gradients compared with a simple reference, and training on bags."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import h5py
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import histopipe
from helpers.bags import DIMENSION, a_bag, features_of, write_bag
from helpers.commands import RunCommand
from helpers.examples import examples
from helpers.lazy import keras, tf, training
from helpers.paths import GOLDEN
from helpers.runs import without_training
from helpers.stores import a_store, jpegs
from helpers.trainings import opened_setup
from histopipe.dataset.bags import BagSet, read_bag
from histopipe.dataset.batches import BagBatches, feature_moments, scaling_variance
from histopipe.dataset.sampling import Order
from histopipe.dataset.selection import SampleTable, select
from histopipe.errors import DamagedStore, MachineShort, NothingToDo, UsageError
from histopipe.features.feature_file import read_features, read_header, writing
from histopipe.ingestion.coords import read_header as read_coords_header
from histopipe.predictions.prediction_tables import write_patch_values
from histopipe.runs.task_config import BagPooling
from histopipe.slides.slide_files import copy_groups
from histopipe.slides.tables import read_labels
from histopipe.splits.splitting import make_splits
from histopipe.system.tensorflow import load_quietly
from histopipe.system.worker_pool import available_memory

POOLINGS = get_args(BagPooling)


@pytest.fixture(scope="module")
def bags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty labelled bags of 7 to 66 patches, half of them positive; a patient has two of them."""
    folder = tmp_path_factory.mktemp("bags")
    for i in range(20):
        size = 7 + 59 * i % 60
        corners = np.stack([256 * np.arange(size), np.full(size, 512)], axis=1)
        write_bag(
            folder / f"s{i}.h5",
            a_bag(i, size, positive=i % 2 == 1),
            corners,
            label="np"[i % 2],
            patient=f"P{i // 4}{i % 2}",
        )
    return folder


ARGUMENTS: dict[str, Any] = {
    "epochs": 3,
    "fractions": (0.6, 0.2, 0.2),
    "patience": 0,
    "resamples": 20,
    "deterministic": True,
}


@pytest.mark.filterwarnings("ignore:You are using a softmax over axis 1")
@pytest.mark.parametrize("pooling", POOLINGS)
@given(
    rows=st.integers(1, 12), size=st.integers(1, 15), seed=st.integers(0, 99), dropped=st.booleans()
)
@examples(4)
def test_gradients_of_micro_batches_equal_those_of_the_bag(
    pooling: Any, rows: int, size: int, seed: int, dropped: bool
) -> None:
    keras.utils.set_random_seed(seed)
    model = training.bag_model.BagModel(
        pooling,
        dimension=4,
        objective=training.objective.ClassObjective(3),
        dropout=0.4,
        precision="float64",
    )
    rng = np.random.default_rng(seed)
    values, places = rng.normal(size=(rows, 4)), rng.integers(0, 40, (rows, 2))
    patches = training.bag_model.Patches(tf.constant(values), tf.constant(places, tf.float64))
    patch_weights = [tf.convert_to_tensor(v.value) for v in model.patch_weights]
    last = [tf.convert_to_tensor(v.value) for v in model.last_weights]
    bag_seed = tf.constant(seed, tf.int64) if dropped else None
    slopes = tf.constant([1, -2, 0.5], tf.float64)

    def plain() -> Any:
        if pooling in training.bag_model.JOINT:
            return model.together(patch_weights, patches, bag_seed).pooled[0]
        hidden, scores = model.patches(
            patch_weights, patches.features, tf.range(rows, dtype=tf.int64), bag_seed
        )
        if pooling == "max":
            return tf.reduce_max(hidden, axis=0)
        if pooling == "mean":
            return tf.reduce_mean(hidden, axis=0)
        return tf.reduce_sum(tf.nn.softmax(scores)[:, None] * hidden, axis=0)

    with tf.GradientTape() as tape:
        tape.watch([*patch_weights, *last])
        value = plain()
        loss = tf.tensordot(model.logits(last, value)[0], slopes, 1)
    expected = tape.gradient(loss, patch_weights, unconnected_gradients="zero")
    pooled = training.bag_pooling.pool(model, patch_weights, patches, tf.constant(size), bag_seed)
    for again in (
        pooled.value,
        training.bag_pooling.pool_at_once(model, patch_weights, patches, bag_seed)[0],
    ):
        np.testing.assert_allclose(again, value, rtol=1e-10, atol=1e-12)
    if pooling not in training.bag_model.JOINT:
        with tf.GradientTape() as tape:
            tape.watch(pooled.value)
            loss = tf.tensordot(model.logits(last, pooled.value)[0], slopes, 1)
        outer = tape.gradient(loss, pooled.value)
        gradients = training.bag_pooling.patch_gradients(
            model, patch_weights, patches, tf.constant(size), bag_seed, pooled, outer
        )
        for ours, theirs in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-10)
    if not dropped:
        logits = model.logits(last, pooled.value)
        inputs = {"features": values[None].astype(np.float32)}
        if model.takes_positions:
            inputs["positions"] = places[None].astype(np.float32)
        served = model.serving(inputs if len(inputs) > 1 else inputs["features"])
        np.testing.assert_allclose(
            served["probability"], tf.nn.softmax(logits), rtol=1e-4, atol=1e-6
        )
        attention, parts = training.bag_pooling.patch_values(model, patches)
        assert attention.sum() == pytest.approx(1)
        # The parts of all patches and the bias are the whole.
        whole = parts.sum(axis=0) + np.asarray(last[1]) * model.last_layer_share
        np.testing.assert_allclose(whole, logits[0], atol=1e-9)
        if "attention" in served:
            np.testing.assert_allclose(served["attention"][0], attention, atol=1e-6)
        assert ("attention" in served) == (pooling not in ("mean", "max", "none"))


def test_statistics_of_features_weight_bags_equally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of float16, whose squares overflow, of a constant, and of two joined sets; and of a part of a large cohort."""
    rng = np.random.default_rng(0)
    whole = []
    for i, size in enumerate((3, 1, 40, 7)):
        values = rng.normal(i, [2, 1, 1e-4], (size, 3)).astype(np.float32)
        large = np.full((size, 2), (60_000, 7)).astype(np.float16)
        large[::2, 0] = 100 * i
        corners = 512 * np.indices((size, 1)).reshape(2, -1).T
        write_bag(tmp_path / "a" / f"s{i}.h5", values, corners)
        write_bag(tmp_path / "b" / f"s{i}.h5", large, corners)
        whole.append(np.hstack([values, large], dtype=np.float64))
    bags = BagSet([tmp_path / "a", tmp_path / "b"])
    mean, variance = feature_moments(bags, sorted(bags.complete))
    weights = np.concatenate([np.full(len(part), 1 / len(part) / 4) for part in whole])
    rows = np.concatenate(whole)
    np.testing.assert_allclose(mean, weights @ rows, rtol=1e-12)
    np.testing.assert_allclose(
        variance, weights @ (rows - weights @ rows) ** 2, rtol=1e-9, atol=1e-20
    )
    assert (mean[4], variance[4]) == (7, 0)
    monkeypatch.setattr("histopipe.dataset.batches._ROWS", 2)
    monkeypatch.setattr("histopipe.dataset.batches._BAGS", 3)
    mean, _ = feature_moments(bags, sorted(bags.complete))
    read = [whole[0][[0, 1]], whole[1], whole[2][[0, 20]]]
    np.testing.assert_allclose(mean, np.mean([part.mean(axis=0) for part in read], axis=0))
    (tmp_path / "a" / "s1.h5").write_bytes((tmp_path / "a" / "s1.h5").read_bytes()[:-900])
    with pytest.raises(DamagedStore, match="s1"):
        feature_moments(bags, [1])
    with pytest.raises(DamagedStore, match="s1"):
        feature_moments(bags, [1], on_error="skip")
    np.testing.assert_allclose(
        feature_moments(bags, [0, 1], on_error="skip")[0], whole[0][[0, 1]].mean(axis=0)
    )


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e12])
def test_features_of_one_unit_keep_their_proportions(unit: float) -> None:
    """Features that hardly vary stay small, unless each feature has its own unit."""
    mean, deviations = np.zeros(41), np.append(np.ones(40), 0.01) * unit
    varied, variance = scaling_variance(mean, deviations**2)
    scaled = deviations / np.sqrt(variance)
    assert varied.all() and np.all(scaled[:40] > 0.7) and scaled[40] < 0.02
    of_table = np.logspace(-4, 4, 9, dtype=np.float64) * np.float64(unit)
    varied, variance = scaling_variance(mean[:9], of_table**2)
    assert varied.all()
    np.testing.assert_allclose(of_table / np.sqrt(variance), 1)
    varied, variance = scaling_variance(mean, np.zeros(41))
    assert not varied.any() and np.all(variance == 1)


@pytest.mark.filterwarnings("ignore:You are using a softmax over axis 1")
@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_features_are_standardised_in_the_model(precision: Any) -> None:
    """Also in the serving model, with constants, with features beyond the range of float16, and with rare large ones."""
    rng = np.random.default_rng(3)
    plain = rng.normal(size=(9, 4)).astype(np.float32)
    plain[:, 1] = 0
    plain[2, 3] = 50
    factors, offsets = (
        np.array([1e5, 3, 1e-9, 1], np.float32),
        np.array([3e5, 7, 1e-8, 0], np.float32),
    )
    keras.utils.set_random_seed(1)
    options: dict[str, Any] = {
        "dimension": 4,
        "objective": training.objective.ClassObjective(2),
        "dropout": 0.0,
    }
    models = [
        training.bag_model.BagModel("attention", precision=precision, scaled=scaled, **options)
        for scaled in (True, False)
    ]
    scaling: Any = models[0].scaling
    for variable, value in zip(scaling.weights, ([1, 0, 1, 1], offsets, factors**2), strict=True):
        variable.assign(value)
    assert not any(variable.trainable for variable in scaling.weights)
    models[1].serving.set_weights([*models[0].serving.get_weights()[3:]])
    pooled = [
        training.bag_pooling.pool(
            model,
            training.models.values_of(model.patch_weights),
            training.bag_model.Patches(tf.constant(rows)),
            tf.constant(4),
        ).value
        for model, rows in zip(
            models, (plain * factors + offsets, np.clip(plain, -10, 10)), strict=True
        )
    ]
    np.testing.assert_allclose(pooled[0], pooled[1], rtol=1e-2, atol=1e-2)
    served = models[0].serving((plain * factors + offsets)[None])
    expected = models[1].serving(np.clip(plain, -10, 10)[None])
    np.testing.assert_allclose(served["probability"], expected["probability"], atol=1e-2)


@given(rows=st.integers(1, 30), size=st.integers(1, 40), seed=st.integers(0, 99))
@examples(15)
def test_loss_of_single_patches_equals_that_of_clam(rows: int, size: int, seed: int) -> None:
    keras.utils.set_random_seed(seed)
    model = training.bag_model.BagModel(
        "clam",
        dimension=4,
        objective=training.objective.ClassObjective(3),
        dropout=0.4,
        precision="float64",
    )
    features = tf.constant(np.random.default_rng(seed).normal(size=(rows, 4)))
    patch_weights = [tf.convert_to_tensor(v.value) for v in model.patch_weights]
    label, bag_seed, some = seed % 3, tf.constant(seed, tf.int64), min(8, rows // 2)
    with tf.GradientTape() as tape:
        tape.watch(patch_weights)
        hidden, scores = model.patches(
            patch_weights, features, tf.range(rows, dtype=tf.int64), bag_seed
        )
        ordered = np.argsort(-scores.numpy(), kind="stable")
        chosen = np.concatenate([ordered[:some], ordered[rows - some :]])
        answers = tf.nn.log_softmax(
            model.instances(patch_weights, tf.gather(hidden, chosen))[:, label]
        )
        signs = np.repeat([1, 0], some)
        mean = -sum(answers[i, sign] for i, sign in enumerate(signs)) / max(len(signs), 1)
        loss = tf.cast(mean, tf.float64) * 0.3
    expected = tape.gradient(loss, patch_weights, unconnected_gradients="zero") if some else None
    gradients = training.bag_pooling.instance_gradients(
        model,
        patch_weights,
        training.bag_model.Patches(features),
        tf.constant(size),
        bag_seed,
        tf.constant(label),
        tf.constant(0.3, tf.float64),
    )
    for i, ours in enumerate(gradients):
        theirs = np.zeros(ours.shape) if expected is None else expected[i]
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "pooling",
    [
        pooling
        if pooling in ("clam", "gated")
        else pytest.param(pooling, marks=pytest.mark.nightly(reason="clam and gated are shown"))
        for pooling in POOLINGS
    ],
)
def test_gradients_of_a_bag_at_once_equal_those_in_pieces(pooling: Any) -> None:
    """A bag of 9 patches and one of 4: both in pieces of 2; then one of them; then none."""
    keras.utils.set_random_seed(3)
    objective = training.objective.ClassObjective(2)
    model = training.bag_model.BagModel(
        pooling, dimension=5, objective=objective, dropout=0.4, precision="float64"
    )
    settings = training.train_step.StepSettings(
        batch_size=2, objective=objective, class_weight=np.array([1, 3], np.float32)
    )
    step = training.bag_step.BagTrainStep(
        tf.distribute.OneDeviceStrategy("/CPU:0"), model, keras.optimizers.SGD(0.1), settings
    )
    batch = {
        "features": np.random.default_rng(3).normal(size=(13, 5)),
        "position": np.zeros((13, 2)),
        "label": np.array([0, 1], np.int32),
        "end": np.array([9, 13]),
        "key": np.arange(2),
        "weight": np.ones(2, np.float32),
    }
    tensors = {name: tf.constant(values) for name, values in batch.items()}
    results = []
    for size in (2, 5, 9):
        (sums, *_), ((columns,),) = step.gradients(tensors, tf.constant(1, tf.int64), 2, size)
        results.append([*sums, columns])
    assert max(np.abs(values).max() for values in results[0][:-1]) > 0.01
    for other in results[1:]:
        for values, expected in zip(other, results[0], strict=True):
            np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.nightly(reason="trains to a quality")
@pytest.mark.parametrize("pooling", ["gated", "clam", "dsmil", "transformer"])
def test_other_poolings_find_what_the_mean_misses(
    hidden_signal: tuple[Path, float], tmp_path: Path, pooling: BagPooling
) -> None:
    """Also: the positive patches of a slide have the attention."""
    folder, auc_of_mean = hidden_signal
    assert auc_of_hidden(folder, tmp_path, pooling) > max(0.95, auc_of_mean + 0.1)
    predicted = pd.read_csv(tmp_path / pooling / "predictions.csv")
    tested = predicted[(predicted["split"] == "test") & (predicted["label"] == "p")]["slide"]
    for slide in tested if pooling == "gated" else ():
        shares = pd.read_csv(tmp_path / pooling / "attention" / f"{slide}.csv")["attention"]
        with h5py.File(folder / "features" / f"{slide}.h5") as file:
            positive = file["features"][:, 0].argsort()[-2:]
        assert shares[positive].mean() > 5 * shares.drop(positive).mean()


@pytest.fixture(scope="module")
def hidden_signal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Bags whose positive patches are few, and hidden from the mean by an offset of all patches; and the mean's AUC."""
    folder, rng = tmp_path_factory.mktemp("hidden"), np.random.default_rng(4)
    corners = 512 * np.indices((6, 4)).reshape(2, -1).T
    for i in range(60):
        values = rng.normal(size=(24, 8)).astype(np.float32)
        values[:, 0] += rng.normal(0, 1.5)
        if i % 2:
            values[rng.choice(24, 2, replace=False), 0] += 9
        path = folder / "features" / f"s{i}.h5"
        write_bag(path, values, corners, label="np"[i % 2], patient=f"P{i}")
    return folder, auc_of_hidden(folder, folder, "mean")


def auc_of_hidden(folder: Path, out: Path, pooling: BagPooling) -> Any:
    result = histopipe.train(
        mil=folder / "features",
        out=out / pooling,
        pooling=pooling,
        epochs=10,
        patience=0,
        learning_rate=1e-3,
        resamples=0,
        fractions=(0.4, 0.2, 0.4),
    )
    return result.metrics["test"].slide["mean"].values["auc"]


@pytest.mark.long(reason="the training of bags of patches")
def test_bags_of_patients_have_all_of_their_slides_and_the_saved_model_predicts_the_same(
    bags: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result = histopipe.train(mil=bags, bag="patient", out=out, **ARGUMENTS)
    model, values = keras.models.load_model(out / "model.keras"), features_of(bags)
    predicted = pd.read_csv(out / "predictions.csv")
    assert list(predicted) == ["split", "patient", "label", "predicted", "p_n", "p_p"]
    assert set(predicted["split"]) == {"validation", "test"}
    assert predicted["patient"].is_unique
    assert result.metrics["test"].finest.count == (predicted["split"] == "test").sum() > 1
    for row in predicted.itertuples():
        attention = pd.read_csv(out / "attention" / f"{row.patient}.csv")
        used = list(dict.fromkeys(attention["slide"]))
        first = 4 * int(row.patient[1]) + int(row.patient[2])
        assert used == sorted([f"s{first}", f"s{first + 2}"])
        served = model(np.concatenate([values[slide] for slide in used])[None])
        np.testing.assert_allclose(
            served["probability"][0], [row.p_n, row.p_p], rtol=1e-4, atol=1e-6
        )
        np.testing.assert_allclose(
            served["attention"][0], attention["attention"], rtol=1e-4, atol=1e-7
        )
        assert set(attention["size_l0"]) == {512}


def batches_of(folder: Path, **settings: Any) -> BagBatches:
    bags = BagSet(folder)
    table = SampleTable(select([bags]))
    return BagBatches(bags, table, batch_size=2, order=Order(len(table)), **settings)


def four_bags(folder: Path, rows: int, dtype: Any = np.float32) -> Path:
    corners = np.stack([512 * np.arange(rows), np.zeros(rows, int)], axis=1)
    for i in range(4):
        values = a_bag(i, rows, positive=False).astype(dtype)
        write_bag(folder / f"b{i}.h5", values, corners, label="np"[i % 2])
    return folder


def test_batches_concatenate_bags_without_padding(bags: Path) -> None:
    batches, values = batches_of(bags), features_of(bags)
    for step in range(batches.steps_per_epoch):
        features, ends, _, weights, keys = batches.load(step).values()
        expected = [values[batches.bags.complete[key >> 32].id] for key in keys.tolist()]
        np.testing.assert_array_equal(features, np.concatenate(expected))
        np.testing.assert_array_equal(ends, np.cumsum([len(part) for part in expected]))
        assert (weights == 1).all()


def test_epochs_draw_different_patches_until_all_are_drawn(bags: Path) -> None:
    batches = batches_of(bags, most=10, seed=3)
    seen: dict[int, list[bytes]] = defaultdict(list)
    for step in range(4 * batches.steps_per_epoch):
        features, ends, _, _, keys = batches.load(step).values()
        for part, key in zip(np.split(features, ends[:-1]), keys.tolist(), strict=True):
            assert len(part) <= 10
            seen[key >> 32].extend(row.tobytes() for row in part)
    for number, rows in seen.items():
        assert len(set(rows)) == min(batches.bags.complete[number].rows, 40)


@pytest.mark.parametrize(("memory", "epochs_read"), [(8 * 4 * 9 * DIMENSION * 4, 1), (10, 3)])
def test_bags_stay_in_memory_only_if_all_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, epochs_read: int
) -> None:
    """Four bags of nine patches in float32 take an eighth of the memory, or more."""
    monkeypatch.setattr("histopipe.dataset.batches.available_memory", lambda: memory)
    batches, reads = batches_of(four_bags(tmp_path, 9)), mock.Mock(wraps=read_bag)
    monkeypatch.setattr("histopipe.dataset.batches.read_bag", reads)
    loaded = [batches.load(step)["features"] for step in range(3 * batches.steps_per_epoch)]
    assert reads.call_count == 4 * epochs_read
    np.testing.assert_array_equal(loaded[2:], loaded[:-2])


GROUPS = "/sys/fs/cgroup"
JOB = {
    "/proc/self/cgroup": "0::/job/step\n",
    f"{GROUPS}/job/memory.max": "5000\n",
    f"{GROUPS}/job/memory.current": "1000\n",
}
FIRST_VERSION = {
    "/proc/self/cgroup": "3:cpu:/job\n2:memory:/job\n",
    f"{GROUPS}/memory/job/memory.limit_in_bytes": "700\n",
    f"{GROUPS}/memory/job/memory.usage_in_bytes": "100\n",
}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({}, 2048 << 10),
        (JOB, 4000),
        (JOB | {f"{GROUPS}/job/memory.max": "max\n"}, 2048 << 10),
        (JOB | {f"{GROUPS}/memory.max": "9000\n", f"{GROUPS}/memory.current": "8000\n"}, 1000),
        (JOB | {f"{GROUPS}/job/memory.current": "6000\n"}, 0),
        (FIRST_VERSION, 600),
    ],
    ids=["no group", "job", "no limit", "outer group", "above the limit", "version 1"],
)
def test_available_memory_is_that_of_the_machine_and_of_its_container(
    monkeypatch: pytest.MonkeyPatch, groups: dict[str, str], expected: int
) -> None:
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    2048 kB\n"} | groups

    def read_text(path: Path, *_: Any) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert available_memory() == expected


def test_damaged_bags_fail_or_have_weight_zero(tmp_path: Path) -> None:
    batches = batches_of(four_bags(tmp_path, 9))
    skipping = batches_of(tmp_path, on_error="skip")
    (tmp_path / "b1.h5").write_bytes(b"no HDF5 at all")
    with pytest.raises(DamagedStore, match=r"b1\.h5 cannot be read"):
        batches.load(0)
    _, ends, _, weights, _ = skipping.load(0).values()
    assert (ends.tolist(), weights.tolist()) == ([9, 10], [1, 0])
    assert len(skipping.skipped) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_that_are_not_finite_are_refused_by_file_and_patch(
    tmp_path: Path, value: float, dtype: Any
) -> None:
    whole, wrong = (four_bags(tmp_path / name, 600, dtype) for name in ("whole", "wrong"))
    with h5py.File(wrong / "b1.h5", "r+") as file:
        file["features"][301, 2] = value
    expected = rf"wrong/b1\.h5: feature 2 of patch 301 is not finite: found {value:g}"
    with pytest.raises(DamagedStore, match=expected):
        batches_of(wrong).load(0)
    # Of two joined sets, the file with the value is named; a bag of the drawn patches is read in part.
    bag, rows = BagSet([whole, wrong]).complete[1], np.arange(250, 350)
    for drawn in (None, rows):
        with pytest.raises(DamagedStore, match=expected):
            read_bag(bag, np.dtype(dtype), drawn)
    assert np.isfinite(read_bag(bag, np.dtype(dtype), rows[:51])).all()
    _, _, _, weights, _ = batches_of(wrong, on_error="skip").load(0).values()
    assert weights.tolist() == [1, 0]


@pytest.mark.parametrize("options", [{}, {"max_per_slide": 4}, {"balance": "slide"}])
def test_class_weights_balance_what_an_epoch_draws(tmp_path: Path, options: dict[str, Any]) -> None:
    """Of six normal slides of 4 patches, and six of tumour with 12 each."""
    pictures = jpegs(0, 12, 32)
    slides = {f"{'nt'[i % 2]}{i}": pictures[: (4, 12)[i % 2]] for i in range(12)}
    store = str(a_store(tmp_path / "unbalanced.lmdb", slides, patch_size=32))
    with opened_setup(
        stores=(store,), class_weights="balanced", split_by="slide", **options
    ) as setup:
        batches, weights = setup.batches("train", 1), setup.class_weights()
        located = [batches.locate(step) for step in range(12 * batches.steps_per_epoch)]
    labels = np.concatenate([part.labels[real > 0] for part, real in located])
    drawn = np.bincount(labels) * weights
    assert drawn[0] == pytest.approx(drawn[1], rel=1e-5 if options.get("balance") is None else 0.1)
    assert weights[labels].mean() == pytest.approx(1, rel=0.01)


def test_weights_of_labels_count_samples_and_not_slides() -> None:
    targets = np.array([[1, 0], [0, np.nan], [np.nan, 1]])
    objective: Any = training.objective.MultilabelObjective.of(targets, draws=np.array([2.0, 6, 1]))
    assert objective.positive_weight.tolist() == [3, 2]


@pytest.mark.parametrize("kind", ["patches", "bags"])
def test_weighted_gradient_is_the_mean_over_the_real_rows(kind: str) -> None:
    """Compare steps of one and of three samples, whole and in pieces, with weighted gradients of single samples."""
    keras.utils.set_random_seed(1)
    rng, objective = np.random.default_rng(1), training.objective.ClassObjective(2)
    samples: dict[str, Any] = {"label": np.array([0, 1, 1, 0], np.int32), "key": np.arange(4)}
    classes = np.array([0.25, 4], np.float32)
    options: dict[str, Any] = {"objective": objective, "dropout": 0.0}
    if kind == "bags":
        step_class = training.bag_step.BagTrainStep
        model = training.bag_model.BagModel("mean", dimension=3, **options)
        samples |= {"features": rng.normal(size=(8, 3)), "end": np.arange(2, 9, 2)}
    else:
        step_class = training.train_step.TrainStep
        model = training.models.build_model("small-cnn", patch_size=16, **options)
        samples["image"] = rng.integers(0, 256, (4, 16, 16, 3)).astype(np.uint8)
    plain, weighted = (
        step_class(
            tf.distribute.OneDeviceStrategy("/CPU:0"),
            model,
            keras.optimizers.SGD(1.0),
            training.train_step.StepSettings(
                batch_size=4, objective=objective, class_weight=class_weight
            ),
        )
        for class_weight in (np.ones(2, np.float32), classes)
    )

    def change(step: Any, real: list[float], size: int = 4) -> np.ndarray:
        """Return the change of all weights by a step with these real rows, and undo it."""
        batch = {name: tf.constant(values) for name, values in samples.items()}
        batch["weight"] = tf.constant(real, tf.float32)
        before = model.training.get_weights()
        gradients, _ = step.gradients(batch, tf.constant(0, tf.int64), 4, size)
        step.apply(gradients, tf.zeros(2))
        pairs = zip(model.training.get_weights(), before, strict=True)
        changes = np.concatenate([(after - old).ravel() for after, old in pairs])
        model.training.set_weights(before)
        return changes

    single = np.stack([change(plain, real) for real in np.eye(4).tolist()])
    assert np.abs(single).max(axis=1).min() > 0.01
    expected = (classes[samples["label"]][:, None] * single)[:3].sum(axis=0) / 3
    for size in (4, 1):
        actual = change(weighted, [1, 1, 1, 0], size)  # the last row is padding
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-6)
    actual = change(weighted, [0, 1, 0, 0])
    np.testing.assert_allclose(actual, 4 * single[1], rtol=1e-3, atol=1e-6)


def test_weights_that_are_not_finite_are_never_saved() -> None:
    """The losses are finite, as behind a ReLU layer."""
    variables = [
        keras.Variable([1.0, 2.0]),
        keras.Variable(3, dtype="int32"),
        keras.Variable([1.0], name="kernel"),
    ]
    trainer = mock.Mock(
        _state=training.outputs.TrainState(epoch=4, values=np.ones((2, 1, 4), np.float32)),
        _step=mock.Mock(variables=variables),
    )
    training.trainer.Trainer._check_state(trainer)
    for wrong in (np.nan, np.inf):
        variables[2].assign([wrong])
        with pytest.raises(UsageError, match="epoch 5: the weights kernel are not finite"):
            training.trainer.Trainer._check_state(trainer)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (
            "image_data_format",
            "channels_first",
            r"found 'channels_first'.*set_image_data_format\('channels_last",
        ),
        ("backend", "jax", "backend of Keras in this process: found 'jax'"),
    ],
)
def test_keras_of_a_program_must_have_our_settings(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setattr(keras.config, name, lambda: value)
    with pytest.raises(UsageError, match=expected):
        training.devices.make_strategy("cpu")


def test_keras_gets_our_settings_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module in place of Keras records its settings, and the backend that the environment names."""
    (tmp_path / "loads_keras.py").write_text(
        "import os, sys, types\n"
        "values = {'backend': os.environ['KERAS_BACKEND']}\n"
        "setters = {f'set_{n}': (lambda v, n=n: values.update({n: v})) for n in ('image_data_format', 'floatx', 'epsilon')}\n"
        "sys.modules['keras'] = types.SimpleNamespace(config=types.SimpleNamespace(**setters))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with mock.patch.dict(sys.modules):
        sys.modules.pop("keras", None)
        recorded = load_quietly("loads_keras").values
    assert recorded == {
        "backend": "tensorflow",
        "image_data_format": "channels_last",
        "floatx": "float32",
        "epsilon": 1e-7,
    }
    assert os.environ["KERAS_BACKEND"] == "torch"


def test_features_need_no_locks(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_bag(path, a_bag(0, 3, positive=True), np.zeros((3, 2), np.int64))
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            h5py.File(path)
        header = read_header(path)
        assert (header.rows, len(read_features(header))) == (3, 3)


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.ENOENT, errno.EAGAIN, errno.ENOLCK, errno.EMFILE, errno.EIO]
)
@pytest.mark.parametrize("only_as_text", [False, True])
def test_failures_of_the_system_are_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, only_as_text: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        text = f"unable to open file (errno = {number}, error message = '{os.strerror(number)}')"
        raise RuntimeError(text) if only_as_text else OSError(number, text)

    monkeypatch.setattr(h5py, "File", fail)
    kind = UsageError if number in (errno.EACCES, errno.ENOENT) else MachineShort
    for read in (read_header, read_coords_header):
        with pytest.raises(kind, match=r"a\.h5") as raised:
            read(tmp_path / "a.h5")
        assert "embed" not in str(raised.value)


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Lower a limit of this process."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def test_too_many_open_files_is_not_damage(tmp_path: Path) -> None:
    write_bag(tmp_path / "a.h5", a_bag(0, 3, positive=True))
    with limited(resource.RLIMIT_NOFILE, 0), pytest.raises(MachineShort, match="Too many open"):
        read_header(tmp_path / "a.h5")
    assert read_header(tmp_path / "a.h5").rows == 3


def test_a_feature_file_beyond_the_limit_of_file_size(tmp_path: Path) -> None:
    with (
        pytest.raises(MachineShort, match="became too large"),
        limited(resource.RLIMIT_FSIZE, 10_000),
        writing(tmp_path / "a.h5", 100, 100, "float32") as writer,
    ):
        writer.append(np.ones((100, 100)), np.zeros((100, 2), np.int64))
        writer.finish({}, {})
    assert not list(tmp_path.iterdir())


def test_feature_files_of_other_tools_are_read(tmp_path: Path) -> None:
    write_bag(tmp_path / "TCGA-AB-1234-01.h5", a_bag(0, 9, positive=False)[None].astype(np.float16))
    write_bag(tmp_path / "sub" / "TCGA-AB-1234-02.h5", a_bag(1, 5, positive=True))
    write_bag(tmp_path / "none.h5", np.zeros((0, DIMENSION), np.float32))
    write_bag(tmp_path / "part-2.h5", a_bag(2, 4, positive=True), label=1)
    (tmp_path / ".part-3.h5").write_text("left by a killed process")
    (tmp_path / "l.csv").write_text("slide,label\nnone,a\npart-2,b\n")
    bags = BagSet(tmp_path)
    described = {
        bag.id: (bag.rows, bags.records[number].patient, bags.records[number].label)
        for number, bag in bags.complete.items()
    }
    assert described == {
        "TCGA-AB-1234-01": (9, "TCGA-AB-1234", None),
        "part-2": (4, "part-2", "1"),
        "sub/TCGA-AB-1234-02": (5, "TCGA-AB-1234", None),
    }
    assert BagSet(tmp_path, labels=partial(read_labels, tmp_path / "l.csv")).records[1].label == "b"
    assert len(bags.notes) == 1


THREE = np.zeros((3, 4), np.float32)


@pytest.mark.parametrize(
    ("files", "error", "expected"),
    [
        (
            {"x": {"features": THREE}, "y": {"features": np.zeros((3, 5), np.float32)}},
            UsageError,
            "features per patch: found 5, expected 4",
        ),
        (
            {"x": {"features": THREE.astype(int)}},
            UsageError,
            r"expected \(patches, features\) float32 or float16",
        ),
        ({"x": {"vectors": THREE}}, UsageError, "contains no features: found vectors"),
        (
            {"x": {"features": THREE, "coords": np.zeros((2, 2), int)}},
            UsageError,
            r"x.h5: coords: found \(2, 2\), expected \(3, 2\)",
        ),
        ({}, NothingToDo, "contains no features"),
        ({"x": {"features": THREE[:0]}}, NothingToDo, r"no slide in .* has patches: found x"),
    ],
)
def test_invalid_features_are_refused(
    tmp_path: Path, files: dict[str, dict[str, Any]], error: type[Exception], expected: str
) -> None:
    for name, datasets in files.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.update(datasets)
    with pytest.raises(error, match=expected):
        BagSet(tmp_path)


def test_patients_with_two_labels_are_refused(bags: Path, tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("slide,label,patient\ns0,a,P\ns1,b,P\n")
    with pytest.raises(UsageError, match="patient P: found slides with labels a and b"):
        BagSet(bags, bag="patient", labels=partial(read_labels, tmp_path / "l.csv"))


def test_stores_and_features_together_are_refused(small_store: Path, run: RunCommand) -> None:
    both = run("train", "patches.lmdb", "--mil", "features", "--out", "x")
    assert both.returncode == 2
    assert "STORES: found --mil features" in both.stderr
    encoder = run("embed", small_store, "--model", GOLDEN / "2026-11-25" / "bags", "--out", "f")
    assert encoder.returncode == 2
    assert "takes features, not patches" in encoder.stderr


def test_resume_accepts_new_slides_and_detects_changed_features(bags: Path, tmp_path: Path) -> None:
    folder, out = Path(shutil.copytree(bags, tmp_path / "features")), tmp_path / "run"
    with without_training():
        histopipe.train(mil=folder, out=out, **ARGUMENTS)
        write_bag(folder / "a_new.h5", a_bag(99, 9, positive=True))
        histopipe.train(out=out, resume=True, epochs=4)
        write_bag(folder / "s3.h5", a_bag(98, 7 + 59 * 3 % 60, positive=True))
        with pytest.raises(DamagedStore, match="slide s3 of"):
            histopipe.train(out=out, resume=True, epochs=5)


def test_patients_as_bags_do_not_leak(tmp_path: Path) -> None:
    """Copies of scans connect three patients. A patient with slides of two sites has no site."""
    for i in range(16):
        content = {0: "x", 3: "x", 4: "y", 2: "y"}.get(i, f"c{i}")
        write_bag(
            tmp_path / f"s{i:02}.h5",
            a_bag(i, 5, positive=False),
            content=content,
            label="ab"[i // 2 % 2] if i > 4 else "a",
            patient=f"P{i // 2}",
            site=f"site{i % 2}",
        )
    bags = BagSet(tmp_path, bag="patient")
    with pytest.raises(UsageError, match="a site for every slide"):
        make_splits([bags], split_by="site", seed=1)
    splits = make_splits([bags], split_by="patient", seed=1)
    contents = [slide.content for slide in splits.slides]
    assert contents[0] == contents[1] == contents[2]
    assert len(set(contents)) == 6
    assert len({int(slide.subsets[0]) for slide in splits.slides[:3]}) == 1


def test_features_of_one_quickhash_with_different_pixels_are_no_copies(tmp_path: Path) -> None:
    """Features of earlier versions have no hash of pixels, and are compared by their content."""
    for i, pixels in enumerate(("p", "q", "p", None)):
        description: dict[str, Any] = {"pixel_hash": pixels} if pixels else {}
        for label in "ab":
            path, values = tmp_path / f"{label}{i}.h5", a_bag(i, 5, positive=False)
            write_bag(path, values, content=label, label=label, **description)
    records = BagSet(tmp_path).records
    scans = [record.scans for record in records.values() if record.label == "a"]
    level0, groups = copy_groups(scans[:3])
    assert level0 == groups == [groups[0], groups[1], groups[0]]
    assert groups[0] != groups[1]
    assert len(set(copy_groups(scans)[1])) == 1


def test_patient_name_cannot_lead_out_of_the_run(tmp_path: Path) -> None:
    values: dict[str, Any] = {"attention": None, "contributions": np.zeros((1, 1))}
    places, run = [("s", 0, 0, "512")], tmp_path / "runs" / "run"
    with pytest.raises(DamagedStore, match="evil"):
        write_patch_values(run, "../../../evil/P", places, names=["t"], **values)
    assert not list(tmp_path.rglob("*evil*"))
