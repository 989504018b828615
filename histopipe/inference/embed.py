"""Every patch of a store through an encoder, slide by slide, into a folder of feature files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from histopipe.dataset.options import OnError, StainNorm, check_whole
from histopipe.dataset.sample_table import SampleRows
from histopipe.dataset.selection import select, store_paths
from histopipe.errors import NothingToDo, UsageError
from histopipe.features.feature_file import Precision
from histopipe.features.folder import pin_encoder
from histopipe.inference.embed_result import EmbedResult
from histopipe.inference.embedding import Embedding
from histopipe.inference.encoder import load_encoder
from histopipe.runs import folder as run_folder
from histopipe.runs.task_config import read_config
from histopipe.store.store import Store, check_patch_sizes


def embed(
    stores: str | Path | Sequence[str | Path] = "patches.lmdb",
    *,
    model: str | Path,
    out: str | Path,
    weights: str | None = None,
    precision: Precision = "float32",
    batch_size: int = 64,
    devices: str = "auto",
    stain_norm: StainNorm | None = None,
    on_error: OnError = "raise",
) -> EmbedResult:
    """Compute the features of every patch of stores; slides that `out` holds already are kept.

    Args:
        stores: a store, or several, whose patches are of one size.
        model: a run's folder, an ONNX file, or the name of a network of `keras.applications`.
        out: the folder for the files, one a slide, named by its id.
        weights: of a named network: "imagenet" if not given, "none", or a file.
        precision: "float32", or "float16" for half the size.
        batch_size: patches at once, over all devices.
        devices: "auto", "cpu", "cpu:N", "gpu" or "gpu:0,1".
        stain_norm: give every slide one stain first; as the run was trained, or "none", if not given.
        on_error: "skip" leaves out patches that are damaged in the store; with "raise" their slides fail.

    Raises:
        UsageError: the encoder cannot be used, or the folder holds features of another.
        NothingToDo: no store, or no patch.
        MachineShort: disk or memory ran out, or something is not installed.
        Interrupted: told to stop; slides that are done stay.

    Example:
        >>> embed("patches.lmdb", model="resnet50", out="features")  # doctest: +SKIP
    """
    check_whole(1, batch_size=batch_size)
    if precision not in ("float32", "float16"):
        raise UsageError("--precision", found=repr(precision), expected="float32 or float16")
    folder = Path(out)
    with ExitStack() as stack:
        opened = [stack.enter_context(Store(path)) for path in store_paths(stores)]
        check_patch_sizes(opened)
        slides = _slides(opened)
        encoder = load_encoder(
            str(model), weights=weights, patch_size=opened[0].patch_size, devices=devices,
            batch_size=batch_size,
        )  # fmt: skip
        stain = stain_norm or _trained_stain(Path(model))
        stack.enter_context(run_folder.held(folder))
        pin_encoder(folder, {**encoder.facts, "stain_norm": stain, "precision": precision})
        work = Embedding(
            opened, encoder, folder, precision=precision, batch_size=batch_size,
            stain_norm=stain, on_error=on_error,
        )  # fmt: skip
        return work.run(slides)


def _slides(stores: Sequence[Store]) -> list[SampleRows]:
    """Every slide that has patches.

    Raises:
        NothingToDo: there is none.
        UsageError: two stores hold a slide of one id, which would share a file.
    """
    slides = [rows for rows in select(stores) if rows.count]
    if not slides:
        raise NothingToDo("no patch to embed", todo="see `histopipe info` for what the store holds")
    ids = Counter(stores[rows.store].records[rows.slide].id for rows in slides)
    twice = [name for name, times in ids.items() if times > 1]
    if twice:
        raise UsageError(
            "slides of one id in several stores", found=", ".join(twice[:3]),
            todo="embed the stores one by one, each with its own --out",
        )  # fmt: skip
    return slides


def _trained_stain(model: Path) -> StainNorm:
    """The stain that a run's model was trained on; "none" for other encoders."""
    config = model / run_folder.CONFIG
    found: StainNorm = read_config(config).get("stain_norm", "none") if config.exists() else "none"
    return found
