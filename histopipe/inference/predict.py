"""Predict slides with the model of a run: from stores, or directly from slide files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.dataset.options import OnError, check_whole
from histopipe.dataset.selection import store_paths
from histopipe.dataset.splits import trained_on
from histopipe.errors import NothingToDo, UsageError
from histopipe.evaluation.evaluate import Evaluation
from histopipe.evaluation.levels import AGGREGATIONS, Aggregation, Level
from histopipe.evaluation.predictions import PatchScores
from histopipe.evaluation.table import evaluation_lines
from histopipe.inference.classifier import Classifier, PredictOptions, load_classifier
from histopipe.inference.predictions_folder import (
    PATIENTS,
    SETTINGS,
    SLIDES,
    PredictedSlide,
    PredictionsFolder,
    evaluate_labelled,
    write_table,
)
from histopipe.inference.slide_run import Results, SlideRun, SlideRunResult
from histopipe.inference.slide_tiler import FileSource, TiledSlide
from histopipe.inference.stored_slides import StoredSlide, StoreSource
from histopipe.runs import folder as run_folder
from histopipe.runs.result import METRICS
from histopipe.store.store import Store
from histopipe.system.files import record_or_check
from histopipe.system.progress import Progress, default_progress
from histopipe.tiling.spec import Tissue

_DATA = "data.mdb"


@dataclass(frozen=True, kw_only=True, repr=False)
class PredictResult(SlideRunResult):
    """Result of `predict`.

    Attributes:
        metrics: evaluation of all predictions in the folder; None unless labels of two classes are known.
    """

    metrics: Evaluation | None = field(default=None)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        facts = SlideRunResult.to_json(self)
        metrics = facts.pop("metrics")
        return facts if metrics is None else {**facts, "metrics": metrics.to_json()}

    def __str__(self) -> str:
        lines = [] if self.metrics is None else evaluation_lines("labelled", self.metrics)
        return "\n".join([*lines, self.summary("predicted", "patches")])


def predict(
    run: str | Path,
    sources: str | Path | Sequence[str | Path],
    *,
    out: str | Path,
    batch_size: int = 64,
    devices: str = "auto",
    aggregate: Aggregation = "mean",
    labels: str | Path | None = None,
    allow_extra_rows: bool = False,
    on_error: OnError = "raise",
    overlap: int | None = None,
    tissue: Tissue | None = None,
    tissue_threshold: float | None = None,
    mpp_csv: str | Path | None = None,
    default_mpp: float | None = None,
    max_unreadable: float = 0.01,
    workers: int | None = None,
    progress: Progress | None = None,
) -> PredictResult:
    """Predict all patches of stores or slides with the model of a run, and aggregate to slides and patients.

    Args:
        run: folder of a finished patch-level run.
        sources: stores; or slide files and folders of slide files.
        out: folder for the predictions. Slides that are already in it are kept.
        batch_size: patches per batch, over all devices.
        devices: "auto", "cpu", "cpu:N", "gpu" or "gpu:0,1".
        aggregate: how patches are aggregated to slides and patients: "mean", "top_k" or "majority".
        labels: CSV file with the columns slide, label, and optionally patient; by default the labels in stores.
        allow_extra_rows: ignore rows of `labels` and `mpp_csv` that name no slide.
        on_error: "skip" leaves out damaged patches of stores; with "raise" their slides fail.
        overlap, tissue, tissue_threshold: tiling of slide files, if it differs from the training's.
        mpp_csv, default_mpp: scale of slide files that have none: CSV file slide,mpp, and µm per pixel.
        max_unreadable: share of the patches of a slide file, 0 to 1, that may be unreadable.
        workers: processes that read slide files; one per core if None.
        progress: shows the progress; `default_progress()` if None.

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
    check_whole(1, batch_size=batch_size)
    if aggregate not in get_args(Aggregation):
        raise UsageError("--aggregate", found=repr(aggregate), expected=" or ".join(AGGREGATIONS))
    tiling = {"overlap": overlap, "tissue": tissue, "tissue_threshold": tissue_threshold}
    options = PredictOptions(
        batch_size=batch_size, labels=labels, allow_extra_rows=allow_extra_rows, on_error=on_error,
        tiling={name: value for name, value in tiling.items() if value is not None},
        mpp_csv=mpp_csv, default_mpp=default_mpp, max_unreadable=max_unreadable, workers=workers,
    )  # fmt: skip
    shown = progress or default_progress()
    paths = store_paths(sources)
    are_stores = _are_stores(paths)
    classifier = load_classifier(Path(run), devices=devices, batch_size=batch_size)
    with ExitStack() as stack:
        stack.enter_context(run_folder.held(Path(out)))
        source: StoreSource | FileSource
        if are_stores:
            options.check_for_stores()
            stores = [stack.enter_context(Store(path)) for path in paths]
            source = StoreSource(stores, classifier.patches, options)
        else:
            source = stack.enter_context(FileSource(paths, classifier.patches, options, shown))
        folder = PredictionsFolder(Path(out))
        return _Prediction(classifier, folder, source, aggregate, shown).run()


