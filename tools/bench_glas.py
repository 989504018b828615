"""Measure the default settings on GlaS: glands against stroma, and benign against malignant regions.

    python tools/bench_glas.py GLAS PUBLISHED.csv WORK [--seeds 5] [--only patches,regions,folds,keras]

GLAS holds `raw/images/*.png`, `annotations/*.geojson` and `labels.csv` with the columns slide, label and
patient. PUBLISHED.csv has the columns slide and subset. Stores, features and runs are kept in WORK and reused. The same
trainings in plain Keras use the patches and features of the same store, and the same split.

Source of the split: S. Belharbi et al., "Deep interpretable classification and weakly-supervised segmentation of
histology images via max-min uncertainty" (2022). Ten of its twelve test patients are also in training.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import histopipe

_SIDES = ("train", "validation", "test")


def write_labels(glas: Path, published: Path, path: Path) -> None:
    """Write the labels of all regions with the published subsets."""
    with published.open(newline="") as file:
        subsets = {row["slide"]: row["subset"] for row in csv.DictReader(file)}
    with (glas / "labels.csv").open(newline="") as file, path.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["slide", "label", "patient", "subset"])
        for row in csv.DictReader(file):
            writer.writerow([row["slide"], row["label"], row["patient"], subsets[row["slide"]]])


def test_metrics(run: Path, level: str) -> dict[str, Any]:
    """Return the test metrics of a run at a level: patch, or slide."""
    metrics = json.loads((run / "metrics.json").read_text())["test"][level]
    return dict(metrics.get("bag", metrics))


def trained(out: Path, **settings: Any) -> float:
    """Train unless the run is finished. Return the duration in seconds."""
    began = time.perf_counter()
    if not (out / "metrics.json").exists():
        histopipe.train(out=out, **settings)
    return time.perf_counter() - began


def published(labels: Path) -> dict[str, Any]:
    """Return the settings of the published split."""
    return {"labels": str(labels), "split_column": "subset", "allow_leaks": True}


def patches(store: Path, labels: Path, work: Path, seed: int) -> None:
    """Train glands against stroma with default settings."""
    out = work / f"patches-{seed}"
    seconds = trained(out, stores=store, labels_from="annotation", seed=seed, **published(labels))
    print(f"patches, seed {seed}: AUC {test_metrics(out, 'patch')['auc']:.4f}, {seconds:.0f} s")


def regions(features: Path, labels: Path, work: Path, seed: int, pooling: str | None) -> None:
    """Train benign against malignant with default settings, or another pooling."""
    out = work / f"regions-{pooling or 'default'}-{seed}"
    settings = {} if pooling is None else {"pooling": pooling}
    seconds = trained(out, mil=features, seed=seed, **published(labels), **settings)
    print(f"regions, {pooling or 'default'}, seed {seed}: {_of_run(out)}, {seconds:.0f} s")


def _of_run(out: Path) -> str:
    with (out / "predictions.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "test"]
    right = np.array([row["label"] == row["predicted"] for row in rows])
    return f"error {1 - right.mean():.3f} of {len(rows)}"


def read_bags(features: Path, labels: Path) -> dict[str, list[tuple[NDArray[np.float32], int]]]:
    """Return the features and the class of each region by subset."""
    import h5py

    bags: dict[str, list[tuple[NDArray[np.float32], int]]] = {side: [] for side in _SIDES}
    with labels.open(newline="") as file:
        for row in csv.DictReader(file):
            path = features / f"{row['slide']}.h5"
            if path.exists():
                with h5py.File(path) as content:
                    bag = content["features"][:].astype(np.float32)
                bags[row["subset"]].append((bag, int(row["label"] == "malignant")))
    return bags


def keras_regions(features: Path, labels: Path, seed: int) -> None:
    """Train attention pooling in plain Keras, as a careful user writes it: standardised features, 30 epochs."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(seed)
    bags, began = read_bags(features, labels), time.perf_counter()
    every = np.concatenate([bag for bag, _ in bags["train"]])
    mean, std = every.mean(0), every.std(0) + 1e-6
    inputs = keras.Input((None, every.shape[1]))
    hidden = keras.layers.Dense(512, activation="relu")(inputs)
    hidden = keras.layers.Dropout(0.15)(hidden)
    score = keras.layers.Dense(1)(keras.layers.Dense(256, activation="tanh")(hidden))
    shares = keras.layers.Softmax(axis=1)(score)
    pooled = keras.layers.Flatten()(keras.layers.Dot(axes=1)([shares, hidden]))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(pooled))
    model.compile(keras.optimizers.Adam(2e-4), "binary_crossentropy")

    def data(side: str, *, repeat: bool) -> tf.data.Dataset:
        def bag_by_bag() -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
            order = np.random.default_rng(seed).permutation(len(bags[side]))
            for number in order if repeat else range(len(bags[side])):
                bag, label = bags[side][number]
                yield (bag[None] - mean) / std, np.array([[label]], np.float32)

        shapes = tf.TensorSpec((1, None, every.shape[1])), tf.TensorSpec((1, 1))
        return tf.data.Dataset.from_generator(bag_by_bag, output_signature=shapes)

    best = keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True)
    model.fit(
        data("train", repeat=True),
        validation_data=data("validation", repeat=False),
        epochs=30,
        verbose=0,
        callbacks=[best],
    )
    predicted = model.predict(data("test", repeat=False), verbose=0)[:, 0] > 0.5
    wrong = np.mean(predicted != np.array([label for _, label in bags["test"]], bool))
    print(
        f"regions, plain Keras, seed {seed}: error {wrong:.3f}, {time.perf_counter() - began:.0f} s"
    )


