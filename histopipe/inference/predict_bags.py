"""Predict slides or patients with slide models: from features, from stores, or straight from slide files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.errors import OutOfMemory, UsageError
from histopipe.evaluation.evaluate import mean_thresholds, tempered
from histopipe.features.bags import Bag, BagSet, read_bag, read_positions
from histopipe.features.feature_file import feature_files
from histopipe.inference.bag_features import BagFeatures
from histopipe.inference.embed import describe_slide
from histopipe.inference.external_evaluation import (
    ExternalEvaluation,
    evaluate_labelled,
    evaluated_slides,
    find_in_training,
    write_evaluation,
)
from histopipe.inference.predict_patches import PredictResult
from histopipe.predictions.prediction_tables import write_patch_values, write_summary
from histopipe.predictions.sources import PATIENTS, SLIDES
from histopipe.system.csv_files import column_key, read_csv
from histopipe.system.filesystems import roomy
from histopipe.system.output import slide_failure
from histopipe.tasks.choices import EvaluationLevel, name_of
from histopipe.tasks.predictions import ThresholdsByLevel
from histopipe.tasks.task import NO_THRESHOLDS, Predictions, Target

if TYPE_CHECKING:
    from histopipe.inference.networks import TrainedBags

T = TypeVar("T")


@dataclass(slots=True)
class BagPrediction:
    """Predictions of bags by one model, or by the models of several folds."""

    models: Sequence[TrainedBags]
    features: BagFeatures
    done: list[Bag] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def _first(self) -> TrainedBags:
        return self.models[0]

    def run(self) -> PredictResult:
        """Compute missing features, then predict all bags, and write the tables."""
        first, path = self._first, self.features.predictions.path
        if first.covariates is not None and self.features.options.labels is None:
            raise UsageError(
                "the model takes covariates",
                found="no --labels",
                expected="a CSV file with the columns slide, " + ", ".join(first.config.covariates),
            )
        with roomy(path):
            features, began, evaluated = self.features, time.monotonic(), None
            folders = features.folders(self._record_settings)
            for run in features.runs:
                self.failed |= run.failed
            if features.kind == "features" or all(map(feature_files, folders)):
                bags = self._bags(folders)
                self._record_settings()
                evaluated = self._predict(bags)
        return PredictResult(
            folder=path,
            done=tuple(bag.id for bag in self.done),
            kept=(),
            failed=self.failed,
            patches=sum(bag.rows for bag in self.done)
            if features.kind == "features"
            else sum(run.patches for run in features.runs),
            skipped=sum(run.skipped for run in features.runs),
            seconds=time.monotonic() - began,
            input_wait=sum(run.input_wait for run in features.runs),
            unit=first.config.bag,
            evaluated=evaluated,
        )

    def _record_settings(self) -> None:
        first, temperatures = self._first, [list(model.run.temperature) for model in self.models]
        self.features.predictions.record(
            {
                "histopipe": __version__,
                "run": str(first.run.folder),
                "task": first.task.name,
                "classes": list(first.task.classes),
                "targets": list(first.targets),
                "bag": first.config.bag,
                "sha256": [model.sha256 for model in self.models],
                "sources": self.features.kind,
                "tiling": dict(self.features.options.tiling),
                **({"temperature": temperatures} if any(temperatures) else {}),
            }
        )

    def _bags(self, folders: Sequence[Path]) -> BagSet:
        first, options = self._first, self.features.options
        labels = None if options.labels is None else Path(options.labels)
        columns: list[str] = []
        has_label = True
        if labels is not None:
            present, covariates = read_csv(labels)[0], first.config.covariates
            columns = [n for n in (*first.targets, *covariates) if column_key(n) in present]
            missing = [name for name in covariates if name not in columns]
            if missing:
                raise UsageError(
                    f"{labels}: columns",
                    found=", ".join(present),
                    expected="the covariates of the model: " + ", ".join(missing),
                )
            has_label = first.task.of_classes and "label" in present
        bags = BagSet(
            folders,
            bag=first.config.bag,
            labels=labels,
            columns=columns,
            more_columns=options.subgroup_columns,
            with_label=has_label,
            allow_extra=options.allow_extra_rows,
            na=first.config.na if options.na is None else options.na,
            notify=self.features.progress.message,
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
        for note in bags.notes:
            self.features.progress.message(note)
        self.failed |= {**bags.failed, **dict.fromkeys(bags.empty, "the slide has no patches")}
        return bags

    def _predict(self, bags: BagSet) -> ExternalEvaluation | None:
        """Predict all bags, and write what is known of each patch, bag and patient."""
        results: list[tuple[Bag, list[NDArray[np.float32]]]] = []
        config, progress = self._first.config, self.features.progress
        # A wrong cell is reported before the work.
        targets = {bag.id: self._target(bag) for bag in bags.bags.values()}
        with progress.bar("predicting", unit=f"{config.bag}s", total=len(bags.bags)) as bar:
            for bag in bags.bags.values():
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
        predicted, config = self.done, self._first.config
        seen = find_in_training(
            {bag.id: bag.patient for bag in predicted},
            [model.run.folder for model in self.models],
            config.bag,
            self.features.progress,
        )
        thresholds = mean_thresholds([model.run.thresholds for model in self.models])
        self._write_tables(predicted, targets, outputs.astype(np.float64), thresholds)
        rows = [row for row, bag in enumerate(predicted) if targets[bag.id] is not None]
        labelled_bags, settings = [predicted[row] for row in rows], config.evaluation_settings
        parts = [self._predictions(labelled_bags, targets, outputs[:, rows])] if rows else []
        evaluated = evaluate_labelled(parts, settings, thresholds, set(seen.values()))
        labelled = frozenset(() if evaluated is None else evaluated[0][0].slides)
        failed = self.failed | {
            slide: self.failed[bag.id]
            for bag in bags.bags.values()
            if bag.id in self.failed
            for slide in bag.slides
        }
        entries = evaluated_slides(
            bags.found_slides(),
            {
                slide: (part.rows, 0)
                for bag in predicted
                for slide, part in zip(bag.slides, bag.parts, strict=True)
            },
            {slide for bag in predicted if bag.id in labelled for slide in bag.slides},
            failed,
            self._first.task.classes,
        )
        return write_evaluation(
            self.features.predictions.path,
            evaluated,
            entries,
            subgroups=self.features.options.subgroup,
            settings=settings,
            in_training=seen,
        )

    def _predictions(
        self,
        bags: Sequence[Bag],
        targets: Mapping[str, Target | None],
        outputs: NDArray[np.float32],
    ) -> Predictions:
        """Return the means over the models of (N,) bags with known targets, from (M, N, C) outputs."""
        task, level = self._first.task, self._first.config.bag
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
            np.array([targets[bag.id] or () for bag in bags], np.float64),
            outputs.mean(axis=0).astype(np.float32),
            level,
        )

    def _write_tables(
        self,
        bags: Sequence[Bag],
        targets: Mapping[str, Target | None],
        outputs: NDArray[np.float64],
        thresholds: ThresholdsByLevel,
    ) -> None:
        """Write a table of the slides, if they are the bags, and one of the patients: means of their slides."""
        task = self._first.task.with_settings(self._first.config.evaluation_settings)
        by_patient: dict[str, list[int]] = {}
        for number, bag in enumerate(bags):
            by_patient.setdefault(bag.patient or bag.id, []).append(number)
        tables: list[tuple[str, EvaluationLevel, Sequence[Sequence[int]]]] = [
            (PATIENTS, "patient", [*by_patient.values()])
        ]
        if self._first.config.bag == "slide":
            tables.append((SLIDES, "slide", [[number] for number in range(len(bags))]))
        for name, level, groups in tables:
            values = np.stack([outputs[:, group].mean(axis=1) for group in groups], axis=1)
            means, first = values.mean(axis=0), [bags[group[0]] for group in groups]
            columns: dict[str, Sequence[object]] = {"patient": [*by_patient]}
            if level == "slide":
                columns = {"slide": [b.id for b in first], "patient": [b.patient for b in first]}
            if task.of_classes:
                columns["label"] = [_common([bags[i].label for i in group]) for group in groups]
            else:
                blank = (np.nan,) * len(task.columns)
                common = [
                    _common([targets[bags[i].id] for i in group]) or blank for group in groups
                ]
                cells = task.target_cells(np.array(common), means)
                columns |= zip(task.target_names, zip(*cells, strict=True), strict=True)
            spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.empty((0, 0))
            write_summary(
                self.features.predictions.path / name,
                columns,
                task=task,
                output=means,
                patches=[sum(bags[i].rows for i in group) for group in groups],
                spread=[[f"{value:.9g}" for value in row] for row in spread],
                limits=np.array(thresholds.get(name_of(level, "mean"), NO_THRESHOLDS).values),
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
        write_patch_values(
            self.features.predictions.path,
            bag.id,
            bag.places(),
            names=first.task.names,
            attention=np.mean(attention, axis=0),
            contributions=np.mean(contributions, axis=0),
        )
        for slide, part in zip(bag.slides, bag.parts, strict=True):
            predicted = describe_slide(part.headers[0], slide, bag.patient or slide, bag.label)
            if predicted is not None:
                path = self.features.predictions.json(slide)
                path.parent.mkdir(parents=True, exist_ok=True)
                predicted.write(path)
        return [
            tempered(output, model.run.temperature).astype(np.float32)
            if model.run.temperature
            else output
            for output, model in zip(outputs, self.models, strict=True)
        ]

    def _covariates(self, model: TrainedBags, bag: Bag) -> list[float] | None:
        if model.covariates is None:
            return None
        cells = [bag.cells.get(name, "") for name in model.config.covariates]
        if model is self._first:
            for text in model.covariates.unknown(cells):
                self.features.progress.message(
                    f"warning: {model.config.bag} {bag.id}, {text} is not in training: taken as missing"
                )
        return model.covariates.encode(cells)

    def _target(self, bag: Bag) -> Target | None:
        task, cells = self._first.task, {**bag.cells, "label": bag.label or ""}
        if not cells.keys() >= {*task.columns}:
            return None
        return task.target(cells, f"{self._first.config.bag} {bag.id}")


def _common(values: Sequence[T | None]) -> T | None:
    """Return the value that all have; None if they differ."""
    return values[0] if len(set(values)) == 1 else None
