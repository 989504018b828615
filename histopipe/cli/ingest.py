"""`histopipe ingest`: slides into a store."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from histopipe.cli.annotation_options import annotation_options
from histopipe.cli.ingestion import run_ingest
from histopipe.cli.parameters import Gigabytes, Share


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("slides", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="patches.lmdb",
    show_default=True,
    help="The store; made if missing, added to if it has the same settings.",
)
@click.option(
    "--patch-size", type=int, default=256, show_default=True, help="Side of a patch, pixels."
)
@click.option(
    "--mpp", type=float, help="Scale of the patches, micrometres a pixel.  [default: 0.5]"
)
@click.option("--mag", type=float, help="The same as a magnification: 20 is 0.5 mpp.")
@click.option("--level", type=int, help="The same as a pyramid level, taken as it is.")
@click.option("--overlap", type=int, default=0, show_default=True, help="Pixels neighbours share.")
@click.option(
    "--tissue",
    type=click.Choice(["otsu", "none"]),
    default="otsu",
    show_default=True,
    help="How tissue is found; none takes every cell.",
)
@click.option(
    "--tissue-threshold",
    type=float,
    default=0.5,
    show_default=True,
    help="Least share of a cell that is tissue.",
)
@click.option(
    "--codec",
    type=click.Choice(["auto", "jpeg", "png"]),
    default="auto",
    show_default=True,
    help="How patches are stored; auto copies a slide's own JPEG tiles where patches lie on them, else encodes JPEG.",
)
@click.option(
    "--quality", type=int, default=90, show_default=True, help="JPEG quality of what is encoded."
)
@click.option(
    "--subsampling",
    type=click.Choice(["444", "422", "420"]),
    default="444",
    show_default=True,
    help="JPEG chroma subsampling.",
)
@click.option(
    "--resample",
    type=click.Choice(["fast", "exact"]),
    default="fast",
    show_default=True,
    help="fast decodes JPEG tiles at 1/2, 1/4 or 1/8 where that suits; exact decodes all and averages.",
)
@click.option(
    "--route",
    type=click.Choice(["auto", "copy", "decode", "openslide"]),
    default="auto",
    show_default=True,
    help="How patches are made. auto copies tiles, else decodes them, else goes through OpenSlide.",
)
@click.option(
    "--annotations",
    type=click.Path(path_type=Path),
    help="Folder of SLIDE.geojson (QuPath) or SLIDE.xml (ASAP, ImageScope): classes of patches.",
)
@click.option("--roi", help="Take only patches in outlines of this class of --annotations.")
@annotation_options
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Processes; with --cluster a Dask worker has as many as threads.  [default: one a core]",
)
@click.option(
    "--labels",
    type=click.Path(path_type=Path),
    help="CSV: slide,label[,patient][,site].  [default: labels.csv beside the slides, else the sub-folders]",
)
@click.option(
    "--mpp-csv", type=click.Path(path_type=Path), help="CSV: slide,mpp, for slides that do not say."
)
@click.option("--default-mpp", type=float, help="Level-0 mpp of slides that have none.")
@click.option(
    "--slide-list", type=click.Path(path_type=Path), help="CSV with a column slide: only these."
)
@click.option("--allow-extra-rows", is_flag=True, help="Ignore CSV rows that name no slide.")
@click.option(
    "--allow-mixed-mpp", is_flag=True, help="With --level: slides of different scale in one store."
)
@click.option(
    "--max-unreadable",
    type=Share(),
    default="1%",
    show_default=True,
    help="Share of a slide's patches that may be lost to damage.",
)
@click.option(
    "--slide-timeout",
    type=click.FloatRange(0, 1e9, min_open=True),
    help="Seconds of work that a slide may take.  [default: 600, and 0.2 a patch]",
)
@click.option(
    "--allow-network",
    is_flag=True,
    help="Let the store lie on a network filesystem, at your own risk.",
)
@click.option(
    "--plan",
    "plan_only",
    is_flag=True,
    help="Write nothing; tell each slide's level, route, patches, and estimated bytes and time.",
)
@click.option("--force", is_flag=True, help="Ingest again slides whose file was replaced.")
@click.option("--retry-failed", is_flag=True, help="Try again slides whose file was bad.")
@click.option(
    "--cluster",
    help="Ingest by the workers of a Dask cluster, tcp://HOST:PORT, local:N or slurm:N, into a folder of parts.",
)
@click.option(
    "--scratch",
    type=click.Path(path_type=Path),
    default=tempfile.gettempdir(),
    help="With --cluster: on each machine a folder on a local disk.  [default: the temporary folder]",
)
@click.option(
    "--part-gb",
    "part_bytes",
    type=Gigabytes(0.001),
    default=16,
    show_default=True,
    help="With --cluster: a larger part is moved to --out, and another begun.",
)
@click.option("--json", "as_json", is_flag=True, help="The outcome of every slide as JSON.")
def command(
    slides: tuple[Path, ...], out: Path, as_json: bool, plan_only: bool, **flags: Any
) -> int:
    """Tile SLIDES, files or folders, into a store.

    Complete slides are skipped, so the same command goes on where it was interrupted. A bad slide is recorded, passed
    over and listed at the end.

    \b
    Example: histopipe ingest slides/ --mpp 0.5 --labels labels.csv
    Example: histopipe ingest slides/ --out parts --cluster tcp://scheduler:8786
    """  # fmt: skip
    return run_ingest(slides, out, flags, as_json=as_json, plan_only=plan_only)
