"""Predict slides with the model of a run: from stores, or directly from slide files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.dataset.selection import store_paths
from histopipe.errors import NothingToDo, UsageError
from histopipe.evaluation.subgroups import check_subgroup
from histopipe.features.feature_file import SUFFIX
from histopipe.inference.options import PredictOptions
from histopipe.inference.predict_bags import BagPrediction, SourceKind
from histopipe.inference.predict_patches import (
    PatchPrediction,
    PredictResult,
    check_same,
    load_classifier,
    read_run,
)
from histopipe.inference.slide_run import SlideSource, batch_rule
from histopipe.inference.slide_tiler import FileSource
from histopipe.inference.stored_slides import StoreSource
from histopipe.predictions.sources import SETTINGS, PredictionsFolder
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import is_finished
from histopipe.runs.task_config import BagTrainConfig
from histopipe.slides.tables import table_columns
from histopipe.splits.slide_table import COLUMNS
from histopipe.store.store import Store
from histopipe.system.csv_files import column_key
from histopipe.system.folders import ENCODER, FolderKind, folder_kind, held
from histopipe.system.output import Progress, default_progress, message
from histopipe.system.settings import make_settings
from histopipe.system.tensorflow import load_quietly
from histopipe.system.urls import is_url

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
        stack.enter_context(held(target.path))
        source: SlideSource
        if kind == "stores":
            options.check_for_stores()
            stores = [stack.enter_context(Store(path)) for path in paths]
            source = StoreSource(stores, patches, options)
        else:
            source = FileSource(paths, patches, options, display)
        stack.enter_context(source)
        return PatchPrediction(runs, network, patches, target, source, options, display).run()


def complete_options(options: PredictOptions, config: TrainConfig) -> PredictOptions:
    """Return options with missing values of the training, and its subgroups whose columns are in the labels file."""
    columns = set(COLUMNS)
    if options.labels is not None:
        columns.update(table_columns(Path(options.labels)))
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


def run_folders(folder: Path) -> list[Path]:
    """Return the folder of a run, or the folders of the finished folds of a cross-validation.

    Raises:
        UsageError: no fold is finished.
    """
    if not run_folder.is_cross_validation(folder):
        return [folder]
    folds = sorted(folder.glob("fold-*"), key=lambda path: (len(path.name), path.name))
    done = [path for path in folds if is_finished(path)]
    if not done:
        raise UsageError(
            f"{folder} has no finished fold", todo="continue it with `histopipe train --resume`"
        )
    if len(done) < len(folds):
        message(f"warning: {len(folds) - len(done)} of {len(folds)} folds are not finished")
    return done


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


def read_sources(
    sources: str | Path | Sequence[str | Path],
) -> tuple[list[Path | str], SourceKind]:
    """Return the paths of sources, then the URLs, which are of slides; and their kind.

    Raises:
        NothingToDo: a path does not exist.
        UsageError: there is no source, or they are of several kinds.
    """
    entries = [sources] if isinstance(sources, str | Path) else list(sources)
    urls = [entry for entry in entries if isinstance(entry, str) and is_url(entry)]
    rest = [entry for entry in entries if entry not in urls]
    paths = store_paths(rest) if rest or not urls else []
    for path in paths:
        if not path.exists():
            raise NothingToDo(f"{path} does not exist", todo="check the path")
    names = sorted({_kind(path) for path in paths}) or ["slides"]
    mixed: list[str] = [*names]
    if urls and names in (["features"], ["stores"]):
        mixed.append("slides at URLs")
    if len(mixed) > 1:
        raise UsageError(
            f"{' and '.join(mixed)} are mixed",
            expected="stores, features or slides",
            todo="predict them separately, with different --out",
        )
    return [*paths, *urls], names[0]


def _kind(path: Path) -> SourceKind:
    if folder_kind(path) is FolderKind.STORE:
        return "stores"
    if path.is_dir() and ((path / ENCODER).exists() or any(path.rglob(f"*{SUFFIX}"))):
        return "features"
    return "slides"
