"""Predict slides with the model of a run: from stores, or directly from slide files. Patches are aggregated to slides and patients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.evaluation.evaluate import mean_thresholds
from histopipe.evaluation.prediction_sets import NamedSets
from histopipe.evaluation.subgroups import check_subgroup
from histopipe.evaluation.unusual import (
    TrainingRange,
    all_or_none,
    beyond,
    rate_settings,
    unusual_cells,
    warn_of_unusual,
)
from histopipe.inference.external_evaluation import (
    ExternalEvaluation,
    PredictResult,
    evaluate_labelled,
    evaluated_slides,
    find_in_training,
    write_evaluation,
)
from histopipe.inference.options import BATCHES, PredictOptions
from histopipe.inference.predict_bags import BagPrediction
from histopipe.inference.recalibration import recalibration
from histopipe.inference.slide_run import (
    Network,
    Results,
    SlidePatches,
    SlideRun,
    SlideSource,
    batch_rule,
)
from histopipe.inference.slide_tiler import source_of_files
from histopipe.inference.stored_slides import PatchRequirements, StoreSource, read_sources
from histopipe.ingestion.cluster.cluster_parts import on_cluster
from histopipe.predictions.prediction_tables import write_unusual
from histopipe.predictions.sources import (
    PATIENTS,
    SETTINGS,
    SLIDES,
    PredictedSlide,
    PredictionsFolder,
    labelled_patches,
    level_outputs,
    write_level_table,
)
from histopipe.runs.config import TrainConfig
from histopipe.runs.run import Run, check_same, describe_runs, mean_text
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.splits.slide_table import COLUMNS
from histopipe.store.store import Store
from histopipe.system.filesystems import roomy
from histopipe.system.output import Progress, default_progress
from histopipe.system.settings import make_settings
from histopipe.system.table_files import column_key, read_table
from histopipe.system.tensorflow import load_quietly
from histopipe.tasks.choices import EvaluationLevel
from histopipe.tasks.predictions import scores_of
from histopipe.tasks.task import Predictions, Target, Task

if TYPE_CHECKING:
    from histopipe.inference.networks import TrainedBags


def predict(
    run: str | Path,
    sources: str | Path | Sequence[str | Path],
    *,
    out: str | Path,
    progress: Progress | None = None,
    **settings: Any,
) -> PredictResult:
    """Predict slides and patients with the model of a run, or with those of a cross-validation together.

    A patch model predicts all patches, which are aggregated. A slide model predicts bags of features: it computes them
    with the encoder that the run records, unless `sources` are folders of features.

    Args:
        run: folder of a finished run, or of a cross-validation: then the predictions are the means over its folds,
            with their standard deviations.
        sources: stores; or slide files, folders of slide files, and URLs of slides as for `ingest`; or, for a slide
            model, folders of features, in the order of the training's `mil`.
        out: folder for the predictions. Slides that are already in it are kept.
        progress: shows the progress; `default_progress()` if None.
        settings: options by name, as in docs/reference/settings.md and as the flags of `histopipe predict`.

    Returns:
        The slides that were predicted, kept or failed; and metrics, if labels are known.

    Raises:
        UsageError: the run cannot predict these sources, or `out` holds predictions of another model.
        NothingToDo: there is no store, no slide, or no patch.
        MachineShort: disk or memory ran out, or TensorFlow is not installed.
        Interrupted: by Ctrl-C or SIGTERM; completed slides are kept.

    Example:
        >>> predict("runs/first", "new-slides", out="predictions").done  # doctest: +SKIP
    """
    options, display = make_settings(PredictOptions, settings), progress or default_progress()
    runs = Run(Path(run)).models
    config = runs[0].config
    options = complete_options(options, config)
    if len(runs) > 1:
        display.message(f"predictions of {run}: {mean_text(len(runs))}")
    paths, kind = read_sources(sources)
    share = options.share
    if options.cluster:
        return on_cluster(predict, run, sources, out=out, progress=display, **settings)
    if kind == "features" and (options.part or options.join or options.cluster):
        raise UsageError(
            "features",
            found="an option of several machines",
            expected="stores or slides",
            todo="remove the option: bags of features take seconds",
        )
    with ExitStack() as stack:
        target = PredictionsFolder(Path(out))
        rule = batch_rule(target.folder / SETTINGS)
        if config.on_bags:
            if options.aggregate != "mean":
                raise UsageError(
                    f"--aggregate {options.aggregate}",
                    found="a slide model",
                    expected="no aggregation of patches",
                )
            networks = load_quietly("histopipe.inference.networks")
            models = [networks.TrainedBags(run, devices=options.devices) for run in runs]
            check_alike(models)
            stack.enter_context(share.held(target.folder))
            return BagPrediction(models, target, paths, kind, options, display).run()
        _check_for_patches(runs[0], kind, options)
        network, patches = load_patch_models(
            runs, devices=options.devices, batch_size=options.batch_size
        )
        stack.enter_context(share.held(target.folder))
        source: SlideSource
        if kind == "stores":
            options.check_for_stores()
            stores = [stack.enter_context(Store(path)) for path in paths]
            source = StoreSource(stores, patches, options, rule, runs[0].targets)
        else:
            source = source_of_files(
                paths, patches, options, display, rule, targets=runs[0].targets
            )
        stack.enter_context(source)
        return PatchPrediction(runs, network, patches, target, source, options, display).run()


def _check_for_patches(run: Run, kind: str, options: PredictOptions) -> None:
    """Raise a UsageError if sources or options are not those of a model of patches."""
    if kind == "features":
        raise UsageError(
            f"{run.folder} is a model of patches", found="features", expected="stores or slides"
        )
    if options.encoder or options.encoder_weights:
        raise UsageError("--encoder", found="a model of patches", expected="a slide model")
    if options.aggregate not in run.task.aggregations:
        raise UsageError(
            f"--aggregate {options.aggregate}",
            found=f"a model of {run.task.name}",
            expected=" or ".join(run.task.aggregations),
        )


def check_alike(models: Sequence[TrainedBags]) -> None:
    """Check that models can be averaged: the same task, outputs, inputs and encoders.

    Raises:
        UsageError: they differ.
    """
    check_same(
        {
            model.run.folder: {
                "task": model.task.name,
                "classes": model.task.classes,
                "targets": model.run.targets,
                "--bag": model.config.bag,
                "--covariates": model.config.covariates,
                "features per patch": model.dimension,
            }
            for model in models
        }
    )


def complete_options(options: PredictOptions, config: TrainConfig) -> PredictOptions:
    """Return options with missing values of the training, and its subgroups whose columns are in the labels file."""
    of_labels = (
        []
        if options.labels is None
        else read_table(Path(options.labels), columns=("slide",)).columns
    )
    names = {
        subgroup: column_key(check_subgroup(subgroup)[0])
        for subgroup in (*config.subgroup, *options.subgroup)
    }
    additional = {*COLUMNS, *of_labels} - {names[subgroup] for subgroup in options.subgroup}
    return replace(
        options,
        subgroup=(*options.subgroup, *(s for s in config.subgroup if names[s] in additional)),
        na=config.na if options.na is None else options.na,
    )


def load_patch_models(
    runs: Sequence[Run], *, devices: str, batch_size: int
) -> tuple[Network, PatchRequirements]:
    """Load the patch model of a run onto its devices; or those of several runs, whose outputs are to be averaged.

    The network maps patches to the outputs of all models, each in the order of the classes or targets. If all runs have a
    range of their training, the whitened features follow those of each model.

    Raises:
        UsageError: the models differ in classes, targets or patches.
        DamagedStore: a model cannot be read.
        MachineShort: TensorFlow is not installed.
    """
    values: dict[Path, dict[str, Any]] = {}
    for run in runs:
        names = ("task", "stain_norm", "labels_from", "calibrate")
        values[run.folder] = {
            "classes": run.task.classes,
            "targets": run.targets,
            **{name: run.metrics_file.get(name) for name in ("spec", "patch_mpp")},
            **{name: getattr(run.config, name) for name in names},
        }
    networks, folders = load_quietly("histopipe.inference.networks"), list(values)
    network = networks.KerasNetwork(
        lambda: networks.load_run_models(
            folders, [each.whitening for each in all_or_none([run.training_range for run in runs])]
        ),
        name=folders[0].name,
        devices=devices,
        batch_size=batch_size,
    )
    check_same(values)
    first = values[folders[0]]
    return network, PatchRequirements(
        folders[0], network.patch_size, first["spec"], first["patch_mpp"], first["stain_norm"]
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
            share,
            source.work,
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
        tables: tuple[tuple[str, EvaluationLevel], ...] = ((SLIDES, "slide"), (PATIENTS, "patient"))
        for name, level in tables:
            write_level_table(
                path / name,
                parts,
                slides,
                level,
                self.options.aggregate,
                task=self.task.with_settings(settings),
                evaluation_settings=settings,
                thresholds=thresholds,
                further=sets.add(level, *level_outputs(slides, level))
                | unusual_cells(unusual if level == "slide" else {}),
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
