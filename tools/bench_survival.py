"""Show that survival models find a known hazard, and none where there is none.

    python tools/bench_survival.py --out scratch --seeds 5 --null-seeds 100

The share of patches with an offset in a bag drives the hazard. The concordance of the model on the test set is compared
with that of the true risk (the oracle). Without a signal, the interval must cover 0.5 in most seeds.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import histopipe
from histopipe.features.feature_file import writing
from histopipe.features.feature_sets import record_encoder
from histopipe.predictions.prediction_tables import read_predictions
from histopipe.system.output import Progress, use_progress
from histopipe.tasks.survival import SurvivalStatistics

DIMENSION = 32
CENSORED = (0.3, 0.7)
MODELS = (("cox", "gated"), ("cox", "mean"), ("discrete", "gated"), ("discrete", "mean"))
"""Loss and pooling."""


def main() -> None:
    """Parse the arguments, train, and print a line per training and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder of the results, as JSON")
    parser.add_argument("--bags", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--null-seeds", type=int, default=100)
    options = parser.parse_args()
    rows = []
    with use_progress(Progress()):
        for censored in CENSORED:
            for model in MODELS:
                for seed in range(options.seeds):
                    rows.append(trained(options, seed, censored, model, strength=4.0))
                    print(json.dumps(rows[-1]), flush=True)
        for seed in range(options.null_seeds):
            rows.append(trained(options, 1000 + seed, 0.3, MODELS[0], strength=0.0))
            print(json.dumps(rows[-1]), flush=True)
    null = [row for row in rows if not row["strength"]]
    summary = {
        "oracle_inside": sum(
            row["low"] <= row["oracle"] <= row["high"] for row in rows if row["strength"]
        ),
        "with_signal": len(rows) - len(null),
        "half_inside": sum(row["low"] <= 0.5 <= row["high"] for row in null),
        "without_signal": len(null),
    }
    print(json.dumps(summary))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "survival.json").write_text(json.dumps({**summary, "rows": rows}, indent=1))


def trained(
    options: argparse.Namespace,
    seed: int,
    censored: float,
    model: tuple[str, str],
    *,
    strength: float,
) -> dict[str, Any]:
    """Train on synthetic bags, and return the concordance on the test set, and that of the true risk."""
    loss, pooling = model
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        risk = write_bags(folder, options.bags, seed, censored, strength)
        settings: dict[str, Any] = {
            "mil": str(folder / "features"),
            "labels": str(folder / "labels.csv"),
            "task": "survival",
            "time": "time",
            "event": "event",
            "loss": loss,
            "pooling": pooling,
            "epochs": options.epochs,
            "seed": seed,
            "fractions": (0.5, 0.2, 0.3),
            "learning_rate": 1e-3,
            "resamples": 500,
        }
        if loss != "cox":
            settings["batch_size"] = 8
        result = histopipe.train(out=folder / "run", in_process=True, **settings)
        scores = read_predictions(folder / "run" / "predictions.csv")["test"]
        metrics = result.metrics["test"].finest
        true = np.array([[risk[scores.slides[i]], 0.5] for i in scores.slide])
        time, event = scores.target.T
        oracle = SurvivalStatistics(
            time, event, true, [float(np.median(time))], scores.patient, fold=scores.folds
        )
        low, high = metrics.intervals["c_index"]
        return {
            "strength": strength,
            "censored": censored,
            "loss": loss,
            "pooling": pooling,
            "seed": seed,
            "events": int(event.sum()),
            "test": len(time),
            "c_index": metrics.values["c_index"],
            "low": low,
            "high": high,
            "oracle": float(oracle.compute(np.ones((1, oracle.patients)))["c_index"][0]),
        }


def write_bags(
    folder: Path, bags: int, seed: int, censored: float, strength: float
) -> dict[str, float]:
    """Write features and labels.csv. Return the true risk of each bag."""
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=DIMENSION)
    direction *= 3 / np.linalg.norm(direction)
    (folder / "features").mkdir()
    record_encoder(folder / "features", {"encoder": "synthetic", "dimension": DIMENSION})
    share = rng.random(bags)
    risk = strength * (share - 0.5)
    time = rng.exponential(np.exp(-risk))
    limit = time_limits(time, rng.exponential(size=bags), censored)
    rows: list[tuple[object, ...]] = [("slide", "patient", "time", "event")]
    for i in range(bags):
        size = int(rng.integers(50, 150))
        values = rng.normal(size=(size, DIMENSION))
        values[rng.random(size) < share[i]] += direction
        with writing(folder / "features" / f"{i}.h5", size, DIMENSION, "float32") as writer:
            writer.append(values.astype(np.float32), np.stack([256 * np.arange(size)] * 2, axis=1))
            writer.finish({}, {"name": str(i)})
        rows.append((i, f"p{i}", f"{min(time[i], limit[i]):.6f}", int(time[i] <= limit[i])))
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return {str(i): float(value) for i, value in enumerate(risk)}


def time_limits(
    time: NDArray[np.float64], draws: NDArray[np.float64], censored: float
) -> NDArray[np.float64]:
    """Return censoring times, exponential draws scaled so that this share of the times is censored."""
    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if (time > middle * draws).mean() > censored else (low, middle)
    return high * draws


if __name__ == "__main__":
    main()
