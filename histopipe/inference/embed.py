"""Compute the features of all patches in stores, one HDF5 file per slide."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.dataset.options import OnError, StainNorm
from histopipe.dataset.selection import store_paths
from histopipe.errors import DamagedStore, UsageError
from histopipe.features.feature_file import (
    ENCODER,
    feature_path,
    is_ours,
    read_header,
    record_encoder,
    record_stores,
)
from histopipe.inference.encoder import EncoderChoice, encoder_record
from histopipe.inference.feature_folder import FeatureFolder, record_slides
from histopipe.inference.options import EmbedOptions
from histopipe.inference.slide_run import BATCHES, SlideRun, SlideRunResult, batch_rule
from histopipe.inference.stored_slides import StoredSlide, slides_with_patches, stored_slides
from histopipe.runs import folder as run_folder
from histopipe.runs.recipe import LITE, SMALLEST_TRAINED, default_model
from histopipe.splits.labelling import Labelling
from histopipe.splits.slide_table import table_of
from histopipe.store.store import Store
from histopipe.system.filesystems import roomy
from histopipe.system.progress import Progress, default_progress
from histopipe.system.settings import make_settings


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbedResult(SlideRunResult):
    """Result of `embed`.

    Attributes:
        dimension: number of features per patch.
    """

    dimension: int

    def __str__(self) -> str:
        return self.summary("embedded", f"patches of {self.dimension} features")


def embed(
    stores: str | Path | Sequence[str | Path] = "patches.lmdb",
    *,
    out: str | Path,
    progress: Progress | None = None,
    **settings: Any,
) -> EmbedResult:
    """Compute the features of all patches in stores. Slides that are already in `out` are kept.

    Args:
        stores: one store or several, with patches of one size.
        out: folder for the feature files `SLIDE.h5`.
        progress: shows the progress; `default_progress()` if None.
        settings: options by name, as in docs/reference/settings.md and as the flags of `histopipe embed`.

    Returns:
        The slides that were embedded, kept or failed.

    Raises:
        UsageError: the encoder cannot be used, or the folder holds features of another encoder.
        NothingToDo: there is no store, or no patch.
        MachineShort: disk or memory ran out, or a library is not installed.
        Interrupted: by Ctrl-C or SIGTERM; completed slides are kept.

    Example:
        >>> embed("patches.lmdb", model="resnet50", out="features")  # doctest: +SKIP
        8 slides embedded, 0 already done, 0 failed; 403 patches of 2048 features in 8 s, …
    """
    options = make_settings(EmbedOptions, settings)
    folder, display = Path(out), progress or default_progress()
    with ExitStack() as stack:
        opened = [stack.enter_context(Store(path)) for path in store_paths(stores)]
        slides_with_patches(opened)  # raises early
        size = opened[0].patch_size
        if options.model is None and default_model(size) != LITE:
            raise UsageError(
                "--model",
                found=f"none, and patches of {size} pixels",
                expected=f"the name of an encoder, or patches of {SMALLEST_TRAINED} pixels or more",
            )
        choice = EncoderChoice(
            str(options.model or LITE),
            None if options.weights is None else str(options.weights),
            options.precision,
            options.xla,
            options.allow_mismatch,
        )
        mpps = [record.patch_mpp for store in opened for record in store.complete.values()]
        mismatch = choice.check(size, mpps)
        # Loaded first, because the encoder must configure the devices before anything else uses TensorFlow.
        encoder = choice.load(size, devices=options.devices, batch_size=options.batch_size)
        stain = options.stain_norm or choice.stain_norm()
        stack.enter_context(run_folder.held(folder))
        facts = {"mismatch": mismatch} if mismatch else {}
        record = encoder_record(
            choice, encoder, opened, **facts, stain_norm=stain, dtype=options.dtype
        )
        record_encoder(folder, {**record, "batches": BATCHES})
        record_stores(folder, opened)
        features = FeatureFolder(encoder, folder, options.dtype)
        return embed_stores(
            opened, features, on_error=options.on_error, stain_norm=stain, batch_size=encoder.batch_size,
            progress=display,
        )  # fmt: skip


def embed_stores(
    stores: Sequence[Store],
    features: FeatureFolder,
    *,
    on_error: OnError,
    stain_norm: StainNorm,
    batch_size: int,
    progress: Progress,
) -> EmbedResult:
    """Compute the features of the slides of open stores that are missing in a folder. Options as for `embed`."""
    rows = slides_with_patches(stores)
    slides = stored_slides(
        stores,
        rows,
        batch_size=batch_size,
        on_error=on_error,
        stain_norm=stain_norm,
        rule=batch_rule(features.path / ENCODER),
    )
    run = SlideRun(features.encoder, "embedding", len(slides), progress)
    missing = run.missing(
        slides,
        lambda slide: _is_complete(slide, features.path, on_error=on_error, progress=progress),
    )
    run.run(missing, features.write, steps=sum(slide.steps for slide in missing))
    with roomy(features.path):
        record_slides(features.path, table_of(stores, Labelling()), run.failed)
    return EmbedResult(**run.result(features.path), dimension=features.encoder.dimension)


def _is_complete(
    slide: StoredSlide, folder: Path, *, on_error: OnError, progress: Progress
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
    if not is_ours(header):
        raise UsageError(f"{path} was made by another tool", todo="choose another --out")
    if int(header.facts["patches_crc"]) != slide.patches_crc:
        progress.message(
            f"{path}: the patches in the store have changed; computing the features again"
        )
        path.unlink()  # it must not be used for the new patches
        return False
    return on_error == "skip" or not header.facts["skipped"]
