"""Predict the class of each pixel of slides: maps, outlines, and areas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from histopipe.errors import UsageError
from histopipe.geometry import PointL0, RegionL0, Size
from histopipe.inference.options import BATCHES, PredictOptions
from histopipe.inference.slide_run import Network, Results, SlidePatches, SlideRun, SlideSource
from histopipe.inference.stored_slides import PatchRequirements
from histopipe.predicting.external_evaluation import (
    PredictResult,
    describe_runs,
    find_in_training,
)
from histopipe.predictions.sources import (
    PATIENTS,
    SLIDES,
    PredictedSlide,
    PredictionsFolder,
)
from histopipe.runs.run import Run
from histopipe.slides.slide import Turn
from histopipe.system.files import path_within, roomy
from histopipe.system.forecast import Outlook
from histopipe.system.grouping import grouped
from histopipe.system.output import Progress
from histopipe.system.table_files import write_table
from histopipe.tiling.class_maps import (
    ClassMap,
    pooled,
    write_class_outlines,
    write_class_tiff,
)

OVERLAP = 4
"""Overlap of patches of slide files: the side divided by this."""
LEAST_TISSUE = 0.02
"""Least share of tissue of a patch of slide files: the edge of tissue has a class, too."""


def pixel_options(options: PredictOptions, patches: PatchRequirements) -> PredictOptions:
    """Return options with an overlap and a share of tissue for maps, where these are not given."""
    overlap, least = options.overlap, options.tissue_threshold
    return replace(
        options,
        overlap=patches.patch_size // OVERLAP if overlap is None else overlap,
        tissue_threshold=LEAST_TISSUE if least is None else least,
    )


@dataclass(frozen=True, slots=True)
class PixelPrediction:
    """Predictions of the pixels of slides. The fields are those of `PatchPrediction`."""

    runs: Sequence[Run]
    network: Network
    patches: PatchRequirements
    folder: PredictionsFolder
    source: SlideSource
    options: PredictOptions
    progress: Progress

    @property
    def reduction(self) -> int:
        """Pixels of a patch along a side of a pixel of the map: the divisor of its side that is next to `map_mpp`.

        Raises:
            UsageError: the scale of the patches is unknown, or larger.
        """
        mpp, map_mpp, side = self.patches.patch_mpp, self.options.map_mpp, self.patches.patch_size
        if map_mpp is None:
            return 1
        if mpp is None or map_mpp < 0.99 * mpp:
            raise UsageError(
                "--map-mpp",
                found=map_mpp,
                expected="patches with a scale"
                if mpp is None
                else f"{mpp:g} or more, as of the patches",
            )
        divisors = [number for number in range(1, side + 1) if side % number == 0]
        return min(divisors, key=lambda number: abs(math.log(number * mpp / map_mpp)))

    def run(self) -> PredictResult:
        """Predict the slides that are missing, then write the tables of all slides in the folder."""
        source, share, classes = self.source, self.options.share, self.runs[0].task.classes
        self.folder.record(
            {
                "batches": BATCHES,
                **describe_runs(self.runs),
                "sha256": self.network.identity["sha256"],
                "pixel_classes": list(classes),
                "map_reduction": self.reduction,
                "tolerance_um": self.options.tolerance_um,
                "stain_norm": self.patches.stain_norm,
                "patch_size": self.patches.patch_size,
                **source.settings,
            },
            share,
        )
        run = SlideRun(
            self.network,
            "predicting",
            source.count,
            self.progress,
            self.folder.folder,
            Outlook(source.work),
            share,
        )
        with roomy(self.folder.folder):
            run.run(source.slides(run, self.folder.complete), self._write, stop=source.close)
            share.end(self.folder.folder, run.failed)
            if not share.is_part:
                self._write_tables()
        return PredictResult(**run.result(), evaluated=None)

    def _write(self, slide: SlidePatches, results: Iterator[Results]) -> tuple[int, int]:
        """Write map and outlines of a slide, and last its description."""
        classes, record = self.runs[0].task.classes, slide.record
        scale = record.side_l0 / self.patches.patch_size * self.reduction
        left, top, width, height = record.bounds or (0, 0, record.width, record.height)
        size = Size(math.ceil(width / scale), math.ceil(height / scale))
        path = self.folder.map_of(slide.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".part-{path.name}")
        try:
            side = self.patches.patch_size // self.reduction
            blended = ClassMap(part, size, side=side, classes=len(classes))
            for values, corners in results:
                models = values.reshape(*values.shape[:3], len(self.runs), len(classes))
                for value, (x, y) in zip(models.mean(axis=3), corners.tolist(), strict=True):
                    place = round((x - left) / scale), round((y - top) / scale)
                    blended.add(pooled(value, self.reduction), *place)
            blended.close()
            predicted = self.source.current(slide.predicted())
            mpp = None if record.mpp is None else record.mpp * scale
            described = self.folder.path_of(slide.id, ".json")
            described.unlink(missing_ok=True)  # of an old map
            write_class_tiff(blended.values, path, mpp=mpp, classes=classes)
            tolerance = self.options.tolerance_um / (record.mpp or 1.0)
            write_class_outlines(
                blended.values,
                path_within(path.parent, f"{slide.id}.geojson"),
                scale=scale,
                classes=classes,
                bounds=RegionL0(PointL0(left, top), Size(width, height)),
                corner=record.frame_bounds.origin,
                turn=Turn(record.orientation or 1, Size(record.width, record.height)),
                tolerance=tolerance,
            )
        finally:
            part.unlink(missing_ok=True)
        area = 1.0 if mpp is None else mpp**2 / 1e6
        predicted = replace(predicted, areas=[float(n * area) for n in blended.counts.tolist()])
        self.folder.write_pixels(predicted, slide.thumbnail)
        return predicted.patches, predicted.skipped

    def _write_tables(self) -> None:
        """Write `slides.csv` and `patients.csv` with the areas of all slides in the folder."""
        slides = [self.source.current(slide) for slide in self.folder.predicted_slides.values()]
        patients = {slide.slide: slide.patient for slide in slides}
        folders = [run.folder for run in self.runs]
        in_training = find_in_training(patients, folders, "slide", self.progress)
        for level, file in (("slide", SLIDES), ("patient", PATIENTS)):
            groups = grouped(slides, attrgetter(level))
            rows = (
                self._row(name, of_name, level, in_training)
                for name, of_name in sorted(groups.items())
            )
            classes = self.runs[0].task.classes
            write_table(
                self.folder.folder / file,
                [
                    *(["slide", "patient"] if level == "slide" else ["patient"]),
                    "patches",
                    *(f"area_mm2_{name}" for name in classes),
                    *(f"share_{name}" for name in classes),
                    "in_training",
                ],
                rows,
            )

    @staticmethod
    def _row(
        name: str, slides: Sequence[PredictedSlide], level: str, in_training: Mapping[str, str]
    ) -> list[object]:
        areas = np.sum([slide.areas for slide in slides], axis=0)
        shares = areas / areas.sum() if areas.any() else areas
        scales = {slide.mpp is not None for slide in slides}
        scaled, comparable = (
            scales == {True},
            len(scales) == 1,
        )  # else areas are in mm² and in pixels
        return [
            *([name, slides[0].patient] if level == "slide" else [name]),
            sum(slide.patches for slide in slides),
            *(f"{value:.6g}" if scaled else "" for value in areas.tolist()),
            *(f"{value:.6g}" if comparable else "" for value in shares.tolist()),
            "yes" if any(slide.slide in in_training for slide in slides) else "no",
        ]
