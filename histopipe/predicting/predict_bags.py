"""Predict slides or patients with slide models: from features, from stores, or straight from slide files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.bags import Bag, BagSet, read_bag, read_positions
from histopipe.errors import OutOfMemory, UsageError
from histopipe.evaluation.evaluate import mean_thresholds
from histopipe.evaluation.prediction_sets import NamedSets
from histopipe.evaluation.unusual import (
    TrainingRange,
    all_or_none,
    beyond,
    rate_settings,
    warn_of_unusual,
)
from histopipe.features.feature_file import feature_files
from histopipe.features.feature_sets import check_level
from histopipe.inference.feature_folders import describe_slides
from histopipe.inference.options import PredictOptions
from histopipe.predicting.bag_features import BagFeatures
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
from histopipe.predicting.predict_patches import write_bag_tables
from histopipe.predictions.prediction_tables import write_patch_values, write_unusual
from histopipe.predictions.sources import PredictionsFolder
from histopipe.runs.run import Run
from histopipe.slides.tables import read_labels
from histopipe.system.files import roomy
from histopipe.system.output import Progress, slide_failure
from histopipe.system.table_cells import source_column
from histopipe.system.table_files import read_table
from histopipe.tasks.predictions import Predictions
from histopipe.tasks.task import Target

if TYPE_CHECKING:
    from histopipe.inference.networks import TrainedBags


@dataclass(slots=True)
class BagPrediction:
    """Predictions of bags by one model, or by the models of several folds. The bags are of the features in `sources`."""

    models: Sequence[TrainedBags]
    predictions: PredictionsFolder
    features: BagFeatures
    options: PredictOptions
    progress: Progress
    done: list[Bag] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unusual: dict[str, float] = field(default_factory=dict)
    """Distance of bags from the training, of which 1 is the limit."""

    @property
    def _first(self) -> TrainedBags:
        return self.models[0]

    @property
    def _runs(self) -> list[Run]:
        return [model.run for model in self.models]

    @property
    def _ranges(self) -> list[TrainingRange]:
        return all_or_none([run.training_range for run in self._runs])

    def run(self) -> PredictResult:
        """Compute missing features, then predict all bags, and write the tables."""
        first, path, share = self._first, self.predictions.folder, self.options.share
        if first.covariates is not None and self.options.labels is None:
            raise UsageError(
                "the model takes covariates",
                found="no --labels",
                expected="a CSV file with the columns slide, " + ", ".join(first.config.covariates),
            )
        with roomy(path):
            began, evaluated, computed = time.monotonic(), None, self.features.kind != "features"
            folders = self.features.folders(self._record_settings)
            self.failed |= self.features.failed
            share.end(path, self.failed)
            if not share.is_part and (not computed or all(map(feature_files, folders))):
                evaluated = self._predict(self._bags(folders))
        return PredictResult(
            folder=path,
            done=tuple(bag.id for bag in self.done),
            kept=(),
            failed=self.failed,
            patches=sum(run.patches for run in self.features.runs)
            if computed
            else sum(bag.rows for bag in self.done),
            skipped=sum(run.skipped for run in self.features.runs),
            seconds=time.monotonic() - began,
            input_wait=sum(run.input_wait for run in self.features.runs),
            shares=self.features.runs[0].shares if self.features.runs else {},
            unit=first.config.bag,
            evaluated=evaluated,
        )

    def _record_settings(self) -> None:
        first, temperatures = self._first, [list(run.temperature) for run in self._runs]
        self.predictions.record(
            {
                **describe_runs(self._runs),
                "task": first.task.name,
                "classes": list(first.task.classes),
                "targets": list(first.run.targets),
                "bag": first.config.bag,
                "sha256": [model.sha256 for model in self.models],
                "sources": self.features.kind,
                "tiling": dict(self.options.tiling),
                **({"temperature": temperatures} if any(temperatures) else {}),
                **rate_settings(self._ranges),
            },
            self.options.share,
        )

    def _bags(self, folders: Sequence[Path]) -> BagSet:
        first, options = self._first, self.options
        labels = None if options.labels is None else Path(options.labels)
        present, covariates = (
            read_table(labels, columns=("slide",)).columns if labels else [],
            first.config.covariates,
        )
        columns = [n for n in (*first.run.targets, *covariates) if source_column(n) in present]
        missing = [name for name in covariates if name not in columns]
        if labels is not None and missing:
            raise UsageError(
                f"{labels}: columns",
                found=", ".join(present),
                expected="the covariates of the model: " + ", ".join(missing),
            )
        bags = BagSet(
            folders,
            bag=first.config.bag,
            labels=None
            if labels is None
            else partial(
                read_labels,
                labels,
                columns=columns,
                groups=options.subgroup_columns,
                with_label=first.task.of_classes and "label" in present,
                allow_extra=options.allow_extra_rows,
                na=first.config.na if options.na is None else options.na,
                notify=self.progress.message,
            ),
            columns=columns,
            unlabelled=True,
            on_error="skip",
        )
        if bags.dimension != first.dimension:
            raise UsageError(
                f"{' and '.join(map(str, folders))}: features per patch",
                found=bags.dimension,
                expected=f"{first.dimension}, as in the training",
                todo="use features of the encoder of the training",
            )
        parts = [part for bag in bags for part in bag.parts]
        check_level(parts, vectors=first.config.pooling == "none")
        for note in bags.notes:
            self.progress.message(note)
        self.failed |= {**bags.failed, **dict.fromkeys(bags.empty, "the slide has no patches")}
        return bags

    def _predict(self, bags: BagSet) -> ExternalEvaluation | None:
        """Record the settings, predict all bags, and write what is known of each patch, bag and patient."""
        self._record_settings()  # after all checks, and before the first file is written
        results: list[tuple[Bag, list[NDArray[np.float32]]]] = []
        config, progress = self._first.config, self.progress
        # A wrong cell is reported before the work.
        targets = {bag.id: self._target(bag) for bag in bags}
        with progress.bar("predicting", unit=f"{config.bag}s", total=len(bags.complete)) as bar:
            for bag in bags:
                try:
                    results.append((bag, self._predict_bag(bag)))
                except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                    self.failed[bag.id] = (
                        str(error) if isinstance(error, OutOfMemory) else slide_failure(error)
                    )
                    progress.message(f"{bag.id}: failed: {self.failed[bag.id]}")
                bar.advance()
        if not results:
            return None
        warn_of_unusual(self.unusual, self._ranges, progress)
        self.done = [bag for bag, _ in results]
        # (M, N, C), in the form of the first model.
        outputs = np.stack(
            [
                self._first.task.converted(
                    model.task, np.stack([output[number] for _, output in results])
                )
                for number, model in enumerate(self.models)
            ]
        )
        return self._evaluate(bags, targets, outputs)

    def _evaluate(
        self, bags: BagSet, targets: Mapping[str, Target | None], outputs: NDArray[np.float32]
    ) -> ExternalEvaluation | None:
        """Write the tables of the predicted bags, and the evaluation of those with known targets."""
        predicted, config, task = self.done, self._first.config, self._first.task
        runs, settings = self._runs, config.evaluation_settings
        patients, folders = {bag.id: bag.patient for bag in predicted}, [run.folder for run in runs]
        seen = find_in_training(patients, folders, config.bag, self.progress)
        every = self._predictions(predicted, targets, outputs)
        calibration = recalibration([every], self.options, seen, settings, self.progress)
        thresholds = calibration.thresholds or mean_thresholds(
            [run.result.thresholds for run in runs]
        )
        sets = NamedSets([run.result.sets for run in runs], task)
        write_bag_tables(
            self.predictions.folder,
            predicted,
            targets,
            outputs.astype(np.float64),
            thresholds=thresholds,
            sets=sets,
            bag_level=config.bag,
            task=task,
            settings=settings,
            unusual=self.unusual,
            calibration=calibration,
        )
        kept = calibration.kept([replace(every, output=calibration.applied(every.output))])
        evaluated = evaluate_labelled(kept, settings, thresholds, set(seen.values()))
        labelled = {*(() if evaluated is None else evaluated[0][0].ids("slide"))}
        failed = self.failed | {
            slide: self.failed[bag.id]
            for bag in bags
            if bag.id in self.failed
            for slide in bag.slides
        }
        entries = evaluated_slides(
            [*bags.slides.values()],
            {
                slide: (part.rows, 0)
                for bag in predicted
                for slide, part in zip(bag.slides, bag.parts, strict=True)
            },
            {slide for bag in predicted if bag.id in labelled for slide in bag.slides},
            failed,
            task.classes,
            calibrating=calibration.patients,
        )
        return write_evaluation(
            self.predictions.folder,
            evaluated,
            entries,
            subgroups=self.options.subgroup,
            settings=settings,
            in_training=seen,
            sets=sets,
        )

    def _predictions(
        self,
        bags: Sequence[Bag],
        targets: Mapping[str, Target | None],
        outputs: NDArray[np.float32],
    ) -> Predictions:
        """Return the means over the models of (N,) bags, from (M, N, C) outputs."""
        task, level = self._first.task, self._first.config.bag
        blank = (np.nan,) * len(task.columns)
        patients, patient = np.unique([bag.patient or bag.id for bag in bags], return_inverse=True)
        zeros = np.zeros(len(bags), np.int64)
        return Predictions(
            task,
            tuple(bag.id for bag in bags),
            tuple(patients.tolist()),
            np.arange(len(bags), dtype=np.int32),
            patient.astype(np.int32),
            zeros,
            zeros,
            np.array([targets[bag.id] or blank for bag in bags], np.float64),
            outputs.mean(axis=0).astype(np.float32),
            level,
        )

    def _predict_bag(self, bag: Bag) -> list[NDArray[np.float32]]:
        """Return the output of each model, and write the means of attention and contributions."""
        features, first = read_bag(bag, bag.dtype), self._first
        positions = read_positions(bag) if first.takes_positions else None
        outputs, attention, contributions = zip(
            *(
                model.predict(features, positions, self._covariates(model, bag))
                for model in self.models
            ),
            strict=True,
        )
        using = [model for model in self.models if model.uses_features]
        if using and self.features.vectors is None:
            rows = [model in using for model in self.models]
            write_patch_values(
                self.predictions.folder,
                bag.id,
                bag.places(),
                names=first.task.names,
                attention=np.mean(np.array(attention)[rows], axis=0),
                contributions=np.mean(contributions, axis=0),
            )
        elif using and self.features.vectors:
            self.features.vectors.write_patches(
                self.predictions, bag, features, using, regions=self.options.regions
            )
        if self._ranges:
            white = [each.whitened(features) for each in self._ranges]
            shares, self.unusual[bag.id] = beyond(self._ranges, white)
            write_unusual(self.predictions.folder, bag.places(), shares)
        describe_slides(self.predictions, bag)
        return [
            model.run.calibrated(output) for output, model in zip(outputs, self.models, strict=True)
        ]

    def _covariates(self, model: TrainedBags, bag: Bag) -> list[float] | None:
        if model.covariates is None:
            return None
        cells = [bag.cells.get(name, "") for name in model.config.covariates]
        if model is self._first:
            for text in model.covariates.unknown(cells):
                where = f"{model.config.bag} {bag.id}"
                self.progress.message(
                    f"warning: {where}, {text} is not in training: taken as missing"
                )
        return model.covariates.encode(cells)

    def _target(self, bag: Bag) -> Target | None:
        task, cells = self._first.task, {**bag.cells, "label": bag.label or ""}
        where = f"{self._first.config.bag} {bag.id}"
        return task.target(cells, where) if cells.keys() >= {*task.columns} else None
