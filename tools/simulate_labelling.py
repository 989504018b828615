"""Compare ways to choose the patches that are labelled next, by simulated labellers; and check the interval of the accuracy.

    python tools/simulate_labelling.py STORE FEATURES --labels labels.csv --seeds 10

STORE has a class of each patch (`histopipe annotate`), which the labeller gives without errors; FEATURES are those of
`histopipe embed`; labels.csv has the columns slide and patient. For each seed, patients are assigned as in `histopipe view
--journal`, and patches of the others are labelled in rounds of 24, by each order. The AUC is that of all labelled patches
of the held-out patients. In each round, the interval of the balanced accuracy is that of the random held-out patches so
far, a quarter of the labels; it covers if it has the balanced accuracy of all patches of the held-out patients.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.features.feature_file import feature_files, features_at
from histopipe.labels.journal import LabelStudy
from histopipe.labels.learner import QueueOrder, fit_classifier, held_out_metrics, queue
from histopipe.store.store import Store

ROUND = 24
ROUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 20)
ORDERS: tuple[QueueOrder, ...] = ("random", "uncertain", "far", "certain")


def read(store: Path, features: Path, labels: Path) -> tuple[Any, ...]:
    """Return (N, D) features, (N,) classes and (N,) patients of the labelled patches, and the names of the classes."""
    with labels.open(newline="") as file:
        patient_of = {row["slide"]: row["patient"] for row in csv.DictReader(file)}
    files, parts = feature_files(features), []
    with Store(store) as opened:
        for number, record in sorted(opened.complete.items()):
            index = opened.index(number)
            rows = np.flatnonzero(index["label"] >= 0)
            corners = np.stack([index["x_l0"][rows], index["y_l0"][rows]], axis=1)
            values = features_at(files[record.id], corners)
            parts.append((values, index["label"][rows], [patient_of[record.id]] * len(rows)))
        names = opened.classes
    return *(np.concatenate(column) for column in zip(*parts, strict=True)), names


def simulate(
    order: QueueOrder,
    seed: int,
    data: tuple[Any, ...],
) -> tuple[list[float], list[bool | None], list[float]]:
    """Return AUC, whether the interval covers, and its width, after each round."""
    features, classes, patients, names = data
    study = LabelStudy(tuple(names), seed).with_patients(patients.tolist())
    held_out = np.isin(patients, study.held_out)
    rng = np.random.default_rng(seed)
    train, test = (rng.permutation(np.flatnonzero(side)) for side in (~held_out, held_out))
    # As in the viewer: random patches of each held-out patient in turn.
    turns = [int((patients[test[:at]] == patients[row]).sum()) for at, row in enumerate(test)]
    test = test[np.argsort(turns, kind="stable")]
    values = features.astype(np.float16)
    labelled: NDArray[np.int64] = train[:ROUND]
    areas, covers, widths = [], [], []
    model = None
    for number in range(max(ROUNDS) + 1):
        if number:
            free = train[~np.isin(train, labelled)]
            chosen = queue(
                order,
                values,
                free,
                ROUND,
                classifier=model,
                of_class=number % len(names),
                references=features[labelled],
            )
            labelled = np.concatenate([labelled, chosen])
        model = fit_classifier(features[labelled], classes[labelled], len(names))
        if number not in ROUNDS:
            continue
        output = model.predict(features[test])
        truth = held_out_metrics(names, classes[test], output, patients[test], resamples=0)
        areas.append(float(truth.values["auc"] or np.nan))
        sample = test[: len(labelled) // 3]
        running = held_out_metrics(
            names, classes[sample], model.predict(features[sample]), patients[sample]
        )
        ends, value = running.intervals.get("balanced_accuracy"), truth.values["balanced_accuracy"]
        covers.append(None if ends is None or value is None else ends[0] <= value <= ends[1])
        widths.append(np.nan if ends is None else ends[1] - ends[0])
    return areas, covers, widths


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("store", type=Path)
    parser.add_argument("features", type=Path)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    data = read(options.store, options.features, options.labels)
    print("| order |", " | ".join(str(ROUND * (number + 1)) for number in ROUNDS), "| covered |")
    area_of: dict[str, NDArray[np.float64]] = {}
    for order in ORDERS:
        results = [simulate(order, seed, data) for seed in range(1, options.seeds + 1)]
        area_of[order] = np.array([areas for areas, _, _ in results])
        covers = [each for _, of_seed, _ in results for each in of_seed if each is not None]
        means = " | ".join(f"{mean:.3f}" for mean in area_of[order].mean(axis=0))
        widths = np.nanmean([widths for *_, widths in results])
        print(f"| {order} | {means} | {sum(covers)} of {len(covers)}, mean width {widths:.2f} |")
    target = area_of["random"][:, -1] - 0.01
    for order in ORDERS:
        reached = area_of[order] >= target[:, None]
        first = [
            ROUND * (ROUNDS[int(row.argmax())] + 1) if row.any() else np.inf for row in reached
        ]
        print(
            f"{order}: labels to 0.01 below the last AUC of random: median {np.median(first):g}, {first}"
        )


if __name__ == "__main__":
    main()
