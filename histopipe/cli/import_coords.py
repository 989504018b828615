"""`histopipe import-coords`: slides into a store, where another tool has chosen the patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from histopipe.cli.ingest import command as ingest
from histopipe.cli.ingestion import run_ingest
from histopipe.cli.untrusted import untrusted_option

_SHARED = (
    "annotations", "annotation_threshold", "unclassified", "annotation_origin", "out", "codec", "quality", "subsampling", "resample", "route", "workers", "labels", "mpp_csv", "default_mpp",
    "slide_list", "allow_extra_rows", "allow_mixed_mpp", "max_unreadable", "slide_timeout", "allow_network", "force",
    "retry_failed", "as_json",
)  # fmt: skip
"""What it has in common with `histopipe ingest`; size, scale and tissue are as the coordinates have them."""


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[it for it in ingest.params if it.name in _SHARED],
)
@click.argument("coords", type=click.Path(path_type=Path))
@click.argument("slides", nargs=-1, required=True, type=click.Path(path_type=Path))
@untrusted_option(coords="coords")
def command(coords: Path, slides: tuple[Path, ...], out: Path, as_json: bool, **flags: Any) -> int:
    """Tile SLIDES, files or folders, into a store: the patches whose coordinates are in the folder COORDS.

    Its files are NAME.h5 or NAME_patches.h5, as CLAM and TRIDENT write them; patch size and scale are as they say, and the same in
    all. Slides without coordinates are left out. The same command goes on where it was interrupted.

    \b
    Example: histopipe import-coords trident_processed/20x_256px_0px_overlap/patches slides/
    """  # fmt: skip
    return run_ingest(slides, out, flags, as_json=as_json, coords=coords)
