"""Fixtures of several packages: real slides, synthetic slides, stores, a run, and commands run as a user runs them."""

from __future__ import annotations

import gc
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

import histopipe
from helpers import budget
from helpers.bags import TARGET_TASKS, target_training, write_target_bags
from helpers.commands import (
    COMMAND,
    LOADS_TENSORFLOW,
    NEW_PROCESS,
    Once,
    RunCommand,
    run_command,
    succeed,
    with_tensorflow,
)
from helpers.inline import SharedPool, run_tasks_here
from helpers.json_results import check_json
from helpers.networks import replace_networks
from helpers.paths import FAULTY_PATH, GOLDEN, PROJECT
from helpers.runs import without_training
from helpers.slides import make_slides
from helpers.stores import a_store, jpegs
from helpers.trainings import ARGUMENTS
from helpers.viewed import make_viewed
from histopipe.runs.fork_server import ADDRESS, start_server
from histopipe.system.locks import locked
from histopipe.system.output import Progress
from histopipe.system.tensorflow import load_quietly
from histopipe.system.worker_pool import silence

# Test machines are busy, so the duration of an example is not meaningful. `make nightly` uses "many".
settings.register_profile("many", deadline=None)
settings.register_profile("few", deadline=None, max_examples=10)
settings.load_profile("few")

_seconds: dict[str, float] = defaultdict(float)
"""Duration of each test without its fixtures, in the process that collects the reports."""
_long: set[str] = set()
"""Tests with the mark `long`."""


def pytest_configure(config: pytest.Config) -> None:
    """Create the folder of a test run, and a fork server with fault injection, which the first training starts.

    Workers of xdist inherit both, so TensorFlow is loaded by one server only, and equal slides are drawn once.
    """
    budget.count_started()
    if hasattr(config, "workerinput"):
        return
    # Workers share the cores: with a thread of numpy for each core in each of them, products of matrices take twice as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    folder = Path(tempfile.mkdtemp(prefix="histopipe-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(folder))
    os.environ[budget.FOLDER], os.environ[ADDRESS] = str(folder), str(folder / "fork-server")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.environ[ADDRESS])
    listener.listen(64)
    environment = {
        **{name: value for name, value in os.environ.items() if name != ADDRESS},
        "PYTHONPATH": FAULTY_PATH,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }

    def start() -> None:
        select.select([listener], [], [])
        _, control = start_server(environment)  # this thread must outlive the loading
        while True:
            client, _ = listener.accept()
            threading.Thread(target=forward, args=(client, control), daemon=True).start()

    def forward(client: socket.socket, control: socket.socket) -> None:
        """Send the connections of a client to the server."""
        with client:
            while fds := socket.recv_fds(client, 1, 3)[1]:
                socket.send_fds(control, [b"\n"], fds)
                for fd in fds:
                    os.close(fd)

    threading.Thread(target=start, daemon=True, name="fork server").start()


