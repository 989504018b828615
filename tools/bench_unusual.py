"""Measure which shifts the range of a training finds, and how often it marks patients like those of the training.

    python tools/bench_unusual.py SLIDES [--patients 60] [--repeats 10]

SLIDES has the real slides CMU-1-Small-Region.svs and TCGA-CR-7395-01A-01-TS1.svs. Features are those of
efficientnet-lite0. Patients are squares of one real slide, or synthetic ones whose stain and nuclei vary. For each source:
the share of held-out patients beyond the limit, and with each shift the share and the area under the ROC curve.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import openslide
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from histopipe.demo.synthetic_slides import synthetic_texture
from histopipe.evaluation.unusual import PatchFeatures, beyond, training_range
from histopipe.inference.networks import KerasNetwork, keras_encoder

SIDE, STEP, ROWS = 112, 56, 25
Images = NDArray[np.uint8]
"""(P, ROWS, SIDE, SIDE, 3) patches of patients."""


def with_colour(images: Images) -> Images:
    """Return images of another scanner: other gains, and another gamma."""
    light = (images / 255) ** np.array([1.15, 0.9, 1.05]) * np.array([0.97, 1.0, 0.93])
    return np.asarray(np.clip(255 * light, 0, 255), np.uint8)


def blurred(images: Images) -> Images:
    """Return images that are out of focus."""
    flat = images.reshape(-1, SIDE, SIDE, 3)
    blur = ImageFilter.GaussianBlur(2)
    return np.stack([np.asarray(Image.fromarray(i).filter(blur)) for i in flat]).reshape(
        images.shape
    )


def recompressed(images: Images) -> Images:
    """Return images with a slightly different brightness, which should hardly be found."""
    return np.clip(images.astype(np.int16) + 3, 0, 255).astype(np.uint8)


SHIFTS: Mapping[str, Callable[[Images], Images]] = {
    "colour of another scanner": with_colour,
    "out of focus": blurred,
    "3 of 255 brighter": recompressed,
}


def squares(path: Path) -> Images:
    """Return squares of a real slide that are mostly tissue, each as patches that overlap by half."""
    with openslide.OpenSlide(str(path)) as slide:
        pixels = np.asarray(slide.read_region((0, 0), 0, slide.dimensions).convert("RGB"))
    side = 3 * SIDE
    every = []
    for y in range(0, pixels.shape[0] - side + 1, side):
        for x in range(0, pixels.shape[1] - side + 1, side):
            square = pixels[y : y + side, x : x + side]
            if (square.min(axis=2) < 200).mean() > 0.5:
                places = range(0, side - SIDE + 1, STEP)
                every.append(
                    np.stack([square[v : v + SIDE, u : u + SIDE] for v in places for u in places])
                )
    return np.stack(every)


def synthetic(patients: int, seed: int) -> Images:
    """Return patients with random patches of textures of two classes; the stain of each varies."""
    rng = np.random.default_rng(seed)
    textures = [synthetic_texture(rng, kind, 0.5) for kind in ("normal", "tumour")]
    every = []
    for i in range(patients):
        places = rng.integers(0, textures[0].shape[0] - SIDE, (ROWS, 2)).tolist()
        patches = np.stack([textures[i % 2][y : y + SIDE, x : x + SIDE] for y, x in places])
        light = (patches / 255) ** rng.normal(1, 0.05, 3) * rng.uniform(0.97, 1, 3)
        every.append(np.clip(255 * light, 0, 255).astype(np.uint8))
    return np.stack(every)


def features_of(network: KerasNetwork, images: Images) -> NDArray[np.float32]:
    """Return (P, ROWS, D) features."""
    flat = images.reshape(-1, SIDE, SIDE, 3)
    parts = [
        network.finish(network.start(part))[: len(part)]
        for part in np.array_split(flat, -(-len(flat) // 64))
    ]
    return np.concatenate(parts).reshape(*images.shape[:2], -1)


def patches_of(features: NDArray[np.float32], chosen: NDArray[np.intp], name: str) -> PatchFeatures:
    """Return the patches of some patients."""
    names = np.repeat([f"{name}{i}" for i in chosen.tolist()], ROWS)
    return PatchFeatures(
        features[chosen].reshape(len(names), -1), np.zeros(len(names)), names, names
    )


def area(low: NDArray[np.floating], high: NDArray[np.floating]) -> float:
    """Return the probability that a value of `high` is above one of `low`."""
    pairs = high[:, None] - low[None]
    return float(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def measure(
    usual: NDArray[np.float32], shifted: Mapping[str, NDArray[np.float32]], repeats: int
) -> Iterator[str]:
    """Yield a row for the false alarms and one for each shift, which are means over random divisions of the patients."""
    alarms: list[tuple[float, float]] = []
    marked: dict[str, list[tuple[float, float, float]]] = {name: [] for name in shifted}
    for seed in range(repeats):
        order = np.random.default_rng(seed).permutation(len(usual))
        train, held, new = np.array_split(order, [len(order) // 3, 2 * len(order) // 3])
        reference = training_range(
            patches_of(usual, train, "t"), patches_of(usual, held, "h"), seed
        )
        assert reference is not None  # noqa: S101 - for mypy

        def scores(features: NDArray[np.float32]) -> tuple[NDArray[np.floating], float]:
            white = [patches @ reference.whitening for patches in features]  # noqa: B023
            each = [beyond([reference], [of_patient]) for of_patient in white]  # noqa: B023
            share = float(np.mean([(patches > 1).mean() for patches, _ in each]))
            return np.array([slide for _, slide in each]), share

        of_new, patches = scores(usual[new])
        alarms.append(((of_new > 1).mean(), patches))
        for name, features in shifted.items():
            part = features[new] if len(features) == len(usual) else features
            values, patches = scores(part)
            marked[name].append(((values > 1).mean(), patches, area(of_new, values)))
    slides, patches = np.mean(alarms, axis=0)
    yield f"| no shift | {slides:.3f} | {patches:.3f} | |"
    for name, rows in marked.items():
        slides, patches, roc = np.mean(rows, axis=0).tolist()
        yield f"| {name} | {slides:.3f} | {patches:.3f} | {roc:.3f} |"


def main() -> None:
    """Print a table for each source."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("slides", type=Path)
    parser.add_argument("--patients", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    network = keras_encoder(
        "efficientnet-lite0", weights="imagenet", patch_size=SIDE, devices="cpu", batch_size=64
    )
    skin = squares(options.slides / "CMU-1-Small-Region.svs")
    neck = squares(options.slides / "TCGA-CR-7395-01A-01-TS1.svs")
    drawn = synthetic(options.patients, 1)
    sources = {
        "skin, one slide": (skin, {"head and neck, another slide": neck}),
        "head and neck, one slide": (neck, {"skin, another slide": skin}),
        "synthetic patients": (drawn, {"skin, a real slide": skin}),
    }
    for title, (usual, unlike) in sources.items():
        shifted = {name: shift(usual) for name, shift in SHIFTS.items()} | unlike
        features = {name: features_of(network, images) for name, images in shifted.items()}
        print(f"\n{title}: {len(usual)} patients of {ROWS} patches")
        print("| shift | slides marked | patches marked | ROC |\n| --- | --- | --- | --- |")
        for row in measure(features_of(network, usual), features, options.repeats):
            print(row, flush=True)


if __name__ == "__main__":
    main()
