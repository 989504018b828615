"""Compute the features of all patches in stores, one HDF5 file per slide."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from histopipe.dataset.options import OnError, StainNorm, check_whole
from histopipe.dataset.selection import store_paths
from histopipe.errors import DamagedStore, UsageError
from histopipe.features.feature_file import (
    StoredType,
    feature_path,
    is_ours,
    read_header,
    record_encoder,
    writing,
)
from histopipe.inference.slide_run import Network, Results, SlideRun, SlideRunResult
from histopipe.inference.stored_slides import StoredSlide, slides_with_patches, stored_slides
from histopipe.pretrained.sources import named_preset, own_file
from histopipe.runs import folder as run_folder
from histopipe.runs.config import Precision
from histopipe.runs.task_config import read_config
from histopipe.slides.scale import MAGNIFICATION_MPP
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.progress import Progress, default_progress, message
from histopipe.system.tensorflow import load_quietly

_ONNX = ".onnx"
_DEFAULT_WEIGHTS = "imagenet"
_USUAL_MAGNIFICATIONS = (80, 60, 40, 20, 10, 5)
_MAGNIFICATION_TOLERANCE = 0.15
_PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
_DTYPES = ("float32", "float16")
_ONNX_BATCH = 64
_LIBRARIES = ("histopipe", "tensorflow", "tensorflow-cpu", "keras", "onnxruntime", "pillow")


class Encoder(Network, Protocol):
    """A network that computes features, with the size of its batches."""

    @property
    def batch_size(self) -> int:
        """Patches per batch, over all devices."""


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
    model: str | Path,
    out: str | Path,
    weights: str | None = None,
    allow_mismatch: bool = False,
    precision: Precision = "float32",
    xla: bool = False,
    dtype: StoredType = "float32",
    batch_size: int | Literal["auto"] = 64,
    devices: str = "auto",
    stain_norm: StainNorm | None = None,
    on_error: OnError = "raise",
    progress: Progress | None = None,
) -> EmbedResult:
    """Compute the features of all patches in stores. Slides that are already in `out` are kept.

    Args:
        stores: one store or several, with patches of one size.
        model: folder of a run; an encoder of `histopipe encoders`, or a TOML file of one; a network in
            `keras.applications`; an ONNX or `.keras` file; a SavedModel folder; or `module.py:function`.
        out: folder for the feature files `SLIDE.h5`.
        weights: weights of a named network: "imagenet" (default of `keras.applications`), "none", a file or a folder.
        allow_mismatch: embed even if the patches have another size or scale than the encoder was trained on.
        precision: precision of the network: "float32", "mixed_bfloat16" or "mixed_float16".
        xla: compile the network with XLA.
        dtype: type of the stored features: "float32", or "float16" for half the file size.
        batch_size: patches per batch, over all devices, or "auto" for the fastest that fits into memory.
        devices: "auto", "cpu", "cpu:N", "gpu" or "gpu:0,1".
        stain_norm: method of stain normalization; by default the method of the run, else "none".
        on_error: "skip" leaves out damaged patches; with "raise", slides with damaged patches fail.
        progress: shows the progress; `default_progress()` if None.

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
    if batch_size != "auto":
        check_whole(1, batch_size=batch_size)
    for flag, value, choices in (
        ("--precision", precision, _PRECISIONS),
        ("--dtype", dtype, _DTYPES),
    ):
        if value not in choices:
            raise UsageError(flag, found=repr(value), expected=" or ".join(choices))
    folder = Path(out)
    with ExitStack() as stack:
        opened = [stack.enter_context(Store(path)) for path in store_paths(stores)]
        rows = slides_with_patches(opened)
        mpps = [record.patch_mpp for store in opened for record in store.complete.values()]
        mismatch = _check_preset(str(model), opened[0].patch_size, mpps, allowed=allow_mismatch)
        # Loaded first, because the encoder must configure the devices before anything else uses TensorFlow.
        encoder = _load_encoder(
            str(model), weights, opened[0].patch_size, devices=devices, batch_size=batch_size, precision=precision,
            xla=xla,
        )  # fmt: skip
        stain = stain_norm or _stain_norm_of_run(Path(model))
        stack.enter_context(run_folder.held(folder))
        mismatched = {"mismatch": mismatch} if mismatch else {}
        record_encoder(
            folder,
            {
                **encoder.identity,
                **mismatched,
                "stain_norm": stain,
                "dtype": dtype,
                "libraries": _versions(),
            },
        )
        slides = stored_slides(
            opened, rows, batch_size=encoder.batch_size, on_error=on_error, stain_norm=stain
        )
        embedding = _Embedding(encoder, folder, dtype, on_error, progress or default_progress())
        return embedding.run(slides)


def _check_preset(
    model: str, patch_size: int, mpps: Sequence[float | None], *, allowed: bool
) -> str | None:
    """Check that the patches fit a preset. Return the mismatch, if it is allowed, or None."""
    is_run = (Path(model) / run_folder.CONFIG).exists()
    preset = None if is_run else named_preset(model)
    mismatch = preset.check_patches(patch_size, mpps, allowed=allowed) if preset else None
    if mismatch:
        message(f"warning: {mismatch}; continuing because of --allow-mismatch")
    return mismatch


