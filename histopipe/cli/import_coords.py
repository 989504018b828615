"""`histopipe import-coords`: tile slides into a store at the coordinates of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from histopipe.cli.ingest import command as ingest
from histopipe.cli.ingest import print_report
from histopipe.cli.untrusted import untrusted_option

_SHARED = (
    "annotations", "annotation_threshold", "unclassified", "annotation_origin", "out", "codec", "quality", "subsampling", "resample", "route", "workers", "labels", "mpp_csv", "default_mpp",
    "slide_list", "allow_extra_rows", "allow_mixed_mpp", "max_unreadable", "slide_timeout", "allow_network", "force",
    "retry_failed", "as_json",
)  # fmt: skip
"""Options that it shares with `histopipe ingest`; the coordinates decide size, scale and tissue."""


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[it for it in ingest.params if it.name in _SHARED],
)
@click.argument("coords", type=click.Path(path_type=Path))
@click.argument("slides", nargs=-1, required=True, type=click.Path(path_type=Path))
@untrusted_option(coords="coords")
def command(coords: Path, slides: tuple[Path, ...], out: Path, as_json: bool, **flags: Any) -> int:
    """Tile SLIDES, files or folders, into a store at the coordinates in the folder COORDS.

    The files of COORDS are NAME.h5 or NAME_patches.h5, as CLAM and TRIDENT write them, with the same patch size and scale in
    all. Slides without coordinates are left out. The same command goes on where it was interrupted.

    \b
    Example: histopipe import-coords trident_processed/20x_256px_0px_overlap/patches slides/
    """  # fmt: skip
    from histopipe.ingestion.ingest import import_coords  # late: `--help` needs none of it

    report = import_coords(coords, slides, out, **flags)
    print_report(report, as_json=as_json)
    return report.exit_code
