"""Heatmaps of slides: the library call behind `histopipe heatmap`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from histopipe.dataset.selection import store_paths
from histopipe.errors import DamagedStore, NothingToDo, SlideError, UsageError
from histopipe.features.folder import path_within
from histopipe.inference.predictions_folder import PredictionFolder, is_prediction
from histopipe.reports.background import Backgrounds
from histopipe.reports.heat import SlideHeat
from histopipe.reports.heat_geojson import Objects, write_heat_geojson
from histopipe.reports.heat_png import draw_heat
from histopipe.reports.heat_sources import HeatSource
from histopipe.reports.heat_tiff import write_heat_tiff
from histopipe.runs import folder as run_folder
from histopipe.runs.folder import check_one_run
from histopipe.runs.task_config import read_config
from histopipe.slides.discovery import discover
from histopipe.store.catalog import parts_of
from histopipe.store.store import Store
from histopipe.system.progress import default_progress, message

Format = Literal["png", "tiff", "geojson"]
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(slots=True)
class Drawn:
    """What was drawn.

    Attributes:
        files: written, by slide id.
        failed: why, by slide id.
    """

    files: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatmapOptions:
    """How heatmaps are drawn.

    Attributes:
        slide: only these, by id.
        class_name: whose probability; the last class by name if not given.
        formats: "png", "tiff" and "geojson".
        stores: of the patches; those of a run, if not given.
        slides: files or folders of slides, for finer pictures than the thumbnails that stores keep.
        objects: of GeoJSON: "cells", or "contours" from `threshold` on.
        threshold: 0 to 1.
    """

    slide: Sequence[str] = ()
    class_name: str | None = None
    formats: Sequence[str] = ("png",)
    stores: Sequence[str | Path] = ()
    slides: Sequence[str | Path] = ()
    objects: Objects = "cells"
    threshold: float = 0.5

    def __post_init__(self) -> None:
        wrong = [it for it in self.formats if it not in FORMATS]
        if wrong or not self.formats:
            raise UsageError("--to", found=", ".join(self.formats), expected=" or ".join(FORMATS))
        if self.objects not in get_args(Objects):
            raise UsageError("--objects", found=repr(self.objects), expected="cells or contours")
        if not 0 <= self.threshold <= 1:
            raise UsageError("--threshold", found=self.threshold, expected="from 0 to 1")


def heatmap(place: str | Path, *, out: str | Path, **options: Any) -> Drawn:
    """Draw heatmaps of predictions, or of attention.

    Args:
        place: a folder of `histopipe predict`, or of a finished run: of its validation and test patches, or, where it learnt from
            bags, of their attention.
        out: the folder for the files, which are called as the slides are.
        options: fields of `HeatmapOptions`.

    Raises:
        UsageError: there are no such predictions, slides, classes or formats.
        NothingToDo: no store tells where the patches lie.

    Example:
        >>> heatmap("predictions", out="heatmaps", formats=["png", "tiff"]).files  # doctest: +SKIP
    """
    settings, folder = HeatmapOptions(**options), Path(place)
    check_one_run(folder)
    result = Drawn()
    with ExitStack() as stack:
        stores = _stores(folder, settings, stack)
        source = HeatSource(folder, stores, settings.class_name)
        found = discover(map(Path, settings.slides)) if settings.slides else []
        predictions = PredictionFolder(folder) if is_prediction(folder) else None
        backgrounds = Backgrounds({it.id: it.path for it in found}, stores, predictions)
        progress = stack.enter_context(
            closing(default_progress().bar("drawing", unit="slides", detail=True))
        )
        with run_folder.writable(Path(out)):
            Path(out).mkdir(parents=True, exist_ok=True)
        stack.enter_context(run_folder.roomy(Path(out)))
        for name, heat_of in source.slides(settings.slide):
            try:
                heat = heat_of()
                if heat is not None:
                    result.files[name] = list(
                        map(str, _draw(heat, backgrounds, Path(out), settings))
                    )
            except (SlideError, DamagedStore, NothingToDo) as error:
                result.failed[name] = str(error)
                message(f"{name}: failed: {error}")
            progress.advance()
    if not result.files and not result.failed:
        raise NothingToDo(f"{folder} has no patch to draw")
    return result


def _draw(
    heat: SlideHeat, backgrounds: Backgrounds, out: Path, settings: HeatmapOptions
) -> list[Path]:
    base = path_within(out, heat.slide)
    base.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in settings.formats:
        # Never what a slide, or an outline of it, is called.
        path = base.with_name(f"{base.name}.heat.{kind}")
        if kind == "png":
            background = backgrounds.of(heat.slide)
            if background is None:
                message(f"{heat.slide}: no picture of it is at hand: give --slides or --store")
            draw_heat(heat, background, path)
        elif kind == "tiff":
            write_heat_tiff(heat, path)
        else:
            write_heat_geojson(heat, path, objects=settings.objects, threshold=settings.threshold)
        written.append(path)
    return written


def _stores(folder: Path, settings: HeatmapOptions, stack: ExitStack) -> list[Store]:
    """The stores given, or those of a run that are where they were."""
    if settings.stores:
        return [stack.enter_context(Store(path)) for path in store_paths(settings.stores)]
    config = folder / run_folder.CONFIG
    paths = read_config(config).get("stores", ()) if config.exists() else ()
    parts = [part for path in paths for part in parts_of(Path(path))]
    return [stack.enter_context(Store(p)) for p in parts if (p / "data.mdb").exists()]