def _are_stores(paths: Sequence[Path]) -> bool:
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise NothingToDo(f"{missing[0]} does not exist", todo="check the path")
    are_stores = {(path / _DATA).exists() for path in paths}
    if len(are_stores) > 1:
        raise UsageError(
            "slides and stores are mixed",
            expected="slides or stores",
            todo="predict them separately, with different --out",
        )
    return are_stores == {True}


@dataclass(frozen=True, slots=True)
class _Prediction:
    classifier: Classifier
    folder: PredictionsFolder
    source: StoreSource | FileSource
    aggregate: Aggregation
    progress: Progress

    def run(self) -> PredictResult:
        """Predict the slides that are missing, then write the tables of all slides in the folder."""
        self._record_settings()
        source = self.source
        run = SlideRun(self.classifier.network, "predicting", source.count, self.progress)
        with run_folder.roomy(self.folder.path):
            slides: Iterable[StoredSlide | TiledSlide] = source.slides(run, self.folder)
            run.run(slides, self._write, stop=source.close)
            metrics = self._write_tables(run)
        return PredictResult(**run.result(self.folder.path), metrics=metrics)

    def _record_settings(self) -> None:
        """Record the settings of the predictions, or compare them with the recorded ones."""
        classifier, path = self.classifier, self.folder.path
        if not self.folder.exists and any(path.iterdir()):
            raise UsageError(
                f"{path} holds files that are not predictions", found=min(path.iterdir()).name,
                todo="choose another --out",
            )  # fmt: skip
        settings = {
            "histopipe": __version__, "run": str(classifier.folder), "sha256": classifier.sha256,
            "classes": list(classifier.classes), "stain_norm": classifier.patches.stain_norm,
            "patch_size": classifier.patches.patch_size, **self.source.settings,
        }  # fmt: skip
        # A run folder may be moved, so the weights are compared instead of the path.
        record_or_check(
            path / SETTINGS, settings, ignored=("histopipe", "run"), contents="predictions"
        )

    def _write(
        self, slide: StoredSlide | TiledSlide, results: Iterator[Results]
    ) -> tuple[int, int]:
        """Write the predictions of a slide, sorted by row and column."""
        found = list(results)
        predicted, thumbnail = self.source.current(slide.predicted()), slide.thumbnail
        probability = np.concatenate([part for part, _ in found])
        corners = np.concatenate([part for _, part in found])
        order = np.lexsort((corners[:, 0], corners[:, 1]))
        probability, corners = probability[order], corners[order].astype(np.int64)
        zeros = np.zeros(len(order), np.int32)
        scores = PatchScores(
            self.classifier.classes, (predicted.slide,), (predicted.patient,), slide=zeros,
            patient=zeros, x_l0=corners[:, 0], y_l0=corners[:, 1],
            label=self._labels(predicted, corners), probability=probability,
        )  # fmt: skip
        self.folder.write(predicted, scores, thumbnail)
        return predicted.patches, predicted.skipped

    def _labels(self, slide: PredictedSlide, corners: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the (N,) class numbers of patches, -1 if unknown."""
        classes = self.classifier.classes
        if self.classifier.labels_from == "annotation":  # slide labels do not apply to patches
            annotated = self.source.patch_labels(slide.slide, classes)
            return np.array([annotated.get((x, y), -1) for x, y in corners.tolist()], np.int32)
        number = classes.index(slide.label) if slide.label in classes else -1
        return np.full(len(corners), number, np.int32)

    def _current(self, slide: PredictedSlide) -> tuple[PredictedSlide, PatchScores]:
        """Read the predictions of a slide, and update its labels if they have changed."""
        scores, now = self.folder.read(slide.slide), self.source.current(slide)
        if now is slide:
            return slide, scores
        label = self._labels(now, np.stack([scores.x_l0, scores.y_l0], axis=1))
        if now != slide or not np.array_equal(label, scores.label):
            scores = replace(scores, patients=(now.patient,), label=label)
            self.folder.write(now, scores)
        return now, scores

    def _write_tables(self, run: SlideRun) -> Evaluation | None:
        """Write `slides.csv`, `patients.csv` and, if labels are known, `metrics.json`."""
        found = [
            self._current(slide)
            for name, slide in self.folder.slides().items()
            if name not in run.failed
        ]
        slides, classifier, path = [slide for slide, _ in found], self.classifier, self.folder.path
        seen = {it.slide for it in slides} & trained_on(classifier.folder / run_folder.SPLITS)
        if seen:
            some = ", ".join(sorted(seen)[:3]) + (", …" if len(seen) > 3 else "")
            self.progress.message(
                f"warning: {len(seen)} of these slides were used in the training ({some}): "
                "metrics on them are not valid for new slides"
            )
        parts = [scores for _, scores in found if len(scores.label)]
        tables: tuple[tuple[str, Level], ...] = ((SLIDES, "slide"), (PATIENTS, "patient"))
        for name, level in tables:
            write_table(
                path / name, parts, slides, level, self.aggregate, classes=classifier.classes,
                judging=classifier.judging, thresholds=classifier.thresholds,
            )  # fmt: skip
        metrics = evaluate_labelled(parts, classifier.judging, classifier.thresholds)
        (path / METRICS).unlink(missing_ok=True)
        if metrics is not None:
            text = json.dumps({"test": metrics.to_json()}, indent=2) + "\n"
            run_folder.write_text(path / METRICS, text)
        return metrics
