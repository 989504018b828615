"""Run the pipeline of slide models on synthetic slides: features, training, prediction of new slides, heatmaps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.demo.synthetic_slides import (
    SlideSettings,
    make_slide,
    shifted_textures,
    synthetic_texture,
)
from histopipe.errors import HistopipeError
from histopipe.evaluation.evaluate import evaluation_lines, split_lines
from histopipe.geometry import Size
from histopipe.inference.embed import embed
from histopipe.inference.encoder import SMALL
from histopipe.inference.predict import predict
from histopipe.inference.predict_patches import PredictResult
from histopipe.ingestion.request import ingest
from histopipe.reports.heatmap import heatmap
from histopipe.reports.report import report
from histopipe.runs.result import TrainResult
from histopipe.runs.train import train
from histopipe.system.arrays import PixelArray
from histopipe.system.csv_files import write_table
from histopipe.system.output import Progress

_SIZE = Size(1536, 1536)
_MPP = 0.499
_NODULES = 2
_STAINS = 3
_TEXTURES = {"texture": "normal", "tumour": "tumour"}
_NEW_SLIDES = 10
_LABELS = ("normal", "tumour")
FRACTIONS = (0.5, 0.25, 0.25)
"""Of 40 slides, each of one patient, validation and test have 10: enough for intervals."""


@dataclass(frozen=True, slots=True, repr=False)
class SlideDemoResult:
    """Results of `demo` with `slides`.

    `slides` are for training, `new_slides` are predicted straight from their files. `labels` is the table of both.
    `heatmaps` shows what each patch of the new slides contributes to the class tumour.
    """

    slides: Path
    new_slides: Path
    labels: Path
    store: Path
    features: Path
    run: Path
    predictions: Path
    heatmaps: Path
    report: Path
    result: TrainResult
    predicted: PredictResult

    def to_json(self) -> dict[str, Any]:
        """Return the paths as a JSON-ready dict."""
        names = (
            "slides", "new_slides", "labels", "store", "features", "run", "predictions", "heatmaps", "report"
        )  # fmt: skip
        return {name: str(getattr(self, name)) for name in names}

    def __repr__(self) -> str:
        new = (
            []
            if self.predicted.metrics is None
            else evaluation_lines("new slides", self.predicted.metrics)
        )
        return "\n".join(
            [
                *split_lines(self.result.metrics),
                *new,
                f"heatmaps of new slides: {self.heatmaps}",
                f"open in a browser: {self.report}",
            ]
        )


def demo_of_slide_models(out: Path, count: int, progress: Progress) -> SlideDemoResult:
    """Make slides, with nodules of tumour in every second one, and go from them to predictions of new slides.

    `out` is empty or missing; `count` is the number of slides for training.
    """
    training, new, labels = out / "slides", out / "new-slides", out / "labels.csv"
    store, features, run = out / "patches.lmdb", out / "features", out / "run"
    predictions, heatmaps = out / "predictions", out / "heatmaps"

    def step(number: int, text: str) -> None:
        progress.message(f"{number}/6 {text}")

    step(1, f"make {count} synthetic slides for training, and {_NEW_SLIDES} new slides")
    _make(training, new, labels, count)
    step(2, "ingest the slides")
    ingested = ingest(training, store, patch_size=64, mpp=0.5, progress=progress)
    for name, reason in ingested.failed.items():
        raise HistopipeError(f"the synthetic slide {name} failed", found=reason)
    step(3, "compute features with a small encoder of random weights")
    embed(store, model=SMALL, out=features, progress=progress)
    step(4, "train a slide model on the labels of the slides")
    result = train(
        mil=features, labels=labels, allow_extra_rows=True, out=run, epochs=10,
        learning_rate=5e-4, split_by="slide", fractions=FRACTIONS,
    )  # fmt: skip
    step(5, "predict the new slides from their files, and draw heatmaps")
    predicted = predict(
        run, new, out=predictions, labels=labels, allow_extra_rows=True, progress=progress
    )
    heatmap(
        predictions, out=heatmaps, show="contribution", class_name=_LABELS[1], slides=[new],
        progress=progress,
    )  # fmt: skip
    step(6, "write a report")
    file = report(run).file
    return SlideDemoResult(
        training, new, labels, store, features, run, predictions, heatmaps, file, result, predicted
    )


def draw_textures(count: int) -> list[dict[str, PixelArray]]:
    """Return textures of normal tissue and tumour, by name of the setting."""
    rng = np.random.default_rng(1)
    return [
        {name: synthetic_texture(rng, kind, _MPP) for name, kind in _TEXTURES.items()}
        for _ in range(count)
    ]


def _make(training: Path, new: Path, labels: Path, count: int) -> None:
    rows = []
    textures = draw_textures(_STAINS)
    for number in range(count + _NEW_SLIDES):
        folder = training if number < count else new
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"slide-{number:03d}.svs"
        positive = number % 2
        # Slides of both classes share textures.
        shifted: dict[str, Any] = shifted_textures(textures[number // 2 % _STAINS], number)
        settings = SlideSettings(size=_SIZE, mpp=_MPP, nodules=_NODULES * positive, **shifted)
        make_slide(path, "normal", number, settings)
        path.with_suffix(".geojson").unlink()
        rows.append((path.stem, _LABELS[positive]))
    write_table(labels, ["slide", "label"], rows)
