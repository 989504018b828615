"""Several devices and several workers give the result of one process. If a worker is lost, the others end soon and name it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.commands import COMMAND, RunCommand, run_program
from helpers.lazy import training
from helpers.stores import a_store, jpegs
from helpers.trainings import FILES, assert_close, free_ports, history, tf_config
from histopipe.errors import UsageError
from histopipe.system.tensorflow import in_cluster

ARGUMENTS = ("--epochs", "3", "--batch-size", "15", "--split-by", "slide", "--devices", "cpu")


def start(
    store: Path, out: Path, ports: list[int], index: int, *options: str, fault: str = ""
) -> subprocess.Popen[str]:
    variables = {"TF_CONFIG": tf_config(ports, index), "HISTOPIPE_TEST_FAULT": fault}
    return subprocess.Popen(
        [*COMMAND, "train", str(store), "--out", str(out), *ARGUMENTS, *options],
        env=os.environ | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture
def ports() -> list[int]:
    return free_ports(2)


@pytest.mark.nightly(
    reason="two processes; test_replicas_equal_one_device shows the same of devices"
)
def test_two_workers_equal_one_process(
    run: RunCommand, small_store: Path, tmp_path: Path, ports: list[int]
) -> None:
    workers = [start(small_store, tmp_path / "two", ports, index) for index in (0, 1)]
    ends = [worker.communicate(timeout=200) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], ends
    assert run("train", small_store, "--out", "one", *ARGUMENTS).returncode == 0
    two = tmp_path / "two"
    assert {path.name for path in two.iterdir()} == FILES | {"resume-older.npz"}
    assert_close(two, tmp_path / "one")
    assert json.loads((two / "metrics.json").read_text())["replicas"] == 2
    # Both print the metrics; how long each has waited differs.
    printed = [[line for line in end[0].splitlines() if "limited by" not in line] for end in ends]
    assert printed[0] == printed[1]


@pytest.mark.nightly(
    reason="three pairs of processes; a lost worker is a case of several machines only"
)
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("SIGKILL", "had its last heartbeat"),
        ("SIGSTOP", "had its last heartbeat"),
        ("hang", "is alive, reading"),
    ],
)
def test_lost_worker_ends_the_other_and_is_named(
    run: RunCommand, small_store: Path, tmp_path: Path, ports: list[int], kind: str, status: str
) -> None:
    place = "read:8" if kind == "hang" else "gradients:7"
    lost = start(
        small_store,
        tmp_path / "run",
        ports,
        1,
        "--worker-timeout",
        "15",
        fault=f"{place}:{kind}:{tmp_path / 'lost'}",
    )
    other = start(
        small_store, tmp_path / "run", ports, 0, "--worker-timeout", "15", "--save-minutes", "1e-9"
    )
    try:
        while not (tmp_path / "lost").exists():
            assert other.poll() is None
            time.sleep(0.1)
        _, stderr = other.communicate(timeout=120)
    finally:
        for worker in (lost, other):
            worker.kill()
            worker.communicate()
    assert other.returncode == 6, stderr
    assert f"worker 1 (127.0.0.1:{ports[1]}) {status}" in stderr
    if kind == "SIGKILL":
        again = run("train", "--resume", "--out", "run", "--devices", "cpu:2")
        assert again.returncode == 0, again.stderr
        assert "resuming run after epoch" in again.stderr
        assert len(history(tmp_path / "run")) == 3


@pytest.mark.nightly(reason="waits for a timeout")
def test_worker_that_never_starts_is_named(
    small_store: Path, tmp_path: Path, ports: list[int]
) -> None:
    alone = start(small_store, tmp_path / "run", ports, 0, "--worker-timeout", "5")
    _, stderr = alone.communicate(timeout=100)
    assert alone.returncode == 6, stderr
    assert f"worker 1 (127.0.0.1:{ports[1]}) never started" in stderr


@pytest.mark.nightly(
    reason="a pair of processes; test_resume.py shows that a stopped training continues"
)
@pytest.mark.parametrize(
    ("place", "codes", "message", "steps"),
    [
        ("gradients:8", [130, 130], "saved after epoch 1 and 3 steps of the next", (1, 3)),
        ("predict:1", [6, 130], r"worker 1 \(127.0.0.1:\d+\) failed: interrupted", (0, 6)),
    ],
    ids=["in a step", "in the validation"],
)
def test_stop_of_one_worker_stops_all_and_loses_no_step(
    run: RunCommand,
    small_store: Path,
    tmp_path: Path,
    ports: list[int],
    place: str,
    codes: list[int],
    message: str,
    steps: tuple[int, int],
) -> None:
    """Stopped in the eighth step, the worker sends the request in the ninth, and all workers stop."""
    fault = f"{place}:SIGTERM:{tmp_path / 'stopped'}"
    workers = [
        start(small_store, tmp_path / "run", ports, 0, "--worker-timeout", "15"),
        start(small_store, tmp_path / "run", ports, 1, "--worker-timeout", "15", fault=fault),
    ]
    ends = [worker.communicate(timeout=100)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == codes, ends
    assert re.search(message, ends[0])
    done = run("train", "--resume", "--out", "run", "--devices", "cpu")
    assert done.returncode == 0, done.stderr
    assert "after epoch {} and {} steps of the next".format(*steps) in done.stderr


@pytest.mark.nightly(reason="a pair of processes")
def test_workers_with_different_settings_are_refused(
    small_store: Path, tmp_path: Path, ports: list[int]
) -> None:
    workers = [
        start(small_store, tmp_path / "run", ports, index, "--learning-rate", rate)
        for index, rate in ((0, "0.001"), (1, "0.01"))
    ]
    ends = [worker.communicate(timeout=100)[1] for worker in workers]
    for worker, stderr in zip(workers, ends, strict=True):
        assert worker.returncode == 2, stderr
        assert (
            f"workers differ from the first worker: found worker 1 (127.0.0.1:{ports[1]})" in stderr
        )


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker"}}',
        '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": -1}}',
        '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "chief", "index": 0}}',
        '{"cluster": {"worker": ["a:1"], "ps": ["b:2"]}, "task": {"type": "worker", "index": 0}}',
    ],
)
def test_invalid_tf_config_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(UsageError, match="TF_CONFIG"):
        training.devices.find_cluster()


def test_workers_of_a_slurm_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "node[07-08]",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_PROCID": "2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    cluster = training.devices.find_cluster()
    assert cluster.workers == ("node07:8888", "node07:8889", "node08:8888")
    assert (cluster.index, cluster.chief, cluster.alone) == (2, False, False)
    assert cluster.own_part(6) == range(4, 6)


def test_slurm_batch_script_is_not_a_worker() -> None:
    assert not in_cluster({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"})
    assert not in_cluster({"SLURM_STEP_NUM_TASKS": "1"})


# Every step, with all optimizers

SHALLOW = ("adagrad-clipped", "adamw-accumulated", "batch-norm-cosine", "last-block", "low-rank")
OF_WORKERS = SHALLOW[:3]
DEEP = ("deep-float64",)
STEPS = 24

REPLICAS = pytest.mark.nightly(
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


@REPLICAS
def test_four_replicas_equal_one_device(odd_store: Path, one: Found, tmp_path: Path) -> None:
    """The replicas' shares of a batch are 4, 4, 3 and 3 patches. In an epoch's last step one replica has none."""
    out = tmp_path / "many.npz"
    assert_same(one, train(odd_store, out, SHALLOW, "4"), SHALLOW)


@REPLICAS
def test_two_workers_equal_one_device(odd_store: Path, one: Found, tmp_path: Path) -> None:
    ports = free_ports(2)
    outs = [tmp_path / f"worker-{index}.npz" for index in (0, 1)]

    def work(index: int) -> Found:
        config = tf_config(ports, index)
        return train(odd_store, outs[index], OF_WORKERS, "workers", TF_CONFIG=config)

    with ThreadPoolExecutor(2) as pool:
        for results in pool.map(work, (0, 1)):
            assert_same({case: one[case] for case in OF_WORKERS}, results, OF_WORKERS)


@REPLICAS
def test_deep_networks_are_equal_in_float64(odd_store: Path, tmp_path: Path) -> None:
    """With 27 layers of batch normalization, rounding errors grow tenfold per step: float32 drifts, as documented."""
    one, many = (train(odd_store, tmp_path / f"{n}.npz", DEEP, n) for n in ("1", "2"))
    assert_same(one, many, DEEP)
