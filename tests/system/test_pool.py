"""Worker pool: workers that crash, hang or are killed."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from helpers.inline import InlineWorkers
from histopipe.errors import HistopipeError, MachineShort, SlideUnreadable
from histopipe.system import worker_pool as module
from histopipe.system.worker_pool import (
    TookTooLong,
    WorkerDied,
    WorkerPool,
    results_of,
    run_tasks,
)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Pool of two workers, which survives the tests."""
    with WorkerPool(2) as created:
        yield created


class Unreadable(Exception):
    """Exception that can be pickled, but not unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


class UnreadableResult:
    """Result that can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def fail(kind: Callable[..., Exception], *arguments: Any) -> None:
    raise kind(*arguments)


def test_results_and_errors_are_returned(pool: WorkerPool) -> None:
    futures = [pool.submit(pow, 2, n) for n in range(50)]
    assert [future.result() for future in futures] == [2**n for n in range(50)]
    with pytest.raises(SlideUnreadable, match=r"a\.svs: found nothing"):
        pool.submit(fail, partial(SlideUnreadable, "a.svs", found="nothing")).result()


def test_workers_have_one_thread_of_numpy_unless_the_user_sets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "OPENBLAS_NUM_THREADS"
    monkeypatch.delenv(name, raising=False)
    with WorkerPool(1) as pool:
        assert pool.submit(os.getenv, name).result(timeout=60) == "1"
    monkeypatch.setenv(name, "3")
    with WorkerPool(1) as pool:
        assert pool.submit(os.getenv, name).result(timeout=60) == "3"


def test_workers_that_still_start_are_ended() -> None:
    with WorkerPool(3, signal.pause) as pool:
        waiting = [pool.submit(abs, -1) for _ in range(2)]
        ends = time.monotonic() + module._GRACE_SECONDS
        pool.shutdown(cancel_futures=True)
    assert time.monotonic() < ends
    assert all(future.cancelled() for future in waiting)
    assert not Path(f"/proc/{pool._server.process.pid}").exists()


def test_workers_are_forks_of_a_server_with_one_thread(pool: WorkerPool) -> None:
    server = pool._server.process.pid
    assert pool.submit(os.getppid).result() == server
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1
    idle = WorkerPool(2)
    idle.submit(abs, 1).result()
    children = Path(f"/proc/{idle._server.process.pid}/task/{idle._server.process.pid}/children")
    assert len(children.read_text().split()) == 1  # as many as calls
    idle.shutdown()
    assert not children.exists()


def test_a_killed_server_is_replaced() -> None:
    # One worker: another one, which the kernel has not ended yet, could get the second call.
    with WorkerPool(1) as pool:
        running = pool.submit(time.sleep, 60)
        while not running.running():
            time.sleep(0.01)
        pool._server.process.kill()
        with pytest.raises(WorkerDied, match="killed by SIGKILL"):
            running.result(timeout=10)
        assert pool.submit(abs, -1).result(timeout=60) == 1


def test_at_most_the_limit_of_tasks_is_started() -> None:
    futures: dict[int, Future[int]] = {}

    def start(item: int) -> Future[int]:
        futures[item] = Future()
        return futures[item]

    tasks = run_tasks(start, [0, 1, None, 2, 3, 4, 5], limit=2)
    assert next(tasks) == (0, futures[0]) and futures.keys() == {0, 1}
    assert next(tasks) == (1, futures[1]) and futures.keys() == {0, 1}
    assert next(tasks) is None
    assert next(tasks) == (2, futures[2]) and futures.keys() == {0, 1, 2, 3}
    tasks.close()
    assert futures[3].cancelled() and not futures[2].cancelled()


def test_tasks_are_yielded_as_they_end() -> None:
    futures = {item: Future[int]() for item in range(4)}
    tasks = run_tasks(futures.__getitem__, futures, limit=3, in_order=False)
    for item in (2, 0, 3, 1):
        futures[item].set_result(item)
        assert next(tasks) == (item, futures[item])
    assert list(tasks) == []


def test_workers_run_in_parallel(pool: WorkerPool) -> None:
    wait([pool.submit(time.sleep, 0.01) for _ in range(2)])
    pool.submit(time.sleep, 0.5)
    assert pool.submit(os.getpid).result(timeout=0.4) != os.getpid()


def test_crash_fails_only_its_task(pool: WorkerPool) -> None:
    futures = [pool.submit(abs, n) for n in range(15)]
    crashed = pool.submit(ctypes.string_at, 0)
    futures += [pool.submit(abs, n) for n in range(15, 30)]
    assert [future.result() for future in futures] == list(range(30))
    with pytest.raises(WorkerDied, match="killed by SIGSEGV"):
        crashed.result()


def test_hanging_task_is_killed(pool: WorkerPool) -> None:
    hanging = pool.submit_within(0.3, signal.pause)
    futures = [pool.submit_within(60, abs, n) for n in range(10)]
    assert [future.result() for future in futures] == list(range(10))
    with pytest.raises(TookTooLong):
        hanging.result(timeout=10)
    assert pool.submit(abs, -1).result() == 1


def test_idle_workers_killed_from_outside_are_replaced(pool: WorkerPool) -> None:
    pids = {pool.submit(os.getpid).result() for _ in range(20)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    assert pool.submit(os.getpid).result() not in pids


def test_workers_that_never_start_raise_an_error() -> None:
    with (
        WorkerPool(1, partial(os._exit, 3)) as pool,
        pytest.raises(MachineShort, match="exit code 3"),
    ):
        pool.submit(abs, 1).result(timeout=60)


def test_early_shutdown_cancels_waiting_and_kills_hanging_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.5)
    pool = WorkerPool(1)
    hanging, waiting = pool.submit(signal.pause), pool.submit(abs, 1)
    while not hanging.running():
        time.sleep(0.01)
    pool.shutdown(cancel_futures=True)
    assert waiting.cancelled()
    assert isinstance(hanging.exception(), TookTooLong)
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(abs, 1)


