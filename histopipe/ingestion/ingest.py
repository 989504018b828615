"""The public functions that write patches into a store: `ingest` and `import_coords`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.ingestion.options import ClusterOptions, IngestOptions
from histopipe.system.progress import Progress, default_progress
from histopipe.system.settings import make_settings, split_settings
from histopipe.system.worker_pool import WorkerPool

if TYPE_CHECKING:
    from histopipe.ingestion.report import IngestReport


def ingest(
    slides: str | Path | Sequence[str | Path],
    out: str | Path = "patches.lmdb",
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> IngestReport:
    """Tile slides into a store.

    Complete slides are skipped, so the same call resumes an interrupted ingest. Failed slides are recorded with the
    reason and reported at the end.

    Args:
        slides: slide files, folders, and URLs of files or prefixes: s3://, gs://, az://, https://.
        out: path of the store, created if missing. An existing store must have the same tiling settings.
        progress: shows the progress; `default_progress()` if None.
        settings: options by name, as in docs/reference/settings.md and as the flags of `histopipe ingest`.

    Returns:
        The outcome of every slide. Failed slides raise no error: see `IngestReport.failed` and `exit_code`.

    Raises:
        UsageError: an option, a table or a folder is wrong, or the store has other settings.
        NothingToDo: no slide was found.
        DamagedStore: the store cannot be used.
        MachineShort: disk or memory ran out; complete slides are kept.

    Example:
        >>> ingest("slides", "patches.lmdb", mpp=0.5, labels="labels.csv")  # doctest: +SKIP
    """
    of_cluster, of_slides = split_settings(settings, ClusterOptions)
    where = make_settings(ClusterOptions, of_cluster)
    progress, store = progress or default_progress(), Path(out)
    if where.cluster is None:
        return _ingest_here(slides, store, of_slides, progress)
    from histopipe.ingestion.cluster.cluster_ingest import ingest_on_cluster  # late: an extra
    from histopipe.ingestion.request import read_request

    inputs, spec, options = read_request(slides, store, of_slides, progress)
    return ingest_on_cluster(
        inputs, store, spec, options, cluster=where.cluster, scratch=Path(where.scratch),
        part_bytes=int(where.part_gb * 1e9), progress=progress,
    )  # fmt: skip


def import_coords(
    coords: str | Path,
    slides: str | Path | Sequence[str | Path],
    out: str | Path = "patches.lmdb",
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> IngestReport:
    """Tile slides into a store at the coordinates that CLAM or TRIDENT has chosen.

    Patch size and scale are those of the coordinates, and must be the same in all files. Slides without coordinates
    are skipped.

    Args:
        coords: folder with NAME.h5 or NAME_patches.h5 files.
        slides, out, progress: as for `ingest`.
        settings: options of `ingest` apart from size, scale, tissue and region of interest.

    Returns:
        The outcome of every slide.

    Raises:
        UsageError: as for `ingest`, or the coordinates are invalid, or have several sizes or scales.
        NothingToDo, DamagedStore, MachineShort: as for `ingest`.

    Example:
        >>> import_coords("trident/20x_256px_0px_overlap/patches", "slides")  # doctest: +SKIP
    """
    progress = progress or default_progress()
    return _ingest_here(slides, Path(out), settings, progress, coords=Path(coords))


def _ingest_here(
    slides: str | Path | Sequence[str | Path],
    store: Path,
    settings: Mapping[str, Any],
    progress: Progress,
    coords: Path | None = None,
) -> IngestReport:
    """Ingest with worker processes of this machine, which import their modules while this process imports its own."""
    workers = make_settings(IngestOptions, {"workers": settings.get("workers")}).worker_count
    with WorkerPool(workers, _prepare) as pool:
        from histopipe.ingestion.ingest_slides import ingest_slides  # late: takes 0.2 s
        from histopipe.ingestion.request import read_request

        inputs, spec, options = read_request(slides, store, settings, progress, coords=coords)
        return ingest_slides(inputs, store, spec, options, progress=progress, pool=pool)


def _prepare() -> None:
    importlib.import_module("histopipe.ingestion.planning").prepare()
