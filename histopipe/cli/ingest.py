"""`histopipe ingest`: slides into a store."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from histopipe.errors import UsageError

if TYPE_CHECKING:
    from histopipe.geometry import Mpp
    from histopipe.ingest.outcome import IngestReport
    from histopipe.ingest.preview import IngestPreview
    from histopipe.slides.discovery import SlideFile
    from histopipe.slides.tables import SlideLabel, SlideNames
    from histopipe.tiling.spec import TilingSpec


class _Share(click.ParamType[float]):
    """`1%` or `0.01`."""

    name = "share"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        text = str(value).strip()
        try:
            share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            self.fail(f"{text!r} is no share: write 1% or 0.01", param, ctx)
        return share


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
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: one a core]")
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
    type=_Share(),
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
@click.option("--json", "as_json", is_flag=True, help="The outcome of every slide as JSON.")
def command(
    slides: tuple[Path, ...], out: Path, as_json: bool, plan_only: bool, **flags: Any
) -> int:
    """Tile SLIDES, files or folders, into a store.

    Complete slides are skipped, so the same command goes on where it was interrupted. A bad slide is recorded, passed
    over and listed at the end.

    \b
    Example: histopipe ingest slides/ --mpp 0.5 --labels labels.csv
    """  # fmt: skip
    # Late: `--help` needs none of it.
    from histopipe.ingest.decide import with_recorded_ids
    from histopipe.ingest.preview import plan_ingest
    from histopipe.ingest.progress import choose_progress
    from histopipe.ingest.request import IngestOptions, recorded, resolved
    from histopipe.ingest.run import ingest
    from histopipe.slides.discovery import discover
    from histopipe.slides.tables import SlideNames

    spec = _spec(flags)
    if flags["slide_timeout"] != flags["slide_timeout"]:
        raise UsageError("--slide-timeout", found="nan", expected="seconds")
    if flags["default_mpp"] is not None:
        _check_mpp(flags["default_mpp"])
    records = recorded(out)
    found = with_recorded_ids(discover(slides), records, resolved)
    names = SlideNames([s.id for s in found], [record.id for record in records.values()])
    extra = flags["allow_extra_rows"]
    options = IngestOptions(
        workers=flags["workers"],
        labels=_labels(found, slides, flags["labels"], names, extra),
        mpps=_mpps(flags["mpp_csv"], names, extra),
        default_mpp=flags["default_mpp"],
        allow_mixed_mpp=flags["allow_mixed_mpp"],
        max_unreadable=flags["max_unreadable"],
        force=flags["force"],
        retry_failed=flags["retry_failed"],
        route=flags["route"],
        slide_timeout=flags["slide_timeout"],
        allow_network=flags["allow_network"],
    )
    listed = _listed(found, flags["slide_list"], names, extra)
    progress = choose_progress()
    try:
        if plan_only:
            preview = plan_ingest(listed, out, spec, options, progress)
        else:
            report = ingest(listed, out, spec, options, progress)
    finally:
        progress.close()
    if plan_only:
        _print_plan(preview, as_json=as_json)
        return preview.exit_code
    _print(report, as_json=as_json)
    return report.exit_code


def _spec(flags: dict[str, Any]) -> TilingSpec:
    from histopipe.tiling.spec import TilingSpec, magnification_to_mpp

    scales = {name: flags[name] for name in ("mpp", "mag", "level") if flags[name] is not None}
    if len(scales) > 1:
        raise UsageError(
            "the scale of patches",
            found=" and ".join(f"--{name}" for name in scales),
            expected="one of --mpp, --mag and --level",
        )
    mpp = magnification_to_mpp(flags["mag"]) if "mag" in scales else scales.get("mpp")
    if not scales:
        mpp = magnification_to_mpp(20)
    return TilingSpec(
        patch_size=flags["patch_size"],
        overlap=flags["overlap"],
        mpp=mpp,
        level=flags["level"],
        tissue=flags["tissue"],
        tissue_threshold=flags["tissue_threshold"],
        codec=flags["codec"],
        quality=flags["quality"],
        subsampling=flags["subsampling"],
        resample=flags["resample"],
    )


def _check_mpp(value: float) -> None:
    from histopipe.slides.scale import PLAUSIBLE_MPP

    low, high = PLAUSIBLE_MPP
    if not low <= value <= high:
        raise UsageError("--default-mpp", found=value, expected=f"from {low:g} to {high:g}")


def _listed(
    found: list[SlideFile], path: Path | None, names: SlideNames, allow_extra: bool
) -> list[SlideFile]:
    from histopipe.slides.tables import read_slide_list

    if path is None:
        return found
    listed = read_slide_list(path, names, allow_extra=allow_extra)
    chosen = [slide for slide in found if slide.id in listed]
    if not chosen:
        raise UsageError(
            f"{path} names none of the slides found", found=f"{len(listed)} other names"
        )
    return chosen


def _labels(
    slides: list[SlideFile],
    arguments: tuple[Path, ...],
    path: Path | None,
    names: SlideNames,
    allow_extra: bool,
) -> dict[str, SlideLabel]:
    from histopipe.ingest.labels import label_slides
    from histopipe.slides.tables import SlideNames, read_labels

    if path is not None:
        return label_slides(slides, read_labels(path, names, allow_extra=allow_extra))
    rows = {}
    for folder in dict.fromkeys(p if p.is_dir() else p.parent for p in arguments):
        if (folder / "labels.csv").is_file():
            # A folder's own labels name its own slides; files named one by one may be few of those.
            own = SlideNames(s.id for s in slides if s.path.is_relative_to(folder))
            some = allow_extra or folder not in arguments
            rows.update(read_labels(folder / "labels.csv", own, allow_extra=some))
    return label_slides(slides, rows or None)


def _mpps(path: Path | None, names: SlideNames, allow_extra: bool) -> dict[str, Mpp]:
    from histopipe.slides.tables import read_mpps

    return {} if path is None else read_mpps(path, names, allow_extra=allow_extra)


def _print(report: IngestReport, *, as_json: bool) -> None:
    from histopipe.ingest.outcome import Status
    from histopipe.ingest.summary import summary_lines

    if as_json:
        value = dataclasses.asdict(report) | {"exit_code": int(report.exit_code)}
        click.echo(json.dumps(value, indent=2, ensure_ascii=False))
        return
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    failed = report.of(Status.FAILED)
    if failed:
        click.echo(f"\n{len(failed)} of {len(report.slides)} slides failed:", err=True)
        for slide in failed:
            click.echo(f"  {slide.id}: {slide.reason}", err=True)
    sys.stderr.flush()
    click.echo("\n".join([str(report.store), *summary_lines(report)]))


def _print_plan(preview: IngestPreview, *, as_json: bool) -> None:
    from histopipe.ingest.preview import preview_lines

    if as_json:
        click.echo(json.dumps(preview.to_json(), indent=2, ensure_ascii=False))
        return
    click.echo("\n".join(preview_lines(preview)))
