"""Everything once, on made slides: from slides with outlines to a trained model, heatmaps of new slides, and reports."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from histopipe.annotations.folder import find_annotations
from histopipe.demo.slide_maker import SlideSettings, make_slide
from histopipe.errors import HistopipeError, MachineShort, UsageError
from histopipe.evaluation.roc import Roc, roc_of
from histopipe.evaluation.scores import scores_of
from histopipe.geometry import Mpp, Size
from histopipe.inference.predict import predict
from histopipe.ingest.outcome import IngestReport, Status
from histopipe.ingest.progress import Progress
from histopipe.ingest.request import IngestOptions
from histopipe.ingest.run import ingest
from histopipe.measure.quality import measure_quality
from histopipe.reports import charts
from histopipe.reports.heatmap import heatmap
from histopipe.reports.page_images import plan_image
from histopipe.reports.report import report
from histopipe.reports.run_data import read_run
from histopipe.runs.result import TrainResult
from histopipe.runs.supervision import train
from histopipe.slides.discovery import discover
from histopipe.slides.tables import SlideNames
from histopipe.store.picture import decode_picture
from histopipe.store.store import Store
from histopipe.system.files import appearing
from histopipe.tiling.spec import TilingSpec

_SIZE = Size(3072, 3072)
_NODULES = 2
_NEW = 2
_EPOCHS = 6
_SPEC = TilingSpec(patch_size=128, mpp=Mpp(0.5))
STEPS = 6


@dataclass(frozen=True, slots=True)
class Demo:
    """What a demo has made.

    Attributes:
        slides, new: folders of slides with outlines, and of two without, which no training sees.
        store, run, predictions, heatmaps: as the commands of these names make them.
        reports: of store and run.
        pictures: of what was tiled of a slide, the ROC curve, and a heatmap.
        result: of the training.
    """

    slides: Path
    new: Path
    store: Path
    run: Path
    predictions: Path
    heatmaps: Path
    reports: tuple[Path, Path]
    pictures: Path
    result: TrainResult


def demo(out: Path, *, slides: int, progress: Progress, step: Callable[[int, str], None]) -> Demo:
    """Make slides of tissue with tumour in it, and take them all the way.

    Args:
        out: the folder for all of it; it must not be there, or be empty.
        slides: how many to train on.
        progress: told of the ingest.
        step: called with the number of each step, from 1, and what it is.

    Raises:
        UsageError: the folder holds something, or there are fewer than six slides.
        MachineShort: TensorFlow is not installed.
    """
    if slides < 6:
        raise UsageError(
            "--slides", found=slides, expected="6 or more: two for each side of the split"
        )
    if importlib.util.find_spec("tensorflow") is None:
        raise MachineShort(
            "the demo trains a model, which needs TensorFlow", todo="pip install 'histopipe[train]'"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(
            f"{out} exists and is not empty", todo="remove it, or choose another --out"
        )
    made, new, store = out / "slides", out / "new-slides", out / "patches.lmdb"
    step(1, f"making {slides} slides, and {_NEW} that no training sees")
    _make(made, new, slides)
    step(2, "tiling them into a store, with classes from their outlines")
    _ingest(made, store, progress)
    step(3, "measuring focus, pen and folds of every patch")
    measure_quality(store)
    step(4, "training on the classes drawn, split by slide")
    result = train(
        store, out=out / "run", labels_from="annotation", split_by="slide", epochs=_EPOCHS, max_per_slide=300,
    )  # fmt: skip
    step(5, "predicting the new slides, straight from their files")
    predict(out / "run", new, out=out / "predictions")
    heatmap(
        out / "predictions", out=out / "heatmaps", slides=[new], formats=["png", "tiff", "geojson"]
    )
    step(6, "writing reports")
    reports = report(store).file, report(out / "run").file
    pictures = out / "pictures"
    _pictures(pictures, store, out / "run", out / "heatmaps")
    return Demo(
        made,
        new,
        store,
        out / "run",
        out / "predictions",
        out / "heatmaps",
        reports,
        pictures,
        result,
    )


def _make(made: Path, new: Path, count: int) -> None:
    settings = SlideSettings(size=_SIZE, nodules=_NODULES)
    for number in range(count + _NEW):
        folder = made if number < count else new
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"slide-{number:03d}.svs"
        make_slide(path, "normal", number, settings)
        if folder == new:
            path.with_suffix(".geojson").unlink()


def _ingest(made: Path, store: Path, progress: Progress) -> IngestReport:
    slides = discover([made])
    files = find_annotations(made, SlideNames(slide.id for slide in slides))
    found = ingest(slides, store, _SPEC, IngestOptions(annotations=files.by_slide), progress)
    failed = found.of(Status.FAILED)
    if failed:
        raise HistopipeError(
            f"{failed[0].id} of the demo's own slides failed", found=failed[0].reason
        )
    return found


def _pictures(folder: Path, store: Path, run: Path, heatmaps: Path) -> None:
    """Three small pictures of what was done."""
    folder.mkdir(exist_ok=True)
    with Store(store) as opened:
        number, record = next(iter(opened.complete.items()))
        index, mask = opened.index(number), opened.thumbnail(number, "mask")
        thumbnail = decode_picture(opened.thumbnail(number) or b"", record.id)
        corners = np.stack([index["x_l0"], index["y_l0"]], axis=1)
        side = (record.read_size or 0) * (record.downsample or 0)
    tissue = None if mask is None else decode_picture(mask, record.id, mode="L")
    picture = plan_image(thumbnail, tissue, corners, side, record.bounds)
    with appearing(folder / "ingest.png") as part:
        Image.fromarray(picture).convert("P", palette=Image.Palette.ADAPTIVE).save(
            part, "PNG", optimize=True
        )
    with ExitStack() as stack:
        facts = read_run(run, [], stack)
        curves: dict[str, Roc] = {}
        for name, patches in facts.predictions.items():
            scores = scores_of(patches, "patch", "mean", top_k=1, positive=1)
            roc = roc_of(scores, 1, patients=len(patches.patients), seed=1)
            if roc is not None:
                curves[name] = roc
    charts.write_roc_png(folder / "roc.png", "ROC of patches", curves)
    drawn = sorted(heatmaps.rglob("*.png"))[0]
    with Image.open(drawn) as image, appearing(folder / "heatmap.png") as part:
        image.thumbnail((520, 520))
        image.convert("RGB").convert("P", palette=Image.Palette.ADAPTIVE).save(
            part, "PNG", optimize=True
        )
