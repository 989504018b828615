"""Export stores (patches, index, tissue masks), the model of a run, or features, for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from histopipe.dataset.selection import store_paths
from histopipe.errors import UsageError
from histopipe.exporting.export_formats import (
    EXPORTS,
    ExportFormat,
    ExportOptions,
    flag_text,
    formats_by_source,
)
from histopipe.exporting.exported_models import ModelExport
from histopipe.exporting.index import IndexResult
from histopipe.exporting.patches import ExportResult
from histopipe.system.cluster_parts import on_cluster
from histopipe.system.folders import ENCODER, FolderKind, folder_kind
from histopipe.system.output import Progress, default_progress
from histopipe.system.settings import declared_settings, make_settings, takes
from histopipe.system.shared_folders import ALL
from histopipe.system.urls import is_url
from histopipe.tiling.mask_files import TissueReport


@takes(declared_settings(ExportOptions))
def export(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> ExportResult | IndexResult | TissueReport | ModelExport:
    """Export the index, the patches or the tissue masks of stores, the model of a run, or features.

    Args:
        sources: one or several stores; a run; or a folder of features. Patches can be exported from one store only, and are
            neither decoded nor encoded.
        out: file of the index, or folder of the patches. Files that already exist in the folder are kept. With some formats
            also a URL: s3://, gs:// or az://.
        progress: shows the progress; `default_progress()` if None.
        settings: options by name, as in docs/reference/settings.md and as the flags of `histopipe export`. Of a run see
            `export_model`, of features `export_h5ad`.

    Returns:
        The files and the number of patches written.

    Raises:
        UsageError: both or neither of `to` and `index` are given, `out` has other content, or the format is not one of the
            kind of the folder, or does not take an option.
        NothingToDo: there is no store, or no patch.
        MachineShort: the disk is full, or a library is not installed.
        Interrupted: by Ctrl-C or SIGTERM; complete files are kept.

    Example:
        >>> export("patches.lmdb", "index.parquet", index="parquet")  # doctest: +SKIP
        403 patches: index.parquet
        >>> export("runs/first", "model", to="onnx")  # doctest: +SKIP
        model/model.onnx, model/model-channels-first.onnx, model/model.json; equals Keras to 1e-07
        >>> export("patches.lmdb", "shards", to="webdataset")  # doctest: +SKIP
        403 patches in 1 files, 0 files already done: shards
    """
    options, display = make_settings(ExportOptions, settings), progress or default_progress()
    to, index = options.to, options.index
    name = to or index
    if name is None or (to and index):
        raise UsageError(
            "export", found="both" if index else "neither", expected="one of --index and --to"
        )
    chosen, flag = EXPORTS[name], f"--to {to}" if to else f"--index {index}"
    if options.predictions is not None and "predictions" not in chosen.options:
        raise UsageError("--predictions", found=flag, expected=flag_text("predictions"))
    if (options.share != ALL or options.cluster) and (is_url(out) or "share" not in chosen.options):
        raise UsageError(
            "an option of several machines",
            found=flag if "share" not in chosen.options else "a URL",
            expected="patches or masks of a store, in a folder",
        )
    paths = [Path(p) for p in ([sources] if isinstance(sources, str | Path) else sources)]
    _check_source(flag, chosen, paths)
    if options.cluster:
        return on_cluster(export, sources, out, progress=display, **settings)
    if is_url(out) and "url" not in chosen.options:
        raise UsageError(
            f"{flag} with a URL",
            expected=f"a local path, or {flag_text('url')}",
            todo="export to a local folder, and copy it",
        )
    if chosen.source is FolderKind.STORE and (index or len(paths) < 2):
        paths = store_paths(sources)
    # Not of several for `to`: `store_paths` would report a store that is given twice.
    if to and len(paths) > 1:
        raise UsageError(
            "--to", found=f"{len(paths)} stores", expected="one store, with a separate --out"
        )
    result: ExportResult | IndexResult | TissueReport | ModelExport = chosen.write(
        paths if index else paths[0],
        out=str(out) if is_url(out) else Path(out),
        to=name,
        shard_patches=options.shard_patches,
        predictions=None if options.predictions is None else Path(options.predictions),
        share=options.share,
        progress=display,
    )
    return result


def _check_source(flag: str, chosen: ExportFormat, paths: Sequence[Path]) -> None:
    """Raise a UsageError if a folder is not of the kind that the format exports."""
    kind = folder_kind(paths[0]) if paths else None
    if chosen.source is FolderKind.FEATURES and not kind and any(map(_has_features, paths)):
        kind = FolderKind.FEATURES  # of another tool
    _, *of_folders = formats_by_source().items()  # the first is of stores
    is_other = kind is not chosen.source or len(paths) != 1
    if kind in dict(of_folders) if chosen.source is FolderKind.STORE else is_other:
        raise UsageError(
            flag,
            found=f"{kind or 'no run, and no features'} in {', '.join(map(str, paths))}",
            expected=f"{chosen.source} for {flag}"
            + "".join(f"; {of}: {' or '.join(names)}" for of, names in of_folders),
        )


def _has_features(folder: Path) -> bool:
    """Return whether a folder has feature files of another tool, and is not one of several folders of features."""
    return any(folder.rglob("*.h5")) and not any(folder.rglob(ENCODER))
