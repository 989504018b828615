"""Commands that find tissue and tile slides into a store: `tissue`, `ingest`, `import-coords`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import histopipe
from histopipe.cli.parameters import (
    PATH,
    SettingsCommand,
    echo,
    json_option,
    path_or_url,
    setting_options,
    show,
    untrusted_option,
)
from histopipe.ingestion.options import (
    IMPORT_SETTINGS,
    INGEST_SETTINGS,
    SETTING_CLASSES,
    ClusterOptions,
    MaskOptions,
)
from histopipe.system.settings import select_settings

if TYPE_CHECKING:
    from histopipe.ingestion.ingest_report import IngestReport

_store_option = click.option(
    "--out",
    type=PATH,
    default="patches.lmdb",
    help="The store: created if missing, extended if its settings are the same.",
)


@click.command(cls=SettingsCommand)
@click.argument("slides", nargs=-1, required=True, type=PATH)
@click.option("--out", type=PATH, default="masks", help="Folder of the masks.")
@setting_options(MaskOptions)
@json_option("the tissue of every slide")
def tissue(slides: tuple[Path, ...], out: Path, *, as_json: bool, **options: Any) -> int:
    """Write the tissue mask of each of SLIDES, files or folders: GeoJSON for QuPath, PNG, and a page with pictures.

    Masks that exist are kept, since they may have been corrected; their pictures and numbers are written again.

    \b
    Example: histopipe tissue slides/ --out masks
    Then:    histopipe ingest slides/ --tissue masks
    """
    report = histopipe.tissue(slides, out, **options)
    return show(report, as_json=as_json, then=("ingest", *slides, "--tissue", out))


@click.command(cls=SettingsCommand)
@click.argument("slides", nargs=-1, type=path_or_url)
@_store_option
@click.option(
    "--plan",
    "plan_only",
    is_flag=True,
    help="Write nothing; show each slide's level, route, patches, and estimated bytes and time.",
)
@setting_options(*SETTING_CLASSES, ClusterOptions)
@json_option("the result of every slide")
def ingest(
    slides: tuple[Path | str, ...],
    out: Path,
    *,
    as_json: bool,
    plan_only: bool,
    **options: Any,
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
    if plan_only:
        preview = histopipe.plan(slides, out, **select_settings(options, *SETTING_CLASSES))
        code = show(preview, as_json=as_json)
        if not as_json:
            echo("next: the same command without --plan", err=True)
        return code
    return _show_report(histopipe.ingest(slides, out, **options), as_json=as_json)


def _show_report(report: IngestReport, *, as_json: bool) -> int:
    """Print the summary to standard output, and warnings and failed slides to standard error."""
    notes = [f"warning: {warning}" for warning in report.warnings]
    if report.failed:
        notes.append(f"\n{len(report.failed)} of {len(report.slides)} slides failed:")
        notes += [f"  {line}" for line in report.failed_lines()]
    text = "\n".join([report.store, *report.summary_lines()])
    then = ("info", report.store) if len(report.failed) < len(report.slides) else ()
    return show(report, as_json=as_json, notes=notes, text=text, then=then)


@click.command(cls=SettingsCommand)
@click.argument("coords", type=PATH)
@click.argument("slides", nargs=-1, type=path_or_url)
@_store_option
@setting_options(*SETTING_CLASSES, skip=INGEST_SETTINGS.keys() - IMPORT_SETTINGS.keys())
@json_option("the result of every slide")
@untrusted_option()
def import_coords(
    coords: Path, slides: tuple[Path | str, ...], out: Path, as_json: bool, **options: Any
) -> int:
    """Tile SLIDES, files or folders, into a store at the coordinates in the folder COORDS.

    COORDS contains files NAME.h5 or NAME_patches.h5 of CLAM or TRIDENT, all with the same patch size and scale. Slides
    without coordinates are left out. The same command continues after an interruption.

    \b
    Example: histopipe import-coords trident_processed/20x_256px_0px_overlap/patches slides/
    """
    return _show_report(histopipe.import_coords(coords, slides, out, **options), as_json=as_json)
