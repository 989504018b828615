"""Run commands and their workers' tasks in the process of the test, without starting an interpreter.

Tests of kills, crashes and signals start the command in a new process instead.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import pytest

import histopipe.cli as command_line
from helpers.commands import RunCommand
from helpers.json_results import check_json
from histopipe.ingestion import patch_source
from histopipe.system.worker_pool import WorkerPool

T = TypeVar("T")
WITH_POOLS = (
    "histopipe.ingestion.request",
    "histopipe.ingestion.ingest_slides",
    "histopipe.ingestion.preview",
    "histopipe.measure.quality",
    "histopipe.exporting.masks",
)


_one_task = threading.RLock()
"""Tasks of one process never run together: a worker closes the slides of other tasks."""


class InlineWorkers(Executor):
    """Has the interface of a `WorkerPool`, and runs each task when it is submitted."""

    def __init__(self, workers: int = 1, prepare: Callable[[], None] | None = None) -> None:
        pass

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            with _one_task:
                future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)
        return future

    def submit_within(self, seconds: float, fn: Callable[..., T], /, *args: Any) -> Future[T]:
        return self.submit(fn, *args)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with _one_task:
            patch_source.close_all()


class PicklingWorkers(InlineWorkers):
    """Pickles calls, too, as processes need it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        content = pickle.dumps((fn, args, kwargs), protocol=5)
        fn, args, kwargs = pickle.loads(content)  # noqa: S301 - of this process
        return super().submit(fn, *args, **kwargs)


def call_in(folder: Path, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Call a function with `folder` as the working directory: paths of commands may be relative."""
    os.chdir(folder)
    return fn(*args, **kwargs)


class SharedPool(WorkerPool):
    """A pool for many commands, so that not each one starts and ends processes."""

    def submit_within(
        self, seconds: float, fn: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> Future[T]:
        return super().submit_within(seconds, call_in, Path.cwd(), fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing."""

    def close(self) -> None:
        """End the processes."""
        super().shutdown(cancel_futures=True)


def use_inline_workers(
    monkeypatch: pytest.MonkeyPatch,
    workers: type[InlineWorkers] = InlineWorkers,
    modules: Sequence[str] = WITH_POOLS,
) -> None:
    """Run the tasks of the workers of these modules in this process until the end of a test."""
    for name in modules:
        monkeypatch.setattr(importlib.import_module(name), "WorkerPool", workers)
    monkeypatch.setattr("histopipe.ingestion.ingest.started_early", lambda _: nullcontext())


def run_tasks_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the tasks of workers in this process until the end of a test, with `folder` as the working directory."""
    use_inline_workers(monkeypatch)
    monkeypatch.chdir(folder)


def in_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunCommand:
    """Return a function that runs `histopipe ARGUMENTS` in a folder, with all tasks in this process."""
    run_tasks_here(folder, monkeypatch)

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = ["histopipe", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words)
        capsys.readouterr()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as ended:
                command_line.main()
        finally:
            signal.signal(signal.SIGTERM, handler)
        stdout, stderr = capsys.readouterr()
        check_json(words[1:], stdout)
        return subprocess.CompletedProcess(words, int(ended.value.code or 0), stdout, stderr)

    return call
