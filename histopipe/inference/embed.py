"""Compute the features of all patches in stores, or of slides, one HDF5 file per slide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore, OnError, UsageError
from histopipe.features.feature_file import FORMAT, feature_path, read_header
from histopipe.features.feature_sets import record_encoder, record_stores
from histopipe.inference.encoder import (
    EncodersTogether,
    check_all_patches,
    common_stain_norm,
    encoder_record,
    load_encoder,
)
from histopipe.inference.feature_folders import (
    FeatureFolder,
    FeatureFolders,
)
from histopipe.inference.options import BATCHES, EmbedOptions, encoder_name
from histopipe.inference.slide_run import (
    SlideRun,
    SlideRunResult,
    batch_rule,
)
from histopipe.inference.slide_tiler import FileSource
from histopipe.inference.slide_vectors import SlideVectors, refuse_for_patches
from histopipe.inference.stored_slides import (
    StoredSlide,
    read_sources,
    slides_with_patches,
    stored_slides,
)
from histopipe.ingestion.options import EMBED_SETTINGS
from histopipe.ingestion.request import read_request
from histopipe.pretrained.encoders import named_preset
from histopipe.runs.defaults import LITE, SMALLEST_TRAINED, default_model
from histopipe.splits.labelling import Labelling
from histopipe.splits.slide_table import (
    table_of,
)
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.cluster_parts import on_cluster
from histopipe.system.folders import ENCODER
from histopipe.system.output import Progress, default_progress
from histopipe.system.settings import (
    declared_settings,
    flag,
    make_settings,
    read_arguments,
    split_settings,
    takes,
)
from histopipe.system.shared_folders import Share
from histopipe.tasks.choices import StainNorm

_MODEL = "{model}"
"""Place of the name of the encoder in the name of its folder."""
_USUAL_MPP = 0.5
"""Scale of patches in µm per pixel, if an encoder was trained on several."""


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbedResult(SlideRunResult):
    """Result of `embed`.

    Attributes:
        dimension: number of features per patch, of all encoders.
        each: number of features of each encoder.
        unit: "slide" or "patient" of the vectors of a slide encoder; empty: features of patches.
    """

    dimension: int
    each: tuple[int, ...]
    unit: str = ""

    def __str__(self) -> str:
        if self.unit:
            return self.summary(
                "embedded", f"patches as vectors of {self.dimension} values", self.unit
            )
        return self.summary("embedded", f"patches of {' + '.join(map(str, self.each))} features")


@takes(declared_settings(EmbedOptions), EMBED_SETTINGS)
def embed(
    sources: str | Path | Sequence[str | Path] = "patches.lmdb",
    *,
    out: str | Path,
    progress: Progress | None = None,
    **settings: Any,
) -> EmbedResult:
    """Compute the features of all patches in stores, or of slides. Slides that are already in `out` are kept.

    Of a folder of features, compute one vector per slide or patient by a slide encoder.

    Patches of slides are not stored. Their features are those of a store that `ingest` makes with the same settings.

    Args:
        sources: one store or several, with patches of one size; slide files, folders and URLs, as for `ingest`; or a
            folder of features.
        out: folder for the feature files `SLIDE.h5`. Of several encoders, with `{model}` in place of the name.
        progress: shows the progress; `default_progress()` if None.
        settings: options by name, as in docs/reference/settings.md and as the flags of `histopipe embed`; for slides
            also those of `ingest` that do not concern its store. Patch size and scale are those of a named encoder, or
            the defaults of `ingest`.

    Returns:
        The slides that were embedded, kept or failed.

    Raises:
        UsageError: the encoder cannot be used, or the folder holds features of another encoder.
        NothingToDo: there is no store, no slide, or no patch.
        MachineShort: disk or memory ran out, or a library is not installed.
        Interrupted: by Ctrl-C or SIGTERM; completed slides are kept.

    Example:
        >>> embed("patches.lmdb", model="resnet50", out="features")  # doctest: +SKIP
        8 slides embedded, 0 already done, 0 failed; 403 patches of 2048 features in 8 s, …
    """
    options, tiling = read_options(settings)
    display = progress or default_progress()
    if options.cluster:
        return on_cluster(embed, sources, out=out, progress=display, **settings)
    folder = slide_features(sources)
    if folder is not None:
        _refuse_tiling(tiling, "features")
        return EmbedResult(**SlideVectors(folder, options).write(Path(out), display))
    refuse_for_patches(options)
    run, folders = run_encoders(
        sources, out, options, tiling, share=options.share, progress=display
    )
    dimensions = tuple(folder.encoder.dimension for folder in folders.folders)
    target = Path(out) if len(dimensions) > 1 else folders.folders[0].path
    return EmbedResult(**run.result(target), dimension=sum(dimensions), each=dimensions)


def read_options(settings: Mapping[str, Any]) -> tuple[EmbedOptions, dict[str, Any]]:
    """Return the options of `embed`, and those of the tiling of slides.

    Raises:
        UsageError: an option is unknown or wrong.
    """
    of_network, tiling = split_settings(settings, EmbedOptions)
    for name in {"model", "weights"} & of_network.keys():
        value = of_network[name]
        of_network[name] = (
            (value,) if isinstance(value, str | Path) else () if value is None else value
        )
    return make_settings(EmbedOptions, of_network), read_arguments(tiling, EMBED_SETTINGS)


def slide_features(sources: str | Path | Sequence[str | Path]) -> Path | None:
    """Return the folder of features among sources; None if they are stores or slides.

    Raises:
        UsageError: there are several folders.
    """
    paths, kind = read_sources(sources)
    if kind != "features":
        return None
    if len(paths) > 1:
        raise UsageError("folders of features", found=len(paths), expected="one folder")
    return Path(paths[0])


def _refuse_tiling(tiling: Mapping[str, Any], kind: str) -> None:
    if tiling:
        raise UsageError(
            flag(next(iter(tiling))),
            found=kind,
            expected="slides",
            todo="remove the option: the patches are already tiled",
        )


def run_encoders(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    options: EmbedOptions,
    tiling: Mapping[str, Any],
    *,
    share: Share,
    progress: Progress,
) -> tuple[SlideRun, FeatureFolders]:
    """Compute the features of this process; see `embed`. Return the run and the folders."""
    paths, kind = read_sources(sources)
    if kind == "features":
        raise UsageError("SOURCES", found="a folder of features", expected="stores or slides")
    with ExitStack() as stack:
        if kind == "stores":
            _refuse_tiling(tiling, kind)
            opened = [stack.enter_context(Store(path)) for path in paths]
            slides_with_patches(opened)  # raises early
            mpps = [record.patch_mpp for store in opened for record in store.complete.values()]
            size, tiled = opened[0].patch_size, opened[0].spec
            folders, stain, _ = _load(
                options, share, out, stack, patch_size=size, spec=tiled, mpps=mpps
            )
            for folder in () if share.is_part else folders.folders:
                record_stores(folder.path, opened)
            run = embed_stores(
                opened, folders, on_error=options.on_error, stain_norm=stain, progress=progress
            )
        else:
            jobs, spec, reading = read_request(
                paths, None, preset_tiling(options.encoder, tiling), progress
            )
            size, mpps = spec.patch_size, [spec.mpp] * (spec.level is None)
            folders, stain, choices = _load(
                options,
                share,
                out,
                stack,
                patch_size=size,
                spec=spec.to_json(),
                mpps=mpps,
                tiling=spec.to_json(),  # of a store, the checksum of the patches is compared
            )
            source = FileSource(
                jobs,
                spec,
                reading,
                batch_size=folders.network.batch_size,
                rule=batch_rule(folders.folders[0].path / ENCODER),
                stain_norm=stain,
                misfit=partial(_misfit, choices, size),
                as_stored=True,
                share=share,
            )
            run = embed_files(stack.enter_context(source), folders, progress)
        return run, folders


def _load(
    options: EmbedOptions,
    share: Share,
    out: str | Path,
    stack: ExitStack,
    *,
    patch_size: int,
    spec: Mapping[str, Any],
    mpps: Sequence[float | None],
    **settings: Any,
) -> tuple[FeatureFolders, StainNorm, list[EmbedOptions]]:
    """Load the encoders, and lock their folders until the stack is closed, with a record of what features depend on.

    `settings` are further ones.

    Returns:
        The folders, the stain normalization, and the options of each encoder.
    """
    if not options.model and default_model(patch_size) != LITE:
        raise UsageError(
            "--model",
            found=f"none, and patches of {patch_size} pixels",
            expected=f"the name of an encoder, or patches of {SMALLEST_TRAINED} pixels or more",
        )
    choices = replace(options, model=options.model or (LITE,)).of_encoders()
    paths, mismatches = _folders(out, choices), check_all_patches(choices, patch_size, mpps)
    # Loaded first, because the encoder must configure the devices before anything else uses TensorFlow.
    encoders = [load_encoder(choice, patch_size) for choice in choices]
    stain = common_stain_norm(choices)
    folders = [
        FeatureFolder(encoder, path, options.dtype)
        for encoder, path in zip(encoders, paths, strict=True)
    ]
    network = encoders[0] if len(encoders) == 1 else EncodersTogether(encoders, patch_size)
    for choice, folder, mismatch in zip(choices, folders, mismatches, strict=True):
        stack.enter_context(share.held(folder.path))
        record = encoder_record(
            choice,
            folder.encoder,
            patch_size,
            spec,
            mpps,
            **({"mismatch": mismatch} if mismatch else {}),
            stain_norm=stain,
            dtype=options.dtype,
            **settings,
        )
        record_encoder(folder.path, {**record, "batches": BATCHES}, share)
    return FeatureFolders(folders, network, share), stain, choices


def _folders(out: str | Path, choices: Sequence[EmbedOptions]) -> list[Path]:
    """Return the folder of each encoder: `out` with its name in place of {model}."""
    if len(choices) > 1 and _MODEL not in str(out):
        raise UsageError(
            "--out", found=str(out), expected=f"{_MODEL} in the name, such as features/{_MODEL}"
        )
    return [Path(str(out).replace(_MODEL, encoder_name(choice.encoder))) for choice in choices]


def preset_tiling(encoder: str, tiling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a tiling with the patch size and scale of a named encoder, if they are not given."""
    preset = named_preset(encoder)
    if preset is None:
        return dict(tiling)
    resized = preset.preprocessing.resized
    size = tiling.get("patch_size", resized)
    scale = _USUAL_MPP if _USUAL_MPP in preset.mpp or not preset.mpp else preset.mpp[0]
    # Larger patches are reduced to the size of the network.
    scales = {"mpp", "mag", "level"} & tiling.keys()
    return {"patch_size": size, **({} if scales else {"mpp": scale * resized / size}), **tiling}


