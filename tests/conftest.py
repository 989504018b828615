"""What several tests need: the real slides, made slides, and the command as a user runs it."""

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

from histopipe.cli import main
from histopipe.runs.fork_server import ADDRESS, TrainingProcess, start_server
from histopipe.system.files import locked

PROJECT = Path(__file__).parents[1]
TOOLS = PROJECT / "tools"
PROGRAMS = PROJECT / "tests" / "programs"
COMMAND = [str(Path(sys.executable).with_name("histopipe"))]

# A job in the background of a script ignores Ctrl-C, and so would what it starts: here it must not.
_RESET = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
INTERRUPTIBLE = [sys.executable, "-c", _RESET, *COMMAND]

# Machines here are noisy: how long an example takes says nothing.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")

SLOW_FILES = (
    "test_workers", "test_cluster", "test_memory", "test_tune", "test_reader", "test_resume",
    "test_replicas", "test_folds", "test_mil", "test_ingest", "test_training", "test_repair",
    "test_predict", "test_embedding", "test_faults", "test_train_options", "test_maintenance",
    "test_cluster_jobs", "test_untrusted", "test_compare", "test_report",
)  # fmt: skip
"""These come first, so that none of them runs alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


Run = Callable[..., subprocess.CompletedProcess[str]]
Once = Callable[[str, Callable[[Path], object]], Path]
T = TypeVar("T")
R = TypeVar("R")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with the real slides. Without it the tests that need it say so and are skipped; CI requires it."""
    folder = os.environ.get("HISTOPIPE_TEST_DATA")
    if not folder:
        pytest.skip("HISTOPIPE_TEST_DATA is not set: it names the folder of the real slides")
    path = (PROJECT / folder).resolve()
    assert (path / "slides").is_dir(), f"HISTOPIPE_TEST_DATA={folder} has no folder slides"
    return path


@pytest.fixture(scope="session", autouse=True)
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One fork server for all trainings of these tests, with faults on demand. The first training starts it."""
    address = tmp_path_factory.getbasetemp() / "fork-server"
    environment = {
        **os.environ, "PYTHONPATH": str(PROGRAMS / "faults"), "TF_CPP_MIN_LOG_LEVEL": "3",
    }  # fmt: skip
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen()

    def start() -> None:
        select.select([listener], [], [])
        start_server(environment, listener)[0].wait()  # this thread must outlive the loading

    threading.Thread(target=start, daemon=True, name="fork server").start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS, str(address))
        yield


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the committed store of format version 1: reading leaves a lock file in its folder."""
    return Path(shutil.copytree(PROJECT / "tests" / "golden" / "store-v1", tmp_path / "golden"))


LOADS_TENSORFLOW = ("embed", "export", "predict")
"""Commands that load TensorFlow into their own process, which keeps its devices and memory: each needs one of its own."""
NEW_PROCESS = ("bench", "demo", "doctor", "tune")
"""Commands that look at the process or the machine, and one that leaves files of Optuna's open until its process ends."""


