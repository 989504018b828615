"""One device, several devices and several workers give the same losses and weights."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.commands import run_program
from helpers.stores import a_store, jpegs
from helpers.trainings import free_ports, tf_config

SHALLOW = ("adagrad-clipped", "adamw-accumulated", "batch-norm-cosine", "last-block", "low-rank")
OF_WORKERS = SHALLOW[:3]
DEEP = ("deep-float64",)
STEPS = 24

pytestmark = pytest.mark.nightly(
    reason="all optimizers and devices; test_replicas_equal_one_device and test_two_workers_equal_one_process are one case"
)

Found = dict[str, dict[str, np.ndarray[Any, Any]]]


@pytest.fixture(scope="module")
def odd_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 101 patches: with batches of 14, the last step of an epoch has three."""
    slides = {"n": jpegs(0, 50, 32), "t": jpegs(50, 51, 32)}
    return a_store(tmp_path_factory.mktemp("stores") / "odd.lmdb", slides, patch_size=32)


def train(store: Path, out: Path, cases: tuple[str, ...], replicas: str, **variables: str) -> Found:
    """Return losses and weights of each case, from a process with `replicas` replicas."""
    arguments = (store, out, ",".join(cases), replicas)
    ended = run_program("invariant.py", *arguments, env=os.environ | variables)
    assert ended.returncode == 0, ended.stderr
    results: Found = {}
    with np.load(out) as saved:
        for name in saved.files:
            case, _, key = name.split("/")
            results.setdefault(case, {})[key] = saved[name]
    return results


def assert_same(one: Found, many: Found, cases: tuple[str, ...]) -> None:
    """Assert equal losses to 1e-5 at each step, and equal weights to 1e-4 of each layer's norm, of cases that learn."""
    assert set(one) == set(many) == set(cases)
    for case in cases:
        losses = one[case]["losses"]
        assert len(losses) >= STEPS
        assert losses.std() > 1e-3
        np.testing.assert_allclose(many[case]["losses"], losses, rtol=0, atol=1e-5)
        for key in one[case].keys() - {"losses"}:
            expected, actual = (each[case][key].astype(float) for each in (one, many))
            off = np.linalg.norm(actual - expected)
            assert off <= 1e-4 * np.linalg.norm(expected), (case, key)


@pytest.fixture(scope="module")
def one(odd_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    out = tmp_path_factory.mktemp("one") / "one.npz"
    return train(odd_store, out, SHALLOW, "1")


def test_four_replicas_equal_one_device(odd_store: Path, one: Found, tmp_path: Path) -> None:
    """The replicas' shares of a batch are 4, 4, 3 and 3 patches. In an epoch's last step one replica has none."""
    out = tmp_path / "many.npz"
    assert_same(one, train(odd_store, out, SHALLOW, "4"), SHALLOW)


def test_two_workers_equal_one_device(odd_store: Path, one: Found, tmp_path: Path) -> None:
    ports = free_ports(2)
    outs = [tmp_path / f"worker-{index}.npz" for index in (0, 1)]

    def work(index: int) -> Found:
        config = tf_config(ports, index)
        return train(odd_store, outs[index], OF_WORKERS, "workers", TF_CONFIG=config)

    with ThreadPoolExecutor(2) as pool:
        for results in pool.map(work, (0, 1)):
            assert_same({case: one[case] for case in OF_WORKERS}, results, OF_WORKERS)


def test_deep_networks_are_equal_in_float64(odd_store: Path, tmp_path: Path) -> None:
    """With 27 layers of batch normalization, rounding errors grow tenfold per step: float32 drifts, as documented."""
    one, many = (train(odd_store, tmp_path / f"{n}.npz", DEEP, n) for n in ("1", "2"))
    assert_same(one, many, DEEP)
