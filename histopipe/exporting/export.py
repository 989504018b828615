"""Export the index, or the patches, of stores for other tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from histopipe.dataset.selection import store_paths
from histopipe.errors import UsageError
from histopipe.exporting.index import IndexFormat, IndexResult, export_index
from histopipe.exporting.patches import ExportResult, PatchFormat, export_patches
from histopipe.system.progress import Progress, default_progress


def export(
    stores: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    to: PatchFormat | None = None,
    index: IndexFormat | None = None,
    shard_patches: int = 10_000,
    progress: Progress | None = None,
) -> ExportResult | IndexResult:
    """Export the index, or the patches, of stores for other tools. Patches are neither decoded nor encoded.

    Args:
        stores: one store or several; patches are exported of one store only.
        out: file of the index, or folder of the patches. Files that are already in the folder are kept.
        to: format of the patches. "tfrecord": one file per slide, with slideflow's feature names. "webdataset": tar files of
            `shard_patches` patches, each an image and a JSON file. "folder": images by label and slide.
        index: format of the index: "csv" or "parquet".
        shard_patches: number of patches per tar file.
        progress: shows the progress; `default_progress()` if None.

    Returns:
        What was written.

    Raises:
        UsageError: not exactly one of `to` and `index`, or `out` holds something else.
        NothingToDo: no store, or no patch.
        MachineShort: the disk is full, or a library is not installed.
        Interrupted: by Ctrl-C or SIGTERM; complete files stay.

    Example:
        >>> export("patches.lmdb", "index.parquet", index="parquet")  # doctest: +SKIP
        403 patches: index.parquet
        >>> export("patches.lmdb", "shards", to="webdataset")  # doctest: +SKIP
        403 patches in 1 files, 0 files already done: shards
    """
    if (index is None) == (to is None):
        raise UsageError(
            "export", found="both" if index else "neither", expected="one of --index and --to"
        )
    shown = progress or default_progress()
    if index is not None:
        return export_index(store_paths(stores), out=Path(out), kind=index, progress=shown)
    given = [stores] if isinstance(stores, str | Path) else list(stores)
    paths = store_paths(given) if len(given) == 1 else given
    if len(paths) > 1:
        raise UsageError(
            "--to", found=f"{len(paths)} stores", expected="one store, each with its own --out"
        )
    assert to is not None  # noqa: S101 - checked above
    return export_patches(
        Path(paths[0]), out=Path(out), to=to, shard_patches=shard_patches, progress=shown
    )
