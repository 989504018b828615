"""The public functions that write patches into a store: `ingest` and `import_coords`."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from histopipe.errors import UsageError
from histopipe.system.progress import Progress, default_progress
from histopipe.system.worker_pool import WorkerPool, count_usable_cores

if TYPE_CHECKING:
    from histopipe.ingestion.report import IngestReport
    from histopipe.ingestion.request import ImportSettings, IngestSettings


def ingest(
    slides: str | Path | Sequence[str | Path],
    out: str | Path = "patches.lmdb",
    *,
    cluster: str | None = None,
    scratch: str | Path | None = None,
    part_gb: float = 16.0,
    progress: Progress | None = None,
    **settings: Unpack[IngestSettings],
) -> IngestReport:
    """Tile slides into a store.

    Complete slides are skipped, so the same call resumes an interrupted ingest. Failed slides are recorded with the
    reason and reported at the end.

    Args:
        slides: slide files, folders, and URLs of files or prefixes: s3://, gs://, az://, https://.
        out: path of the store, created if missing. An existing store must have the same tiling settings.
        cluster: ingest on a Dask cluster, "tcp://HOST:PORT", "local:N" or "slurm:N", into a folder of parts.
        scratch: with `cluster`, a folder on a local disk of each machine; the temporary folder if not given.
        part_gb: with `cluster`, the size in GB at which a part is moved to `out` and the next part is started.
        progress: shows the progress; `default_progress()` if None.
        images: take only images (PNG, JPEG, BMP, WebP, and TIFF files of one image without tiles). Without this, they are
            taken if there is no slide.
        patch_size: side of a patch in pixels. The default is 256; of images, their smaller side if that is less.
        mpp, mag, level: scale of the patches in µm per pixel, as a magnification, or as a pyramid level. The default is
            0.5 mpp; of images, their own scale.
        overlap: pixels that neighbouring patches share, 0.
        edge: rest of a slide at its right and lower edge that is smaller than a patch: "drop" leaves it out, "shift"
            moves the last column and row of patches to the edge, "pad" lets them extend beyond it. The default is
            "drop"; of images, "shift".
        tissue: the default is "otsu"; of images, "none". "otsu" finds tissue on a thumbnail by the version of an
            existing store, else by the newest, "otsu-3"; "otsu-1", "otsu-2", "otsu-3"; "none" takes all patches; a folder
            of masks, SLIDE.geojson or SLIDE.png; or a
            segmentation network, an ONNX or Keras file with a JSON file.
        tissue_threshold: minimum fraction of a patch that is tissue, 0.5.
        tissue_fallback: with a folder of masks, the algorithm for slides without a mask; None lets them fail.
        exclude: classes of outlines to cut out of the tissue, such as artefacts.
        codec: "auto" copies the slide's own JPEG tiles where patches match them, else encodes JPEG; "jpeg"; "png".
        quality, subsampling: quality and chroma subsampling of encoded JPEG, 90 and "444".
        resample: "fast" decodes JPEG tiles at 1/2, 1/4 or 1/8 if possible; "exact" decodes all pixels and averages.
        route: "auto", or the only route to use: "copy", "decode" or "openslide".
        reader: library that reads the slides: "auto" (see `histopipe.slides.readers.open_slide`), "openslide",
            "tifffile", "pillow" or "fastslide".
        annotations: folder with SLIDE.geojson (QuPath), SLIDE.xml (ASAP, ImageScope) or SLIDE.annotations (HALO) files.
        roi: take only patches in outlines of this class.
        annotation_threshold: minimum fraction of a patch that its class covers, 0.5.
        unclassified: class of outlines that have none; None ignores these outlines.
        class_property: property of an outline that has its class; None for the usual one of each tool.
        annotation_origin: origin of coordinates: "bounds", "slide", or "auto" (depends on the tool that wrote them).
        workers: number of processes; None starts one per core.
        labels: CSV with the columns slide, label and optionally patient and site; None reads labels.csv in the slide
            folders, else uses the names of the sub-folders.
        patient_regex: regular expression that finds the patient in the id of each slide: its first group, or all of its
            match. A patient in `labels` comes first.
        na: cells of `labels` that are missing values, apart from the empty cell; None: NA, nan, None, - and the like.
        mpp_csv: CSV with the columns slide and mpp. It takes precedence over the headers of the slides.
        default_mpp: level-0 scale of slides that have none.
        slide_list: CSV with the column slide: ingest only these slides. URLs in it need not be in `slides`.
        allow_extra_rows: ignore CSV rows that match no slide.
        allow_mixed_mpp: with `level`, accept slides of different scale.
        max_unreadable: maximum fraction of unreadable patches per slide, 0 to 1, 0.01.
        slide_timeout: seconds of worker time per slide; None allows 600, plus 0.2 per patch.
        allow_network: accept a store on a network filesystem.
        stage: folder on a local disk, to which slides are copied before they are read. Slides at URLs are always
            copied: into the temporary folder if None.
        stage_gb: most GB of copies at once, 50.
        force: ingest slides again if their file was replaced.
        retry_failed: ingest slides again if their file could not be read.

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
    if not part_gb > 0:
        raise UsageError("--part-gb", found=part_gb, expected="above 0")
    progress, store = progress or default_progress(), Path(out)
    if cluster is None:
        return _ingest_here(slides, store, settings, progress)
    from histopipe.ingestion.cluster.cluster_ingest import ingest_on_cluster  # late: an extra
    from histopipe.ingestion.request import read_request

    inputs, spec, options = read_request(slides, store, settings, progress)
    return ingest_on_cluster(
        inputs, store, spec, options, cluster=cluster, scratch=Path(scratch or tempfile.gettempdir()),
        part_bytes=int(part_gb * 1e9), progress=progress,
    )  # fmt: skip


def import_coords(
    coords: str | Path,
    slides: str | Path | Sequence[str | Path],
    out: str | Path = "patches.lmdb",
    *,
    progress: Progress | None = None,
    **settings: Unpack[ImportSettings],
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
    settings: IngestSettings | ImportSettings,
    progress: Progress,
    coords: Path | None = None,
) -> IngestReport:
    """Ingest with worker processes of this machine, which import their modules while this process imports its own."""
    workers: Any = settings.get("workers") or count_usable_cores()
    valid = type(workers) is int and workers > 0  # otherwise `read_request` raises an error
    with WorkerPool(workers if valid else 1, _prepare) as pool:
        from histopipe.ingestion.ingest_slides import ingest_slides  # late: takes 0.2 s
        from histopipe.ingestion.request import read_request

        inputs, spec, options = read_request(slides, store, settings, progress, coords=coords)
        return ingest_slides(inputs, store, spec, options, progress=progress, pool=pool)


def _prepare() -> None:
    importlib.import_module("histopipe.ingestion.planning").prepare()
