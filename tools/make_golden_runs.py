"""Create the results of an earlier version, which later versions must open, continue and use.

    python tools/make_golden_runs.py 59ffcac tests/golden/slides tests/golden/0.2.0

Checks out a commit of this repository, installs it with its locks into a separate environment, and runs its
commands on the slides: two stores (one of them extended), a run of patches and one of bags, two folds, a search,
features, predictions, and an interrupted run. Files that no command needs later are removed, since the folder is meant
to be committed. The paths in it are relative.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).parents[1]
TRAIN = ("--epochs", 1, "--resamples", 20, "--seed", 3)
PATCHES = (*TRAIN, "--batch-size", 16, "--model", "small-cnn")
SPACE = 'learning_rate = [0.001, 0.01]\nmodel = "small-cnn"\nepochs = 1\nbatch_size = 16\n'
FIRST, NEW = (
    8,
    10,
)  # slides of the first ingest and of the extended store; the last two are predicted
ONCE_ONLY = ("resume.npz", "lock.mdb", "*.lock", "server.log")
"""Files of finished runs that no later command reads."""


def main() -> None:
    """Parse, install the commit, and run its commands in the output folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit")
    parser.add_argument("slides", type=Path, help="folder of 12 slides and labels.csv")
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--environment", type=Path, help="installed environment of that commit")
    parser.add_argument("--pooling", default="gated", help="pooling of the run of bags")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        environment = options.environment or _install(options.commit, Path(scratch))
        work = (
            Path(scratch) / "golden"
        )  # records name absolute paths, which must be those of no machine
        work.mkdir()
        _create(
            (environment / "bin" / "histopipe").absolute(), options.slides, work, options.pooling
        )
        shutil.move(work, options.out)


def _install(commit: str, scratch: Path) -> Path:
    """Install a commit with its own lock into a new environment, and return that."""
    source, environment = scratch / "source", scratch / "environment"
    git = shutil.which("git") or "git"
    subprocess.run([git, "clone", "--quiet", PROJECT, source], check=True)
    subprocess.run([git, "-C", source, "checkout", "--quiet", commit], check=True)
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    lock = source / "requirements" / "tune.lock"
    subprocess.run([*pip, "--require-hashes", "--requirement", lock], check=True)
    subprocess.run([*pip, "setuptools"], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", source], check=True)
    return environment


def _create(histopipe: Path, slides: Path, out: Path, pooling: str) -> None:
    for name in ("slides", "slides-new"):
        (out / name).mkdir()
    paths = sorted(slides.glob("*.svs"))
    for number, path in enumerate(paths):
        shutil.copy2(path, out / ("slides" if number < NEW else "slides-new"))
    labels = shutil.copy(slides / "labels.csv", out / "labels.csv")
    first = out / "first.csv"
    first.write_text("\n".join(["slide", *(path.stem for path in paths[:FIRST])]) + "\n")

    def run(*arguments: object) -> None:
        done = subprocess.run(
            [histopipe, *map(str, arguments)], cwd=out, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(
                f"{' '.join(map(str, arguments))} ended with {done.returncode}:\n{done.stderr}"
            )
        print(" ".join(map(str, arguments)))

    labelled = ("--labels", Path(labels).name, "--allow-extra-rows")
    tiles = (*labelled, "--patch-size", 64, "--quality", 60, "--tissue", "none", "--workers", 1)
    for store in ("store.lmdb", "extended.lmdb"):
        run("ingest", "slides", *tiles, "--slide-list", "first.csv", "--out", store)
    run("ingest", "slides", *tiles, "--out", "extended.lmdb")
    run("train", "store.lmdb", *PATCHES, "--out", "run")
    run("train", "store.lmdb", *PATCHES, "--folds", 2, "--out", "folds")
    (out / "space.toml").write_text(SPACE)
    run(
        "tune",
        "store.lmdb",
        "--space",
        "space.toml",
        "--trials",
        2,
        "--sampler",
        "random",
        "--out",
        "search",
    )
    run("embed", "store.lmdb", "--model", "run", "--out", "features")
    run("train", "--mil", "features", *labelled, *TRAIN, "--pooling", pooling, "--out", "bags")
    run(
        "predict",
        "run",
        "slides-new",
        "--labels",
        "labels.csv",
        "--allow-extra-rows",
        "--out",
        "predictions",
    )
    interrupted = ("train", "store.lmdb", *PATCHES, "--epochs", 3, "--out", "interrupted")
    _interrupt([*map(str, (histopipe, *interrupted))], out)
    kept = out / "interrupted" / "resume.npz"
    for pattern in ONCE_ONLY:
        for path in out.rglob(pattern):
            if path != kept:
                path.unlink()
    for name in ("slides", "slides-new"):
        shutil.rmtree(out / name)


def _interrupt(command: list[str], folder: Path) -> None:
    """Start a training, and interrupt it as Ctrl-C does when its first epoch is done."""
    reset = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", reset, *command],
        cwd=folder,
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    ) as process:
        for line in process.stdout or ():
            if line.startswith("epoch 1"):
                process.send_signal(signal.SIGINT)
    if process.returncode != 130:
        raise SystemExit(f"the interrupted training ended with {process.returncode}, not 130")


if __name__ == "__main__":
    main()