def _misfit(choices: Sequence[EmbedOptions], patch_size: int, record: SlideRecord) -> str | None:
    """Return why the patches of a slide do not fit the encoders, if they do not."""
    if not choices[0].allow_mismatch:
        try:
            check_all_patches(choices, patch_size, [record.patch_mpp])
        except UsageError as error:
            return str(error)
    return None


def embed_files(source: FileSource, features: FeatureFolders, progress: Progress) -> SlideRun:
    """Compute the features of slide files that are missing in a folder."""
    run = features.start(source.work, progress)
    run.run(source.slides(run, features.complete), features.write, stop=source.close)
    features.record_slides(source.slide_table(()), run.failed)
    return run


def embed_stores(
    stores: Sequence[Store],
    features: FeatureFolders,
    *,
    on_error: OnError,
    stain_norm: StainNorm,
    progress: Progress,
) -> SlideRun:
    """Compute the features of the slides of open stores that are missing in folders. Options as for `embed`."""
    slides = stored_slides(
        stores,
        slides_with_patches(stores, features.share),
        batch_size=features.network.batch_size,
        on_error=on_error,
        stain_norm=stain_norm,
        rule=batch_rule(features.folders[0].path / ENCODER),
    )
    run = features.start({slide.id: slide.rows for slide in slides}, progress)
    missing = run.missing(
        slides,
        # Each folder is asked: it removes features of earlier patches.
        lambda slide: (
            {
                _is_complete(
                    slide,
                    folder.path,
                    on_error=on_error,
                    progress=progress,
                    keep=features.share.join,
                )
                for folder in features.folders
            }
            == {True}
        ),
    )
    run.run(missing, features.write)
    features.record_slides(table_of(stores, Labelling()), run.failed)
    return run


def _is_complete(
    slide: StoredSlide, folder: Path, *, on_error: OnError, progress: Progress, keep: bool
) -> bool:
    """Return whether the folder holds the features of exactly these patches."""
    path = feature_path(folder, slide.id)
    if not path.exists():
        return False
    try:
        header = read_header(path)
    except DamagedStore as error:
        progress.message(f"{error}")
        return False
    if header.attributes.get("format") != FORMAT:
        raise UsageError(f"{path} was made by another tool", todo="choose another --out")
    if int(header.attributes["patches_crc"]) != slide.origin["patches_crc"]:
        progress.message(
            f"{path}: the patches in the store have changed; computing the features again"
        )
        if not keep:
            path.unlink()  # it must not be used for the new patches
        return False
    return on_error == "skip" or not header.attributes["skipped"]
