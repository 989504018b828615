"""Run the full pipeline on synthetic slides with outlines: ingest, training, prediction, heatmaps and reports."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from histopipe.demo.slide_demo import (
    FRACTIONS,
    SlideDemoResult,
    demo_of_slide_models,
    draw_textures,
)
from histopipe.demo.synthetic_slides import SlideSettings, make_slide, shifted_textures
from histopipe.errors import HistopipeError, MachineShort, UsageError
from histopipe.evaluation.evaluate import split_lines
from histopipe.geometry import Size
from histopipe.inference.predict import predict
from histopipe.ingestion.request import ingest
from histopipe.measure.quality import quality
from histopipe.reports import charts
from histopipe.reports.data_description import read_run
from histopipe.reports.heatmap import heatmap
from histopipe.reports.html_page import plan_image
from histopipe.reports.report import report
from histopipe.runs.recipe import SMALL_CNN
from histopipe.runs.result import TrainResult
from histopipe.runs.train import train
from histopipe.store.reading import decode_picture
from histopipe.store.store import Store
from histopipe.system.files import atomic_write
from histopipe.system.output import Progress, default_progress
from histopipe.tasks.statistics import Roc, roc_of

_SIZE, _NEW_SIZE = Size(1536, 1536), Size(3072, 3072)
_NODULES = 2
_NEW_SLIDES = 2
_STAINS = 5
_SLIDES = 40
_LEAST_SLIDES = 6


@dataclass(frozen=True, slots=True, repr=False)
class DemoResult:
    """Results of `demo`.

    `slides` have outlines. `new_slides` have none and are not used for training. `reports` are those of the store and
    of the run. `pictures` is a folder with images of the patch grid of a slide, the ROC curve and a heatmap.
    """

    slides: Path
    new_slides: Path
    store: Path
    run: Path
    predictions: Path
    heatmaps: Path
    reports: tuple[Path, Path]
    pictures: Path
    result: TrainResult

    def to_json(self) -> dict[str, Any]:
        """Return the paths as a JSON-ready dict."""
        names = ("slides", "new_slides", "store", "run", "predictions", "heatmaps", "pictures")
        paths = {name: str(getattr(self, name)) for name in names}
        return {**paths, "reports": [str(path) for path in self.reports]}

    def __repr__(self) -> str:
        lines = [
            *split_lines(self.result.metrics),
            f"heatmaps of new slides: {self.heatmaps}",
            f"open in a browser: {self.reports[0]}",
            f"                   {self.reports[1]}",
        ]
        return "\n".join(lines)


def demo(
    out: str | Path = "demo",
    *,
    slides: bool = False,
    count: int | None = None,
    progress: Progress | None = None,
) -> DemoResult | SlideDemoResult:
    """Make synthetic slides, ingest them, train on their outlines, predict new slides, and write reports.

    Args:
        out: folder for all results. It must be empty or missing.
        slides: train a slide model on the labels of slides, instead of a patch model on outlines.
        count: number of slides for training, 6 or more; by default 40.
        progress: shows the progress; `default_progress()` if None.

    Raises:
        UsageError: the folder is not empty, or there are too few slides.
        MachineShort: TensorFlow is not installed.

    Example:
        >>> demo("demo").reports  # doctest: +SKIP
    """
    count = _SLIDES if count is None else count
    if count < _LEAST_SLIDES:
        expected = f"{_LEAST_SLIDES} or more: two for each side of the split"
        raise UsageError("--count", found=count, expected=expected)
    if importlib.util.find_spec("tensorflow") is None:
        needs = "the demo needs TensorFlow to train a model"
        raise MachineShort(needs, todo="pip install 'histopipe[train]'")
    out, display = Path(out), progress or default_progress()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        todo = "remove it, or choose another --out"
        raise UsageError(f"{out} exists and is not empty", todo=todo)
    if slides:
        return demo_of_slide_models(out, count, display)
    labelled, new = out / "slides", out / "new-slides"
    store, run = out / "patches.lmdb", out / "run"
    predictions, heatmaps, pictures = out / "predictions", out / "heatmaps", out / "pictures"

    def step(number: int, text: str) -> None:
        display.message(f"{number}/6 {text}")

    step(1, f"make {count} synthetic slides for training, and {_NEW_SLIDES} new slides")
    _make(labelled, new, count)
    step(2, "ingest the slides, with patch labels from their outlines")
    ingested = ingest(
        labelled, store, patch_size=128, mpp=0.5, annotations=labelled, progress=display
    )
    for name, reason in ingested.failed.items():
        raise HistopipeError(f"the synthetic slide {name} failed", found=reason)
    step(3, "measure focus, pen marks and folds of every patch")
    quality(store, progress=display)
    step(4, "train on the patch labels, split by slide")
    result = train(
        store,
        out=run,
        model=SMALL_CNN,
        labels_from="annotation",
        split_by="slide",
        fractions=FRACTIONS,
        epochs=6,
    )
    step(5, "predict the new slides, and draw heatmaps")
    predict(run, new, out=predictions)
    heatmap(predictions, out=heatmaps, slides=[new], formats=["png", "tiff", "geojson"])
    step(6, "write reports")
    reports = report(store).file, report(run).file
    _pictures(pictures, store, run, heatmaps)
    return DemoResult(labelled, new, store, run, predictions, heatmaps, reports, pictures, result)


def _make(labelled: Path, new: Path, count: int) -> None:
    textures = draw_textures(_STAINS)
    for number in range(count + _NEW_SLIDES):
        folder = labelled if number < count else new
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"slide-{number:03d}.svs"
        size = _SIZE if folder == labelled else _NEW_SIZE
        shifted: dict[str, Any] = shifted_textures(textures[number % _STAINS], number)
        make_slide(path, "normal", number, SlideSettings(size=size, nodules=_NODULES, **shifted))
        if folder == new:
            path.with_suffix(".geojson").unlink()


def _pictures(folder: Path, store: Path, run: Path, heatmaps: Path) -> None:
    """Write three small images of the results."""
    folder.mkdir(exist_ok=True)
    with Store(store) as opened:
        number, record = next(iter(opened.complete.items()))
        index, mask = opened.index(number), opened.thumbnail(number, "mask")
        thumbnail = decode_picture(opened.thumbnail(number) or b"", record.id)
        corners = np.stack([index["x_l0"], index["y_l0"]], axis=1)
        side = (record.read_size or 0) * (record.downsample or 0)
    tissue = None if mask is None else decode_picture(mask, record.id, mode="L")
    picture = plan_image(thumbnail, tissue, corners, side, record.bounds)
    _write_png(folder / "ingest.png", Image.fromarray(picture))
    with ExitStack() as stack:
        run_data = read_run(run, [], stack)
        curves: dict[str, Roc] = {}
        for name, patches in run_data.predictions.items():
            roc = roc_of(
                patches.label == 1, patches.output[:, 1].astype(np.float64), patches.patient,
                patients=len(patches.patients), seed=1,
            )  # fmt: skip
            if roc is not None:
                curves[name] = roc
    charts.write_roc_png(folder / "roc.png", "ROC of patches", curves)
    with Image.open(min(heatmaps.rglob("*.png"))) as image:
        image.thumbnail((520, 520))
        _write_png(folder / "heatmap.png", image.convert("RGB"))


def _write_png(path: Path, image: Image.Image) -> None:
    with atomic_write(path) as part:
        image.convert("P", palette=Image.Palette.ADAPTIVE).save(part, "PNG", optimize=True)
