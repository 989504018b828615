"""Training of the last layer on features of the frozen network, which are computed once."""

from __future__ import annotations

import importlib
import os
import shutil
from contextlib import closing
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from helpers.commands import succeed
from helpers.lazy import training
from helpers.trainings import (
    TINY,
    assert_close,
    assert_equal,
    check_saved_model,
    in_fork,
    opened_setup,
    weights,
)
from histopipe.errors import UsageError
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.runs.train import chosen_settings
from histopipe.system.forecast import spelled

HEAD = {**TINY, "trainable": "head"}
FLAGS = [word for name, value in HEAD.items() for word in (f"--{name}", value)]
FLAGS += [
    "--epochs",
    "4",
    "--batch-size",
    "15",
    "--learning-rate",
    "0.01",
    "--split-by",
    "slide",
    "--deterministic",
]


def cache_of(run: Path) -> Path:
    (cache,) = (run.parent / ".head-features").iterdir()
    return cache


@pytest.mark.long(reason="two trainings")
def test_features_of_two_devices_train_as_the_network_of_one(
    small_store: Path, tmp_path: Path
) -> None:
    plain = ("train", small_store, *FLAGS, "--augment", "none", "--dropout", "0.2")
    succeed(*plain, "--head-copies", 0, "--out", tmp_path / "network")
    succeed(*plain, "--head-copies", 1, "--devices", "cpu:2", "--out", tmp_path / "features")
    assert_close(tmp_path / "features", tmp_path / "network")
    assert {each.name for each in cache_of(tmp_path / "features").iterdir()} == {"0.f32", "0.crc"}
    assert sum(each.size for each in weights(tmp_path / "features")) < 1000  # only the last layer
    ranges = [np.load(tmp_path / name / "training-range.npz") for name in ("features", "network")]
    assert ranges[0].files == ranges[1].files
    for name in ranges[0].files:
        if ranges[0][name].dtype.kind == "f":
            assert np.allclose(
                ranges[0][name], ranges[1][name], rtol=1e-3, atol=1e-4 * abs(ranges[1][name]).max()
            ), name
    in_fork(check_saved_model, small_store, tmp_path / "features")