def pytest_collection_finish() -> None:
    """Exclude what exists now, above all TensorFlow's modules, from the garbage collections of the tests.

    Opening a store for writing collects garbage, which takes half a second of each test otherwise.
    """
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tenth",
        metavar="I",
        type=int,
        help="run tenth I of the tests only, from 0 to 9",
    )
    parser.addoption("--budget", action="store_true", help="fail if tests start too many processes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tenth, kept, left_out = config.getoption("--tenth"), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        for marker in (*item.iter_markers("nightly"), *item.iter_markers("long")):
            if not marker.kwargs.get("reason"):
                raise pytest.UsageError(f'{item.nodeid}: expected {marker.name}(reason="...")')
        # By name, so that a new test does not move the others.
        chosen = tenth is None or zlib.crc32(item.nodeid.encode()) % 10 == tenth
        (kept if chosen else left_out).append(item)
        of_module = any(
            definition.scope == "module"
            for definitions in item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
            for definition in definitions
        )
        if of_module and not item.get_closest_marker("xdist_group"):
            # These tests share what was made for them, so one worker runs them.
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        _seconds[report.nodeid] += report.duration
        if {"long", "nightly"} & report.keywords.keys():
            _long.add(report.nodeid)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the slowest tests, those that need a mark, and the processes by kind."""
    slowest = sorted(_seconds.items(), key=lambda test: -test[1])
    terminalreporter.section("slowest tests, without their fixtures")
    for name, seconds in slowest[:20]:
        terminalreporter.line(f"{seconds:6.1f} s  {name}")
    for name, seconds in slowest:
        if seconds > budget.LONG_SECONDS and name not in _long:
            terminalreporter.line(f"{name} took {seconds:.1f} s: it needs `long(reason=...)`")
    counted = budget.counts()
    terminalreporter.line(
        "processes: " + ", ".join(f"{counted[kind]} {kind}" for kind in budget.LIMITS)
    )
    for text in budget.excess(counted) if config.getoption("--budget") else ():
        terminalreporter.line(text, red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (
        session.config.getoption("--budget")
        and not hasattr(session.config, "workerinput")
        and session.exitstatus == pytest.ExitCode.OK
        and budget.excess(budget.counts())
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def tensorflow() -> None:
    """Load TensorFlow into this worker, and exclude its modules from garbage collections, like those loaded before."""
    load_quietly("histopipe.inference.networks")
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder with the real slides. Without it, tests that need it are skipped with a reason; CI requires it."""
    folder = os.environ.get("HISTOPIPE_TEST_DATA")
    if not folder:
        pytest.skip("HISTOPIPE_TEST_DATA, the folder of the real slides, is not set")
    path = (PROJECT / folder).resolve()
    assert (path / "slides").is_dir(), f"HISTOPIPE_TEST_DATA={folder} has no folder slides"
    return path


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Copy of the committed store of format version 1. A copy, because reading creates a lock file in the folder."""
    return Path(shutil.copytree(GOLDEN / "store-v1", tmp_path / "golden"))


@pytest.fixture
def run(tmp_path: Path) -> RunCommand:
    """Run `histopipe ARGUMENTS` in a temporary folder, and in this process if that makes no difference."""

    def call(
        *arguments: object,
        cwd: Path = tmp_path,
        env: Mapping[str, str] | None = None,
        new_process: bool = False,
        timeout: float = 300,
        **kwargs: Any,
    ) -> subprocess.CompletedProcess[str]:
        done = execute(arguments, cwd, env, new_process=new_process, timeout=timeout, **kwargs)
        check_json(arguments, done.stdout or "")
        return done

    def execute(
        arguments: tuple[object, ...],
        cwd: Path,
        env: Mapping[str, str] | None,
        *,
        new_process: bool,
        timeout: float,
        **kwargs: Any,
    ) -> subprocess.CompletedProcess[str]:
        in_thread = threading.current_thread() is not threading.main_thread()
        name = str(arguments[0]) if arguments else ""
        if not (new_process or kwargs or in_thread or name in NEW_PROCESS):
            if name in LOADS_TENSORFLOW:
                code = "from histopipe.cli import main; main()"
                return with_tensorflow(code, *arguments, cwd=cwd, env=env)
            return run_command(*arguments, cwd=cwd, env=env)
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            cwd=cwd,
            env=env,
            text=True,
            capture_output=True,
            timeout=timeout,
            check=False,
            **kwargs,
        )

    return call


@pytest.fixture
def inline_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the tasks of workers in the process of the test, whose working directory is its temporary folder."""
    run_tasks_here(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def shared_verifiers() -> Iterator[None]:
    """One worker process for all calls of verify, remove and repair of a test module."""
    with closing(SharedPool(1, silence)) as pool, ExitStack() as stack:
        for name in ("verify", "remove", "repair"):
            where = f"histopipe.maintenance.{name}.WorkerPool"
            stack.enter_context(mock.patch(where, lambda *_: pool))
        yield


@pytest.fixture(scope="session")
def chromium() -> str:
    """Browser for tests of pages. Without it, tests that need it are skipped with a reason; CI requires it."""
    executable = os.environ.get("HISTOPIPE_TEST_BROWSER") or shutil.which("chromium")
    if not executable or not shutil.which("chromedriver"):
        assert "HISTOPIPE_TEST_BROWSER" not in os.environ, "chromium or chromedriver is missing"
        pytest.skip(
            "there is no chromium with its chromedriver (Debian: chromium, chromium-driver)"
        )
    return executable


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[webdriver.Chrome]:
    """Browser, which keeps the messages of the console."""
    options = Options()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Return a function that creates a folder once for all workers of a test run, at its first use."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def folder(name: str, make: Callable[[Path], object]) -> Path:
        path, done = root / name, root / f"{name}-done"
        with locked(root / f"{name}-lock", wait_seconds=500) as has_lock:
            assert has_lock, f"{name}: another worker has not created it within 500 s"
            if not done.exists():
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
                make(path)
                done.touch()
        return path

    return folder


@pytest.fixture(scope="session")
def made(once: Once) -> Path:
    """Twelve small synthetic slides of two classes, with labels.csv."""
    options = ("--count", "12", "--size", "1536x1536", "--classes", "normal,tumour")
    return once("made", lambda folder: make_slides(folder, *options))


@pytest.fixture(scope="session")
def made_store(made: Path, once: Once) -> Path:
    """Store of the slides of `made`, with patches of 128 pixels."""

    def ingest(folder: Path) -> None:
        succeed("ingest", made, "--out", folder / "patches.lmdb", "--patch-size", 128)

    return once("made-store", ingest) / "patches.lmdb"


@pytest.fixture(scope="session")
def real_slides(data: Path, once: Once) -> Path:
    """Small real slides in `slides`, and `plain.lmdb`: what several ways to ingest them are compared with."""

    def ingest(folder: Path) -> None:
        slides, leave_out = folder / "slides", shutil.ignore_patterns("TCGA*")
        shutil.copytree(data / "slides", slides, ignore=leave_out)
        with pytest.MonkeyPatch.context() as patch:
            run_tasks_here(folder, patch)
            out, display = folder / "plain.lmdb", Progress()
            histopipe.ingest(slides, out, default_mpp=0.5, patch_size=240, progress=display)

    return once("real-slides", ingest)


@pytest.fixture(scope="session")
def small_store(once: Once) -> Path:
    """Store of 120 patches of 32 pixels on twelve slides of two classes. A training on it takes a second."""

    def write(folder: Path) -> None:
        pictures = jpegs(0, 120, 32)
        slides = {f"{'nt'[i % 2]}{i}": pictures[10 * i : 10 * i + 10] for i in range(12)}
        a_store(folder / "small.lmdb", slides, patch_size=32)

    return once("small-store", write) / "small.lmdb"


@pytest.fixture(scope="session")
def target_bags(once: Once) -> Path:
    """Bags with targets of each task in labels.csv."""
    return once("target-bags", write_target_bags)


@pytest.fixture
def numpy_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace networks by those of NumPy, and worker processes by this one: without TensorFlow."""
    replace_networks(monkeypatch)


@pytest.fixture(scope="session")
def golden_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store, features, runs and slides of an earlier version. A copy, because a store that is read gets a lock file."""
    folder = tmp_path_factory.mktemp("golden") / "results"
    shutil.copytree(GOLDEN / "2026-11-25", folder)
    shutil.copytree(GOLDEN / "slides", folder / "slides")
    return folder


@pytest.fixture(scope="session")
def slide_model(golden_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features of eight slides by a network of NumPy, and a calibrated run on them, without a training."""
    folder = tmp_path_factory.mktemp("slide-model")
    with pytest.MonkeyPatch.context() as patch, without_training():
        replace_networks(patch)
        histopipe.embed(golden_runs / "store.lmdb", out=folder / "features", model="small-cnn")
        histopipe.train(
            mil=folder / "features",
            labels=golden_runs / "labels.csv",
            allow_extra_rows=True,
            split_by="slide",
            fractions=(0.5, 0.25, 0.25),
            resamples=20,
            calibrate=True,
            out=folder / "run",
        )
    return folder


@pytest.fixture(scope="session", params=TARGET_TASKS)
def target_run(request: pytest.FixtureRequest, target_bags: Path, once: Once) -> tuple[str, Path]:
    """A task, and a run on bags with its targets."""
    task = str(request.param)

    def train(folder: Path) -> None:
        flags = ("--fractions", "0.5,0.2,0.3", "--out", folder / "run")
        succeed(*target_training(target_bags, task, *flags))

    return task, once(f"run-{task}", train) / "run"


@pytest.fixture(scope="session")
def viewed(data: Path, once: Once) -> Path:
    """The real slide with store, run, attention, predictions, features and outlines, for the viewer."""
    return once("viewed", lambda folder: make_viewed(folder, data))


@pytest.fixture(scope="session")
def trained(made_store: Path, once: Once) -> Path:
    """Run of one epoch on slides of two classes, with patches of 128 pixels."""
    return (
        once(
            "trained",
            lambda folder: succeed(
                "train",
                made_store,
                "--model",
                "small-cnn",
                "--epochs",
                1,
                "--calibrate",
                "--out",
                folder / "run",
            ),
        )
        / "run"
    )


@pytest.fixture(scope="session")
def uninterrupted(small_store: Path, once: Once) -> Path:
    """Run with `ARGUMENTS`, on one device and without interruption."""

    def train(folder: Path) -> None:
        succeed("train", small_store, "--out", folder / "run", *ARGUMENTS)

    return once("uninterrupted", train) / "run"