def with_tensorflow(
    code: str, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python code as `python -c CODE ARGUMENTS`, in a process forked from the one that has loaded TensorFlow and Keras."""
    words = ["-c", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        more = {
            "HISTOPIPE_TEST_CHILD": code, "HISTOPIPE_TEST_ARGUMENTS": json.dumps(words),
            "HISTOPIPE_TEST_OUTPUT": str(out), "TF_CPP_MIN_LOG_LEVEL": "3",
        }  # fmt: skip
        environment = {**(os.environ if env is None else env), **more}
        with (
            err.open("w") as file,
            Path(os.devnull).open() as nothing,
            chdir(cwd) if cwd else nullcontext(),
        ):
            process = TrainingProcess(environment, pipe=nothing.fileno(), stderr=file.fileno())
        try:
            code_of_exit = process.wait()
        finally:
            process.end()
        return subprocess.CompletedProcess(
            words, code_of_exit, out.read_text() if out.exists() else "", err.read_text()
        )


def run_program(
    name: str, *arguments: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of tests/programs in the same way."""
    code = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    return with_tensorflow(code, PROGRAMS / name, *arguments, env=env)


def command(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `histopipe ARGUMENTS` in this process: as a new process would, but without its start."""
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
        except Exception:  # noqa: BLE001 - as the interpreter does
            traceback.print_exc()
            code = 1
        return subprocess.CompletedProcess(words, int(code or 0), out(), err())
    raise AssertionError  # for mypy: none of these contexts swallows an exception


@contextmanager
def captured(name: str) -> Iterator[Callable[[], str]]:
    """Keep what is written to a standard stream, by this process and by those that it starts; gives a function for it."""
    usual = getattr(sys, name)
    usual.flush()
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
            setattr(sys, name, usual)
            os.dup2(kept, fd)
            os.close(kept)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `histopipe ARGUMENTS` in a folder of its own, in this process where that makes no difference."""

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
    """The browser that pages are tested in. Without it the tests that need it say so and are skipped; CI requires it."""
    found = os.environ.get("HISTOPIPE_TEST_BROWSER") or shutil.which("chromium")
    if not found or not shutil.which("chromedriver"):
        assert "HISTOPIPE_TEST_BROWSER" not in os.environ, "chromium or chromedriver is missing"
        pytest.skip(
            "there is no chromium with its chromedriver (Debian: chromium, chromium-driver)"
        )
    return found


def two_at_a_time(task: Callable[[T], R], items: Iterable[T]) -> dict[T, R]:
    """Results by item. A training spends most of a test on one core, loading TensorFlow."""
    items = list(items)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(items, pool.map(task, items), strict=True))


def make_slides(out: Path, *arguments: str) -> list[Path]:
    """Slides by the project's own tool; painted once for all tests that want the same."""
    shutil.copytree(_painted(arguments), out, dirs_exist_ok=True, copy_function=shutil.copyfile)
    return sorted(path for path in out.iterdir() if path.suffix in (".svs", ".tiff", ".scn"))


@cache
def _painted(arguments: tuple[str, ...]) -> Path:
    """A folder of slides, removed at the end."""
    spec = importlib.util.spec_from_file_location("make_slides", TOOLS / "make_slides.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    folder = Path(tempfile.mkdtemp(prefix="painted-"))
    atexit.register(shutil.rmtree, folder)
    with contextlib.redirect_stderr(io.StringIO()):
        tool.main([str(folder), *arguments])
    return folder


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Makes a folder that all workers of a test run share: the first one that needs it makes it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def folder(name: str, make: Callable[[Path], object]) -> Path:
        path, done = root / name, root / f"{name}-done"
        with locked(root / f"{name}-lock", wait_seconds=500) as mine:
            assert mine, f"{name}: another worker has not made it yet"
            if not done.exists():
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
                make(path)
                done.touch()
        return path

    return folder


def succeed(*arguments: object) -> str:
    """Run a command that must succeed. Returns its standard output."""
    ended = command(*arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="session")
def made(once: Once) -> Path:
    """Twelve small slides of two classes, with labels.csv."""
    options = ("--count", "12", "--size", "1536x1536", "--classes", "normal,tumour")
    return once("made", lambda folder: make_slides(folder, *options))


@pytest.fixture(scope="session")
def made_store(made: Path, once: Once) -> Path:
    """These slides as a store of 128-pixel patches."""

    def ingest(folder: Path) -> None:
        succeed("ingest", made, "--out", folder / "patches.lmdb", "--patch-size", 128)

    return once("made-store", ingest) / "patches.lmdb"


@pytest.fixture(scope="session")
def small_store(once: Once) -> Path:
    """A store of 120 patches of 32 pixels on twelve slides of two classes: what trains in a second."""
    from test_reader import a_store, jpegs  # late: that module imports this one

    def write(folder: Path) -> None:
        pictures = jpegs(0, 120, 32)
        slides = {f"{'nt'[i % 2]}{i}": pictures[10 * i : 10 * i + 10] for i in range(12)}
        a_store(folder / "small.lmdb", slides, patch_size=32)

    return once("small-store", write) / "small.lmdb"


@pytest.fixture(scope="session")
def trained(made_store: Path, once: Once) -> Path:
    """A run of one epoch on slides of two classes, patches of 128 pixels."""
    return (
        once(
            "trained",
            lambda folder: succeed("train", made_store, "--epochs", 1, "--out", folder / "run"),
        )
        / "run"
    )
