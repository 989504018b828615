"""Predict patches of slides with patch models, and aggregate them to slides and patients.

Their tables, `slides.csv` and `patients.csv`, are also those of slide models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.bags import Bag, common_value
from histopipe.evaluation.evaluate import mean_thresholds
from histopipe.evaluation.prediction_sets import NamedSets
from histopipe.evaluation.unusual import (
    TrainingRange,
    all_or_none,
    beyond,
    rate_settings,
    unusual_cells,
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
    Recalibration,
    describe_runs,
    evaluate_labelled,
    evaluated_slides,
    find_in_training,
    recalibration,
    write_evaluation,
)
from histopipe.predictions.prediction_tables import write_unusual
from histopipe.predictions.sources import (
    PATIENTS,
    SLIDES,
    PredictedSlide,
    PredictionsFolder,
    labelled_patches,
)
from histopipe.runs.run import Run
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.system.files import roomy
from histopipe.system.forecast import Outlook
from histopipe.system.grouping import grouped
from histopipe.system.output import Progress
from histopipe.system.table_files import write_table
from histopipe.tasks.choices import Aggregation, EvaluationLevel, name_of
from histopipe.tasks.predictions import (
    NO_THRESHOLDS,
    EvaluationSettings,
    Predictions,
    ThresholdsByLevel,
    joined_predictions,
    scores_of,
)
from histopipe.tasks.task import Target, Task

_TABLES: tuple[tuple[EvaluationLevel, str], ...] = (("slide", SLIDES), ("patient", PATIENTS))


def write_summary(
    path: Path,
    level: EvaluationLevel,
    names: Sequence[str],
    *,
    patients: Sequence[str | None],
    labels: Sequence[str | None],
    target: NDArray[np.float64],
    patches: Sequence[int],
    task: Task,
    output: NDArray[np.float64],
    spread: Sequence[Sequence[object]],
    limits: Sequence[float],
    further: Mapping[str, Mapping[str, str]],
) -> None:
    """Write a table with a row per slide or patient atomically: ids, label or targets, patches, decisions, and outputs.

    Args:
        path: the file.
        level, names: what the N rows are, and their ids.
        patients: patients of slides.
        labels, target: known labels, or (N, T) targets, NaN if unknown.
        patches: numbers of patches.
        task: the task; of a classification with the positive class of the evaluation.
        output: (N, C) predictions, NaN for slides or patients without patches, whose cells are empty.
        spread: (N,) standard deviations of the outputs over several models, empty where unknown.
        limits: (L,) thresholds of the decided class.
        further: further columns, each by id.
    """
    table: dict[str, Sequence[object]] = {level: names}
    if level == "slide":
        table["patient"] = patients
    if task.of_classes:  # slides without patches have labels, too
        table["label"] = labels
    else:
        cells = zip(*task.target_cells(target, output), strict=True)
        table |= zip(task.target_names, cells, strict=True)
    table["patches"] = patches
    if task.of_classes:
        for name, numbers in (
            ("predicted", output.argmax(axis=1)),
            ("decided", task.decide(output, np.array(limits))),
        ):
            chosen = np.array(task.classes, object)[numbers]
            table[name] = np.where(np.isnan(output[:, 0]), "", chosen).tolist()
    for name, values in zip(task.output_names, output.T.tolist(), strict=True):
        table[name] = ["" if math.isnan(value) else f"{value:.9g}" for value in values]
    if any(spread):
        for number, name in enumerate(task.output_names):
            table["sd_" + name.removeprefix("p_")] = [row[number] if row else "" for row in spread]
    for column, of_name in further.items():
        table[column] = [of_name.get(name, "") for name in names]
    write_table(path, list(table), zip(*table.values(), strict=True))


def write_patch_tables(
    folder: Path,
    parts: Sequence[Predictions],
    slides: Sequence[PredictedSlide],
    how: Aggregation,
    *,
    task: Task,
    settings: EvaluationSettings,
    thresholds: ThresholdsByLevel,
    sets: NamedSets,
    unusual: Mapping[str, float],
) -> None:
    """Write the tables of slides whose patches were predicted, and of their patients.

    Slides and patients without patches are not in `parts`. Their outputs are empty. Only slides have standard deviations.
    """
    task, by_slide = task.with_settings(settings), {slide.slide: slide for slide in slides}
    joined = joined_predictions(parts) if parts else None
    for level, file in _TABLES:
        labels = {
            name: {slide.label for slide in of_name if slide.label is not None}
            for name, of_name in grouped(slides, attrgetter(level)).items()
        }
        names = sorted(labels)
        row_of = {name: row for row, name in enumerate(names)}
        output, counts = np.full((len(names), len(task.output_names)), np.nan), Counter[str]()
        target = np.full((len(names), len(task.columns)), np.nan)
        if joined is not None:
            # Without labels, so that patches with different labels are aggregated too.
            scores = scores_of(joined.without_targets(), level, how, settings)
            counts = Counter(joined.ids(level))
            output[[row_of[name] for name in scores.ids(level)]] = scores.output
            labelled = scores_of(joined, level, how, settings)
            target[[row_of[name] for name in labelled.ids(level)]] = labelled.target
        of_slides = [by_slide[name] for name in names] if level == "slide" else []
        write_summary(
            folder / file,
            level,
            names,
            patients=[slide.patient for slide in of_slides],
            # A patient has a label if all slides of the patient have the same.
            labels=[min(labels[name]) if len(labels[name]) == 1 else "" for name in names],
            target=target,
            patches=[counts[name] for name in names],
            task=task,
            output=output,
            spread=[slide.spread for slide in of_slides],
            limits=thresholds.get(name_of(level, how), NO_THRESHOLDS).values,
            further=sets.add(level, *_level_outputs(slides, level))
            | unusual_cells(unusual if of_slides else {}),
        )


def _level_outputs(
    slides: Sequence[PredictedSlide], level: EvaluationLevel
) -> tuple[list[str], NDArray[np.float64]]:
    """Return the slides or patients with `outputs`, and (M, N, C) mean outputs of their patches."""
    groups = grouped((slide for slide in slides if slide.outputs), attrgetter(level))
    means = [
        np.average([slide.outputs for slide in group], axis=0, weights=[s.patches for s in group])
        for group in groups.values()
    ]
    return [*groups], np.stack(means, axis=1) if means else np.empty((0, 0, 0))


def write_bag_tables(
    folder: Path,
    bags: Sequence[Bag],
    targets: Mapping[str, Target | None],
    outputs: NDArray[np.float64],
    *,
    bag_level: EvaluationLevel,
    task: Task,
    settings: EvaluationSettings,
    thresholds: ThresholdsByLevel,
    sets: NamedSets,
    unusual: Mapping[str, float],
    calibration: Recalibration,
) -> None:
    """Write a table of the slides, if they are the bags, and one of the patients: means of their slides.

    `outputs` are (M, N, C), of M models; `targets` those of the bags, and `unusual` their distances, by id. `calibration` is of
    the means over the models.
    """
    task, blank = task.with_settings(settings), (np.nan,) * len(task.columns)
    calibrated = calibration.applied(outputs.mean(axis=0))
    rows = {
        "slide": {bag.id: [row] for row, bag in enumerate(bags)},
        "patient": grouped(range(len(bags)), lambda row: bags[row].patient or bags[row].id),
    }
    for level, file in _TABLES if bag_level == "slide" else _TABLES[1:]:
        names, groups = [*rows[level]], [*rows[level].values()]
        members = [[bags[row] for row in group] for group in groups]
        values = np.stack([outputs[:, group].mean(axis=1) for group in groups], axis=1)
        spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.empty((0, 0))
        write_summary(
            folder / file,
            level,
            names,
            patients=[each[0].patient for each in members],
            labels=[common_value([bag.label for bag in each]) for each in members],
            target=np.array(
                [common_value([targets[bag.id] for bag in each]) or blank for each in members],
                np.float64,
            ),
            patches=[sum(bag.rows for bag in each) for each in members],
            task=task,
            output=np.stack([calibrated[group].mean(axis=0) for group in groups]),
            spread=[[f"{value:.9g}" for value in row] for row in spread],
            limits=thresholds.get(name_of(level, "mean"), NO_THRESHOLDS).values,
            further=sets.add(level, names, values)
            | unusual_cells(unusual if level == bag_level else {}),
        )


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