def keras_patches(store: Path, splits: Path, seed: int) -> None:
    """Fine-tune the same network in plain Keras: Adam with a rate of 3e-4, ten epochs, the best by validation loss."""
    import keras
    from sklearn.metrics import roc_auc_score

    from histopipe.training.pretrained_networks import MEAN, STD, efficientnet_lite

    keras.utils.set_random_seed(seed)
    began = time.perf_counter()
    common: dict[str, Any] = {
        "batch_size": 64,
        "splits": splits,
        "labels_from": "annotation",
        "as_supervised": True,
    }
    train = histopipe.load_dataset(store, seed=seed, **common).cache()
    validation = histopipe.load_dataset(store, subset="validation", shuffle=False, **common).cache()
    test = histopipe.load_dataset(store, subset="test", shuffle=False, **common)
    image = keras.Input((128, 128, 3), dtype="uint8")
    core = efficientnet_lite("efficientnet-lite0", trained=True)
    x = keras.layers.RandomFlip()(keras.layers.Rescaling(1 / STD, offset=-MEAN / STD)(image))
    x = keras.layers.Dropout(0.15)(core(x))
    model = keras.Model(image, keras.layers.Dense(2, activation="softmax")(x))
    model.compile(keras.optimizers.Adam(3e-4), "sparse_categorical_crossentropy")
    best = keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True)
    model.fit(train, validation_data=validation, epochs=10, verbose=0, callbacks=[best])
    scores, truth, weights = [], [], []
    for pixels, label, weight in test:
        scores.append(model.predict_on_batch(pixels)[:, 1])
        truth.append(label.numpy())
        weights.append(weight.numpy())
    auc = roc_auc_score(
        np.concatenate(truth), np.concatenate(scores), sample_weight=np.concatenate(weights)
    )
    print(f"patches, plain Keras, seed {seed}: AUC {auc:.4f}, {time.perf_counter() - began:.0f} s")


