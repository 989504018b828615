"""What the commands that ingest have in common: from flags to a report."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from histopipe.cli.annotation_options import rules_of
from histopipe.errors import UsageError

if TYPE_CHECKING:
    from histopipe.annotations.folder import AnnotationFiles
    from histopipe.geometry import Mpp
    from histopipe.ingest.coords import CoordsFile
    from histopipe.ingest.outcome import IngestReport
    from histopipe.ingest.preview import IngestPreview
    from histopipe.slides.discovery import SlideFile
    from histopipe.slides.tables import SlideLabel, SlideNames
    from histopipe.tiling.spec import TilingSpec


def run_ingest(
    slides: tuple[Path, ...],
    out: Path,
    flags: dict[str, Any],
    *,
    as_json: bool,
    plan_only: bool = False,
    coords: Path | None = None,
) -> int:
    """Ingest as the flags of the command say, or what a folder of coordinates says; the exit code."""
    # Late: `--help` needs none of it.
    from histopipe.ingest.decide import with_recorded_ids
    from histopipe.ingest.preview import plan_ingest
    from histopipe.ingest.progress import choose_progress
    from histopipe.ingest.request import IngestOptions, resolved
    from histopipe.ingest.run import ingest
    from histopipe.slides.discovery import discover
    from histopipe.slides.scale import check_mpp
    from histopipe.slides.tables import SlideNames
    from histopipe.store.recorded import recorded

    if flags["slide_timeout"] != flags["slide_timeout"]:
        raise UsageError("--slide-timeout", found="nan", expected="seconds")
    if flags["default_mpp"] is not None:
        check_mpp("--default-mpp", flags["default_mpp"])
    records = recorded(out)
    found = with_recorded_ids(discover(slides), records, resolved)
    names = SlideNames([s.id for s in found], [record.id for record in records.values()])
    extra = flags["allow_extra_rows"]
    listed = _listed(found, flags["slide_list"], names, extra)
    chosen: dict[str, CoordsFile] = {}
    if coords is None:
        spec = _spec(flags)
    else:
        listed, chosen, spec = _of_coords(listed, coords, flags)
    rules = rules_of(flags, roi=flags.get("roi"))
    annotations = _annotations(flags, names)
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
        coords=chosen,
        annotations=annotations.by_slide if annotations else {},
        rules=rules,
    )
    progress = choose_progress()
    try:
        if plan_only:
            preview = plan_ingest(listed, out, spec, options, progress)
        elif flags.get("cluster") is not None:
            from histopipe.cluster.driver import ingest_on_cluster  # late: an extra

            report = ingest_on_cluster(
                listed, out, spec, options, progress, cluster=flags["cluster"],
                scratch=flags["scratch"], part_bytes=flags["part_bytes"],
            )  # fmt: skip
        else:
            report = ingest(listed, out, spec, options, progress)
    finally:
        progress.close()
    if plan_only:
        _print_plan(preview, as_json=as_json)
        return preview.exit_code
    _print(report, as_json=as_json)
    return report.exit_code


def _of_coords(
    slides: list[SlideFile], folder: Path, flags: dict[str, Any]
) -> tuple[list[SlideFile], dict[str, CoordsFile], TilingSpec]:
    """The slides that a folder has coordinates of, these, and the spec that they make."""
    from histopipe.ingest.coords import find_coords, spec_of
    from histopipe.slides.tables import SlideNames

    names = SlideNames(slide.id for slide in slides)
    found, strangers = find_coords(folder, names, allow_extra=flags["allow_extra_rows"])
    chosen = [slide for slide in slides if slide.id in found]
    for count, what in (
        (len(slides) - len(chosen), "slides have no coordinates"),
        (len(strangers), "files of coordinates name no slide"),
    ):
        if count:
            click.echo(f"{count} {what}: left out", err=True)
    if not chosen:
        raise UsageError(f"{folder} has coordinates of none of the slides")
    encoding = ("codec", "quality", "subsampling", "resample")
    return chosen, found, spec_of(found.values(), **{name: flags[name] for name in encoding})


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
        roi=flags["roi"],
        roi_threshold=flags["annotation_threshold"],
    )


def _annotations(flags: dict[str, Any], names: SlideNames) -> AnnotationFiles | None:
    """The files of outlines, by slide; what is to be known of the others is told."""
    from histopipe.annotations.folder import find_annotations

    if flags["annotations"] is None:
        if flags.get("roi") is not None:
            raise UsageError("--roi", found="no --annotations", expected="a folder that draws it")
        return None
    found = find_annotations(flags["annotations"], names)
    for note in found.notes:
        click.echo(note, err=True)
    return found


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
