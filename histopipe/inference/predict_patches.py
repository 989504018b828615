"""Predict the patches of slides with the model of a run, and aggregate them to slides and patients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.evaluation.breakdown import breakdown_lines
from histopipe.evaluation.evaluate import Evaluation, evaluation_lines
from histopipe.inference.classifier import Classifier
from histopipe.inference.external_evaluation import (
    ExternalEvaluation,
    evaluate_labelled,
    evaluated_slides,
    training_warning,
    write_evaluation,
)
from histopipe.inference.slide_run import BATCHES, Results, SlideRun, SlideRunResult
from histopipe.inference.slide_tiler import FileSource, TiledSlide
from histopipe.inference.stored_slides import StoredSlide, StoreSource
from histopipe.predictions.sources import (
    PATIENTS,
    SLIDES,
    PredictedSlide,
    PredictionsFolder,
    write_level_table,
)
from histopipe.splits.splits import names_of
from histopipe.system.files import roomy
from histopipe.system.output import Progress
from histopipe.tasks.choices import Aggregation, EvaluationLevel
from histopipe.tasks.classification import Classification
from histopipe.tasks.predictions import scores_of
from histopipe.tasks.task import Predictions


@dataclass(frozen=True, kw_only=True, repr=False)
class PredictResult(SlideRunResult):
    """Result of `predict`.

    Attributes:
        evaluated: metrics of all predictions in the folder, also by subgroup; None unless enough labels are known.
        unit: what was predicted: "slide", or "patient" if the model takes all slides of a patient together.
    """

    evaluated: ExternalEvaluation | None = field(default=None)
    unit: EvaluationLevel = "slide"

    @property
    def metrics(self) -> Evaluation | None:
        """Metrics of all predictions in the folder; None unless enough labels are known."""
        return None if self.evaluated is None else self.evaluated.evaluation

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        facts = SlideRunResult.to_json(self)
        del facts["evaluated"]
        if self.evaluated is None:
            return facts
        evaluated = self.evaluated
        return {
            **facts, "metrics": evaluated.evaluation.to_json(), "breakdown": evaluated.breakdown.to_json(),
        }  # fmt: skip

    def __str__(self) -> str:
        lines = []
        if self.evaluated is not None:
            lines += evaluation_lines("labelled", self.evaluated.evaluation)
            lines += breakdown_lines(self.evaluated.breakdown, self.evaluated.task)
        return "\n".join([*lines, self.summary("predicted", "patches", self.unit)])


@dataclass(frozen=True, slots=True)
class PatchPrediction:
    """Predictions of the patches of slides, and of slides and patients."""

    classifier: Classifier
    folder: PredictionsFolder
    source: StoreSource | FileSource
    aggregate: Aggregation
    subgroup: Sequence[str]
    progress: Progress

    def run(self) -> PredictResult:
        """Predict the slides that are missing, then write the tables of all slides in the folder."""
        self._record_settings()
        source = self.source
        run = SlideRun(self.classifier.network, "predicting", source.count, self.progress)
        with roomy(self.folder.path):
            slides: Iterable[Any] = source.slides(run, self.folder.complete)
            run.run(slides, self._write, stop=source.close)
            evaluated = self._write_tables(run)
        return PredictResult(**run.result(self.folder.path), evaluated=evaluated)

    def _record_settings(self) -> None:
        """Record the settings of the predictions, or compare them with the recorded ones."""
        classifier = self.classifier
        settings = {
            "histopipe": __version__, "batches": BATCHES, "run": str(classifier.folder), "sha256": classifier.sha256,
            "classes": list(classifier.classes), "stain_norm": classifier.patches.stain_norm,
            "patch_size": classifier.patches.patch_size, **self.source.settings,
            **({"temperature": [list(temperature) for temperature in classifier.temperatures]} if classifier.temperatures else {}),
        }  # fmt: skip
        self.folder.record(settings)

    def _write(
        self, slide: StoredSlide | TiledSlide, results: Iterator[Results]
    ) -> tuple[int, int]:
        """Write the predictions of a slide, sorted by row and column."""
        batches, classifier = list(results), self.classifier
        predicted, thumbnail = self.source.current(slide.predicted()), slide.thumbnail
        probability = np.concatenate([part for part, _ in batches])
        corners = np.concatenate([part for _, part in batches])
        order = np.lexsort((corners[:, 0], corners[:, 1]))
        probability, corners = probability[order], corners[order].astype(np.int64)
        zeros = np.zeros(len(order), np.int32)
        shape = (len(order), classifier.models, len(classifier.classes))
        by_model = classifier.calibrated(
            probability.reshape(shape)
        )  # a slide may be without patches
        scores = Predictions(
            Classification(classes=classifier.classes), (predicted.slide,), (predicted.patient,),
            slide=zeros, patient=zeros, x_l0=corners[:, 0], y_l0=corners[:, 1],
            target=self._targets(predicted, corners), output=by_model.mean(axis=1),
        )  # fmt: skip
        predicted = replace(predicted, spread=self._spread(scores, by_model))
        self.folder.write(predicted, scores, thumbnail)
        return predicted.patches, predicted.skipped

    def _spread(self, scores: Predictions, by_model: NDArray[np.float32]) -> list[float]:
        """Return the standard deviation of the slide's probabilities over the models, from (N, M, C) of its patches."""
        models = self.classifier.models
        if models == 1 or not len(by_model):
            return []
        unknown = scores.without_targets()
        outputs = [
            scores_of(
                replace(unknown, output=by_model[:, number]), "slide", self.aggregate,
                self.classifier.evaluation_settings,
            ).output[0]
            for number in range(models)
        ]  # fmt: skip
        return [float(value) for value in np.std(outputs, axis=0, ddof=1)]

    def _targets(self, slide: PredictedSlide, corners: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the (N, 1) class numbers of patches, NaN if unknown."""
        classes = self.classifier.classes
        if self.classifier.labels_from == "annotation":  # slide labels do not apply to patches
            annotated = self.source.patch_labels(slide.slide, classes)
            numbers = [annotated.get((x, y), -1) for x, y in corners.tolist()]
        else:
            number = classes.index(slide.label) if slide.label in classes else -1
            numbers = [number] * len(corners)
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
        slides, classifier, path = (
            [slide for slide, _ in entries],
            self.classifier,
            self.folder.path,
        )
        seen = {
            slide.slide: slide.patient
            for slide in slides
            if names_of(slide.slide, slide.patient) & classifier.in_training
        }
        if seen:
            self.progress.message(training_warning(sorted(seen), "slide"))
        parts = [scores for _, scores in entries if len(scores)]
        tables: tuple[tuple[str, EvaluationLevel], ...] = ((SLIDES, "slide"), (PATIENTS, "patient"))
        for name, level in tables:
            write_level_table(
                path / name, parts, slides, level, self.aggregate, classes=classifier.classes,
                evaluation_settings=classifier.evaluation_settings, thresholds=classifier.thresholds,
            )  # fmt: skip
        evaluated = evaluate_labelled(
            parts, classifier.evaluation_settings, classifier.thresholds, set(seen.values())
        )
        table = evaluated_slides(
            self.source.slide_table(slides), {slide.slide: (slide.patches, slide.skipped) for slide in slides},
            [part.slides[0] for part in parts if (part.label >= 0).any()], run.failed, classifier.classes,
        )  # fmt: skip
        return write_evaluation(
            path, evaluated, table, subgroups=self.subgroup, settings=classifier.evaluation_settings, in_training=seen,
        )  # fmt: skip
