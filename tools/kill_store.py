"""Kill histopipe at random moments while it changes stores, and verify what is left each time.

python tools/kill_store.py --kills 200

Ingest, merge, remove, compact and repair take turns on small synthetic slides. After each SIGKILL, to the command and all its
workers, `histopipe verify` must find nothing wrong, except for the slides that a repair was started for, and every complete
slide must be what it was. Then the same command must succeed.
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
from histopipe.system.progress import SilentProgress

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-P", "-m", "histopipe"]
COMMANDS = ("ingest", "merge", "remove", "compact", "repair")
SLIDES = 12

Slides = dict[str, tuple[bytes, ...]]
"""Values of complete slides by id."""


@dataclass(slots=True)
class Victim:
    """A command, what to do before each time, and how long it takes if it is not killed.

    `damaged` are slides that are damaged before each time.
    """

    store: Path
    words: list[str]
    prepare: Callable[[], None]
    damaged: frozenset[str] = frozenset()
    seconds: float = 0.0
    killed: int = 0
    late: int = 0
    states: Counter[str] = field(default_factory=Counter)


def contents(store: Path) -> Slides:
    """What readers see."""
    with Store(store) as opened:
        return {
            record.id: tuple(opened.value(number, row) for row in range(record.planned))
            for number, record in opened.complete.items()
        }


def histopipe(*words: str) -> subprocess.Popen[bytes]:
    """The command, in a process group of its own."""
    return subprocess.Popen(
        [*COMMAND, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def ended_well(*words: str) -> float:
    """Seconds that a command takes."""
    started = time.monotonic()
    process = histopipe(*words)
    _, told = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{words} ended with {process.returncode}: {told.decode()}")
    return time.monotonic() - started


def killed(victim: Victim, moment: float) -> bool:
    """Whether it was still at work when it was killed, with all of its workers."""
    process = histopipe(*victim.words)
    time.sleep(moment)
    at_work = process.poll() is None
    if at_work:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return at_work


def look(store: Path, whole: Slides, damaged: frozenset[str] = frozenset()) -> str:
    """Count the slides that are there, once nothing but the damaged ones is wrong."""
    try:
        found = verify(store, progress=SilentProgress())
    except NothingToDo:
        return "nothing yet"
    if {finding.slide for finding in found.findings} - damaged:
        raise SystemExit(f"{store} is damaged: {found.findings}")
    try:
        held = contents(store)
    except NothingToDo:
        return "nothing yet"
    bad = {finding.slide for finding in found.findings}
    wrong = [n for n, values in held.items() if whole[n] != values and n not in bad]
    if wrong:
        raise SystemExit(f"{store} holds other slides than it should: {wrong}")
    return f"{len(held)} slides"


def victims(work: Path, side: int) -> tuple[dict[str, Victim], Slides]:
    """The commands, and all slides as they should be."""
    slides, source, target = work / "slides", work / "source.lmdb", work / "target.lmdb"
    subprocess.run(
        [sys.executable, str(HERE / "make_slides.py"), str(slides), "--count", str(SLIDES), "--size", f"{side}x{side}"],
        check=True, capture_output=True,
    )  # fmt: skip
    flags = ["--out", str(source), "--patch-size", "64", "--tissue", "none"]
    ended_well("ingest", str(slides), *flags)
    whole = contents(source)
    gone = sorted(whole)[::2]

    def nothing() -> None:
        shutil.rmtree(target, ignore_errors=True)

    def all_slides() -> None:
        nothing()
        shutil.copytree(source, target)

    def some_slides() -> None:
        all_slides()
        ended_well("remove", str(target), *gone)

    def all_slides_some_damaged() -> None:
        all_slides()
        with lmdb.open(str(target), max_dbs=32, map_size=1 << 40) as handle:
            database = handle.open_db(b"patches", create=False)
            with handle.begin(write=True) as transaction:
                for number in hit:
                    value = bytearray(transaction.get(patch_key(number, 0), b"", db=database))
                    value[-9] ^= 1
                    transaction.put(patch_key(number, 0), bytes(value), db=database)

    with Store(source) as opened:
        hit = {number: record.id for number, record in opened.records.items() if number % 3 == 0}
    flags[1] = str(target)
    return {
        "ingest": Victim(target, ["ingest", str(slides), *flags], nothing),
        "merge": Victim(target, ["merge", str(source), "--out", str(target)], nothing),
        "remove": Victim(target, ["remove", str(target), *gone], all_slides),
        "compact": Victim(target, ["compact", str(target)], some_slides),
        "repair": Victim(
            target,
            ["repair", str(target), str(slides)],
            all_slides_some_damaged,
            frozenset(hit.values()),
        ),
    }, whole


def main() -> None:
    """Kill, verify, run again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", type=int, default=3072, help="Of a slide, pixels.")
    parser.add_argument("--commands", nargs="+", default=COMMANDS, choices=COMMANDS)
    parser.add_argument("--work", type=Path)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as own:
        every, whole = victims(arguments.work or Path(own), arguments.side)
        commands = {name: every[name] for name in arguments.commands}
        for victim in commands.values():
            victim.prepare()
            victim.seconds = ended_well(*victim.words)
        done = 0
        while done < arguments.kills:
            victim = list(commands.values())[done % len(commands)]
            victim.prepare()
            # Half of it is Python's start, in which nothing can go wrong.
            if not killed(victim, victim.seconds * rng.uniform(0.5, 1.0)):
                victim.late += 1
                continue
            done += 1
            victim.killed += 1
            victim.states[look(victim.store, whole, victim.damaged)] += 1
            left = contents(victim.store) if victim is commands["remove"] else {}
            gone = [name for name in victim.words[2:] if name in left]
            if victim is not commands["remove"]:
                ended_well(*victim.words)
            elif gone:
                ended_well("remove", str(victim.store), *gone)
            look(victim.store, whole)
    for name, victim in commands.items():
        found = ", ".join(f"{count} × {state}" for state, count in sorted(victim.states.items()))
        print(
            f"{name:8} {victim.seconds:5.2f} s alone; killed {victim.killed} times, too late {victim.late}; left: {found}"
        )
    print(
        f"{done} kills; after each the store was whole, and the command ended when it was run again"
    )


if __name__ == "__main__":
    main()
