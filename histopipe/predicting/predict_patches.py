"""Predict patches of slides with patch models, and aggregate them to slides and patients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.evaluate import mean_thresholds
from histopipe.evaluation.prediction_sets import NamedSets
from histopipe.evaluation.unusual import (
    TrainingRange,
    all_or_none,
    beyond,
    rate_settings,
    warn_of_unusual,
)
from histopipe.inference.options import BATCHES, PredictOptions
from histopipe.inference.slide_run import (
    Network,
    Results,
    SlidePatches,
    SlideRun,
    SlideSource,
)
from histopipe.inference.stored_slides import PatchRequirements
from histopipe.predicting.external_evaluation import (
    ExternalEvaluation,
    PredictResult,
    describe_runs,
    evaluate_labelled,
    evaluated_slides,
    find_in_training,
    recalibration,
    write_evaluation,
)
from histopipe.predicting.summary_tables import write_patch_tables
from histopipe.predictions.prediction_tables import write_unusual
from histopipe.predictions.sources import (
    PredictedSlide,
    PredictionsFolder,
    labelled_patches,
)
from histopipe.runs.run import Run
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.system.files import roomy
from histopipe.system.forecast import Outlook
from histopipe.system.output import Progress
from histopipe.tasks.predictions import Predictions, scores_of
from histopipe.tasks.task import Target, Task


@dataclass(frozen=True, slots=True)
class PatchPrediction:
    """Predictions of the patches of slides, and of slides and patients. Network and patches as of `load_patch_models`."""

    runs: Sequence[Run]
    network: Network
    patches: PatchRequirements
    folder: PredictionsFolder
    source: SlideSource
    options: PredictOptions
    progress: Progress

    @property
    def ranges(self) -> list[TrainingRange]:
        """The ranges of the trainings; none if a run has none."""
        return all_or_none([run.training_range for run in self.runs])

    @property
    def task(self) -> Task:
        """What the models predict."""
        return self.runs[0].task

    def run(self) -> PredictResult:
        """Predict the slides that are missing, then write the tables of all slides in the folder."""
        source, patches, share = self.source, self.patches, self.options.share
        for slide in source.labels:  # a wrong cell is reported before the work
            self._target(slide)
        temperatures = [list(run.temperature) for run in self.runs]
        self.folder.record(
            {
                "batches": BATCHES,
                **describe_runs(self.runs),
                "sha256": self.network.identity["sha256"],
                "classes": list(self.runs[0].task.classes),
                "stain_norm": patches.stain_norm,
                "patch_size": patches.patch_size,
                **source.settings,
                **({"temperature": temperatures} if any(temperatures) else {}),
                **rate_settings(self.ranges),
                **({} if self.task.of_classes else {"targets": [*self.task.columns]}),
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
            evaluated = None if share.is_part else self._write_tables(run)
        return PredictResult(**run.result(), evaluated=evaluated)

    def _write(self, slide: SlidePatches, results: Iterator[Results]) -> tuple[int, int]:
        """Write the predictions of a slide, sorted by row and column."""
        task = self.task
        values, corners = map(np.concatenate, zip(*results, strict=True))
        # After the results: only then it is known which patches were skipped.
        predicted = self.source.current(slide.predicted())
        order = np.lexsort((corners[:, 0], corners[:, 1]))
        corners, zeros = corners[order].astype(np.int64), np.zeros(len(order), np.int32)
        # All sizes are named, since a slide may be without patches.
        width = self.network.dimension // len(self.runs)
        outputs = values[order].reshape(len(order), len(self.runs), width)
        outputs, white = np.split(outputs, [len(task.output_names)], axis=2)
        by_model = np.stack([run.calibrated(outputs[:, i]) for i, run in enumerate(self.runs)], 1)
        scores = Predictions(
            task,
            (predicted.slide,),
            (predicted.patient,),
            slide=zeros,
            patient=zeros,
            x_l0=corners[:, 0],
            y_l0=corners[:, 1],
            target=self._targets(predicted, corners),
            output=by_model.mean(axis=1),
        )
        means = by_model.mean(axis=0, dtype=np.float64).tolist() if len(by_model) else []
        if white.size:
            shares, share = beyond(self.ranges, [*white.swapaxes(0, 1)])
            side = f"{predicted.size_l0:g}"
            places = ((predicted.slide, x, y, side) for x, y in corners.tolist())
            write_unusual(self.folder.folder, places, shares)
            predicted = replace(predicted, unusual=share)
        predicted = replace(
            predicted,
            spread=self._spread(scores, by_model),
            outputs=means if all(run.result.sets for run in self.runs) else [],
        )
        self.folder.write(predicted, scores, slide.thumbnail)
        return predicted.patches, predicted.skipped

    def _spread(self, scores: Predictions, by_model: NDArray[np.float32]) -> list[float]:
        """Return the standard deviation of the slide's outputs over the models, from (N, M, C) of its patches."""
        if by_model.shape[1] == 1 or not len(by_model):
            return []
        unknown, settings = scores.without_targets(), self.runs[0].config.evaluation_settings
        outputs = [
            scores_of(
                replace(unknown, output=output), "slide", self.options.aggregate, settings
            ).output[0]
            for output in by_model.swapaxes(0, 1)
        ]
        return [float(value) for value in np.std(outputs, axis=0, ddof=1)]

    def _targets(self, slide: PredictedSlide, corners: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the (N, T) targets of patches, such as class numbers, NaN if unknown."""
        if not self.task.of_classes:
            blank = (np.nan,) * len(self.task.columns)
            return np.tile(self._target(slide.slide) or blank, (len(corners), 1))
        classes, config = self.task.classes, self.runs[0].config
        # Slide labels do not apply to patches.
        if isinstance(config, PatchTrainConfig) and config.labels_from == "annotation":
            annotated = self.source.patch_labels(slide.slide, classes)
            numbers = [annotated.get((x, y), -1) for x, y in corners.tolist()]
        else:
            numbers = [classes.index(slide.label) if slide.label in classes else -1] * len(corners)
        target = np.array(numbers, np.float64)[:, None]
        return np.where(target < 0, np.nan, target)

    def _target(self, slide: str) -> Target | None:
        """Return the target in the cells of a slide; None for classes, or if it is unknown."""
        row = self.source.labels.get(slide)
        is_known = row is not None and row.cells.keys() >= {*self.task.columns}
        return self.task.target(row.cells, f"slide {slide}") if row and is_known else None

    def _current(self, slide: PredictedSlide) -> tuple[PredictedSlide, Predictions]:
        """Read the predictions of a slide, and update its labels if they have changed."""
        scores, now = self.folder.read(slide.slide), self.source.current(slide)
        if now is slide:
            return slide, scores
        target = self._targets(now, np.stack([scores.x_l0, scores.y_l0], axis=1))
        if now != slide or not np.array_equal(target, scores.target, equal_nan=True):
            scores = replace(scores, patients=(now.patient,), target=target)
            self.folder.write(now, scores)
        return now, scores

    def _write_tables(self, run: SlideRun) -> ExternalEvaluation | None:
        """Write `slides.csv`, `patients.csv` and, if labels are known, `evaluation.json`."""
        entries = [
            self._current(slide)
            for name, slide in self.folder.predicted_slides.items()
            if name not in run.failed
        ]
        slides, parts = [slide for slide, _ in entries], [part for _, part in entries if len(part)]
        path = self.folder.folder
        settings = self.runs[0].config.evaluation_settings
        seen = find_in_training(
            {slide.slide: slide.patient for slide in slides},
            [run.folder for run in self.runs],
            "slide",
            self.progress,
        )
        calibration = recalibration(parts, self.options, seen, settings, self.progress)
        thresholds = calibration.thresholds or mean_thresholds(
            [run.result.thresholds for run in self.runs]
        )
        parts = [replace(part, output=calibration.applied(part.output)) for part in parts]
        unusual = {s.slide: s.unusual for s in slides if s.unusual is not None}
        warn_of_unusual(unusual, self.ranges, self.progress)
        # Means were calibrated.
        calibrated = self.runs if self.options.aggregate == "mean" else []
        sets = NamedSets([run.result.sets for run in calibrated], self.task)
        write_patch_tables(
            path,
            parts,
            slides,
            self.options.aggregate,
            task=self.task,
            settings=settings,
            thresholds=thresholds,
            sets=sets,
            unusual=unusual,
        )
        table = evaluated_slides(
            self.source.slide_table(slides),
            {slide.slide: (slide.patches, slide.skipped) for slide in slides},
            {part.slides[0] for part in labelled_patches(parts)},
            run.failed,
            self.task.classes,
            calibrating=calibration.patients,
        )
        kept = calibration.kept(parts)
        return write_evaluation(
            path,
            evaluate_labelled(kept, settings, thresholds, set(seen.values())),
            table,
            subgroups=self.options.subgroup,
            sets=sets,
            settings=settings,
            in_training=seen,
        )
