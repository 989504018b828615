"""Slide models with few bags: from scratch, and from the weights of a model of another task; with seeds.

    python tools/bench_few_bags.py --out few-bags

Made-up cohorts: features of 24 tissues of tissue as an encoder may see them; the first task asks for some of the tissues, the second
for others that look alike. A model of the first task with 400 bags gives its weights to models of the second with few.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import histopipe

DIMENSION, KINDS, PATCHES, TEST = 64, 24, 120, 200
RARE = 3
"""Patches of a positive bag that show it."""


def write_cohort(folder: Path, bags: int, *, positive: int, seed: int, tissues: np.ndarray) -> None:
    """Write bags of the tissues of tissue; positive ones have a few patches of one kind that others lack."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for number in range(bags):
        chosen = random.integers(0, KINDS - 4, PATCHES)
        label = number % 2
        if label:
            chosen[random.permutation(PATCHES)[:RARE]] = positive
        values = tissues[chosen] + 0.9 * random.normal(size=(PATCHES, DIMENSION))
        with h5py.File(folder / f"b{number:04}.h5", "w") as file:
            file["features"] = values.astype(np.float32)
            file.attrs.update(label="ab"[label], patient=f"p{number}")


def main() -> None:
    """Train, predict a test cohort, and write the areas under the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--bags", nargs="+", type=int, default=[10, 20, 40, 80, 160])
    chosen = parser.parse_args()
    tissues = np.random.default_rng(0).normal(size=(KINDS, DIMENSION))
    # The tissues that tasks ask for have something in common, as tumours have.
    tissues[-4:] = tissues[-4] + 0.7 * tissues[-4:]
    out = chosen.out
    settings: dict[str, Any] = {"devices": "cpu", "epochs": 30, "fractions": [0.7, 0.3, 0.0]}
    write_cohort(out / "first", 400, positive=KINDS - 1, seed=1, tissues=tissues)
    write_cohort(out / "test", TEST, positive=KINDS - 2, seed=2, tissues=tissues)
    histopipe.train(mil=out / "first", out=out / "first-run", feature_scaling="none", **settings)
    rows: list[dict[str, Any]] = []
    for seed in range(chosen.seeds):
        for bags in chosen.bags:
            cohort = out / f"second-{bags}-{seed}"
            write_cohort(cohort, bags, positive=KINDS - 2, seed=10 + seed, tissues=tissues)
            starts: tuple[tuple[str, dict[str, Any]], ...] = (
                ("scratch", {"feature_scaling": "none"}),
                ("weights", {"weights": str(out / "first-run")}),
                ("head", {"weights": str(out / "first-run"), "trainable": "head"}),
            )
            for start, options in starts:
                run = out / f"run-{start}-{bags}-{seed}"
                histopipe.train(mil=cohort, out=run, seed=seed, **options, **settings)
                done = histopipe.predict(
                    run, out / "test", out=out / f"p-{start}-{bags}-{seed}", devices="cpu"
                )
                assert done.evaluated is not None  # noqa: S101 - the labels are in the files
                auc = done.evaluated.evaluation.finest.values["auc"]
                rows.append({"start": start, "bags": bags, "seed": seed, "auc": auc})
                print(json.dumps(rows[-1]), flush=True)
    (out / "few-bags.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