def _load_encoder(
    model: str,
    weights: str | None,
    patch_size: int,
    *,
    devices: str,
    batch_size: int | Literal["auto"],
    precision: Precision,
    xla: bool,
) -> Encoder:
    path = Path(model)
    is_onnx, is_run = path.suffix == _ONNX, (path / run_folder.CONFIG).exists()
    if weights is not None and (is_onnx or is_run):
        raise UsageError(
            "--weights", found=f"--model {model}, which already contains weights",
            expected="--model with the name of a network",
        )  # fmt: skip
    if (precision != "float32" or xla) and (is_onnx or is_run):
        raise UsageError(
            "--xla" if xla else f"--precision {precision}", found=f"--model {model}",
            expected="a network that is not an ONNX file or a run",
        )  # fmt: skip
    if is_onnx:
        from histopipe.inference.onnx_encoder import OnnxEncoder  # imported here: optional

        size = _ONNX_BATCH if batch_size == "auto" else batch_size
        return OnnxEncoder(path, patch_size=patch_size, devices=devices, batch_size=size)
    keras_network = load_quietly("histopipe.inference.keras_network")
    encoder: Encoder = keras_network.keras_encoder(
        path if is_run else model,
        weights=weights or ("none" if named_preset(model) or own_file(model) else _DEFAULT_WEIGHTS),
        patch_size=patch_size, devices=devices, batch_size=batch_size, precision=precision, xla=xla,
    )  # fmt: skip
    return encoder


def _versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@dataclass(frozen=True, slots=True)
class _Embedding:
    encoder: Network
    folder: Path
    dtype: StoredType
    on_error: OnError
    progress: Progress

    def run(self, slides: Sequence[StoredSlide]) -> EmbedResult:
        """Embed the slides that are missing."""
        run = SlideRun(self.encoder, "embedding", len(slides), self.progress)
        missing = run.missing(slides, self._is_complete)
        run.run(missing, self._write, steps=sum(slide.steps for slide in missing))
        return EmbedResult(**run.result(self.folder), dimension=self.encoder.dimension)

    def _is_complete(self, slide: StoredSlide) -> bool:
        """Return whether the folder holds the features of exactly these patches."""
        path = feature_path(self.folder, slide.id)
        if not path.exists():
            return False
        try:
            header = read_header(path)
        except DamagedStore as error:
            self.progress.message(f"{error}")
            return False
        if not is_ours(header):
            raise UsageError(f"{path} was made by another tool", todo="choose another --out")
        if int(header.facts["patches_crc"]) != slide.patches_crc:
            self.progress.message(
                f"{path}: the patches in the store have changed; computing the features again"
            )
            path.unlink()  # it must not be used for the new patches
            return False
        return self.on_error == "skip" or not header.facts["skipped"]

    def _write(self, slide: StoredSlide, results: Iterator[Results]) -> tuple[int, int]:
        """Write the feature file of a slide."""
        path, rows = feature_path(self.folder, slide.id), len(slide.batches.table)
        with writing(path, rows, self.encoder.dimension, self.dtype) as writer:
            for features, corners in results:
                writer.append(features, corners)
            attributes = {  # values of None are not written
                "slide": slide.id,
                "label": slide.record.label,
                "patient": slide.record.patient,
                "site": slide.record.site,
                "content": slide.record.content,
                "store": slide.store.uuid,
                "patches_crc": slide.patches_crc,
                "encoder": self.encoder.identity["encoder"],
                "skipped": slide.skipped,
            }
            writer.finish(attributes, _coords_attributes(slide.record, slide.store))
        return slide.patches, slide.skipped


def _stain_norm_of_run(model: Path) -> StainNorm:
    """Return the stain normalization that a run was trained with, or "none" for other encoders."""
    config = model / run_folder.CONFIG
    found: StainNorm = read_config(config).get("stain_norm", "none") if config.exists() else "none"
    return found


def _coords_attributes(record: SlideRecord, store: Store) -> dict[str, Any]:
    """Return the attributes of the coordinates, with the names that TRIDENT and CLAM use.

    CLAM reads patches at `patch_level` without resampling, so it is written only if they were not resampled.
    """
    attributes: dict[str, Any] = {
        "name": record.id,
        "patch_size": store.patch_size,
        "overlap": int(store.spec["overlap"]),
        "level0_width": record.width,
        "level0_height": record.height,
        "savetodir": "",
    }
    if record.read_size and record.downsample:
        attributes["patch_size_level0"] = round(record.read_size * record.downsample)
    if record.mpp and record.patch_mpp:
        attributes["level0_magnification"] = _magnification(record.mpp)
        attributes["target_magnification"] = _magnification(record.patch_mpp)
    if record.level is not None and record.read_size == store.patch_size:
        attributes["patch_level"] = record.level
    return attributes


def _magnification(mpp: float) -> float:
    """Return the standard magnification nearest to a scale, or the exact one if none is close."""
    exact = MAGNIFICATION_MPP / mpp
    nearest = min(_USUAL_MAGNIFICATIONS, key=lambda usual: abs(usual - exact))
    return nearest if abs(nearest - exact) <= _MAGNIFICATION_TOLERANCE * nearest else exact
