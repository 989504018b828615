"""The "small" slide tasks of kaiko's eva: CAMELYON16 and PANDA with gated attention on features of an encoder."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from run import Row, result_row

import histopipe

TITLE = "CAMELYON16 and PANDA, small, of eva"
METRIC = "balanced accuracy"
REFERENCE = "published"
SEEDS = 2
SOURCE = """
kaiko.ai, eva 0.4.5: `camelyon16_small.yaml` and `panda_small.yaml`, and the leaderboard of pathology
(2025): mean balanced accuracy of 20 trainings on the test split. Published values for features of
Virchow2, UNI and the small encoder of Lunit: CAMELYON16 0.861, 0.833 and 0.771; PANDA 0.646, 0.659
and 0.610.
"""
DIFFERENCES = """
- **Rows named stand-in are not of the real data**, which are not available where this page was made,
  but of synthetic features with the same numbers of slides, patches and classes. They only show
  that the recipe runs: two seeds and few epochs. With the features of an encoder in
  `eva/camelyon16_small` and `eva/panda_small` of the test data (one .h5 file per slide, and
  `labels.csv` with the columns slide, label and subset), it trains 20 seeds by the protocol.
- Protocol: features of up to 1,000 patches at 0.25 µm per pixel (CAMELYON16: 216, 54 and 129 slides), or 200 at
  0.5 (PANDA: 955, 477 and 477); gated attention; AdamW with rate 1e-3 and weight decay 0.01; batches
  of 32; at most 100 epochs; no more than 20 without improvement on validation.
- Here: 512 hidden features and no second layer (eva: 128, then 128 and 64); the epoch with the lowest
  validation loss (eva: the highest balanced accuracy); the threshold of two classes 0.5, as there.
"""
SETTINGS: dict[str, Any] = {
    "pooling": "gated",
    "optimizer": "adamw",
    "learning_rate": 1e-3,
    "weight_decay": 0.01,
    "batch_size": 32,
    "dropout": 0.0,
    "patience": 20,
    "threshold": "0.5",
    "split_column": "subset",
    "devices": "cpu",
}
TASKS: Mapping[str, tuple[Mapping[str, int], int, int]] = {
    "camelyon16_small": ({"train": 216, "validation": 54, "test": 129}, 2, 1000),
    "panda_small": ({"train": 955, "validation": 477, "test": 477}, 6, 200),
}
"""Slides by subset, classes, and most patches of a slide."""
PUBLISHED = {"camelyon16_small": "0.771 to 0.861", "panda_small": "0.610 to 0.659"}
_WIDTH, _EPOCHS, _SEEDS = 384, 3, 20


def has_data(shared: Path) -> bool:  # noqa: ARG001 - as all recipes
    """Return True: without the real features, the recipe makes stand-ins."""
    return True


def run(work: Path, shared: Path, seeds: int, done: Collection[tuple[str, str]]) -> Iterator[Row]:
    """Yield a row for each task."""
    for name in TASKS:
        folder, is_real = shared / "eva" / name, (shared / "eva" / name).is_dir()
        title = name if is_real else f"{name}, stand-in"
        if (title, "gated") in done:
            continue
        if not is_real:
            folder = work / name
            make_stand_in(folder, name)
        result = histopipe.cross_validate(
            mil=folder,
            labels=folder / "labels.csv",
            seeds=_SEEDS if is_real else seeds,
            epochs=100 if is_real else _EPOCHS,
            out=work / f"{name}-runs",
            **SETTINGS,
        )
        published = PUBLISHED[name] if is_real else ""
        yield result_row(title, "gated", published, result, "balanced_accuracy")


def make_stand_in(folder: Path, name: str) -> None:
    """Write features of noise, in which some patches of a slide show its class."""
    subsets, classes, most = TASKS[name]
    rng, rows = np.random.default_rng(1), [("slide", "label", "subset")]
    directions = rng.normal(size=(classes, _WIDTH)) / np.sqrt(_WIDTH)
    folder.mkdir(parents=True)
    for subset, count in subsets.items():
        for number in range(count):
            label, size = number % classes, int(rng.integers(most // 2, most))
            features = rng.normal(size=(size, _WIDTH)).astype(np.float32)
            features[: size // 10] += 4 * directions[label].astype(np.float32)
            with h5py.File(folder / f"{subset}{number}.h5", "w") as bag:
                bag["features"] = features.astype(np.float16)
                bag["coords"] = np.arange(size)[:, None] * (224, 0)
                bag["coords"].attrs["patch_size_level0"] = 224
            rows.append((f"{subset}{number}", f"class {label}", subset))
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
