"""Predict slides with the model of a run: from stores, or directly from slide files. Patches are aggregated to slides and patients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.evaluation.evaluate import mean_thresholds, tempered
from histopipe.evaluation.prediction_sets import NamedSets, PredictionSets
from histopipe.evaluation.subgroups import check_subgroup
from histopipe.evaluation.unusual import (
    TrainingRange,
    all_or_none,
    beyond,
    rate_settings,
    read_range,
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
    level_outputs,
    write_level_table,
)
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import METRICS, is_finished, read_result
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig, load_config
from histopipe.splits.slide_table import COLUMNS
from histopipe.store.store import Store
from histopipe.system.files import read_json
from histopipe.system.filesystems import roomy
from histopipe.system.output import Progress, default_progress, message
from histopipe.system.settings import make_settings
from histopipe.system.table_files import column_key, nfc, read_table
from histopipe.system.tensorflow import load_quietly
from histopipe.tasks.choices import EvaluationLevel
from histopipe.tasks.classification import Classification
from histopipe.tasks.predictions import ThresholdsByLevel, scores_of
from histopipe.tasks.task import Predictions

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
    runs = list(map(read_run, run_folders(Path(run))))
    config = runs[0].config
    options = complete_options(options, config)
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
        rule = batch_rule(target.path / SETTINGS)
        if isinstance(config, BagTrainConfig):
            if options.aggregate != "mean":
                raise UsageError(
                    f"--aggregate {options.aggregate}",
                    found="a slide model",
                    expected="no aggregation of patches",
                )
            networks = load_quietly("histopipe.inference.networks")
            models = [networks.TrainedBags(run, devices=options.devices) for run in runs]
            check_alike(models)
            stack.enter_context(share.held(target.path))
            return BagPrediction(models, target, paths, kind, options, display).run()
        if kind == "features":
            raise UsageError(
                f"{run} is a model of patches", found="features", expected="stores or slides"
            )
        if options.encoder or options.encoder_weights:
            raise UsageError("--encoder", found="a model of patches", expected="a slide model")
        network, patches = load_classifier(
            runs, devices=options.devices, batch_size=options.batch_size
        )
        stack.enter_context(share.held(target.path))
        source: SlideSource
        if kind == "stores":
            options.check_for_stores()
            source = StoreSource(
                [stack.enter_context(Store(path)) for path in paths], patches, options, rule
            )
        else:
            source = source_of_files(paths, patches, options, display, rule)
        stack.enter_context(source)
        return PatchPrediction(runs, network, patches, target, source, options, display).run()


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
                "targets": model.targets,
                "--bag": model.config.bag,
                "--covariates": model.config.covariates,
                "features per patch": model.dimension,
            }
            for model in models
        }
    )


def complete_options(options: PredictOptions, config: TrainConfig) -> PredictOptions:
    """Return options with missing values of the training, and its subgroups whose columns are in the labels file."""
    of_labels = [] if options.labels is None else read_table(Path(options.labels)).columns
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


def run_folders(folder: Path) -> list[Path]:
    """Return the folder of a run, or the folders of the finished folds of a cross-validation.

    Raises:
        UsageError: no fold is finished.
    """
    if not run_folder.is_cross_validation(folder):
        return [folder]
    folds = run_folder.runs_of(folder)
    done = [path for path in folds if is_finished(path)]
    if not done:
        raise UsageError(
            f"{folder} has no finished fold", todo="continue it with `histopipe train --resume`"
        )
    if len(done) < len(folds):
        message(f"warning: {len(folds) - len(done)} of {len(folds)} folds are not finished")
    return done


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """What the files of a finished run record of its model. `metrics` is the content of `metrics.json`."""

    folder: Path
    config: TrainConfig
    metrics: Mapping[str, Any]
    thresholds: ThresholdsByLevel
    """Chosen on the validation data."""
    temperature: tuple[float, ...]
    """Of the probabilities; empty if they are not calibrated."""
    sets: PredictionSets | None
    """Calibration of prediction sets; None without."""
    training_range: TrainingRange | None
    """Range of the training's features; None in runs of earlier versions."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; none for other tasks."""
        return tuple(map(nfc, self.metrics["classes"]))

    def calibrated(self, probability: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return (..., C) outputs of the model with its temperature."""
        return (
            tempered(probability, self.temperature).astype(np.float32)
            if self.temperature
            else probability
        )


def read_run(folder: Path) -> FinishedRun:
    """Read the files of a finished run.

    Raises:
        UsageError: there is no finished run.
        DamagedStore: the run cannot be read.
    """
    result, config = read_result(folder), load_config(folder / run_folder.CONFIG)
    return FinishedRun(
        folder,
        config,
        read_json(folder / METRICS),
        result.thresholds,
        result.calibration.temperature if result.calibration else (),
        result.sets,
        read_range(folder),
    )


def check_same(values_of_runs: Mapping[Path, Mapping[str, object]]) -> None:
    """Raise a UsageError if a named value differs between runs, given by the folder of each run."""
    first, values = next(iter(values_of_runs.items()))
    for folder, of_run in values_of_runs.items():
        for name, value in of_run.items():
            if value != values[name]:
                raise UsageError(
                    f"{folder}: {name}", found=value, expected=f"{values[name]}, as in {first}"
                )


def load_classifier(
    runs: Sequence[FinishedRun], *, devices: str, batch_size: int
) -> tuple[Network, PatchRequirements]:
    """Load the model of a run onto its devices; or those of several runs, whose probabilities are to be averaged.

    The network maps patches to the probabilities of all models, each in the order of the classes. If all runs have a range
    of their training, the whitened features follow those of each model.

    Raises:
        UsageError: a model predicts no classes, or the models differ in classes or patches.
        DamagedStore: a model cannot be read.
        MachineShort: TensorFlow is not installed.
    """
    values: dict[Path, dict[str, Any]] = {}
    for run in runs:
        config = run.config
        if not isinstance(config, PatchTrainConfig) or not config.task_type.of_classes:
            raise UsageError(
                f"the model of {run.folder} predicts no classes of patches",
                found=f"--task {config.task}",
                expected="--task classification",
                todo="use its model.keras, which opens in plain Keras",
            )
        values[run.folder] = {
            "classes": run.classes,
            **{name: run.metrics.get(name) for name in ("spec", "patch_mpp")},
            **{name: getattr(config, name) for name in ("stain_norm", "labels_from", "calibrate")},
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
    """Predictions of the patches of slides, and of slides and patients. Network and patches as of `load_classifier`."""

    runs: Sequence[FinishedRun]
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

    def run(self) -> PredictResult:
        """Predict the slides that are missing, then write the tables of all slides in the folder."""
        source, patches, share = self.source, self.patches, self.options.share
        temperatures = [list(run.temperature) for run in self.runs]
        self.folder.record(
            {
                "batches": BATCHES,
                "run": str(patches.owner),
                "sha256": self.network.identity["sha256"],
                "classes": list(self.runs[0].classes),
                "stain_norm": patches.stain_norm,
                "patch_size": patches.patch_size,
                **source.settings,
                **({"temperature": temperatures} if any(temperatures) else {}),
                **rate_settings(self.ranges),
            },
            share,
        )
        run = SlideRun(
            self.network,
            "predicting",
            source.count,
            self.progress,
            self.folder.path,
            share,
            source.work,
        )
        with roomy(self.folder.path):
            run.run(source.slides(run, self.folder.complete), self._write, stop=source.close)
            share.end(self.folder.path, run.failed)
            evaluated = None if share.is_part else self._write_tables(run)
        return PredictResult(**run.result(), evaluated=evaluated)

    def _write(self, slide: SlidePatches, results: Iterator[Results]) -> tuple[int, int]:
        """Write the predictions of a slide, sorted by row and column."""
        classes = self.runs[0].classes
        probability, corners = map(np.concatenate, zip(*results, strict=True))
        # After the results: only then it is known which patches were skipped.
        predicted = self.source.current(slide.predicted())
        order = np.lexsort((corners[:, 0], corners[:, 1]))
        corners, zeros = corners[order].astype(np.int64), np.zeros(len(order), np.int32)
        # All sizes are named, since a slide may be without patches.
        width = self.network.dimension // len(self.runs)
        outputs = probability[order].reshape(len(order), len(self.runs), width)
        outputs, white = outputs[..., : len(classes)], outputs[..., len(classes) :]
        by_model = np.stack([run.calibrated(outputs[:, i]) for i, run in enumerate(self.runs)], 1)
        scores = Predictions(
            Classification(classes=classes),
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
            write_unusual(self.folder.path, places, shares)
            predicted = replace(predicted, unusual=share)
        predicted = replace(
            predicted,
            spread=self._spread(scores, by_model),
            outputs=means if all(run.sets for run in self.runs) else [],
        )
        self.folder.write(predicted, scores, slide.thumbnail)
        return predicted.patches, predicted.skipped

    def _spread(self, scores: Predictions, by_model: NDArray[np.float32]) -> list[float]:
        """Return the standard deviation of the slide's probabilities over the models, from (N, M, C) of its patches."""
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
        """Return the (N, 1) class numbers of patches, NaN if unknown."""
        classes, config = self.runs[0].classes, self.runs[0].config
        # Slide labels do not apply to patches.
        if isinstance(config, PatchTrainConfig) and config.labels_from == "annotation":
            annotated = self.source.patch_labels(slide.slide, classes)
            numbers = [annotated.get((x, y), -1) for x, y in corners.tolist()]
        else:
            numbers = [classes.index(slide.label) if slide.label in classes else -1] * len(corners)
        target = np.array(numbers, np.float64)[:, None]
        return np.where(target < 0, np.nan, target)

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
            for name, slide in self.folder.slides().items()
            if name not in run.failed
        ]
        slides, parts = [slide for slide, _ in entries], [part for _, part in entries if len(part)]
        classes, path = self.runs[0].classes, self.folder.path
        settings = self.runs[0].config.evaluation_settings
        thresholds = mean_thresholds([run.thresholds for run in self.runs])
        seen = find_in_training(
            {slide.slide: slide.patient for slide in slides},
            [run.folder for run in self.runs],
            "slide",
            self.progress,
        )
        unusual = {s.slide: s.unusual for s in slides if s.unusual is not None}
        warn_of_unusual(unusual, self.ranges, self.progress)
        # Means were calibrated.
        calibrated = self.runs if self.options.aggregate == "mean" else []
        sets = NamedSets([run.sets for run in calibrated], Classification(classes=classes))
        tables: tuple[tuple[str, EvaluationLevel], ...] = ((SLIDES, "slide"), (PATIENTS, "patient"))
        for name, level in tables:
            write_level_table(
                path / name,
                parts,
                slides,
                level,
                self.options.aggregate,
                classes=classes,
                evaluation_settings=settings,
                thresholds=thresholds,
                further=sets.add(level, *level_outputs(slides, level))
                | unusual_cells(unusual if level == "slide" else {}),
            )
        table = evaluated_slides(
            self.source.slide_table(slides),
            {slide.slide: (slide.patches, slide.skipped) for slide in slides},
            {part.slides[0] for part in parts if (part.label >= 0).any()},
            run.failed,
            classes,
        )
        return write_evaluation(
            path,
            evaluate_labelled(parts, settings, thresholds, set(seen.values())),
            table,
            subgroups=self.options.subgroup,
            sets=sets,
            settings=settings,
            in_training=seen,
        )
