"""Ingest slides: the public functions, which start processes before they import what these and this process need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.ingestion.options import IMPORT_SETTINGS, INGEST_SETTINGS, IngestPartOptions, prepare
from histopipe.system.output import Progress, default_progress
from histopipe.system.settings import (
    declared_settings,
    make_settings,
    read_arguments,
    split_settings,
    takes,
)
from histopipe.system.worker_pool import started_early

if TYPE_CHECKING:
    from histopipe.ingestion.ingest_report import IngestReport


@takes(INGEST_SETTINGS, declared_settings(IngestPartOptions))
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
        out: path of the store, created if missing. An existing store must have the same tiling settings. With `part`,
            `join` or `cluster`, a folder of stores, one data set for all readers.
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
    return _ingest(ingest, (slides,), Path(out), settings, progress)


@takes(IMPORT_SETTINGS, declared_settings(IngestPartOptions))
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
    return _ingest(import_coords, (coords, slides), Path(out), settings, progress)


def _ingest(
    command: Callable[..., IngestReport],
    arguments: Sequence[Any],
    out: Path,
    settings: Mapping[str, Any],
    progress: Progress | None,
) -> IngestReport:
    """Ingest with worker processes of this machine: all slides, or a part of them; or do all parts on a cluster."""
    spread, of_slides = split_settings(settings, IngestPartOptions)
    options, progress = make_settings(IngestPartOptions, spread), progress or default_progress()
    if options.cluster:
        from histopipe.system.cluster_parts import on_cluster

        return on_cluster(
            command, *arguments, out, progress=progress, threads_as="workers", **settings
        )
    # Wrong settings start no process.
    read_arguments(of_slides, INGEST_SETTINGS if command is ingest else IMPORT_SETTINGS)
    with nullcontext() if options.join else started_early(prepare):
        return _ingest_here(arguments, out, options, of_slides, progress)


def _ingest_here(
    arguments: Sequence[Any],
    out: Path,
    options: IngestPartOptions,
    settings: Mapping[str, Any],
    progress: Progress,
) -> IngestReport:
    # Imported late, while the server of the workers starts: it takes a quarter of a second, as the server does.
    from histopipe.ingestion.request import read_request
    from histopipe.system.folders import FolderKind, folder_kind
    from histopipe.system.shared_folders import PARTS

    *coords, slides = arguments
    read = partial(
        read_request, slides, out, settings, progress, coords=Path(coords[0]) if coords else None
    )
    share, records = options.share, any((out / PARTS).glob("*-of-*"))
    if not (share.is_part or share.join or records or folder_kind(out) is FolderKind.PARTS):
        jobs, spec, of_ingest = read()
        from histopipe.ingestion.ingest_slides import (
            ingest_slides,  # late: a wrong request must not wait for it
        )

        return ingest_slides(jobs, out, spec, of_ingest, progress=progress)
    from histopipe.ingestion.ingest_parts import IngestParts

    parts = IngestParts.open(out, options, progress)
    jobs, spec, of_ingest = read(records=[entry.record for entry in parts.stored().values()])
    report = None if share.join else parts.ingest(jobs, spec, of_ingest)
    return report if report and share.is_part else parts.join(jobs, spec, of_ingest)
