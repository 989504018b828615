"""Commands that find tissue and tile slides into a store: `tissue`, `ingest`, `import-coords`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from histopipe.cli.parameters import (
    PATH,
    SOURCE,
    annotation_options,
    echo,
    extra_rows_option,
    json_option,
    na_option,
    share,
    show,
    show_json,
    show_text,
    stage_options,
    suggest,
    untrusted_option,
)

if TYPE_CHECKING:
    from histopipe.ingestion.report import IngestReport


@click.command()
@click.argument("slides", nargs=-1, required=True, type=PATH)
@click.option("--out", type=PATH, default="masks", help="Folder of the masks.")
@click.option(
    "--tissue",
    default="otsu",
    help="otsu (the newest version, otsu-3), otsu-1, otsu-2, otsu-3, or a segmentation network (.onnx or .keras).",
)
@click.option(
    "--mpp-csv", type=PATH, help="CSV: slide,mpp. Takes precedence over the slides' headers."
)
@click.option("--default-mpp", type=float, help="Level-0 mpp of slides without a scale.")
@click.option(
    "--workers", type=click.IntRange(1), help="Number of processes.  [default: one per core]"
)
@click.option(
    "--force", is_flag=True, help="Replace masks that exist, also if they were corrected."
)
@json_option("the tissue of every slide")
def tissue(slides: tuple[Path, ...], out: Path, *, as_json: bool, **options: Any) -> int:
    """Write the tissue mask of each of SLIDES, files or folders: GeoJSON for QuPath, PNG, and a page with pictures.

    Masks that exist are kept, since they may have been corrected; their pictures and numbers are written again.

    \b
    Example: histopipe tissue slides/ --out masks
    Then:    histopipe ingest slides/ --tissue masks
    """
    from histopipe.reports.tissue import tissue

    report = tissue(slides, out, **options)
    show(report, as_json=as_json)
    if not as_json:
        suggest("ingest", *map(str, slides), "--tissue", str(out))
    return report.exit_code


@click.command()
@click.argument("slides", nargs=-1, type=SOURCE)
@click.option(
    "--out",
    type=PATH,
    default="patches.lmdb",
    help="The store: created if missing, extended if its settings are the same.",
)
@click.option(
    "--images",
    is_flag=True,
    help="Take only images: PNG, JPEG, BMP, WebP, and TIFF files of one image without tiles. Images are taken without "
    "this flag if there is no slide.",
)
@click.option(
    "--patch-size",
    type=int,
    help="Side of a patch in pixels.  [default: 256; of images, their smaller side if that is less]",
)
@click.option(
    "--mpp",
    type=float,
    help="Scale of the patches in micrometres per pixel.  [default: 0.5; of images, their own scale]",
)
@click.option("--mag", type=float, help="Scale as a magnification: 20 is 0.5 mpp.")
@click.option("--level", type=int, help="Scale as a pyramid level, without resampling.")
@click.option("--overlap", type=int, default=0, help="Overlap of neighbouring patches in pixels.")
@click.option(
    "--edge",
    type=click.Choice(["drop", "shift", "pad"]),
    help="Rest of a slide at its right and lower edge that is smaller than a patch: leave it out, move the last column "
    "and row to the edge, or let them extend beyond it.  [default: drop; of images, shift]",
)
@click.option(
    "--tissue",
    help="Tissue: otsu (the store's version, else the newest, otsu-3), otsu-1, otsu-2, otsu-3, none for all patches, a folder "
    "of masks (SLIDE.geojson or SLIDE.png), or a segmentation network (.onnx or .keras, with a .json file).  "
    "[default: otsu; of images, none]",
)
@click.option(
    "--tissue-fallback",
    type=click.Choice(["otsu", "otsu-1", "otsu-2", "otsu-3"]),
    help="With a folder of masks: how to find the tissue of slides without a mask.  [default: they fail]",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="CLASS",
    help="Cut outlines of this class out of the tissue, such as artefacts. They are in --annotations or in the masks. "
    "Can be repeated.",
)
@click.option(
    "--tissue-threshold",
    type=float,
    default=0.5,
    help="Minimum share of tissue in a patch.",
)
@click.option(
    "--codec",
    type=click.Choice(["auto", "jpeg", "png"]),
    default="auto",
    help="Encoding of patches. auto copies the slide's own JPEG tiles if they match the patches, else encodes JPEG.",
)
@click.option("--quality", type=int, default=90, help="Quality of encoded JPEG.")
@click.option(
    "--subsampling",
    type=click.Choice(["444", "422", "420"]),
    default="444",
    help="Chroma subsampling of encoded JPEG.",
)
@click.option(
    "--resample",
    type=click.Choice(["fast", "exact"]),
    default="fast",
    help="fast decodes JPEG tiles at 1/2, 1/4 or 1/8 scale if possible; exact decodes all pixels and averages.",
)
@click.option(
    "--route",
    type=click.Choice(["auto", "copy", "decode", "openslide"]),
    default="auto",
    help="Route: auto copies tiles, else decodes tiles, else uses OpenSlide.",
)
@click.option(
    "--reader",
    type=click.Choice(["auto", "openslide", "tifffile", "pillow", "fastslide"]),
    default="auto",
    help="Library that reads slides. auto: OpenSlide; tifffile for OME-TIFF and for TIFF files that OpenSlide refuses; "
    "pillow for images; fastslide (experimental, if installed) for other formats.",
)
@click.option(
    "--annotations",
    type=PATH,
    help="Label patches from SLIDE.geojson (QuPath), SLIDE.xml (ASAP, ImageScope) or SLIDE.annotations (HALO) in this "
    "folder.",
)
@click.option("--roi", help="Keep only patches in outlines of this class of --annotations.")
@annotation_options
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Number of processes. With --cluster: as many as a Dask worker has threads.  [default: one per core]",
)
@click.option(
    "--labels",
    type=PATH,
    help="CSV file with the columns slide, label, and optionally patient and site.  "
    "[default: labels.csv in the slide folder, else the sub-folders]",
)
@na_option
@click.option(
    "--patient-regex",
    metavar="REGEX",
    help="Find the patient in the id of each slide: the first group of this regular expression, or all of its match. "
    "A patient in --labels comes first.",
)
@click.option(
    "--mpp-csv", type=PATH, help="CSV: slide,mpp. Takes precedence over the slides' headers."
)
@click.option("--default-mpp", type=float, help="Level-0 mpp of slides without a scale.")
@click.option(
    "--slide-list",
    type=PATH,
    help="CSV with a column slide: ingest only these slides. URLs in it need not be in SLIDES.",
)
@extra_rows_option
@click.option(
    "--allow-mixed-mpp", is_flag=True, help="With --level: accept slides with different scales."
)
@click.option(
    "--max-unreadable",
    type=share,
    default="1%",
    help="Maximum share of unreadable patches per slide.",
)
@click.option(
    "--slide-timeout",
    type=click.FloatRange(0, 1e9, min_open=True),
    help="Time limit per slide in seconds of worker time.  [default: 600, plus 0.2 per patch]",
)
@stage_options
@click.option(
    "--allow-network",
    is_flag=True,
    help="Accept a store on a network filesystem, at your own risk.",
)
@click.option(
    "--plan",
    "plan_only",
    is_flag=True,
    help="Write nothing; show each slide's level, route, patches, and estimated bytes and time.",
)
@click.option("--force", is_flag=True, help="Ingest slides again if their file was replaced.")
@click.option(
    "--retry-failed", is_flag=True, help="Ingest slides again if their file could not be read."
)
@click.option(
    "--cluster",
    help="Ingest on a Dask cluster, tcp://HOST:PORT, local:N or slurm:N, into a folder of parts.",
)
@click.option(
    "--scratch",
    type=PATH,
    default=tempfile.gettempdir(),
    show_default=False,
    help="With --cluster: folder on a local disk of each machine.  [default: the temporary folder]",
)
@click.option(
    "--part-gb",
    type=click.FloatRange(0.001, 1e9),
    default=16,
    help="With --cluster: size in GB at which a part is moved to --out and the next part begins.",
)
@json_option("the result of every slide")
def ingest(
    slides: tuple[Path | str, ...],
    out: Path,
    *,
    as_json: bool,
    plan_only: bool,
    cluster: str | None,
    scratch: Path,
    part_gb: float,
    **flags: Any,
) -> int:
    """Tile SLIDES, files, folders or URLs (s3://, gs://, az://, https://), into a store.

    Complete slides are skipped, so the same command continues after an interruption. Failed slides are recorded with
    their reasons, and listed at the end.

    \b
    Example: histopipe ingest slides/ --mpp 0.5 --labels labels.csv
    Example: histopipe ingest images/ --default-mpp 0.62 --labels labels.csv
    Example: histopipe ingest slides/ --out parts --cluster tcp://scheduler:8786
    Example: histopipe ingest s3://bucket/slides/ --stage /scratch --stage-gb 200
    """
    from histopipe.ingestion.ingest import ingest

    if plan_only:
        from histopipe.ingestion.preview import plan

        preview = plan(slides, out, **flags)
        show(preview, as_json=as_json)
        if not as_json:
            echo("next: the same command without --plan", err=True)
        return preview.exit_code
    report = ingest(slides, out, cluster=cluster, scratch=scratch, part_gb=part_gb, **flags)
    return _show_report(report, as_json=as_json)


def _show_report(report: IngestReport, *, as_json: bool) -> int:
    """Print the summary to standard output, and warnings and failed slides to standard error."""
    if as_json:
        show_json(report.to_json())
        return report.exit_code
    for warning in report.warnings:
        echo(f"warning: {warning}", err=True)
    if report.failed:
        echo(f"\n{len(report.failed)} of {len(report.slides)} slides failed:", err=True)
        echo("\n".join(f"  {line}" for line in report.failed_lines()), err=True)
    show_text("\n".join([report.store, *report.summary_lines()]))
    if len(report.failed) < len(report.slides):
        suggest("info", report.store)
    return report.exit_code


_INGEST_ONLY = (
    "slides", "patch_size", "mpp", "mag", "level", "overlap", "edge", "tissue", "tissue_threshold",
    "tissue_fallback", "exclude", "roi",
    "plan_only", "cluster", "scratch", "part_gb",
)  # fmt: skip
"""Parameters of `ingest` that `import-coords` does not have: the coordinates define size, scale and tissue."""


@click.command(
    params=[parameter for parameter in ingest.params if parameter.name not in _INGEST_ONLY]
)
@click.argument("coords", type=PATH)
@click.argument("slides", nargs=-1, type=SOURCE)
@untrusted_option(coords="coords")
def import_coords(
    coords: Path, slides: tuple[Path | str, ...], out: Path, as_json: bool, **flags: Any
) -> int:
    """Tile SLIDES, files or folders, into a store at the coordinates in the folder COORDS.

    COORDS contains files NAME.h5 or NAME_patches.h5 of CLAM or TRIDENT, all with the same patch size and scale. Slides
    without coordinates are left out. The same command continues after an interruption.

    \b
    Example: histopipe import-coords trident_processed/20x_256px_0px_overlap/patches slides/
    """
    from histopipe.ingestion.ingest import import_coords

    return _show_report(import_coords(coords, slides, out, **flags), as_json=as_json)
