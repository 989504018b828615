"""Shared fixtures and helpers: real slides, synthetic slides, and commands run as a user runs them."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import io
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, chdir, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
from hypothesis import settings
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from histopipe.cli import main
from histopipe.runs.fork_server import ADDRESS, TrainingProcess, start_server
from histopipe.system.files import locked

PROJECT = Path(__file__).parents[1]
TOOLS = PROJECT / "tools"
PROGRAMS = PROJECT / "tests" / "programs"
FAULTY_PATH = f"{PROGRAMS / 'faults'}{os.pathsep}{PROJECT}"
"""Module path of a fork server with fault injection."""
COMMAND = [str(Path(sys.executable).with_name("histopipe"))]

# A background job of a script ignores Ctrl-C, and its child processes inherit this. Restore the default.
_RESET = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
INTERRUPTIBLE = [sys.executable, "-c", _RESET, *COMMAND]

# Test machines are busy, so the duration of an example is not meaningful.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")

SLOW_FILES = (
    "test_workers",
    "test_cluster",
    "test_memory",
    "test_tune",
    "test_reader",
    "test_resume",
    "test_replicas",
    "test_folds",
    "test_mil",
    "test_ingest",
    "test_training",
    "test_repair",
    "test_predict",
    "test_embedding",
    "test_faults",
    "test_train_options",
    "test_maintenance",
    "test_cluster_jobs",
    "test_untrusted",
    "test_compare",
    "test_report",
)
"""Slow files run first, so that none of them runs alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


Run = Callable[..., subprocess.CompletedProcess[str]]
Once = Callable[[str, Callable[[Path], object]], Path]
T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a filesystem of `size` on a new folder, or skip the test: most containers do not permit it."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small filesystem cannot be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder with the real slides. Without it, tests that need it are skipped with a reason; CI requires it."""
    folder = os.environ.get("HISTOPIPE_TEST_DATA")
    if not folder:
        pytest.skip("HISTOPIPE_TEST_DATA, the folder of the real slides, is not set")
    path = (PROJECT / folder).resolve()
    assert (path / "slides").is_dir(), f"HISTOPIPE_TEST_DATA={folder} has no folder slides"
    return path


@pytest.fixture(scope="session", autouse=True)
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One fork server for all trainings of the tests, with fault injection. The first training starts it."""
    address = tmp_path_factory.getbasetemp() / "fork-server"
    environment = {
        **os.environ,
        "PYTHONPATH": FAULTY_PATH,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen()

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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS, str(address))
        yield


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Copy of the committed store of format version 1. A copy, because reading creates a lock file in the folder."""
    return Path(shutil.copytree(PROJECT / "tests" / "golden" / "store-v1", tmp_path / "golden"))


LOADS_TENSORFLOW = ("embed", "export", "predict")
"""Commands that load TensorFlow, which keeps devices and memory of a process: each command needs a separate process."""
NEW_PROCESS = ("bench", "demo", "doctor", "tune")
"""Commands that inspect the process or the machine, and `tune`, whose Optuna files stay open until its process ends."""


NO_TRAINING = (None, None, False)
"""Arguments of a process that runs other code than a training."""


