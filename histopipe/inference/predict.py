"""Predict slides with the model of a run: from stores, or directly from slide files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from histopipe.dataset.options import OnError, check_whole
from histopipe.errors import UsageError
from histopipe.inference.bag_features import BagFeatures
from histopipe.inference.classifier import PredictOptions, load_classifier
from histopipe.inference.predict_bags import BagsPrediction
from histopipe.inference.predict_patches import PatchPrediction, PredictResult
from histopipe.inference.slide_run import batch_rule
from histopipe.inference.slide_tiler import FileSource
from histopipe.inference.source_kinds import read_sources
from histopipe.inference.stored_slides import StoreSource
from histopipe.inference.trained_bags import check_alike, load_bags, run_folders
from histopipe.predictions.predictions_folder import SETTINGS, PredictionsFolder
from histopipe.runs import folder as run_folder
from histopipe.runs.result import read_result
from histopipe.runs.task_config import BagTrainConfig, load_config
from histopipe.store.store import Store
from histopipe.system.progress import Progress, default_progress
from histopipe.tasks.choices import Aggregation
from histopipe.tissue_masks.algorithms import Tissue


def predict(
    run: str | Path,
    sources: str | Path | Sequence[str | Path],
    *,
    out: str | Path,
    batch_size: int = 64,
    devices: str = "auto",
    aggregate: Aggregation = "mean",
    labels: str | Path | None = None,
    na: Sequence[str] | None = None,
    allow_extra_rows: bool = False,
    subgroup: Sequence[str] = (),
    on_error: OnError = "raise",
    images: bool = False,
    overlap: int | None = None,
    tissue: Tissue | None = None,
    tissue_threshold: float | None = None,
    mpp_csv: str | Path | None = None,
    default_mpp: float | None = None,
    max_unreadable: float = 0.01,
    workers: int | None = None,
    stage: str | Path | None = None,
    stage_gb: float = 50.0,
    encoder: Sequence[str | Path] = (),
    encoder_weights: Sequence[str | Path] = (),
    progress: Progress | None = None,
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
        batch_size: patches per batch, over all devices.
        devices: "auto", "cpu", "cpu:N", "gpu" or "gpu:0,1".
        aggregate: patch models: how patches are aggregated to slides and patients: "mean", "top_k" or "majority".
        labels: CSV file with the columns slide, label, and optionally patient, and with the targets and covariates of
            the model; by default the labels in stores or features.
        na: cells of `labels` that are missing values, apart from the empty cell; None: as in the training.
        allow_extra_rows: ignore rows of `labels` and `mpp_csv` that name no slide.
        subgroup: columns of `labels` by which metrics are reported, in addition to those of the training.
        on_error: "skip" leaves out damaged patches of stores; with "raise" their slides fail.
        images: take only images, as for `ingest`.
        overlap, tissue, tissue_threshold: tiling of slide files, if it differs from the training's.
        mpp_csv, default_mpp: scale of slide files: a CSV file slide,mpp, which takes precedence over their headers, and
            µm per pixel of files that have none.
        max_unreadable: share of the patches of a slide file, 0 to 1, that may be unreadable.
        workers: processes that read slide files; one per core if None.
        stage, stage_gb: folder to which slide files are copied before they are read, and most GB of copies at once, as
            for `ingest`.
        encoder, encoder_weights: encoders of a slide model and their weights, as `model` and `weights` of `embed`, if
            they have moved since the training; one per feature set. They must be the same encoders.
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
    tiling = {"overlap": overlap, "tissue": tissue, "tissue_threshold": tissue_threshold}
    options = PredictOptions(
        batch_size=batch_size, labels=labels, na=na, allow_extra_rows=allow_extra_rows, on_error=on_error,
        tiling={name: value for name, value in tiling.items() if value is not None},
        images=images, mpp_csv=mpp_csv, default_mpp=default_mpp, max_unreadable=max_unreadable, workers=workers,
        stage=stage, stage_gb=stage_gb, subgroup=tuple(subgroup),
    )  # fmt: skip
    display = progress or default_progress()
    runs = run_folders(Path(run))
    read_result(runs[0])  # raises if the run has not finished
    config = load_config(runs[0] / run_folder.CONFIG)
    options, on_bags = options.completed_by(config), isinstance(config, BagTrainConfig)
    paths, urls, kind = read_sources(sources)
    with ExitStack() as stack:
        target = PredictionsFolder(Path(out))
        options = replace(options, batch_rule=batch_rule(target.path / SETTINGS))
        if on_bags:
            if aggregate != "mean":
                raise UsageError(
                    f"--aggregate {aggregate}",
                    found="a slide model",
                    expected="no aggregation of patches",
                )
            models = [load_bags(folder, devices=devices) for folder in runs]
            check_alike(models)
            stack.enter_context(run_folder.held(target.path))
            features = BagFeatures(
                models[0], target, paths, kind, options, devices, [str(name) for name in encoder],
                [str(path) for path in encoder_weights], display, urls=urls,
            )  # fmt: skip
            return BagsPrediction(models, target, features, options, display).run()
        if kind == "features":
            raise UsageError(
                f"{run} is a model of patches", found="features", expected="stores or slides"
            )
        if encoder or encoder_weights:
            raise UsageError("--encoder", found="a model of patches", expected="a slide model")
        classifier = load_classifier(runs, devices=devices, batch_size=batch_size)
        stack.enter_context(run_folder.held(target.path))
        source: StoreSource | FileSource
        if kind == "stores":
            options.check_for_stores()
            stores = [stack.enter_context(Store(path)) for path in paths]
            source = StoreSource(stores, classifier.patches, options)
        else:
            source = stack.enter_context(
                FileSource([*paths, *urls], classifier.patches, options, display)
            )
        return PatchPrediction(
            classifier, target, source, aggregate, options.subgroup, display
        ).run()