@pytest.mark.long(reason="two trainings, of which one continues")
def test_features_are_shared_and_computed_again_if_lost_or_changed(
    small_store: Path, tmp_path: Path
) -> None:
    """A resumed training equals an uninterrupted one bit by bit."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    copies = ("train", small_store, *FLAGS, "--augment", "flips,colour", "--head-copies", 2)
    succeed(*copies, "--out", whole)
    cache = cache_of(whole)
    assert {each.name for each in cache.iterdir()} == {
        f"{name}.{kind}" for name in ("0", "1+flips+colour") for kind in ("f32", "crc")
    }
    files = {each: each.read_bytes() for each in cache.iterdir()}
    values = np.frombuffer(files[cache / "0.f32"], np.float32).reshape(120, -1)
    assert values.any(axis=1).all()  # of all patches
    augmented = np.frombuffer(files[cache / "1+flips+colour.f32"], np.float32).reshape(120, -1)
    trained = augmented.any(axis=1)
    assert 0 < trained.sum() < 120 and not np.isclose(values, augmented)[trained].all(axis=1).any()
    written = {each: each.stat().st_mtime_ns for each in cache.glob("*.f32")}
    succeed(*copies, "--epochs", 1, "--out", resumed)  # computes nothing
    assert {each: each.stat().st_mtime_ns for each in written} == written
    (cache / "0.crc").unlink()
    with (cache / "1+flips+colour.f32").open("r+b") as file:
        file.seek(4 * values.shape[1] * int(np.flatnonzero(trained)[0]))
        file.write(b"damage!!")
    succeed("train", "--resume", "--out", resumed, "--epochs", 4)
    assert {each: each.read_bytes() for each in cache.iterdir()} == files
    assert_equal(resumed, whole)


def check_batches(store: str) -> None:
    """Each patch has its features, of the copy of its epoch; what could not be read has weight 0."""
    module = training.patch_training
    with opened_setup(stores=(store,), split_by="slide", batch_size=7, **HEAD) as setup:
        patches = setup.batches("train", 2)
        keys = patches.table.keys
        copies = [np.stack([keys + copy, -keys], axis=1).astype(np.float32) for copy in (0, 1)]
        copies[0][3] = copies[1][3] = np.nan
        places = {key: row for row, key in enumerate(keys.tolist())}
        batches = module.FeatureBatches(
            patches, copies, lambda some: np.array([places[key] for key in some.tolist()])
        )
        assert batches.skipped.keys() == {keys[3]}
        for step in range(2 * batches.steps_per_epoch):
            for replica in (0, 1):
                images, got = patches.load(step, replica), batches.load(step, replica)
                lost = got["key"] == keys[3]
                assert np.array_equal(got["key"], images["key"])
                assert np.array_equal(got["label"], images["label"])
                assert np.array_equal(got["weight"], np.where(lost, 0, images["weight"]))
                copy = step // batches.steps_per_epoch
                values = np.stack([got["key"] + copy, -got["key"]], axis=1).astype(np.float32)
                assert np.array_equal(got["image"], np.where(lost[:, None], 0, values))


def check_folder(place: str) -> None:
    """The features used least recently go first; what cannot fit removes none; a process keeps what another removes."""
    module = importlib.import_module("histopipe.training.patch_training")
    folder = Path(place) / ".head-features"
    for age, name in enumerate(("c", "b", "a", "now")):
        (folder / name).mkdir(parents=True)
        (folder / name / "0.f32").write_bytes(b"1" * (4096 if name == "now" else 40_960))
        os.utime(folder / name, (1e9 - age, 1e9 - age))

    def left(size: int, free: int = 10**9) -> list[str]:
        with (
            mock.patch.object(module, "_MOST_BYTES", 150_000),
            mock.patch.object(module, "free_bytes", lambda _: free),
        ):
            module._make_room(folder / "now", size, 3)
        return sorted(path.name for path in folder.iterdir())

    for size, free in ((150_001, 10**9), (150_000, 5000)):
        with pytest.raises(UsageError, match=r"--head-copies 3: found 0\.0 GB of features"):
            left(size, free)
    assert left(10) == ["a", "b", "c", "now"]
    assert left(40_960) == ["b", "c", "now"]  # 160 kB are too much
    assert left(60_000, free=100_000) == ["b", "c", "now"]
    assert left(100_000) == ["c", "now"]
    step = mock.Mock()
    step.settings.augmentations = ()
    values = np.arange(12, dtype=np.float32).reshape(4, 3) + 1
    with closing(module._Copy(folder / "now", 1, step, 4, 3)) as copy:
        shutil.rmtree(folder / "now")
        copy.write(np.arange(4), values)
    assert np.array_equal(copy.features, values)
    assert len(copy.missing(np.arange(4), lambda keys: keys)) == 0


def check_notice(store: str) -> None:
    """After a minute of 20 steps of 3 s, with 0.1 s for a patch in the network alone: once, and only if it is long."""
    module = importlib.import_module("histopipe.training.patch_training")
    with opened_setup(stores=(store,), split_by="slide", batch_size=7, **TINY) as setup:
        batches = {subset: setup.batches(subset, 1) for subset in setup.subsets}
        rows = {subset: len(each.table) for subset, each in batches.items()}
        steps = batches["train"].steps_per_epoch
        for epochs, expected in ((40, True), (4, False)):
            notice = module.HeadNotice(batches, mock.Mock(), epochs)
            times = [3.0 * n for n in range(25)]
            with (
                mock.patch.object(module, "message") as message,
                mock.patch.object(module.time, "monotonic", side_effect=[100 + t for t in times]),
                mock.patch.object(notice, "_patch_seconds", return_value=0.1),
            ):
                for batch in range(len(times)):
                    notice.on_train_batch_end(batch)
            texts = [call.args[0] for call in message.call_args_list]
            assert len(texts) == expected
            if expected:
                whole = epochs * (3 * steps + 0.1 * rows["validation"])
                assert f"{epochs} epochs take about {spelled(whole)}" in texts[0]
                assert f"head takes about {spelled(0.1 * sum(rows.values()))}" in texts[0]


def test_a_long_training_names_the_fast_one(small_store: Path) -> None:
    in_fork(check_notice, small_store)


def test_the_folder_has_room_for_what_is_used(tmp_path: Path) -> None:
    in_fork(check_folder, tmp_path)


def test_batches_have_the_features_of_their_patches(small_store: Path) -> None:
    in_fork(check_batches, small_store)


def test_copies_are_chosen_for_what_they_fit() -> None:
    assert chosen_settings({**HEAD})["head_copies"] == 4
    assert "head_copies" not in chosen_settings({**HEAD, "max_per_slide": 100})
    for settings in ({"trainable": "last:1"}, {"trainable": "head", "max_per_slide": 9}):
        with pytest.raises(UsageError, match="--head-copies 2: found --trainable"):
            PatchTrainConfig(head_copies=2, **settings)
