"""Run recipes that reproduce published results, and write docs/reference/published.md.

    python tools/published/run.py [RECIPE...] [--seeds N] [--work FOLDER]

A recipe is a folder with `recipe.py`: what was published, with its source, the protocol, what differs here, and a function
that runs it. Its result, with date and version, is written to `result.json`. Recipes whose data are absent are skipped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import histopipe

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reference" / "published.md"
_HEAD = """# Published results

Written by `make published`, which runs the recipes in `tools/published/`. Do not edit.

Each table has a published result with its source, or a reference, and ours by the same protocol,
with the 95 % interval for other patients and other seeds. What differs is listed below each table.
"""


@dataclass(frozen=True)
class Row:
    """A result.

    Attributes:
        data, method: names of the data set and the method.
        published: the published value as text, or that of a reference; empty if there is none.
        ours: mean over the seeds.
        interval: of `ours`, for other patients and seeds.
        deviation: standard deviation over the seeds.
        seeds: their number.
    """

    data: str
    method: str
    published: str
    ours: float
    interval: tuple[float, float] | None = None
    deviation: float | None = None
    seeds: int = 1


def result_row(
    data: str, method: str, published: str, result: Any, metric: str, level: str = "slide_mean"
) -> Row:
    """Return the row of a cross-validation with several seeds. Raise an error if a fold failed."""
    if result.failed:
        raise RuntimeError(
            f"{data}, {method}: {result.failed[0].folder}: {result.failed[0].reason}"
        )
    name = f"{level}_{metric}"
    interval = result.intervals.get(name)
    deviation = result.deviation.get(name)
    return Row(
        data, method, published, result.mean[name], interval, deviation, len(result.seeds) or 1
    )


def load(name: str) -> Any:
    """Import the recipe in a folder."""
    return importlib.import_module(f"{name}.recipe")


def main() -> None:
    """Run the recipes, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipes", nargs="*", help="folders in tools/published; default: all")
    parser.add_argument("--seeds", type=int, help="number of seeds, if not that of the recipe")
    parser.add_argument("--again", action="store_true", help="also run what has a result")
    parser.add_argument("--work", type=Path, default=Path("published"), help="folder of all runs")
    arguments = parser.parse_args()
    names = arguments.recipes or sorted(path.parent.name for path in HERE.glob("*/recipe.py"))
    shared = Path(os.environ.get("HISTOPIPE_TEST_DATA", "../shared")).resolve()
    for name in names:
        recipe = load(name)
        if not recipe.has_data(shared):
            print(f"{name}: skipped, its data are not in {shared}")
            continue
        work = arguments.work / name
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        seeds = arguments.seeds or recipe.SEEDS
        result = earlier_result(name, seeds, again=arguments.again)
        done = {(row["data"], row["method"]) for row in result["rows"]}
        began = time.monotonic()
        for row in recipe.run(work, shared, seeds, done):
            print(f"{name}: {row}", flush=True)
            result["rows"].append({**asdict(row), "date": f"{datetime.now(UTC):%Y-%m-%d}"})
            result["minutes"] += round((time.monotonic() - began) / 60, 1)
            began = time.monotonic()
            (HERE / name / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(text())


def earlier_result(name: str, seeds: int, *, again: bool) -> dict[str, Any]:
    """Return the result of a recipe that ended early, to continue it; else an empty one."""
    new = {
        "histopipe": histopipe.__version__,
        "seeds": seeds,
        "minutes": 0.0,
        "rows": [],
    }
    path = HERE / name / "result.json"
    before = json.loads(path.read_text()) if path.is_file() and not again else new
    same = all(before[key] == new[key] for key in ("histopipe", "seeds"))
    return {**new, "minutes": before["minutes"], "rows": before["rows"]} if same else new


def text() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *_sections()])


def _sections() -> Iterator[str]:
    for path in sorted(HERE.glob("*/result.json")):
        recipe, result = load(path.parent.name), json.loads(path.read_text())
        yield f"## {recipe.TITLE}\n"
        yield f"{recipe.SOURCE.strip()}\n"
        yield (
            f"| data | method | {recipe.REFERENCE} | histopipe, {recipe.METRIC} [95 % interval] "
            "| SD over the seeds | seeds | date |"
        )
        yield "| --- | --- | --- | --- | --- | --- | --- |"
        yield from (_line(row) for row in result["rows"])
        yield (
            f"\nhistopipe {result['histopipe']}, {result['minutes']:.0f} minutes on two cores. Run it with "
            f"`python tools/published/run.py {path.parent.name}`.\n"
        )
        yield f"{recipe.DIFFERENCES.strip()}\n"


def _line(row: Mapping[str, Any]) -> str:
    ends = "" if row["interval"] is None else " [{:.3f}, {:.3f}]".format(*row["interval"])
    deviation = "" if row["deviation"] is None else f"{row['deviation']:.3f}"
    cells = (
        row["data"],
        row["method"],
        row["published"],
        f"{row['ours']:.3f}{ends}",
        deviation,
        str(row["seeds"]),
        row["date"],
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
