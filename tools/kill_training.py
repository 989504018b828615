"""Kill processes of trainings at random times, check that no process remains, and resume the trainings.

python tools/kill_training.py --kills 20

SIGKILL goes to the command, the fork server, the guard or the training (`histopipe.runs.fork_server`); sometimes the
training is stopped by SIGSTOP before. Then no process may remain, and the resumed training must have the same weights,
history and predictions as one that was not killed.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-P", "-m", "histopipe"]
OPTIONS = """--model small-cnn --epochs 2 --max-per-slide 8 --batch-size 16 --split-by slide --resamples 0
--deterministic --devices cpu --save-minutes 1e-9"""
MARK = "HISTOPIPE_KILL_TRAINING"
VICTIMS = ("client", "server", "guard", "training")
TIMED = ("seconds", "input_wait", "patches_per_s")


def start(*arguments: object, mark: str) -> subprocess.Popen[str]:
    """Start a command. All its processes have the mark in their environment."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env={**os.environ, MARK: mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def complete(*arguments: object) -> float:
    """Run a command that must succeed. Return its duration in seconds."""
    began, process = time.monotonic(), start(*arguments, mark="complete")
    _, stderr = process.communicate()
    if process.returncode:
        raise SystemExit(f"{arguments} failed with {process.returncode}: {stderr}")
    return time.monotonic() - began


def marked(mark: str) -> dict[int, int]:
    """Return the running processes with a mark, and the parent of each."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z" and f"{MARK}={mark}\0" in (path / "environ").read_text():
                parents[int(path.name)] = int(parent)
        except (OSError, UnicodeDecodeError):  # it has just ended, or is of another user
            continue
    return parents


def descent(client: int, mark: str) -> dict[str, int]:
    """Return the processes of a training that exist now: each is started by the one before."""
    parents, chain = marked(mark), [client]
    while len(chain) < len(VICTIMS):
        children = [pid for pid, parent in parents.items() if parent == chain[-1]]
        if not children:
            break
        chain.append(children[0])
    return dict(zip(VICTIMS, chain, strict=False))


def kill(process: subprocess.Popen[str], mark: str, name: str, *, stop: bool) -> str:
    """Kill one process of a training, or the client if it does not exist. Return what was killed."""
    processes = descent(process.pid, mark)
    name = name if name in processes else "client"
    # A server that has loaded TensorFlow does not end its trainings.
    stop = stop and "training" in processes and name != "server"
    if stop:
        os.kill(processes["training"], signal.SIGSTOP)
    os.kill(processes[name], signal.SIGKILL)
    _, stderr = process.communicate(timeout=120)
    if "Traceback" in stderr:
        raise SystemExit(f"killed {name}: {stderr}")
    return f"{name} of {'a stopped training' if stop else len(processes)}"


def remaining(mark: str) -> int:
    """Return the number of processes that remain after a few seconds."""
    until = time.monotonic() + 5
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.02)
    return len(marked(mark))


def read_run(folder: Path) -> list[Any]:
    """Return everything of a run that does not depend on time."""
    with (folder / "history.csv").open() as file:
        history = [{k: v for k, v in row.items() if k not in TIMED} for row in csv.DictReader(file)]
    with np.load(folder / "resume.npz") as state:
        weights = {name: state[name].tobytes() for name in state.files if name.startswith("v0")}
    return [history, weights, (folder / "predictions.csv").read_bytes()]


def main() -> None:
    """Kill trainings, look for remaining processes, resume the trainings, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, results, wrong = random.Random(arguments.seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        slides, store, run = work / "slides", work / "small.lmdb", work / "run"
        options = ["--count", "12", "--size", "256x256", "--classes", "normal,tumour"]
        program = [sys.executable, str(HERE / "make_slides.py"), str(slides), *options]
        subprocess.run(program, check=True, capture_output=True)
        complete("ingest", slides, "--out", store, "--patch-size", 32, "--tissue", "none")
        train = ("train", store, "--out", run, *OPTIONS.split())
        seconds = complete(*train)
        expected = read_run(run)
        for number in range(arguments.kills):
            shutil.rmtree(run)
            process, mark = start(*train, mark=str(number)), str(number)
            time.sleep(seconds * rng.uniform(0.1, 1.0))
            what = kill(process, mark, rng.choice(VICTIMS), stop=rng.random() < 0.4)
            left = remaining(mark)
            has_begun = (run / "config.toml").exists()
            if not has_begun:  # such a folder cannot be resumed
                shutil.rmtree(run, ignore_errors=True)
            # A killed training is taken for one that ran out of memory: smaller pieces would round differently.
            (run / "memory.json").unlink(missing_ok=True)
            complete(*(("train", "--resume", "--out", run) if has_begun else train))
            is_equal = read_run(run) == expected
            wrong += bool(left) or not is_equal
            results[f"{what}, {'begun' if has_begun else 'not begun'}"] += 1
            verdict = f"{left} processes remain; {'equal' if is_equal else 'DIFFERENT'} results"
            print(f"kill {number + 1}: {what}: {verdict}", flush=True)
    for what, count in sorted(results.items()):
        print(f"{count:4} × {what}")
    print(f"{arguments.kills} kills: {wrong} with remaining processes or another result")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
