"""Predict slides or patients with slide models: from features, from stores, or straight from slide files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.errors import NothingToDo, OutOfMemory, UsageError
from histopipe.evaluation.evaluate import evaluate, mean_thresholds, tempered
from histopipe.evaluation.subgroups import labels_columns
from histopipe.features.bags import Bag, BagSet, read_bag, read_positions
from histopipe.features.feature_file import (
    feature_files,
)
from histopipe.inference.bag_features import BagFeatures, TrainedBags
from histopipe.inference.classifier import PredictOptions
from histopipe.inference.embed import described
from histopipe.inference.external_evaluation import (
    ExternalEvaluation,
    evaluated_slides,
    training_warning,
    write_evaluation,
)
from histopipe.inference.predict_patches import PredictResult
from histopipe.predictions.sources import PATIENTS, SLIDES, PredictionsFolder
from histopipe.predictions.tables import write_patch_values
from histopipe.slides.tables import table_columns
from histopipe.splits.splits import SPLITS, names_of, trained_on
from histopipe.system.csv_files import column_key, write_table
from histopipe.system.files import roomy
from histopipe.system.output import Progress, slide_failure
from histopipe.tasks.choices import EvaluationLevel, name_of
from histopipe.tasks.predictions import ModelPredictions
from histopipe.tasks.task import NO_THRESHOLDS, Predictions, Target

T = TypeVar("T")
_SPREAD = "sd_"


@dataclass(frozen=True, slots=True)
class BagPredictions:
    """Predictions of (N,) bags by (M,) models. `outputs` has an (N, C) array for each model."""

    models: Sequence[TrainedBags]
    bags: Sequence[Bag]
    targets: Sequence[Target | None]
    """Known target of each bag; None if it is unknown."""
    outputs: Sequence[NDArray[np.float32]]

    @property
    def _first(self) -> TrainedBags:
        return self.models[0]

    def predictions(self) -> Predictions:
        """Return the means over the models, with targets where they are known."""
        first, bags, columns = self._first, self.bags, self._first.task.columns
        patients = sorted({bag.patient or bag.id for bag in bags})
        numbers = {name: number for number, name in enumerate(patients)}
        zeros = np.zeros(len(bags), np.int64)
        blank = (np.nan,) * len(columns)
        target = np.array([values or blank for values in self.targets], np.float64)
        return Predictions(
            first.task, tuple(bag.id for bag in bags), tuple(patients),
            np.arange(len(bags), dtype=np.int32),
            np.array([numbers[bag.patient or bag.id] for bag in bags], np.int32), zeros, zeros,
            target.reshape(len(bags), len(columns)), self._together().mean(axis=0).astype(np.float32),
            first.config.bag,
        )  # fmt: skip

    def labelled(self) -> ModelPredictions | None:
        """Return the bags with known targets, with their thresholds; None if they cannot be evaluated, as with one class."""
        rows = np.flatnonzero([target is not None for target in self.targets])
        try:
            if not len(rows):
                return None
            self._first.task.check(np.array([self.targets[i] for i in rows.tolist()]), "predicted")
        except NothingToDo:
            return None
        kept = rows.tolist()
        some = BagPredictions(
            self.models, [self.bags[i] for i in kept], [self.targets[i] for i in kept],
            [output[rows] for output in self.outputs],
        )  # fmt: skip
        return some.predictions(), mean_thresholds([model.thresholds for model in self.models])

    def write(self, folder: Path, *, slides: str, patients: str) -> None:
        """Write a table of the slides, if they are the bags, and one of the patients: means of their slides."""
        if self._first.config.bag == "slide":
            groups = [[number] for number in range(len(self.bags))]
            self._write(folder / slides, groups, of_slides=True)
        by_patient: dict[str, list[int]] = {}
        for number, bag in enumerate(self.bags):
            by_patient.setdefault(bag.patient or bag.id, []).append(number)
        self._write(folder / patients, list(by_patient.values()), of_slides=False)

    def _write(self, path: Path, groups: Sequence[Sequence[int]], *, of_slides: bool) -> None:
        """Write a row per group of bags."""
        first, together = self._first, self._together().astype(np.float64)
        values = np.stack([together[:, group].mean(axis=1) for group in groups], axis=1)
        means = values.mean(axis=0)
        spread = values.std(axis=0, ddof=1) if len(values) > 1 else None
        task, names = first.task, first.task.output_names
        ids = ("slide", "patient") if of_slides else ("patient",)
        facts = (*task.target_names, "patches")
        if task.of_classes:
            facts = ("label", "patches", "predicted", "decided")
        spreads = (
            () if spread is None else tuple(_SPREAD + name.removeprefix("p_") for name in names)
        )
        decided = self._decided(means, "slide" if of_slides else "patient")
        rows = []
        for row, group in enumerate(groups):
            bag = self.bags[group[0]]
            patches = sum(self.bags[number].rows for number in group)
            target = _common([self.targets[number] for number in group])
            of_target = np.array([target or (np.nan,) * len(task.columns)])
            (names_of,) = task.target_cells(of_target, means[row : row + 1])
            cells: list[object] = [*names_of, patches]
            if task.of_classes:
                label, best = _common([self.bags[number].label for number in group]), cells[1]
                cells = [label, patches, best, decided[row]]
            numbers = [*means[row], *(() if spread is None else spread[row])]
            id_cells = [bag.id, bag.patient] if of_slides else [bag.patient or bag.id]
            rows.append([*id_cells, *cells, *(f"{value:.9g}" for value in numbers)])
        write_table(path, [*ids, *facts, *names, *spreads], rows)

    def _decided(self, means: NDArray[np.float64], level: EvaluationLevel) -> list[str]:
        """Return the decided class of each row; nothing for other tasks."""
        task = self._first.task
        if not task.of_classes:
            return []
        limits = mean_thresholds([model.thresholds for model in self.models])
        values = np.array(limits.get(name_of(level, "mean"), NO_THRESHOLDS).values)
        numbers = task.with_settings(self._first.evaluation_settings).decide(means, values)
        return [task.names[number] for number in numbers]

    def _together(self) -> NDArray[np.float32]:
        """Return (M, N, C) outputs, in the form of the first model."""
        task = self._first.task
        pairs = zip(self.models, self.outputs, strict=True)
        return np.stack([task.converted(model.task, output) for model, output in pairs])


def _common(values: Sequence[T]) -> T | None:
    """Return the value that all have; None if they differ."""
    return values[0] if len(set(values)) == 1 else None


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
