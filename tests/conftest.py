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
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

from histopipe.runs.fork_server import ADDRESS, start_server

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

Run = Callable[..., subprocess.CompletedProcess[str]]
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


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `histopipe ARGUMENTS` in a folder of its own."""

    def call(
        *arguments: object, cwd: Path = tmp_path, timeout: float = 300, **kwargs: Any
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            cwd=cwd,
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
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve small slides of two classes, with labels.csv."""
    folder = tmp_path_factory.mktemp("made")
    make_slides(folder, "--count", "12", "--size", "1536x1536", "--classes", "normal,tumour")
    return folder


@pytest.fixture(scope="session")
def made_store(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """These slides as a store of 128-pixel patches."""
    store = tmp_path_factory.mktemp("stores") / "patches.lmdb"
    done = subprocess.run(
        [*COMMAND, "ingest", str(made), "--out", str(store), "--patch-size", "128", "--json"],
        text=True,
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["exit_code"] == 0
    return store


@pytest.fixture(scope="session")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 120 patches of 32 pixels on twelve slides of two classes: what trains in a second."""
    from test_reader import a_store, jpegs  # late: that module imports this one

    pictures = jpegs(0, 120, 32)
    slides = {f"{'nt'[i % 2]}{i}": pictures[10 * i : 10 * i + 10] for i in range(12)}
    return a_store(tmp_path_factory.mktemp("stores") / "small.lmdb", slides, patch_size=32)


@pytest.fixture(scope="session")
def trained(made_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch on slides of two classes, patches of 128 pixels."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    subprocess.run(
        [*COMMAND, "train", str(made_store), "--epochs", "1", "--out", str(folder)],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder
