"""Predict slides with the model of a run: from stores, or directly from slide files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.errors import UsageError
from histopipe.evaluation.subgroups import check_subgroup
from histopipe.evaluation.unusual import (
    all_or_none,
)
from histopipe.inference.options import PredictOptions
from histopipe.inference.slide_run import (
    Network,
    SlideSource,
    batch_rule,
)
from histopipe.inference.slide_tiler import source_of_files
from histopipe.inference.stored_slides import (
    FeatureSource,
    PatchRequirements,
    SourceKind,
    StoreSource,
    read_sources,
)
from histopipe.predicting.bag_features import BagFeatures, check_same_encoder, patch_encoder
from histopipe.predicting.external_evaluation import (
    PredictResult,
    mean_text,
)
from histopipe.predicting.predict_bags import BagPrediction
from histopipe.predicting.predict_patches import PatchPrediction
from histopipe.predicting.predict_pixels import PixelPrediction, pixel_options
from histopipe.predictions.sources import (
    SETTINGS,
    PredictionsFolder,
)
from histopipe.runs.config import TrainConfig
from histopipe.runs.run import Run
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.splits.slide_table import COLUMNS
from histopipe.store.store import Store
from histopipe.system.cluster_parts import on_cluster
from histopipe.system.output import Progress, default_progress
from histopipe.system.settings import declared_settings, make_settings, takes
from histopipe.system.table_cells import column_key
from histopipe.system.table_files import read_table
from histopipe.system.tensorflow import load_quietly

if TYPE_CHECKING:
    from histopipe.inference.networks import TrainedBags


@takes(declared_settings(PredictOptions))
def predict(
    run: str | Path,
    sources: str | Path | Sequence[str | Path],
    *,
    out: str | Path,
    progress: Progress | None = None,
    **settings: Any,
) -> PredictResult:
    """Predict slides and patients with the model of a run, or with those of a cross-validation together.

    A patch model predicts all patches, which are aggregated. A slide model predicts bags of features. It, and a patch model
    on features, computes these with the encoder that the run records, unless `sources` are folders of features.

    Args:
        run: folder of a finished run, or of a cross-validation: then the predictions are the means over its folds,
            with their standard deviations.
        sources: stores; or slide files, folders of slide files, and URLs of slides as for `ingest`; or, for a model
            on features, folders of these, of a slide model in the order of the training's `mil`.
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
    runs = Run(Path(run)).models
    config = runs[0].config
    options = complete_options(options, config)
    if len(runs) > 1:
        display.message(f"predictions of {run}: {mean_text(len(runs))}")
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
        rule = batch_rule(target.folder / SETTINGS)
        if config.on_bags:
            if options.aggregate != "mean":
                raise UsageError(
                    f"--aggregate {options.aggregate}",
                    found="a slide model",
                    expected="no aggregation of patches",
                )
            networks = load_quietly("histopipe.inference.networks")
            models = [networks.TrainedBags(run, devices=options.devices) for run in runs]
            check_alike(models)
            stack.enter_context(share.held(target.folder))
            return BagPrediction(
                models,
                target,
                BagFeatures(models[0], target, paths, kind, options, display),
                options,
                display,
            ).run()
        _check_for_patches(runs[0], kind, options)
        network, patches = load_patch_models(runs, options, paths, kind, display)
        of_pixels = config.task == "segmentation"
        if of_pixels and kind == "slides":
            options = pixel_options(options, patches)
        stack.enter_context(share.held(target.folder))
        source: SlideSource
        if kind == "features":
            source = FeatureSource(list(map(Path, paths)), options, runs[0].targets)
        elif kind == "stores":
            options.check_for_stores()
            stores = [stack.enter_context(Store(path)) for path in paths]
            source = StoreSource(stores, patches, options, rule, runs[0].targets, by_row=of_pixels)
        else:
            source = source_of_files(
                paths, patches, options, display, rule, targets=runs[0].targets, by_row=of_pixels
            )
        stack.enter_context(source)
        kind_of = PixelPrediction if of_pixels else PatchPrediction
        return kind_of(runs, network, patches, target, source, options, display).run()


