"""Measure segmentation on GlaS and MoNuSeg: the default settings, and a plain U-Net of Keras on the same patches.

    python tools/bench_segmentation.py GLAS WORK [--monuseg FOLDER] [--seeds 3] [--epochs 15] [--only glas,unet,patients,monuseg]

GLAS holds `slides/*.tiff`, `annotations/*.geojson` (gland, stroma) and `labels.csv` with the columns slide, patient and set
(train, testA, testB: the published division). FOLDER holds `slides`, `annotations` and `labels.csv` with the columns slide
and subset. Stores and runs are kept in WORK, and reused. Dice and intersection over union are those of images, by set.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import histopipe
from histopipe.predictions.prediction_tables import read_predictions
from histopipe.tasks.predictions import EvaluationSettings, scores_of
from histopipe.tasks.segmentation import Segmentation, SegmentationStatistics

MPP, SIDE, BATCH = 1.24, 128, 16
_FILTERS = (16, 32, 64, 128, 256)


def stored(slides: Path, store: Path, mpp: float, side: int) -> Path:
    """Return a store of all patches of the images."""
    if not store.exists():
        histopipe.ingest(
            slides,
            out=store,
            mpp=mpp,
            default_mpp=mpp,
            patch_size=side,
            tissue="none",
            edge="shift",
        )
    return store


def write_subsets(glas: Path, path: Path) -> None:
    """Write the published division."""
    with (glas / "labels.csv").open(newline="") as file, path.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["slide", "patient", "subset"])
        for row in csv.DictReader(file):
            subset = "train" if row["set"] == "train" else "test"
            writer.writerow([row["slide"], row["patient"], subset])


def trained(out: Path, **settings: Any) -> float:
    """Train unless the run is finished. Return the duration in seconds."""
    began = time.perf_counter()
    if not (out / "metrics.json").exists():
        histopipe.train(
            out=out, resume=(out / "config.toml").exists(), task="segmentation", **settings
        )
    return time.perf_counter() - began


def of_sets(out: Path, separator: str = "_") -> str:
    """Return the metrics of the test images of a run, by the beginning of their names before a separator."""
    test = read_predictions(out / "predictions.csv")["test"]
    starts = [slide.partition(separator)[0] for slide in test.slides]
    texts = []
    for name in sorted(set(starts)):
        chosen = np.array([start == name for start in starts])
        part = test.rows(np.flatnonzero(chosen[test.slide]))
        scores = scores_of(part, "slide", "mean", EvaluationSettings())
        texts.append(f"{name} ({len(scores)}): {described(scores.task, scores.output)}")
    return "; ".join(texts)


def described(task: Any, counts: NDArray[np.float64]) -> str:
    """Return Dice and intersection over union of each class, means over (N, C) counts of images."""
    values = SegmentationStatistics(
        task.classes, counts, np.arange(len(counts), dtype=np.int32)
    ).values()
    return ", ".join(
        f"{name} Dice {values[f'dice:{name}']:.3f} IoU {values[f'iou:{name}']:.3f}"
        for name in task.classes
    )


def unet(side: int, classes: int) -> Any:
    """Return a plain U-Net of Keras: two convolutions at each of five sizes."""
    import keras
    from keras import layers

    def block(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.Activation("relu")(layers.BatchNormalization()(x))
        return x

    image = keras.Input((side, side, 3), dtype="uint8")
    x, skips = layers.Rescaling(1 / 127.5, -1)(image), []
    for filters in _FILTERS[:-1]:
        skips.append(block(x, filters))
        x = layers.MaxPooling2D(2)(skips[-1])
    x = block(x, _FILTERS[-1])
    for skip, filters in zip(reversed(skips), reversed(_FILTERS[:-1]), strict=True):
        x = block(layers.Concatenate()([layers.Conv2DTranspose(filters, 2, 2)(x), skip]), filters)
    return keras.Model(image, layers.Conv2D(classes, 1, activation="softmax")(x))


def train_unet(store: Path, masks: Path, run: Path, epochs: int, area: str) -> str:
    """Train the U-Net on the training patches of a run, and return its metrics on the test images."""
    import keras
    import tensorflow as tf

    from histopipe.dataset.transforms import augment_masks, flip_and_turn
    from histopipe.training.segmenter import SegmentationObjective

    keras.utils.set_random_seed(1)
    settings: dict[str, Any] = {
        "masks": masks, "annotated_area": area, "splits": run / "splits.json", "batch_size": BATCH,
    }  # fmt: skip
    data = histopipe.load_dataset(store, seed=1, epochs=epochs, subset="train", **settings)
    classes = data.classes

    def moved(number: Any, batch: Any) -> tuple[Any, Any, Any]:
        seeds = batch["key"] * 1009 + number
        image, mask = (
            flip_and_turn(batch["image"], seeds),
            augment_masks(batch["mask"], seeds, ("flips",)),
        )
        return image, mask, batch["weight"][:, None, None]

    model = unet(SIDE, len(classes))
    model.compile(
        keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(ignore_class=255)
    )
    began = time.perf_counter()
    model.fit(
        data.enumerate().map(moved), epochs=epochs, steps_per_epoch=data.steps_per_epoch, verbose=2,
        shuffle=False,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    objective = SegmentationObjective(len(classes))
    counts: dict[str, NDArray[np.float64]] = {}
    for batch in histopipe.load_dataset(
        store, shuffle=False, subset="test", columns=["slide"], **settings
    ):
        each = objective.outcomes(batch, tf.constant(model(batch["image"], training=False))).numpy()
        for name, row, weight in zip(batch["slide"].numpy(), each, batch["weight"], strict=True):
            if weight:
                counts[name.decode()] = counts.get(name.decode(), 0) + row.astype(np.float64)
    task = Segmentation(classes=tuple(classes))
    texts = []
    for name in sorted({slide.partition("_")[0] for slide in counts}):
        of_set = np.array([counts[slide] for slide in counts if slide.startswith(name + "_")])
        texts.append(f"{name} ({len(of_set)}): {described(task, of_set)}")
    return f"{'; '.join(texts)}, {seconds:.0f} s, {model.count_params():,} parameters"


def main() -> None:
    """Run the chosen parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("glas", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--monuseg", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--only", default="glas,unet,patients,monuseg")
    arguments = parser.parse_args()
    glas, work, epochs = arguments.glas, arguments.work, arguments.epochs
    work.mkdir(parents=True, exist_ok=True)
    chosen, masks, labels = arguments.only.split(","), glas / "annotations", work / "subsets.csv"
    write_subsets(glas, labels)
    store = stored(glas / "slides", work / "glas.lmdb", MPP, SIDE)
    published: dict[str, Any] = {
        "stores": store, "masks": masks, "labels": labels, "split_column": "subset", "allow_leaks": True,
        "fractions": (0.5, 0.0, 0.5), "epochs": epochs, "batch_size": BATCH,
    }  # fmt: skip
    for seed in range(1, arguments.seeds + 1) if "glas" in chosen else ():
        seconds = trained(work / f"glas-{seed}", seed=seed, **published)
        print(f"GlaS, seed {seed}: {of_sets(work / f'glas-{seed}')}, {seconds:.0f} s", flush=True)
    if "unet" in chosen:
        print(
            f"GlaS, U-Net: {train_unet(store, masks, work / 'glas-1', epochs, 'outlines')}",
            flush=True,
        )
    if "patients" in chosen:
        out = work / "patients"
        seconds = trained(
            out,
            stores=store,
            masks=masks,
            labels=labels,
            split_by="patient",
            epochs=epochs,
            batch_size=BATCH,
        )
        print(f"GlaS by patient: {of_sets(out)}, {seconds:.0f} s; see {out}", flush=True)
    if "monuseg" in chosen and arguments.monuseg is not None:
        folder, out = arguments.monuseg, work / "monuseg"
        nuclei = stored(folder / "slides", work / "monuseg.lmdb", 0.25, 256)
        seconds = trained(
            out, stores=nuclei, masks=folder / "annotations", labels=folder / "labels.csv",
            split_column="subset", fractions=(0.5, 0.0, 0.5), annotated_area="all", unclassified="nucleus", epochs=epochs,
            batch_size=BATCH,
        )  # fmt: skip
        print(f"MoNuSeg: {of_sets(out, '-')}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
