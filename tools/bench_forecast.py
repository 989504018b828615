"""Compare the time that a progress bar predicts after a tenth of the patches with the time that a run takes.

    python tools/bench_forecast.py [--sets 10] [--slides 10] [--largest 100] [--work FOLDER]

Slides of 1 to LARGEST² patches, log-uniform, are drawn once. Each set is a random choice of them, in random order.
`ingest` processes the slides of a set; `embed` the slides and the store; `train` the store, two epochs of a small network;
`predict` the slides with it. A later command needs the results of an earlier one. The bars record when they have advanced.
The prediction is that of the bars: the time so far, and the mean time per patch since the first ones for what is left.
The measured time is that of the bar, from its start to its end. Printed are both, and their ratio.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import histopipe
from histopipe.system.output import Bar, Progress

PATCH = 96
COMMANDS = ("ingest", "embed", "embed of a store", "train", "predict")


Update = tuple[float, int, int, float | None]
"""Time, finished items, total, and the seconds that are left, if the command has estimated them."""


class Recorded(Bar):
    """Records the time, the finished items and the total of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[Update] = [(time.monotonic(), 0, 0, None)]

    def update(self, done: int, total: int | None = None, left: float | None = None) -> None:
        """Record an update."""
        self._done = done
        self.updates.append((time.monotonic(), done, total or self.updates[-1][2], left))

    def close(self) -> None:
        """Record the end."""
        self.updates.append((time.monotonic(), *self.updates[-1][1:]))


class Recorder(Progress):
    """Keeps the main bar."""

    bar_of_run = Recorded()

    def bar(self, title: str, *, detail: bool = False, **options: Any) -> Bar:
        """Start a bar."""
        if detail:
            return Bar()
        self.bar_of_run = Recorded()
        return self.bar_of_run


def predicted(updates: list[Update], share: float) -> tuple[float, float, int, int]:
    """Return the time that is predicted after a share of the patches, the measured time, and both totals."""
    began, end, patches = updates[0][0], updates[-1][0], updates[-1][1]
    first = next(update for update in updates if update[1])
    now = next(
        update for update in updates if update[1] >= share * patches and update[1] > first[1]
    )
    rate = (now[1] - first[1]) / (now[0] - first[0])
    left = (now[2] - now[1]) / rate if now[3] is None else now[3]
    return now[0] - began + left, end - began, now[2], patches


def main() -> None:
    """Draw slides, run, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sets", type=int, default=10)
    parser.add_argument("--slides", type=int, default=10)
    parser.add_argument(
        "--largest", type=int, default=100, help="side in patches of the largest slide"
    )
    parser.add_argument("--work", type=Path)
    parser.add_argument("--commands", nargs="+", default=COMMANDS, choices=COMMANDS)
    options = parser.parse_args()
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        pool = draw(work / "slides", 2 * options.slides, options.largest)
        print(f"{'':<24}{'patches':>9}{'predicted':>11}{'seconds':>9}{'predicted':>11}{'ratio':>7}")
        for number in range(options.sets):
            slides = chance.sample(pool, options.slides)
            for command in options.commands:
                out = work / f"{number}-{command}"
                store, model = work / f"{number}-ingest", work / f"{number}-train"
                recorder = run(command, slides, store, model, out)
                time_left, seconds, total, patches = predicted(recorder.bar_of_run.updates, 0.1)
                print(
                    f"set {number + 1:>2} {command:<17}{patches:>9,}{total:>11,}{seconds:>9.1f}{time_left:>11.1f}"
                    f"{time_left / seconds:>7.2f}",
                    flush=True,
                )


def run(command: str, slides: list[Path], store: Path, model: Path, out: Path) -> Recorder:
    """Run a command on a set, with its store and a model of it, and return what its bar has shown."""
    recorder = Recorder()
    tiling: dict[str, Any] = {"patch_size": PATCH, "mpp": 0.7, "tissue": "none"}
    if command == "ingest":
        histopipe.ingest(slides, out, progress=recorder, **tiling)
    elif command == "embed":
        histopipe.embed(slides, out=out, progress=recorder, **tiling)
    elif command == "train":
        labels = out.with_name(f"{out.name}.csv")
        rows = (f"{slide.stem},{'ab'[number % 2]}" for number, slide in enumerate(slides))
        labels.write_text("\n".join(["slide,label", *rows, ""]))
        settings: dict[str, Any] = {"model": "small-cnn", "epochs": 2, "split_by": "patch"}
        histopipe.train(
            store, out=out, labels=labels, progress=recorder, allow_leaks=True, **settings
        )
    elif command == "predict":
        histopipe.predict(model, slides, out=out, progress=recorder, tissue="none")
    else:
        histopipe.embed(store, out=out, progress=recorder)
    return recorder


def draw(folder: Path, count: int, largest: int) -> list[Path]:
    """Draw slides with 1 to `largest`² patches, log-uniform, if they are not there."""
    sys.path.insert(0, str(Path(__file__).parent))
    from make_slides import main as make_slides

    paths = []
    for number in range(count):
        side = math.ceil(largest ** (number / max(1, count - 1)) * PATCH * 0.7 / 0.499)
        paths.append(folder / f"s{number:02}-000.svs")
        if not paths[-1].exists():
            size = ["--size", f"{side}x{side}", "--levels", "1"]
            make_slides([str(folder), *size, "--name", f"s{number:02}-", "--seed", str(number)])
    return paths


if __name__ == "__main__":
    main()