def folds(features: Path, labels: Path, work: Path, seed: int) -> None:
    """Cross-validate benign against malignant by patient with default settings."""
    out, began = work / f"folds-{seed}", time.perf_counter()
    if not (out / "summary.json").exists():
        histopipe.cross_validate(
            mil=features, labels=str(labels), folds=5, out=out, seed=seed, allow_extra_rows=True
        )
    seconds = time.perf_counter() - began
    print(f"folds by patient, seed {seed}: {_pooled(out)}, {seconds:.0f} s")
    print(f"  logistic regression on mean features, same folds: {_logistic(features, labels, out)}")


def _pooled(out: Path) -> str:
    from sklearn.metrics import roc_auc_score

    rows = []
    for fold in sorted(out.glob("fold-*")):
        with (fold / "predictions.csv").open(newline="") as file:
            rows += [row for row in csv.DictReader(file) if row["split"] == "test"]
    truth = np.array([row["label"] == "malignant" for row in rows])
    score = np.array([float(row["p_malignant"]) for row in rows])
    return f"AUC {roc_auc_score(truth, score):.3f}, accuracy {np.mean((score > 0.5) == truth):.3f}"


def _logistic(features: Path, labels: Path, out: Path) -> str:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    means: dict[str, tuple[NDArray[np.float32], int]] = {}
    bags = read_bags(features, labels)
    with labels.open(newline="") as file:
        names: dict[str, list[str]] = {side: [] for side in _SIDES}
        for row in csv.DictReader(file):
            if (features / f"{row['slide']}.h5").exists():
                names[row["subset"]].append(row["slide"])
    for side in _SIDES:
        for name, (bag, label) in zip(names[side], bags[side], strict=True):
            means[name] = bag.mean(0), label
    truth, scores = [], []
    for fold in sorted(out.glob("fold-*")):
        sides = {
            row["id"]: row["side"]
            for row in json.loads((fold / "splits.json").read_text())["slides"]
        }
        train = [means[name] for name, side in sides.items() if side == "train"]
        test = [means[name] for name, side in sides.items() if side == "test"]
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000))
        model.fit(np.stack([x for x, _ in train]), [y for _, y in train])
        scores += model.predict_proba(np.stack([x for x, _ in test]))[:, 1].tolist()
        truth += [y for _, y in test]
    right = np.mean((np.array(scores) > 0.5) == np.array(truth))
    return f"AUC {roc_auc_score(truth, scores):.3f}, accuracy {right:.3f}"


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("glas", type=Path)
    parser.add_argument("published", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--poolings", default="", help="further poolings of regions, by commas")
    parser.add_argument("--only", default="patches,regions,folds,keras")
    options = parser.parse_args()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    labels, store, features = work / "labels.csv", work / "glas.lmdb", work / "features"
    if not store.exists():
        write_labels(options.glas, options.published, labels)
        histopipe.ingest(
            options.glas / "raw" / "images",
            store,
            labels=labels,
            default_mpp=0.62,
            mpp=0.62,
            patch_size=128,
        )
        histopipe.annotate(store, options.glas / "annotations")
    histopipe.embed(store, out=features)
    parts = options.only.split(",")
    seeds = range(1, options.seeds + 1)
    steps: list[Callable[[], None]] = []
    if "patches" in parts:
        steps.append(lambda: patches(store, labels, work, 1))
        if "keras" in parts:
            steps.append(lambda: keras_patches(store, work / "patches-1" / "splits.json", 1))
    for seed in seeds:
        if "regions" in parts:
            for pooling in (None, *filter(None, options.poolings.split(","))):
                steps.append(lambda s=seed, p=pooling: regions(features, labels, work, s, p))  # type: ignore[misc]
            if "keras" in parts:
                steps.append(lambda s=seed: keras_regions(features, labels, s))  # type: ignore[misc]
        if "folds" in parts:
            steps.append(lambda s=seed: folds(features, labels, work, s))  # type: ignore[misc]
    for step in steps:
        step()


if __name__ == "__main__":
    main()