def _check_for_patches(run: Run, kind: str, options: PredictOptions) -> None:
    """Raise a UsageError if sources or options are not those of a model of patches."""
    on_features = isinstance(run.config, PatchTrainConfig) and run.config.features
    if kind == "features" and not on_features:
        raise UsageError(
            f"{run.folder} is a model of patches", found="features", expected="stores or slides"
        )
    if (options.encoder or options.encoder_weights) and not on_features:
        raise UsageError("--encoder", found="a model of patches", expected="a model on features")
    if options.aggregate not in run.task.aggregations:
        raise UsageError(
            f"--aggregate {options.aggregate}",
            found=f"a model of {run.task.name}",
            expected=" or ".join(run.task.aggregations),
        )


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
                "targets": model.run.targets,
                "--bag": model.config.bag,
                "--covariates": model.config.covariates,
                "features per patch": model.dimension,
            }
            for model in models
        }
    )


def complete_options(options: PredictOptions, config: TrainConfig) -> PredictOptions:
    """Return options with missing values of the training, and its subgroups whose columns are in the labels file."""
    of_labels = (
        []
        if options.labels is None
        else read_table(Path(options.labels), columns=("slide",)).columns
    )
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


def load_patch_models(
    runs: Sequence[Run],
    options: PredictOptions,
    sources: Sequence[Path | str],
    kind: SourceKind,
    progress: Progress,
) -> tuple[Network, PatchRequirements]:
    """Load the patch model of a run onto its devices; or those of several runs, whose outputs are to be averaged.

    The network maps patches, or the features in `sources`, to the outputs of all models, each in the order of the classes
    or targets. If all runs have a range of their training, the whitened features follow those of each model.

    Raises:
        UsageError: the models differ in classes, targets or patches; or features or encoder are not those of the training.
        DamagedStore: a model cannot be read.
        MachineShort: TensorFlow is not installed.
    """
    values: dict[Path, dict[str, Any]] = {}
    for run in runs:
        names = ("task", "stain_norm", "labels_from", "calibrate")
        values[run.folder] = {
            "classes": run.task.classes,
            "targets": run.targets,
            **{name: run.metrics_file.get(name) for name in ("spec", "patch_mpp", "encoders")},
            **{name: getattr(run.config, name) for name in names},
        }
    networks, folders = load_quietly("histopipe.inference.networks"), list(values)
    check_same(values)
    first = values[folders[0]]
    ranges = [] if runs[0].config.task == "segmentation" else [run.training_range for run in runs]
    whitening = [each.whitening for each in all_or_none(ranges)]
    encoders, tiling = first["encoders"], (first["spec"], first["patch_mpp"])
    if encoders and kind == "features":
        for path in sources:
            check_same_encoder(Path(path), encoders[0], progress)
        network = networks.FeatureNetwork(folders, whitening, None, options.batch_size)
        stain_norm = (encoders[0] or {}).get("stain_norm", "none")
        return network, PatchRequirements(folders[0], tiling[0]["patch_size"], *tiling, stain_norm)
    if encoders:
        patches, encoder = patch_encoder(runs[0], options)
        return networks.FeatureNetwork(folders, whitening, encoder, options.batch_size), patches
    network = networks.KerasNetwork(
        lambda: networks.load_run_models(folders, whitening),
        name=folders[0].name,
        devices=options.devices,
        batch_size=options.batch_size,
    )
    return network, PatchRequirements(folders[0], network.patch_size, *tiling, first["stain_norm"])


def check_same(values_of_runs: Mapping[Path, Mapping[str, object]]) -> None:
    """Raise a UsageError if a named value differs between runs, given by the folder of each run."""
    first, values = next(iter(values_of_runs.items()))
    for folder, of_run in values_of_runs.items():
        for name, value in of_run.items():
            if value != values[name]:
                raise UsageError(
                    f"{folder}: {name}", found=value, expected=f"{values[name]}, as in {first}"
                )
