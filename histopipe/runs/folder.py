"""Files in the folder of a run. Each is written by one rename."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.dataset.patch_masks import ANNOTATIONS, COPY
from histopipe.errors import UsageError
from histopipe.runs.config import TrainConfig
from histopipe.splits.splits import SPLITS, Splits, write_splits
from histopipe.system.files import (
    read_json,
    reading,
    remove_parts,
    writable,
    write_atomically,
    write_json,
)
from histopipe.system.folders import CONFIG, FOLD_SPLITS, SHARE, FolderKind, folder_kind
from histopipe.system.locks import held
from histopipe.system.settings import declared_settings, to_toml

HISTORY = "history.csv"
SLIDES = "slides.csv"
MODEL = "model.keras"
MEMORY = "memory.json"
TRIALS = "trials"
"""Folder of the runs of a search, in that of the search."""


def check(folder: Path, *, resume: bool, ignored: Collection[str] = ()) -> None:
    """Check that a run may use a folder, before anything is written. A new folder may contain the `ignored` names.

    Raises:
        UsageError: the folder is not empty, or with `resume`, contains no run to resume.
    """
    if resume:
        if not has_begun(folder):
            raise UsageError(
                f"no run to resume in {folder}", expected=f"the folder of a run, with its {CONFIG}"
            )
    elif folder.exists() and (
        not folder.is_dir()
        or any(
            path.name not in ignored and not path.name.startswith(".part-")
            for path in folder.iterdir()
        )
    ):
        raise UsageError(
            f"{folder} exists and is not empty",
            todo="pass --resume to continue it, or choose another --out",
        )


def has_begun(folder: Path) -> bool:
    """Return whether a folder contains a run that can be resumed."""
    return folder_kind(folder) in (
        FolderKind.RUN,
        FolderKind.CROSS_VALIDATION,
    )


def resume_hint(folder: Path) -> str:
    """Return how to continue a training, for messages."""
    return f"continue with `histopipe train --resume --out {folder}`"


def clear_leftovers(folder: Path) -> None:
    """Remove the files of a run that was killed before its configuration was written. It cannot be resumed."""
    if not has_begun(folder):
        shutil.rmtree(folder / COPY, ignore_errors=True)
        # Those with a prefix are of version 0.2.
        for name in (SPLITS, ANNOTATIONS, f"part-{SPLITS}", f"part-{CONFIG}"):
            (folder / name).unlink(missing_ok=True)
        remove_parts(folder)


@contextmanager
def opened(
    folder: Path,
    splits: Mapping[str, Splits],
    *settings: Any,
    resume: bool,
    prepare: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Create and lock the folder of a run or a cross-validation, and write splits (by file name) and settings.

    `prepare` writes what the run needs before its settings, without which it has not begun.

    Raises:
        UsageError: as `held` and `writable`, or another run has started in the folder.
    """
    with held(folder):
        if not resume and has_begun(folder):
            raise UsageError(f"another run has started in {folder}")
        prepare()
        write_plan(folder, splits, *settings)
        yield


def write_plan(folder: Path, splits: Mapping[str, Splits], *settings: Any) -> None:
    """Write splits (by file name) and settings. UsageError if the folder cannot be written."""
    with writable(folder):
        # Splits first, because a run without them cannot be resumed.
        for name, each in splits.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_splits(each, folder / name)
        write_atomically(folder / CONFIG, to_toml(*settings))


def fingerprint(config: TrainConfig, splits: Splits, *position: int) -> list[int]:
    """Return sixteen numbers below 65,536 that differ if settings, splits or the position in a training differ.

    Settings that may differ between workers, such as the paths of their stores, are ignored.
    """
    declared = declared_settings(type(config))
    settings = {k: v for k, v in config.values().items() if not declared[k].per_worker}
    digest = hashlib.sha256(repr((settings, splits.uuids, splits.classes, position)).encode())
    for slide in splits.slides:
        digest.update(repr((slide.id, slide.label, slide.crc)).encode() + slide.subsets.tobytes())
        if slide.labels is not None:
            digest.update(slide.labels.tobytes())
    return [int(number) for number in np.frombuffer(digest.digest(), np.uint16)]


def read_micro_batch(folder: Path) -> int | None:
    """Return the size of micro-batches to continue with; None if memory did not run out before."""
    path = folder / MEMORY
    with suppress(FileNotFoundError), reading(path, todo="remove the file"):
        return max(1, int(read_json(path)["micro_batch"]))
    return None


def write_micro_batch(folder: Path, size: int, why: str) -> None:
    """Write `memory.json`: the size of micro-batches to continue with."""
    write_json(folder / MEMORY, {"micro_batch": size, "why": why})


def is_cross_validation(folder: Path) -> bool:
    """Return whether a folder contains a cross-validation."""
    return folder_kind(folder) is FolderKind.CROSS_VALIDATION


def runs_of(folder: Path) -> list[Path]:
    """Return the folders of the runs of a cross-validation, also of those that have not begun, in order.

    Those of a learning curve that use a part of the training patients are not among them.
    """
    return [
        folder / path.stem
        for path in sorted(
            (path for path in (folder / FOLD_SPLITS).glob("*.json") if SHARE not in path.stem),
            key=lambda path: [*map(int, re.findall(r"\d+", path.stem))],
        )
    ]


def check_one_run(folder: Path) -> None:
    """Raise a UsageError if a folder contains a cross-validation."""
    if is_cross_validation(folder):
        raise UsageError(
            f"{folder} is a cross-validation",
            expected="the folder of one run",
            todo="pass the folder of one fold; summary.csv compares the folds",
        )
