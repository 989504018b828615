"""Predict slides with the model of a run: from stores, or directly from slide files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from histopipe.errors import UsageError
from histopipe.evaluation.subgroups import check_subgroup
from histopipe.inference.bag_features import (
    BagFeatures,
    check_alike,
    read_sources,
    run_folders,
)
from histopipe.inference.options import PredictOptions
from histopipe.inference.predict_bags import BagPrediction
from histopipe.inference.predict_patches import (
    PatchPrediction,
    PredictResult,
    load_classifier,
    read_run,
)
from histopipe.inference.slide_run import SlideSource, batch_rule
from histopipe.inference.slide_tiler import FileSource
from histopipe.inference.stored_slides import StoreSource
from histopipe.predictions.sources import SETTINGS, PredictionsFolder
from histopipe.runs.config import TrainConfig
from histopipe.runs.task_config import BagTrainConfig
from histopipe.splits.slide_table import COLUMNS
from histopipe.store.store import Store
from histopipe.system.csv_files import column_key, read_csv
from histopipe.system.folders import held
from histopipe.system.output import Progress, default_progress
from histopipe.system.settings import make_settings
from histopipe.system.tensorflow import load_quietly


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
    paths, urls, kind = read_sources(sources)
    with ExitStack() as stack:
        target = PredictionsFolder(Path(out))
        options = replace(options, batch_rule=batch_rule(target.path / SETTINGS))
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
            stack.enter_context(held(target.path))
            features = BagFeatures(models[0], target, paths, kind, options, display, urls=urls)
            return BagPrediction(models, features).run()
        if kind == "features":
            raise UsageError(
                f"{run} is a model of patches", found="features", expected="stores or slides"
            )
        if options.encoder or options.encoder_weights:
            raise UsageError("--encoder", found="a model of patches", expected="a slide model")
        classifier = load_classifier(runs, devices=options.devices, batch_size=options.batch_size)
        stack.enter_context(held(target.path))
        source: SlideSource
        if kind == "stores":
            options.check_for_stores()
            source = StoreSource(
                [stack.enter_context(Store(path)) for path in paths], classifier.patches, options
            )
        else:
            source = FileSource([*paths, *urls], classifier.patches, options, display)
        stack.enter_context(source)
        return PatchPrediction(classifier, target, source, options, display).run()


def complete_options(options: PredictOptions, config: TrainConfig) -> PredictOptions:
    """Return options with missing values of the training, and its subgroups whose columns are in the labels file."""
    columns = set(COLUMNS)
    if options.labels is not None:
        columns.update(read_csv(Path(options.labels))[0])
    names = {
        subgroup: column_key(check_subgroup(subgroup)[0])
        for subgroup in (*config.subgroup, *options.subgroup)
    }
    additional = columns - {names[subgroup] for subgroup in options.subgroup}
    subgroups = (subgroup for subgroup in config.subgroup if names[subgroup] in additional)
    return replace(
        options,
        subgroup=(*options.subgroup, *subgroups),
        na=config.na if options.na is None else options.na,
    )
