"""Training of the last layer on features of the frozen network, which are computed once."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any
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


def features(run: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {path.name: np.load(path) for path in (run / "head-features").rglob("*.npy")}


@pytest.mark.long(reason="two trainings")
def test_features_of_two_devices_train_as_the_network_of_one(
    small_store: Path, tmp_path: Path
) -> None:
    plain = ("train", small_store, *FLAGS, "--augment", "none", "--dropout", "0.2")
    succeed(*plain, "--head-copies", 0, "--out", tmp_path / "network")
    succeed(*plain, "--head-copies", 1, "--devices", "cpu:2", "--out", tmp_path / "features")
    assert_close(tmp_path / "features", tmp_path / "network")
    assert not features(tmp_path / "network")
    assert features(tmp_path / "features").keys() == {
        "train-0.npy",
        "validation-0.npy",
        "test-0.npy",
    }
    assert sum(each.size for each in weights(tmp_path / "features")) < 1000  # only the last layer
    in_fork(check_saved_model, small_store, tmp_path / "features")


@pytest.mark.long(reason="two trainings, and another two that continue")
def test_lost_changed_and_other_features_are_computed_again(
    small_store: Path, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    copies = ("train", small_store, *FLAGS, "--augment", "flips,colour", "--head-copies", 2)
    succeed(*copies, "--out", whole)
    first = features(whole)
    assert not np.array_equal(first["train-0.npy"], first["train-1.npy"])
    succeed(*copies, "--epochs", 1, "--out", resumed)
    (cache,) = (resumed / "head-features").iterdir()
    (cache / "train-0.npy").unlink()
    with (cache / "train-1.npy").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\0")
    shutil.copytree(cache, cache.with_name("of-other-weights"))
    succeed("train", "--resume", "--out", resumed, "--epochs", 4)
    assert [each.name for each in (resumed / "head-features").iterdir()] == [cache.name]
    again = features(resumed)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert_equal(resumed, whole)


def check_batches(store: str) -> None:
    """Each patch has its features, of the copy of its epoch; what could not be read has weight 0."""
    module = training.head_features
    with opened_setup(stores=(store,), split_by="slide", batch_size=7, **HEAD) as setup:
        patches = setup.batches("train", 2)
        keys = module._keys(patches.table)
        copies = [np.stack([keys + copy, -keys], axis=1).astype(np.float32) for copy in (0, 1)]
        copies[0][3] = copies[1][3] = np.nan
        batches = module.FeatureBatches(patches, copies)
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


def check_notice(store: str) -> None:
    """After a minute of 20 steps of 3 s, with 0.1 s for a patch in the network alone: once, and only if it is long."""
    module = importlib.import_module("histopipe.training.head_features")
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


def test_batches_have_the_features_of_their_patches(small_store: Path) -> None:
    in_fork(check_batches, small_store)


def test_copies_are_chosen_for_what_they_fit() -> None:
    assert chosen_settings({**HEAD})["head_copies"] == 4
    assert "head_copies" not in chosen_settings({**HEAD, "max_per_slide": 100})
    for settings in ({"trainable": "last:1"}, {"trainable": "head", "max_per_slide": 9}):
        with pytest.raises(UsageError, match="--head-copies 2: found --trainable"):
            PatchTrainConfig(head_copies=2, **settings)