def test_pool_survives_unreadable_answers_and_unknown_signals(pool: WorkerPool) -> None:
    with pytest.raises(HistopipeError, match="Unreadable: 1"):
        pool.submit(fail, Unreadable, 1, 2).result(timeout=60)
    with pytest.raises(ValueError, match="invalid literal"):
        pool.submit(UnreadableResult).result(timeout=60)
    with pytest.raises(WorkerDied, match=f"killed by signal {signal.SIGRTMIN + 3}"):
        pool.submit(signal.raise_signal, signal.SIGRTMIN + 3).result(timeout=60)
    assert pool.submit_within(float("inf"), abs, -1).result(timeout=60) == 1


def test_failure_of_pool_fails_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerPool(2) as pool:
        pool.submit(abs, 1).result(timeout=60)
        all_submitted = threading.Event()
        monkeypatch.setattr(pool, "_receive", lambda *_: all_submitted.wait(60) / 0)
        futures = [pool.submit(time.sleep, 100), pool.submit(time.sleep, 100), pool.submit(abs, 1)]
        all_submitted.set()
        for future in futures:
            with pytest.raises(ZeroDivisionError):
                future.result(timeout=60)


SCRIPT = """
import sys
print("imported", flush=True)
import os, time
from pathlib import Path
from histopipe.system.worker_pool import WorkerPool
with WorkerPool(2) as pool:
    pids = {pool.submit(os.getpid).result() for _ in range(4)}
    pool.submit(time.sleep, 0.2)
    pool.submit(Path("touched").touch)
print("done", os.getpid() not in pids, Path("touched").exists())
"""


def test_workers_do_not_import_main_module(tmp_path: Path) -> None:
    """A script without a guard; the end of the block waits for all tasks."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["imported", "done True True"]
    assert not done.stderr


PARENT = """
import os, signal, time
from histopipe.system.worker_pool import WorkerPool
pool = WorkerPool(2)
pids = set()
while len(pids) < 2:
    pids |= {future.result() for future in [pool.submit(os.getpid) for _ in range(8)]}
pool.submit(time.sleep, 1000)
time.sleep(0.5)  # until a worker sleeps: only an idle one sees the closed pipe
print(*pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_a_killed_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT], capture_output=True, text=True, check=False, timeout=60
    )
    pids = done.stdout.split()
    assert len(pids) == 2
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/exe").exists() for pid in pids):  # zombies have none
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize(("most", "longest"), [(500, 1), (2, 4)])
def test_batches_are_halved_until_too_many_workers_died(
    most: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies at each batch with an odd number. Other tests have real deaths."""

    def submit(seconds: float, fn: Any, numbers: list[int]) -> Future[int]:
        if any(number % 2 for number in numbers):
            fn = Mock(side_effect=WorkerDied)
        return InlineWorkers().submit(fn, numbers)

    monkeypatch.setattr(module, "_MOST_DEATHS", most)
    batches = [[1, 3, 5, 9], [11, 13, 15, 17], [2, 4], [19, 6]]
    inline = Mock(submit_within=submit, count=1)
    results = list(results_of(inline, 60, sum, batches))
    assert [number for batch, _ in results for number in batch] == list(chain(*batches))
    failed = [batch for batch, result in results if isinstance(result, WorkerDied)]
    assert max(map(len, failed)) == longest
    assert [result for _, result in results if not isinstance(result, WorkerDied)] == [6, 6]


def test_a_server_that_started_early_is_that_of_the_next_pool(tmp_path: Path) -> None:
    prepare = partial(Path.touch, tmp_path / "prepared")
    with module.started_early(prepare):
        (server,) = module._early.values()
        with WorkerPool(1, prepare) as pool:
            assert pool._server is server
            assert pool.submit(os.getppid).result(timeout=60) == server.process.pid
    with module.started_early(prepare):
        (server,) = module._early.values()
    assert server.process.returncode is not None and not module._early


FAILING = "import os\ndef fork(): raise BlockingIOError('no more processes')\nos.fork = fork"


def test_a_stopped_worker_does_not_delay_the_end_of_the_pool() -> None:
    with WorkerPool(1) as pool:
        worker = pool.submit(os.getpid).result()
        os.kill(worker, signal.SIGSTOP)
        began = time.monotonic()
    assert 0.9 < time.monotonic() - began < 5
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_servers_that_start_early_in_two_threads_are_both_ended_or_used(tmp_path: Path) -> None:
    started = module._start_server
    servers: list[Any] = []

    def recorded(*arguments: Any) -> Any:
        servers.append(started(*arguments))
        return servers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_start_server", recorded)
        prepare: Any = os.getpid
        with (
            module.started_early(prepare),
            module.started_early(prepare),
            WorkerPool(1, prepare) as pool,
        ):
            assert pool.submit(os.getppid).result() == servers[0].process.pid
    assert [server.process.poll() is None for server in servers] == [False, False]


def test_a_server_that_cannot_fork_is_a_shortage_of_the_machine() -> None:
    with WorkerPool(1, partial(exec, FAILING)) as pool, pytest.raises(MachineShort):
        pool.submit(abs, 1).result(timeout=60)


def test_results_that_cannot_be_pickled_are_errors_of_their_call(pool: WorkerPool) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        pool.submit(threading.Lock).result(timeout=60)