def with_tensorflow(
    code: str, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python code like `python -c CODE ARGUMENTS`, in a fork of a process that has loaded TensorFlow and Keras."""
    words = ["-c", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        variables = {
            "HISTOPIPE_TEST_CHILD": code,
            "HISTOPIPE_TEST_ARGUMENTS": json.dumps(words),
            "HISTOPIPE_TEST_OUTPUT": str(out),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        environment = {**(os.environ if env is None else env), **variables}
        with err.open("w") as file, chdir(cwd) if cwd else nullcontext():
            process = TrainingProcess(environment, NO_TRAINING, stderr=file.fileno())
        try:
            while process.receive() != ("ended", None):
                pass
        finally:
            process.end()
        return subprocess.CompletedProcess(
            words, process.status, out.read_text() if out.exists() else "", err.read_text()
        )


def run_program(
    name: str, *arguments: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of tests/programs like `with_tensorflow`."""
    code = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    return with_tensorflow(code, PROGRAMS / name, *arguments, env=env)


def command(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `histopipe ARGUMENTS` in this process, which saves the start of a new one."""
    words = ["histopipe", *map(str, arguments)]
    with ExitStack() as stack:
        stack.enter_context(chdir(cwd or Path.cwd()))
        stack.enter_context(mock.patch.dict(os.environ, env or {}, clear=env is not None))
        stack.enter_context(mock.patch.object(sys, "argv", words))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("default")
        for kind in (DeprecationWarning, PendingDeprecationWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        handler = signal.getsignal(signal.SIGTERM)
        stack.callback(signal.signal, signal.SIGTERM, handler)
        out, err = (stack.enter_context(captured(name)) for name in ("stdout", "stderr"))
        try:
            main()
        except SystemExit as end:
            code = end.code
        except Exception:  # noqa: BLE001 - the interpreter does the same
            traceback.print_exc()
            code = 1
        return subprocess.CompletedProcess(words, int(code or 0), out(), err())
    raise AssertionError  # for mypy: none of these contexts swallows an exception


@contextmanager
def captured(name: str) -> Iterator[Callable[[], str]]:
    """Capture a standard stream of this process and its child processes. Yield a function that returns the text."""
    original = getattr(sys, name)
    original.flush()
    fd = {"stdout": 1, "stderr": 2}[name]
    kept = os.dup(fd)
    with tempfile.TemporaryFile("a+") as file:
        os.dup2(file.fileno(), fd)
        stream = open(fd, "w", closefd=False)  # noqa: SIM115 - closed below
        setattr(sys, name, stream)

        def written() -> str:
            stream.flush()
            file.seek(0)
            return file.read()

        try:
            yield written
        finally:
            stream.close()
            setattr(sys, name, original)
            os.dup2(kept, fd)
            os.close(kept)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `histopipe ARGUMENTS` in a temporary folder, and in this process if that makes no difference."""

    def call(
        *arguments: object,
        cwd: Path = tmp_path,
        env: Mapping[str, str] | None = None,
        new_process: bool = False,
        timeout: float = 300,
        **kwargs: Any,
    ) -> subprocess.CompletedProcess[str]:
        in_thread = threading.current_thread() is not threading.main_thread()
        name = str(arguments[0]) if arguments else ""
        if not (new_process or kwargs or in_thread or name in NEW_PROCESS):
            if name in LOADS_TENSORFLOW:
                code = "from histopipe.cli import main; main()"
                return with_tensorflow(code, *arguments, cwd=cwd, env=env)
            return command(*arguments, cwd=cwd, env=env)
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


def two_at_a_time(task: Callable[[T], R], items: Iterable[T]) -> dict[T, R]:
    """Run a task on two items at a time, and return the results by item. A training mostly uses one core."""
    items = list(items)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(items, pool.map(task, items), strict=True))


sys.path.append(str(TOOLS))  # tools import each other


def make_slides(out: Path, *arguments: str) -> list[Path]:
    """Write synthetic slides with tools/make_slides.py. Equal slides are created only once for all tests."""
    shutil.copytree(
        _slide_folder(arguments), out, dirs_exist_ok=True, copy_function=shutil.copyfile
    )
    return sorted(path for path in out.iterdir() if path.suffix in (".svs", ".tiff", ".scn"))


@cache
def _slide_folder(arguments: tuple[str, ...]) -> Path:
    """Create a folder of synthetic slides, which is removed when the process ends."""
    spec = importlib.util.spec_from_file_location("make_slides", TOOLS / "make_slides.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    folder = Path(tempfile.mkdtemp(prefix="synthetic-"))
    atexit.register(shutil.rmtree, folder)
    with contextlib.redirect_stderr(io.StringIO()):
        tool.main([str(folder), *arguments])
    return folder


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


def succeed(*arguments: object) -> str:
    """Run a command that must succeed, and return its standard output."""
    ended = command(*arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


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
def small_store(once: Once) -> Path:
    """Store of 120 patches of 32 pixels on twelve slides of two classes. A training on it takes a second."""
    from test_reader import a_store, jpegs  # late: that module imports this one

    def write(folder: Path) -> None:
        pictures = jpegs(0, 120, 32)
        slides = {f"{'nt'[i % 2]}{i}": pictures[10 * i : 10 * i + 10] for i in range(12)}
        a_store(folder / "small.lmdb", slides, patch_size=32)

    return once("small-store", write) / "small.lmdb"


@pytest.fixture(scope="session")
def viewed(data: Path, once: Once) -> Path:
    """The real slide with store, run, attention, predictions, features and outlines, for the viewer."""
    from viewed import make_viewed  # late: that module imports this one

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
