"""Kill histopipe while it changes stores, at random moments, and look at what is left each time.

python tools/kill_store.py --kills 200

Ingest, merge, remove and compact take turns on small made slides. After each SIGKILL, to the command and all its workers, the
store must be whole to `histopipe verify`, and every complete slide must be what it was; then the same command must end well.
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

from histopipe.errors import NothingToDo
from histopipe.maintenance.verify import verify
from histopipe.store.store import Store

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-P", "-m", "histopipe"]
SLIDES = 12

Slides = dict[str, tuple[bytes, ...]]
"""Values of complete slides by id."""


@dataclass(slots=True)
class Victim:
    """A command, what it needs before each time, and how long it takes if nobody kills it."""

    store: Path
    words: list[str]
    prepare: Callable[[], None]
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


def look(store: Path, whole: Slides) -> str:
    """How many slides are there, once nothing is wrong with them."""
    try:
        found = verify(store)
    except NothingToDo:
        return "nothing yet"
    if found.findings:
        raise SystemExit(f"{store} is damaged: {found.findings}")
    try:
        held = contents(store)
    except NothingToDo:
        return "nothing yet"
    wrong = [name for name, values in held.items() if whole[name] != values]
    if wrong:
        raise SystemExit(f"{store} holds other slides than it should: {wrong}")
    return f"{len(held)} slides"


def victims(work: Path, side: int) -> tuple[dict[str, Victim], Slides]:
    """The four commands, and all slides as they should be."""
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

    flags[1] = str(target)
    return {
        "ingest": Victim(target, ["ingest", str(slides), *flags], nothing),
        "merge": Victim(target, ["merge", str(source), "--out", str(target)], nothing),
        "remove": Victim(target, ["remove", str(target), *gone], all_slides),
        "compact": Victim(target, ["compact", str(target)], some_slides),
    }, whole


def main() -> None:
    """Kill, look, let it end, and so on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", type=int, default=3072, help="Of a slide, pixels.")
    parser.add_argument("--work", type=Path)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as own:
        commands, whole = victims(arguments.work or Path(own), arguments.side)
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
            victim.states[look(victim.store, whole)] += 1
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
