"""Run the full pipeline on synthetic slides: ingest, training, prediction of new slides, heatmaps and reports."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from histopipe.demo.synthetic_slides import (
    SlideSettings,
    make_slide,
    shifted_textures,
    synthetic_texture,
    texture_side,
)
from histopipe.errors import HistopipeError, MachineShort, UsageError
from histopipe.evaluation.evaluate import evaluation_lines, split_lines
from histopipe.geometry import Size
from histopipe.inference.embed import embed
from histopipe.inference.encoder import SMALL
from histopipe.ingestion.ingest import ingest
from histopipe.measure.quality import quality
from histopipe.predicting.external_evaluation import PredictResult
from histopipe.predicting.predict import predict
from histopipe.predictions.prediction_tables import PREDICTIONS, read_predictions
from histopipe.reports import charts
from histopipe.reports.heatmap import heatmap
from histopipe.reports.report import report
from histopipe.reports.store_report import draw_plan
from histopipe.runs.defaults import SMALL_CNN
from histopipe.runs.run import TrainResult
from histopipe.runs.train import train
from histopipe.store.store import Store
from histopipe.system.files import atomic_write
from histopipe.system.output import Progress, Result, default_progress
from histopipe.system.table_files import write_table
from histopipe.tasks.statistics import Roc, roc_of

_SIZE, _NEW_SIZE = Size(1536, 1536), Size(3072, 3072)
_MPP = 0.499
_NODULES = 2
_SLIDES, _LEAST_SLIDES = 40, 6
_NEW_SLIDES, _NEW_LABELLED_SLIDES = 2, 10
"""Number of slides for a patch model, which have no labels, and for a slide model."""
_STAINS, _STAINS_OF_LABELLED = 5, 3
_LABELS = ("normal", "tumour")
_FRACTIONS = (0.5, 0.25, 0.25)
"""Of 40 slides, each of one patient, validation and test have 10: enough for intervals."""


@dataclass(frozen=True, slots=True, repr=False)
class DemoResult(Result):
    """Results of `demo`.

    Attributes:
        folder: folder of all results. `slides` are for training; `new-slides` are not.
        heatmaps: folder of the heatmaps of new slides.
        reports: reports of the store (of a patch model only) and of the run.
        result, predicted: results of the training, and of the prediction of new slides.
    """

    folder: Path
    heatmaps: Path
    reports: tuple[Path, ...]
    result: TrainResult
    predicted: PredictResult

    def __str__(self) -> str:
        lines = split_lines(self.result.metrics)
        if self.predicted.metrics is not None:
            lines += evaluation_lines("new slides", self.predicted.metrics)
        pages = "\n                   ".join(map(str, self.reports))
        return "\n".join(
            [*lines, f"heatmaps of new slides: {self.heatmaps}", f"open in a browser: {pages}"]
        )


def demo(
    out: str | Path = "demo",
    *,
    slides: bool = False,
    count: int = _SLIDES,
    progress: Progress | None = None,
) -> DemoResult:
    """Make synthetic slides, ingest them, train on their outlines, predict new slides, and write reports.

    Writes small images of the patch grid of a slide, the ROC curve and a heatmap into `pictures`.

    Args:
        out: folder for all results. It must be empty or missing.
        slides: train a slide model on the labels of slides, instead of a patch model on outlines. Its heatmaps show what
            each patch contributes to the class tumour.
        count: number of slides for training, 6 or more.
        progress: shows the progress; `default_progress()` if None.

    Raises:
        UsageError: the folder is not empty, or there are too few slides.
        MachineShort: TensorFlow is not installed.

    Example:
        >>> demo("demo").reports  # doctest: +SKIP
    """
    if count < _LEAST_SLIDES:
        raise UsageError(
            "--count",
            found=count,
            expected=f"{_LEAST_SLIDES} or more: two for each subset of the split",
        )
    if importlib.util.find_spec("tensorflow") is None:
        raise MachineShort(
            "the demo needs TensorFlow to train a model", todo="pip install 'histopipe[train]'"
        )
    out, display = Path(out), progress or default_progress()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(
            f"{out} exists and is not empty", todo="remove it, or choose another --out"
        )
    new_count = _NEW_LABELLED_SLIDES if slides else _NEW_SLIDES
    display.message(f"1/6 make {count} synthetic slides for training, and {new_count} new slides")
    labels = make_demo_slides(out, count, new_count, labelled=slides)
    with_labels = "" if slides else ", with patch labels from their outlines"
    display.message(f"2/6 ingest the slides{with_labels}")
    ingested = ingest(
        out / "slides",
        out / "patches.lmdb",
        patch_size=64 if slides else 128,
        mpp=0.5,
        annotations=None if slides else out / "slides",
        progress=display,
    )
    for name, reason in ingested.failed.items():
        raise HistopipeError(f"the synthetic slide {name} failed", found=reason)
    return _use_slide_model(out, labels, display) if slides else _use_patch_model(out, display)


def _use_slide_model(
    out: Path, slide_labels: Sequence[tuple[str, str]], display: Progress
) -> DemoResult:
    """Train a slide model, and predict the new slides from their files."""
    labels, new, run, heatmaps = (
        out / name for name in ("labels.csv", "new-slides", "run", "heatmaps")
    )
    write_table(labels, ["slide", "label"], slide_labels)
    display.message("3/6 compute features with a small encoder of random weights")
    embed(out / "patches.lmdb", model=SMALL, out=out / "features", progress=display)
    display.message("4/6 train a slide model on the labels of the slides")
    result = train(
        mil=out / "features",
        labels=labels,
        allow_extra_rows=True,
        out=run,
        epochs=10,
        learning_rate=5e-4,
        split_by="slide",
        fractions=_FRACTIONS,
    )
    display.message("5/6 predict the new slides from their files, and draw heatmaps")
    predictions = out / "predictions"
    predicted = predict(
        run, new, out=predictions, labels=labels, allow_extra_rows=True, progress=display
    )
    heatmap(
        predictions,
        out=heatmaps,
        show="contribution",
        class_name=_LABELS[1],
        slides=[new],
        progress=display,
    )
    display.message("6/6 write a report")
    return DemoResult(out, heatmaps, (report(run).file,), result, predicted)


def _use_patch_model(out: Path, display: Progress) -> DemoResult:
    """Train a patch model, predict the new slides, and write pictures of the results."""
    store, new, run, heatmaps = (
        out / name for name in ("patches.lmdb", "new-slides", "run", "heatmaps")
    )
    display.message("3/6 measure focus, pen marks and folds of every patch")
    quality(store, progress=display)
    display.message("4/6 train on the patch labels, split by slide")
    result = train(
        store,
        out=run,
        model=SMALL_CNN,
        labels_from="annotation",
        split_by="slide",
        fractions=_FRACTIONS,
        epochs=6,
    )
    display.message("5/6 predict the new slides, and draw heatmaps")
    predicted = predict(run, new, out=out / "predictions")
    heatmap(out / "predictions", out=heatmaps, slides=[new], formats=["png", "tiff", "geojson"])
    display.message("6/6 write reports")
    reports = report(store).file, report(run).file
    _write_pictures(out / "pictures", store, run, heatmaps)
    return DemoResult(out, heatmaps, reports, result, predicted)


def make_demo_slides(
    out: Path, count: int, new_count: int, *, labelled: bool
) -> list[tuple[str, str]]:
    """Make slides for training with outlines, and new slides; or `labelled` slides without, every second one with tumour.

    Return the names and labels of all slides.
    """
    rng = np.random.default_rng(1)
    side = texture_side(_SIZE if labelled else _NEW_SIZE, SlideSettings.tile)
    textures = [
        {
            "texture": synthetic_texture(rng, "normal", _MPP, side),
            "tumour": synthetic_texture(rng, "tumour", _MPP, side),
        }
        for _ in range(_STAINS_OF_LABELLED if labelled else _STAINS)
    ]
    table = []
    for number in range(count + new_count):
        is_new, positive = number >= count, number % 2
        path = out / ("new-slides" if is_new else "slides") / f"slide-{number:03d}.svs"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Slides of both labels share textures.
        texture = textures[(number // 2 if labelled else number) % len(textures)]
        shifted: dict[str, Any] = shifted_textures(texture, number)
        settings = SlideSettings(
            size=_NEW_SIZE if is_new and not labelled else _SIZE,
            mpp=_MPP,
            nodules=_NODULES * positive if labelled else _NODULES,
            **shifted,
        )
        make_slide(path, "normal", number, settings)
        if is_new or labelled:
            path.with_suffix(".geojson").unlink()
        table.append((path.stem, _LABELS[positive]))
    return table


def _write_pictures(folder: Path, store: Path, run: Path, heatmaps: Path) -> None:
    """Write three small images of the results."""
    folder.mkdir(exist_ok=True)
    with Store(store) as opened:
        number = next(iter(opened.complete))
        plan = draw_plan(opened, number, opened.index(number))
    if plan is not None:
        _write_png(folder / "ingest.png", Image.fromarray(plan))
    rocs = {
        name: roc_of(
            patches.label == 1,
            patches.output[:, 1].astype(np.float64),
            patches.patient,
            patients=len(patches.patients),
            seed=1,
        )
        for name, patches in read_predictions(run / PREDICTIONS).items()
    }
    curves: dict[str, Roc] = {name: roc for name, roc in rocs.items() if roc is not None}
    charts.write_roc_png(folder / "roc.png", "ROC of patches", curves)
    with Image.open(min(heatmaps.rglob("*.png"))) as image:
        image.thumbnail((520, 520))
        _write_png(folder / "heatmap.png", image.convert("RGB"))


def _write_png(path: Path, image: Image.Image) -> None:
    with atomic_write(path) as part:
        image.convert("P", palette=Image.Palette.ADAPTIVE).save(part, "PNG", optimize=True)
