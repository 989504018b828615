"""Draw heatmaps of predictions, or of attention, over slides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from histopipe.dataset.selection import store_paths
from histopipe.errors import NothingToDo, UsageError
from histopipe.features.feature_file import paths_of_stores
from histopipe.predictions.predictions_folder import PredictionsFolder
from histopipe.reports.heatmap_files import (
    Objects,
    write_heatmap_geojson,
    write_heatmap_png,
    write_heatmap_tiff,
)
from histopipe.reports.heatmap_sources import Show, SlideImages, open_values
from histopipe.reports.heatmap_values import NamedPatchValues
from histopipe.runs import folder as run_folder
from histopipe.runs.task_config import read_config
from histopipe.slides.discovery import discover
from histopipe.store.catalog import parts_of
from histopipe.store.store import Store
from histopipe.system.files import path_within
from histopipe.system.filesystems import roomy
from histopipe.system.progress import Progress, default_progress
from histopipe.system.result import Result, counted, slide_failure

HeatmapFormat = Literal["png", "tiff", "geojson"]
FORMATS: tuple[HeatmapFormat, ...] = get_args(HeatmapFormat)


@dataclass(frozen=True, repr=False)
class HeatmapResult(Result):
    """Result of `heatmap`.

    Attributes:
        folder: folder of the files.
        files: files that were written, by slide id.
        failed: reason by slide id.
    """

    folder: Path
    files: Mapping[str, tuple[Path, ...]]
    failed: Mapping[str, str]

    def __str__(self) -> str:
        count = sum(map(len, self.files.values()))
        lines = [f"{counted(count, 'file')} of {counted(len(self.files), 'slide')}: {self.folder}"]
        lines += [f"failed: {name}: {reason}" for name, reason in sorted(self.failed.items())]
        return "\n".join(lines)


def heatmap(
    predictions: str | Path,
    *,
    out: str | Path = "heatmaps",
    slide: Sequence[str] = (),
    class_name: str | None = None,
    show: Show | None = None,
    formats: Sequence[str] = ("png",),
    stores: Sequence[str | Path] = (),
    slides: Sequence[str | Path] = (),
    objects: Objects = "cells",
    threshold: float = 0.5,
    progress: Progress | None = None,
) -> HeatmapResult:
    """Draw heatmaps of predictions, or of attention, over slides.

    Args:
        predictions: folder of `histopipe predict`, or of a finished run: its validation and test patches, or the
            attention of a slide model and the contributions of patches.
        out: folder for the files `SLIDE.heat.FORMAT`.
        slide: ids of the slides to draw; all if empty.
        class_name: class whose probability, or to which the contribution, is drawn; the last class by name if None. In
            slide models of other tasks: name of the label or number.
        show: for slide models, "attention" (default) or "contribution" of the patches to the prediction.
        formats: "png", "tiff" and "geojson".
        stores: stores of the patches; by default the stores of the run, or of the features that it was trained on.
        slides: slide files, or folders of slide files, for finer images than the thumbnails.
        objects: objects of GeoJSON files: "cells", or "contours" around patches with values of at least `threshold`.
        threshold: threshold of the contours, 0 to 1.
        progress: shows the progress; `default_progress()` if None.

    Returns:
        The files, and the reasons why slides failed.

    Raises:
        UsageError: the folder holds no predictions, or an option does not match them.
        NothingToDo: there is no patch to draw.
        DamagedStore: predictions or a store cannot be read.
        MachineShort: the disk is full.

    Example:
        >>> heatmap("predictions", out="heatmaps", formats=["png", "tiff"])  # doctest: +SKIP
        16 files of 8 slides: heatmaps
    """
    _check(formats, threshold)
    folder, target, display = Path(predictions), Path(out), progress or default_progress()
    run_folder.check_one_run(folder)
    files: dict[str, tuple[Path, ...]] = {}
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        opened = _open_stores(folder, stores, stack)
        slide_files = discover([Path(path) for path in slides]) if slides else []
        predicted = PredictionsFolder(folder)
        images = SlideImages(
            {file.id: file.path for file in slide_files},
            opened,
            predicted if predicted.exists else None,
        )
        bar = stack.enter_context(closing(display.bar("drawing", unit="slides", detail=True)))
        with run_folder.writable(target):
            target.mkdir(parents=True, exist_ok=True)
        stack.enter_context(roomy(target))

        def write(values: NamedPatchValues, kind: str) -> Path:
            base = path_within(target, values.slide)
            base.parent.mkdir(parents=True, exist_ok=True)
            # The suffix .heat avoids the names of slide files and of annotations.
            path = base.with_name(f"{base.name}.heat.{kind}")
            if kind == "tiff":
                write_heatmap_tiff(values, path)
            elif kind == "geojson":
                write_heatmap_geojson(values, path, objects=objects, threshold=threshold)
            else:
                background = images.of(values.slide)
                if background is None:
                    hint = "no image of the slide found; use --slides or --store"
                    display.message(f"{values.slide}: {hint}")
                write_heatmap_png(values, background, path)
            return path

        names, read_values = open_values(folder, opened, class_name, slide, show=show)
        for name in names:
            try:
                values = read_values(name)
                if values is not None:
                    files[name] = tuple(write(values, kind) for kind in formats)
            except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                failed[name] = slide_failure(error)
                display.message(f"{name}: failed: {failed[name]}")
            bar.advance()
    if not files and not failed:
        raise NothingToDo(f"{folder} has no patches to draw")
    return HeatmapResult(target, files, failed)


def _check(formats: Sequence[str], threshold: float) -> None:
    if not formats or any(kind not in FORMATS for kind in formats):
        raise UsageError("--to", found=", ".join(formats), expected=" or ".join(FORMATS))
    if not 0 <= threshold <= 1:
        raise UsageError("--threshold", found=threshold, expected="0 to 1")


def _open_stores(folder: Path, stores: Sequence[str | Path], stack: ExitStack) -> list[Store]:
    """Open `stores`, or else the existing stores of a run, or those of the features that it was trained on."""
    config = folder / run_folder.CONFIG
    paths = store_paths(stores) if stores else []
    if not stores and config.exists():
        parts = (part for path in paths_of_stores(read_config(config)) for part in parts_of(path))
        paths = [path for path in parts if (path / "data.mdb").exists()]
    return [stack.enter_context(Store(path)) for path in paths]
