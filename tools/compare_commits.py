"""Show that two commits give the same results: for changes of structure that must not change behaviour.

    python tools/compare_commits.py BASE [HEAD] [--work FOLDER] [--only NAME,NAME]

Each commit makes the same small runs with deterministic operations in one process: of all tasks, on patches and bags,
with folds, covariates, calibration, subgroups and several poolings, predictions of new slides, and their reports.
Without HEAD it is the working tree. Metrics, predictions, reports and printed results are compared, with times, paths,
versions and checksums of archives masked. Results of a commit are kept in FOLDER, and not computed again. A commit
compared with itself must be equal.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1]
SLIDES = PROJECT / "tests" / "golden" / "slides"
MAKE = "make"
BAGS, DIMENSION = 48, 6
COMPARED = (
    "metrics.json",
    "evaluation.json",
    "summary.json",
    "comparison.json",
    "splits.json",
    "*.csv",
    "*.html",
    "*.txt",
    "*.md",
)
IGNORED = ("history.csv", "labels.csv", "ingest.csv")
MASKS = (
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?([.+]\d+)?(\+\d\d:\d\d)?( UTC)?"), "TIME"),
    (re.compile(r"\d+\.\d+\.\d+(\.dev\d+)?(\+[\w.]+)?"), "VERSION"),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"), "UUID"),
    (re.compile(r"\b[0-9a-f]{32,64}\b"), "DIGEST"),
    (re.compile(r"\b[a-z][0-9a-f]{10}\b"), "ID"),  # in SVG of Matplotlib
    (re.compile(r"\b[\d,.]+ (s|ms|min|h|patches/s|bags/s|GB|MB|GiB|MiB)\b"), "AMOUNT"),
    (re.compile(r"\d{4}-\d\d-\d\d"), "DAY"),
    (re.compile(r"\d+% waiting"), "SHARE waiting"),
    (re.compile(r"limited by .*%.*"), "limited by SHARES"),
    # Duration and memory of a fold: at the end of a printed line, in `summary.csv`, and in the report.
    (re.compile(r"  \d+ +\d+ +-$", re.MULTILINE), "  AMOUNTS"),
    (re.compile(r"\d+\.\d{6,},\d{2,5}\.\d+,"), "AMOUNTS,"),
    (re.compile(r'data-v="\d+\.\d{6,}">\d+<'), "AMOUNT<"),
)
"""Patterns of what may differ between two calls."""
MASKED_KEYS = {
    "shares",
    "created",
    "seconds",
    "version",
    "versions",
    "libraries",
    "uuid",
    "host_mb",
    "gpu_mb",
    "host_bytes",
    "attempts",
    "duration",
    "finished",
    "started",
    "device",
    "machine",
}
_SHOWN_LINES = 12


def main() -> None:
    """Make the results of both commits, and print the differences."""
    if sys.argv[1:2] == [MAKE]:
        make_results(Path(sys.argv[2]), sys.argv[3])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base")
    parser.add_argument("head", nargs="?", help="a commit; by default the working tree")
    parser.add_argument("--work", type=Path, help="folder that keeps the results of commits")
    parser.add_argument("--only", default="", help="make only these runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        head = "again" if options.head == options.base else ""
        folders = [
            results_of(options.base, work, options.only),
            results_of(options.head, work, options.only, head),
        ]
        differences = list(compare(*folders))
    for name, lines in differences:
        print(f"\n{name}")
        for line in lines[:_SHOWN_LINES]:
            print(f"  {line[:300]}")
        if len(lines) > _SHOWN_LINES:
            print(f"  and {len(lines) - _SHOWN_LINES} lines more")
    print(f"{len(differences)} of {len(list(files(folders[0])))} files differ")
    sys.exit(bool(differences))


def results_of(commit: str | None, work: Path, only: str, suffix: str = "") -> Path:
    """Return the folder of the results of a commit, or of the working tree for None."""
    git = shutil.which("git") or "git"
    name = "worktree"
    if commit is not None:
        resolved = subprocess.run(
            [git, "-C", PROJECT, "rev-parse", "--short=12", commit],
            check=True,
            capture_output=True,
            text=True,
        )
        name = resolved.stdout.strip()
    out = work / "-".join(filter(None, (name, only, suffix)))
    if out.exists() and commit is not None and not suffix:
        return out
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch)
        if commit is None:
            shutil.copytree(PROJECT / "histopipe", source / "histopipe")
        else:
            archive: list[str] = [git, "-C", str(PROJECT), "archive", commit, "histopipe"]
            packed = subprocess.run(archive, check=True, capture_output=True).stdout
            subprocess.run(
                [shutil.which("tar") or "tar", "-x", "-C", str(source)], input=packed, check=True
            )
        part = out.with_name(f"{out.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        command: list[str] = [sys.executable, "-P", __file__, MAKE, str(part), only]
        with (part / "log.out").open("w") as log:
            done = subprocess.run(
                command, env=environment, stdout=log, stderr=log, check=False, cwd=part
            )
        if done.returncode:
            sys.exit(f"{name}: the runs failed: see {part / 'log.out'}")
        part.rename(out)
    return out


def make_results(out: Path, only: str) -> None:
    """Make all runs with the `histopipe` that is imported."""
    import histopipe

    os.chdir(out)
    write_bags(Path("features"), 1)
    write_bags(Path("new"), 2)
    shutil.copytree(SLIDES, "slides")
    write_slide_labels(Path("slides.csv"))
    tiles: dict[str, Any] = {"patch_size": 64, "tissue": "none", "workers": 1}
    histopipe.ingest("slides", out="store.lmdb", **tiles)
    common = {"in_process": True, "deterministic": True, "resamples": 60, "devices": "cpu"}
    patches = {
        **common,
        "stores": "store.lmdb",
        "model": "small-cnn",
        "epochs": 2,
        "batch_size": 16,
        "labels": "slides.csv",
    }
    bags = {
        **common,
        "mil": "features",
        "labels": "features.csv",
        "epochs": 3,
        "batch_size": 8,
        "fractions": (0.5, 0.25, 0.25),
        "learning_rate": 3e-3,
    }
    survival = {"task": "survival", "time": "time", "event": "event"}
    grades = {**bags, "labels": "grades.csv"}
    runs: dict[str, dict[str, Any]] = {
        "patches": {**patches, "calibrate": True, "subgroup": ("scanner", "age:20")},
        "patches-3": {**patches, "labels": "slides-3.csv", "split_by": "slide"},
        "patches-multilabel": {**patches, "task": "multilabel", "target": ("msi", "braf")},
        "patches-regression": {**patches, "task": "regression", "target": ("share",)},
        "bags": {
            **bags,
            "covariates": ("age", "stage"),
            "calibrate": True,
            "subgroup": ("site", "age:20"),
        },
        "bags-3": {**grades, "pooling": "clam", "threshold": "sensitivity:0.9"},
        "bags-patients": {
            **bags,
            "labels": "patients.csv",
            "bag": "patient",
            "pooling": "attention",
        },
        "bags-multilabel": {
            **bags,
            "task": "multilabel",
            "target": ("msi", "braf"),
            "covariates": ("age",),
        },
        "bags-regression": {
            **bags,
            "task": "regression",
            "target": ("share", "age"),
            "subgroup": ("stage",),
        },
        "bags-cox": {**bags, **survival, "covariates": ("age",), "subgroup": ("site",)},
        "bags-discrete": {**bags, **survival, "loss": "discrete", "pooling": "mean"},
    }
    folds: dict[str, dict[str, Any]] = {
        "folds": {**bags, "folds": 3, "subgroup": ("site",)},
        "folds-3": {**grades, "folds": 3},
        "folds-cox": {**bags, **survival, "folds": 3, "pooling": "max"},
        "folds-patches": {**patches, "folds": 3, "task": "regression", "target": ("share",)},
    }
    predictions: dict[str, tuple[str, str, dict[str, Any]]] = {
        "predict": ("patches", "store.lmdb", {"labels": "slides.csv", "subgroup": ("scanner",)}),
        "predict-unlabelled": ("patches", "store.lmdb", {}),
        "predict-bags": ("bags", "new", {"labels": "new.csv"}),
        "predict-multilabel": ("bags-multilabel", "new", {"labels": "new.csv"}),
        "predict-cox": ("bags-cox", "new", {"labels": "new.csv", "subgroup": ("site",)}),
        "predict-folds": ("folds", "new", {"labels": "new.csv"}),
        "predict-folds-cox": ("folds-cox", "new", {"labels": "new.csv"}),
    }

    def printed(name: str, result: object) -> None:
        Path(name, "printed.txt").write_text(f"{result}\n")

    chosen = only.split(",") if only else [*runs, *folds, *predictions]
    for name, settings in runs.items():
        if name in chosen:
            printed(name, histopipe.train(out=name, **settings))
    for name, settings in folds.items():
        if name in chosen:
            fold_settings = {key: value for key, value in settings.items() if key != "in_process"}
            printed(name, histopipe.cross_validate(out=name, **fold_settings))
    for name, (run, source, options) in predictions.items():
        if name in chosen:
            printed(name, histopipe.predict(run, source, out=name, devices="cpu", **options))
    for name in chosen:
        histopipe.report(name)
        if name in runs:
            histopipe.report(name, checklist="claim", out=f"{name}/claim.md")
            histopipe.report(name, checklist="tripod-ai", out=f"{name}/tripod.md")
    for pair in (
        ("patches", "patches-regression"),
        ("bags", "bags-patients"),
        ("folds-cox", "bags-cox"),
    ):
        if set(pair) <= set(chosen):
            name = f"compare-{'-'.join(pair)}"
            Path(name).mkdir()
            printed(name, histopipe.compare(pair))
            histopipe.report(pair, out=f"{name}/page.html")


def write_bags(folder: Path, seed: int) -> None:
    """Write bags with a share of patches that differ, on which all targets depend, and two files of labels."""
    import h5py
    import numpy as np

    rng = np.random.default_rng(seed)
    folder.mkdir()
    rows = []
    for number in range(BAGS):
        share, size = rng.random(), int(rng.integers(6, 14))
        values = rng.normal(size=(size, DIMENSION)).astype(np.float32)
        values[rng.random(size) < share] += 2 * np.linspace(-1, 1, DIMENSION, dtype=np.float32)
        name = f"{folder.name[0]}{number:02}"
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["features"] = values
            file["coords"] = np.stack([256 * np.arange(size)] * 2, axis=1)
        time, censored = rng.exponential(np.exp(-4 * (share - 0.5))), rng.exponential(1.5)
        rows.append(
            {
                "slide": name,
                "label": "yes" if share + 0.1 * rng.normal() > 0.5 else "no",
                "patient": f"{folder.name[0].upper()}{number * 2 // 3}",
                "site": "AB"[number % 2],
                "age": round(rng.normal(60, 10), 1),
                "stage": ["I", "II", "III", ""][int(rng.integers(4))],
                "msi": int(share > 0.5),
                "braf": "" if rng.random() < 0.2 else int(rng.random() < share),
                "time": round(min(time, censored), 4),
                "event": int(time <= censored),
                "share": round(share, 4),
            }
        )
    write_table(Path(f"{folder.name}.csv"), rows)
    if seed == 1:
        graded = [{**row, "label": f"G{int(float(str(row['share'])) * 2.99)}"} for row in rows]
        write_table(Path("grades.csv"), graded)
        pairs = [{**row, "patient": f"{row['label']}{i // 3}"} for i, row in enumerate(rows)]
        write_table(Path("patients.csv"), pairs)


def write_slide_labels(path: Path) -> None:
    """Write labels of the slides, of two and of three classes."""
    rows: list[dict[str, object]] = []
    with (SLIDES / "labels.csv").open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            tumour = row["label"] == "tumour"
            rows.append(
                {
                    **row,
                    "scanner": "AB"[number // 2 % 2],
                    "age": 40 + 3 * number,
                    "msi": int(tumour),
                    "braf": int(number % 3 == 0),
                    "share": round(0.3 + 0.4 * tumour + 0.02 * number, 3),
                }
            )
    write_table(path, rows)
    write_table(
        path.with_name("slides-3.csv"),
        [{**row, "label": f"class{number % 3}"} for number, row in enumerate(rows)],
    )


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def files(folder: Path) -> Iterator[Path]:
    """Yield the compared files of all results, relative to their folder."""
    for pattern in COMPARED:
        for path in sorted(folder.rglob(pattern)):
            if path.name not in IGNORED and path.parent != folder and path.parent.name != "slides":
                yield path.relative_to(folder)


def compare(base: Path, head: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the files that differ, with the differing lines."""
    for path in sorted({*files(base), *files(head)}):
        texts = [masked(folder, path) for folder in (base, head)]
        if None in texts:
            yield str(path), ["only in one of both"]
        elif texts[0] != texts[1]:
            before, after = (str(text).splitlines() for text in texts)
            lines = difflib.unified_diff(before, after, n=0, lineterm="")
            yield str(path), [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def masked(folder: Path, path: Path) -> str | None:
    """Return the text of a file with a value per line, without what may differ; None if there is no file."""
    if not (folder / path).exists():
        return None
    text = (folder / path).read_text(encoding="utf-8")
    if path.suffix == ".json":
        text = "\n".join(leaves(json.loads(text)))
    if path.suffix == ".html":
        text = re.sub(r"(?<=>)(?=<)", "\n", text)
    for name in (f"{folder.name}.part", folder.name):
        text = text.replace(str(folder.with_name(name)), "WORK")
    for pattern, mask in MASKS:
        text = pattern.sub(mask, text)
    return text


def leaves(value: object, where: str = "") -> Iterator[str]:
    """Yield a line for each leaf of a JSON value."""
    if isinstance(value, dict):
        for name, part in value.items():
            if name not in MASKED_KEYS:
                yield from leaves(part, f"{where}.{name}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from leaves(part, f"{where}[{number}]")
    else:
        yield f"{where} = {value!r}"


if __name__ == "__main__":
    main()
