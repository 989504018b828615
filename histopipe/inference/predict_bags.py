"""Predict slides or patients with slide models: from features, from stores, or straight from slide files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from histopipe._version import __version__
from histopipe.errors import OutOfMemory, UsageError
from histopipe.evaluation.evaluate import evaluate
from histopipe.evaluation.groups import labels_columns
from histopipe.evaluation.temperature import tempered
from histopipe.features.bags import Bag, BagSet, read_bag, read_positions
from histopipe.features.feature_file import (
    feature_files,
)
from histopipe.inference.bag_features import BagFeatures
from histopipe.inference.bag_tables import BagPredictions
from histopipe.inference.classifier import PredictOptions
from histopipe.inference.external_evaluation import (
    ExternalEvaluation,
    evaluated_slides,
    training_warning,
    write_evaluation,
)
from histopipe.inference.feature_folder import described
from histopipe.inference.predict_patches import PredictResult
from histopipe.inference.trained_bags import TrainedBags
from histopipe.predictions.patch_values import write_patch_values
from histopipe.predictions.predictions_folder import PATIENTS, SLIDES, PredictionsFolder
from histopipe.slides.tables import table_columns
from histopipe.splits.splits import SPLITS, names_of, trained_on
from histopipe.system.csv_files import column_key
from histopipe.system.filesystems import roomy
from histopipe.system.progress import Progress
from histopipe.system.result import slide_failure
from histopipe.tasks.task import Target


@dataclass(slots=True)
class BagsPrediction:
    """Predictions of bags by one model, or by the models of several folds."""

    models: Sequence[TrainedBags]
    folder: PredictionsFolder
    features: BagFeatures
    options: PredictOptions
    progress: Progress
    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def _first(self) -> TrainedBags:
        return self.models[0]

    def run(self) -> PredictResult:
        """Compute missing features, then predict all bags, and write the tables."""
        first, path = self._first, self.folder.path
        if first.covariates is not None and self.options.labels is None:
            raise UsageError(
                "the model takes covariates", found="no --labels",
                expected="a CSV file with the columns slide, " + ", ".join(first.config.covariates),
            )  # fmt: skip
        with roomy(path):
            features, began, evaluated = self.features, time.monotonic(), None
            folders = features.folders(self._record_settings)
            self.failed |= features.failed
            if features.kind == "features" or all(map(feature_files, folders)):
                bags = self._bags(folders)
                self._record_settings()
                evaluated = self._predict(bags)
        return PredictResult(
            folder=path, done=tuple(self.done), kept=(), failed=dict(self.failed),
            patches=features.patches, skipped=features.skipped, seconds=time.monotonic() - began,
            input_wait=features.input_wait, unit=first.config.bag, evaluated=evaluated,
        )  # fmt: skip

    def _record_settings(self) -> None:
        first, temperatures = self._first, [list(model.temperature) for model in self.models]
        settings = {
            "histopipe": __version__, "run": str(first.folder), "task": first.task.name,
            "classes": list(first.task.classes), "targets": list(first.targets), "bag": first.config.bag,
            "sha256": [model.network.sha256 for model in self.models], "sources": self.features.kind,
            "tiling": dict(self.options.tiling),
            **({"temperature": temperatures} if any(temperatures) else {}),
        }  # fmt: skip
        self.folder.record(settings)

    def _bags(self, folders: Sequence[Path]) -> BagSet:
        first, labels = self._first, self.options.labels
        columns: list[str] = []
        if labels is not None:
            present = table_columns(Path(labels))
            missing = [
                column for column in first.config.covariates if column_key(column) not in present
            ]
            if missing:
                raise UsageError(
                    f"{labels}: columns", found=", ".join(present),
                    expected="the covariates of the model: " + ", ".join(missing),
                )  # fmt: skip
            columns = [
                column
                for column in (*first.targets, *first.config.covariates)
                if column_key(column) in present
            ]
        has_label = labels is None or (
            first.task.of_classes and "label" in table_columns(Path(labels))
        )
        bags = BagSet(
            folders, bag=first.config.bag, labels=None if labels is None else Path(labels),
            columns=columns, more_columns=labels_columns(self.options.subgroup), with_label=has_label, allow_extra=self.options.allow_extra_rows,
            na=first.config.na if self.options.na is None else self.options.na, notify=self.progress.message, unlabelled=True, on_error="skip",
        )  # fmt: skip
        if bags.dimension != first.network.dimension:
            raise UsageError(
                f"{' and '.join(map(str, folders))}: features per patch", found=bags.dimension,
                expected=f"{first.network.dimension}, as in the training",
                todo="use features of the encoder of the training",
            )  # fmt: skip
        for note in bags.notes:
            self.progress.message(note)
        self.failed |= {**bags.failed, **dict.fromkeys(bags.empty, "the slide has no patches")}
        return bags

    def _predict(self, bags: BagSet) -> ExternalEvaluation | None:
        """Predict all bags, and write what is known of each patch, bag and patient."""
        results: list[tuple[Bag, list[Any]]] = []
        # A wrong cell is reported before the work.
        targets = {bag.id: self._target(bag) for bag in bags.bags.values()}
        with closing(
            self.progress.bar("predicting", unit=f"{self._first.config.bag}s", total=len(bags.bags))
        ) as bar:
            for bag in bags.bags.values():
                try:
                    results.append((bag, self._predict_bag(bag)))
                except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                    large = isinstance(error, OutOfMemory)
                    self.failed[bag.id] = str(error) if large else slide_failure(error)
                    self.progress.message(f"{bag.id}: failed: {self.failed[bag.id]}")
                bar.advance()
        if not results:
            return None
        self.done = [bag.id for bag, _ in results]
        if self.features.kind == "features":
            self.features.patches = sum(bag.rows for bag, _ in results)
        used = {pair for model in self.models for pair in trained_on(model.folder / SPLITS)}
        seen = {
            bag.id: bag.patient or bag.id
            for bag, _ in results
            if names_of(bag.id, bag.patient) & used
        }
        if seen:
            self.progress.message(training_warning(sorted(seen), self._first.config.bag))
        predictions = BagPredictions(
            self.models, [bag for bag, _ in results], [targets[bag.id] for bag, _ in results],
            [np.stack([outputs[i] for _, outputs in results]) for i in range(len(self.models))],
        )  # fmt: skip
        path = self.folder.path
        predictions.write(path, slides=SLIDES, patients=PATIENTS)
        part, evaluation_settings = predictions.labelled(), self._first.evaluation_settings
        evaluated = (
            None
            if part is None
            else (part, evaluate([part], evaluation_settings, set(seen.values())))
        )
        labelled = set() if part is None else set(part[0].slides)
        failed = self.failed | {
            slide: self.failed[bag.id]
            for bag in bags.bags.values()
            if bag.id in self.failed
            for slide in bag.slides
        }
        entries = evaluated_slides(
            bags.found_slides(),
            {slide: (of_it.rows, 0) for bag, _ in results for slide, of_it in zip(bag.slides, bag.parts, strict=True)},
            [slide for bag, _ in results for slide in bag.slides if bag.id in labelled], failed, self._first.task.classes,
        )  # fmt: skip
        return write_evaluation(
            path, evaluated, entries, subgroups=self.options.subgroup, settings=evaluation_settings, in_training=seen,
        )  # fmt: skip

    def _predict_bag(self, bag: Bag) -> list[Any]:
        """Return the output of each model, and write the means of attention and contributions."""
        features = read_bag(bag, bag.dtype)
        network = self._first.network
        positions = read_positions(bag) if network.takes_positions else None
        results = [
            model.network.predict(features, positions, self._covariates(model, bag))
            for model in self.models
        ]
        write_patch_values(
            self.folder.path, bag.id, bag.places(), names=self._first.task.names,
            attention=np.mean([result.attention for result in results], axis=0),
            contributions=np.mean([result.contributions for result in results], axis=0),
        )  # fmt: skip
        for slide, part in zip(bag.slides, bag.parts, strict=True):
            predicted = described(part.headers[0], slide, bag.patient or slide, bag.label)
            if predicted is not None:
                path = self.folder.json(slide)
                path.parent.mkdir(parents=True, exist_ok=True)
                predicted.write(path)
        return [
            tempered(result.output, model.temperature).astype(np.float32)
            if model.temperature
            else result.output
            for result, model in zip(results, self.models, strict=True)
        ]

    def _covariates(self, model: TrainedBags, bag: Bag) -> list[float] | None:
        if model.covariates is None:
            return None
        cells = [bag.cells.get(name, "") for name in model.config.covariates]
        if model is self._first:
            for text in model.covariates.unknown(cells):
                self.progress.message(
                    f"warning: {model.config.bag} {bag.id}, {text} is not in training: taken as missing"
                )
        return model.covariates.encode(cells)

    def _target(self, bag: Bag) -> Target | None:
        task, cells = self._first.task, {**bag.cells, "label": bag.label or ""}
        if not all(name in cells for name in task.columns):
            return None
        return task.target(cells, f"{self._first.config.bag} {bag.id}")
