"""Compare the poolings of slide models on a planted signal, and the published settings of CLAM and STAMP.

    python tools/bench_pooling.py [--seeds 3] [--bags 160] [--only gated,clam] [--out scratch]

A bag is positive if 5 % of its about 100 patches have an offset. All patches of a bag share another offset in the same
direction, like the stain of a slide, so that their mean nearly hides the few. Prints the test AUC of each model, as mean
and standard deviation over the seeds.

The settings of CLAM are those of its command line: CLAM-SB, 0.7 of the loss for the bag, 8 patches for the loss of single
patches, Adam, 2e-4, dropout 0.25, one bag per step, and 50 epochs, before which it does not stop early. Its weight decay
in Adam, 1e-5, is left out. STAMP's are those of its vision transformer: 2 blocks of self-attention, AdamW, 1e-4, 64 bags
per step, 512 patches of each bag, 32 epochs, patience 16.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import histopipe
from histopipe.features.feature_file import writing
from histopipe.features.feature_sets import record_encoder
from histopipe.system.output import Progress, use_progress

DIMENSION = 32
_SHARE, _STAIN = 0.05, 0.1
_STAMP = {
    "pooling": "transformer",
    "optimizer": "adamw",
    "learning_rate": 1e-4,
    "max_per_slide": 512,
    "patience": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    **{
        name: {"pooling": name, "learning_rate": 1e-3}
        for name in ("mean", "max", "attention", "gated", "clam", "dsmil", "transformer")
    },
    "CLAM's settings": {
        "pooling": "clam",
        "optimizer": "adam",
        "learning_rate": 2e-4,
        "dropout": 0.25,
        "batch_size": 1,
        "epochs": 50,
    },
    "STAMP's settings": {**_STAMP, "batch_size": 64, "epochs": 32},
    "STAMP's settings, 8 bags per step": {**_STAMP, "batch_size": 8, "epochs": 32},
}


def main() -> None:
    """Train each model, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bags", type=int, default=160)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--only", help="models, separated by commas")
    parser.add_argument("--out", type=Path, help="folder of the results, as JSON")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(MODELS)
    aucs: dict[str, list[float]] = {name: [] for name in chosen}
    with use_progress(Progress()):
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                write_bags(folder, options.bags, seed)
                for model in chosen:
                    aucs[model].append(test_auc(folder, model, seed, options.epochs))
    print("| model | test AUC |\n| --- | --- |")
    for model, values in aucs.items():
        print(f"| {model} | {np.mean(values):.3f} ± {np.std(values):.3f} |")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "pooling.json").write_text(json.dumps(aucs, indent=1))


def test_auc(folder: Path, model: str, seed: int, epochs: int) -> float:
    """Train a model, and return its AUC on the test bags."""
    settings: dict[str, Any] = {
        "mil": folder / "features",
        "labels": folder / "labels.csv",
        "epochs": epochs,
        "seed": seed,
        "fractions": (0.5, 0.2, 0.3),
        "resamples": 0,
        "patience": 0,
        **MODELS[model],
    }
    out = folder / f"run-{model.replace(' ', '-')}"
    result = histopipe.train(out=out, in_process=True, **settings)
    value = result.metrics["test"].finest.values["auc"]
    assert value is not None  # noqa: S101 - both classes are in each subset
    return value


def write_bags(folder: Path, bags: int, seed: int) -> None:
    """Write features and labels.csv."""
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=DIMENSION)
    direction *= 6 / np.linalg.norm(direction)
    (folder / "features").mkdir()
    record_encoder(folder / "features", {"encoder": "synthetic", "dimension": DIMENSION})
    rows: list[tuple[object, ...]] = [("slide", "label")]
    for i in range(bags):
        size = int(rng.integers(50, 150))
        values = rng.normal(size=(size, DIMENSION)) + rng.normal(0, _STAIN) * direction
        if i % 2:
            values[rng.choice(size, round(_SHARE * size), replace=False)] += direction
        corners = np.stack([256 * (np.arange(size) % 12), 256 * (np.arange(size) // 12)], axis=1)
        with writing(folder / "features" / f"{i}.h5", size, DIMENSION, "float32") as writer:
            writer.append(values.astype(np.float32), corners)
            writer.finish({}, {"name": str(i), "patch_size_level0": 256})
        rows.append((i, "np"[i % 2]))
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
