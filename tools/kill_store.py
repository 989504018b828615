"""Kill histopipe at random times while it changes stores, and verify the store after each kill.

python tools/kill_store.py --kills 200

Ingest, merge, remove, its compaction and repair run in turn on small synthetic slides. SIGKILL goes to the command and all its
workers. After it, `histopipe verify` must have no findings, except for the slides that a repair was started for, and
every complete slide must be unchanged. Then the same command must succeed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from histopipe.errors import NothingToDo
from histopipe.maintenance.verify import verify
from histopipe.store.format import patch_key
from histopipe.store.store import Store
from histopipe.system.output import Progress

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-P", "-m", "histopipe"]
COMMANDS = ("ingest", "merge", "remove", "compact", "repair")
SLIDES = 12

Slides = dict[str, tuple[bytes, ...]]
"""Patch values of complete slides, by slide id."""


@dataclass(slots=True)
class Victim:
    """A command to kill, its preparation, and its duration if it is not killed.

    `damaged` are the slides that the preparation damages.
    """

    store: Path
    arguments: list[str]
    prepare: Callable[[], None]
    damaged: frozenset[str] = frozenset()
    seconds: float = 0.0
    killed: int = 0
    late: int = 0
    states: Counter[str] = field(default_factory=Counter)


def contents(store: Path) -> Slides:
    """Return the data that readers see."""
    with Store(store) as opened:
        return {
            record.id: tuple(opened.value(number, row) for row in range(record.planned))
            for number, record in opened.complete.items()
        }


def histopipe(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a command in a new process group."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def completed(*arguments: str) -> float:
    """Run a command that must succeed, and return its duration in seconds."""
    started = time.monotonic()
    process = histopipe(*arguments)
    _, stderr = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{arguments} failed with {process.returncode}: {stderr.decode()}")
    return time.monotonic() - started


def killed(victim: Victim, seconds: float) -> bool:
    """Kill a command and its workers after some seconds. Return False if it had already finished."""
    process = histopipe(*victim.arguments)
    time.sleep(seconds)
    is_running = process.poll() is None
    if is_running:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return is_running


def checked(store: Path, expected: Slides, damaged: frozenset[str] = frozenset()) -> str:
    """Check that only the damaged slides have findings, and return the number of slides as text."""
    try:
        result = verify(store, progress=Progress())
    except NothingToDo:
        return "no slides yet"
    if {finding.slide for finding in result.findings} - damaged:
        raise SystemExit(f"{store} is damaged: {result.findings}")
    try:
        slides = contents(store)
    except NothingToDo:
        return "no slides yet"
    bad = {finding.slide for finding in result.findings}
    wrong = [n for n, values in slides.items() if expected[n] != values and n not in bad]
    if wrong:
        raise SystemExit(f"{store} has slides with wrong values: {wrong}")
    return f"{len(slides)} slides"


def victims(work: Path, side: int) -> tuple[dict[str, Victim], Slides]:
    """Return the commands by name, and the expected slides."""
    slides, source, target = work / "slides", work / "source.lmdb", work / "target.lmdb"
    subprocess.run(
        [
            sys.executable,
            str(HERE / "make_slides.py"),
            str(slides),
            "--count",
            str(SLIDES),
            "--size",
            f"{side}x{side}",
        ],
        check=True,
        capture_output=True,
    )
    flags = ["--out", str(source), "--patch-size", "64", "--tissue", "none"]
    completed("ingest", str(slides), *flags)
    expected = contents(source)
    removed = sorted(expected)[::2]

    def nothing() -> None:
        shutil.rmtree(target, ignore_errors=True)

    def all_slides() -> None:
        nothing()
        shutil.copytree(source, target)

    def some_slides() -> None:
        all_slides()
        completed("remove", str(target), *removed)

    def all_slides_some_damaged() -> None:
        all_slides()
        with lmdb.open(str(target), max_dbs=32, map_size=1 << 40) as handle:
            database = handle.open_db(b"patches", create=False)
            with handle.begin(write=True) as transaction:
                for number in damaged:
                    value = bytearray(transaction.get(patch_key(number, 0), b"", db=database))
                    value[-9] ^= 1
                    transaction.put(patch_key(number, 0), bytes(value), db=database)

    with Store(source) as opened:
        records = opened.records.items()
        damaged = {number: record.id for number, record in records if number % 3 == 0}
    flags[1] = str(target)
    return {
        "ingest": Victim(target, ["ingest", str(slides), *flags], nothing),
        "merge": Victim(target, ["merge", str(source), "--out", str(target)], nothing),
        "remove": Victim(target, ["remove", str(target), *removed], all_slides),
        "compact": Victim(target, ["remove", str(target), "--compact"], some_slides),
        "repair": Victim(
            target,
            ["repair", str(target), str(slides)],
            all_slides_some_damaged,
            frozenset(damaged.values()),
        ),
    }, expected


def main() -> None:
    """Kill commands, verify their stores, and run them again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", type=int, default=3072, help="Side of a slide in pixels.")
    parser.add_argument("--commands", nargs="+", default=COMMANDS, choices=COMMANDS)
    parser.add_argument("--work", type=Path, help="Folder for slides and stores.")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as temporary:
        victim_of, expected = victims(arguments.work or Path(temporary), arguments.side)
        commands = {name: victim_of[name] for name in arguments.commands}
        for victim in commands.values():
            victim.prepare()
            victim.seconds = completed(*victim.arguments)
        done = 0
        while done < arguments.kills:
            victim = list(commands.values())[done % len(commands)]
            victim.prepare()
            # Python's start takes half of the time, and writes nothing.
            if not killed(victim, victim.seconds * rng.uniform(0.5, 1.0)):
                victim.late += 1
                victim.seconds *= 0.9  # the machine was slower when this was measured
                continue
            done += 1
            victim.killed += 1
            victim.states[checked(victim.store, expected, victim.damaged)] += 1
            left = contents(victim.store) if victim is commands.get("remove") else {}
            remaining = [name for name in victim.arguments[2:] if name in left]
            if victim is not commands.get("remove"):
                completed(*victim.arguments)
            elif remaining:
                completed("remove", str(victim.store), *remaining)
            checked(victim.store, expected)
    for name, victim in commands.items():
        states = ", ".join(f"{count} × {state}" for state, count in sorted(victim.states.items()))
        print(
            f"{name:8} {victim.seconds:5.2f} s without kill; {victim.killed} kills, {victim.late} too late; "
            f"states after kills: {states}"
        )
    print(f"{done} kills; after each one, the store was intact, and the same command succeeded")


if __name__ == "__main__":
    main()
