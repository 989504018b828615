"""The processes that tests start: counted by kind over all workers of a test run, and limited."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = "HISTOPIPE_TEST_RUN"
"""Environment variable: folder of files that all workers of a test run use."""
LIMITS = {"trainings": 66, "forks of TensorFlow": 45, "interpreters": 60, "pools": 113}
"""Most processes of each kind in `make test`: what was reached on a busy machine, and a tenth.

Trainings and other forks of the process that has loaded TensorFlow are counted in that process, new interpreters and
pools where a test worker starts them.
"""
LONG_SECONDS = 3.0
"""A test that takes longer needs the mark `long`, with a reason."""


def count(kind: str) -> None:
    """Count a process of a kind, from any process of a test run."""
    folder = os.environ.get(FOLDER)
    if folder:
        fd = os.open(Path(folder) / "processes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(fd, f"{kind}\n".encode())
        os.close(fd)


def count_started() -> None:
    """Count the interpreters and the pools that this process starts from now on."""
    sys.addaudithook(_watch)


def _watch(event: str, details: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        words = [os.fsdecode(word) for word in _words(details[1])]
        if any("worker_process" in word for word in words):
            count("pools")
        elif any(re.search(r"python[\d.]*$|/bin/histopipe$", word) for word in words[:4]):
            count("interpreters")


def _words(arguments: Any) -> Sequence[Any]:
    return [arguments] if isinstance(arguments, str | bytes | os.PathLike) else list(arguments)


def counts() -> Counter[str]:
    """Return the number of processes by kind, of this test run."""
    path = Path(os.environ[FOLDER]) / "processes"
    return Counter(path.read_text().splitlines() if path.exists() else ())


def excess(counted: Counter[str]) -> list[str]:
    """Return a line for each kind of which there are too many."""
    return [
        f"{counted[kind]} {kind}, expected at most {limit}: share or write what tests need, or change "
        "LIMITS in tests/helpers/budget.py with a reason"
        for kind, limit in LIMITS.items()
        if counted[kind] > limit
    ]
