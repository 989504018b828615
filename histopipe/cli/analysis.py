"""Commands that apply networks, and that show and export results.

`encoders`, `embed`, `predict`; `compare`, `heatmap`, `report`, `view`, `export`. They are apart from those that train, whose
settings take time to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

import histopipe
from histopipe.cli.parameters import (
    PATH,
    SettingsCommand,
    json_option,
    made_when_used,
    path_or_url,
    plan_option,
    setting_options,
    show,
    store_option,
    untrusted_option,
)
from histopipe.errors import UsageError


def _show_slides(result: Any, done: int, *, as_json: bool, then: Sequence[object]) -> int:
    """Print a result with `done` slides and failed ones, and the next command, if a slide is done. Return the exit code."""
    from histopipe.system.output import exit_code_of  # late: `--help` does not need it

    show(result, as_json=as_json, then=then if done else ())
    return exit_code_of(len(result.failed), done)


@click.command(cls=SettingsCommand)
@click.argument("runs", nargs=-1, required=True, type=PATH)
@setting_options("studies.study_settings.CompareOptions")
@json_option()
def compare(runs: tuple[Path, ...], as_json: bool, **options: Any) -> None:
    """Compare finished RUNS, or cross-validations, with the first one.

    Shows settings that differ, and the metrics of each run on its test patches. If two runs were tested on the same
    patches, the difference has a 95 % confidence interval, for one metric alone.

    \b
    Example: histopipe compare runs/resnet50 runs/mobilenet
    """
    show(histopipe.compare(runs, **options), as_json=as_json, then=("report", runs[0]))


@click.command(cls=SettingsCommand)
@click.argument("run", type=PATH)
@click.argument("sources", nargs=-1, required=True, type=path_or_url)
@click.option("--out", type=PATH, required=True, help="Folder for the predictions.")
@setting_options("inference.options.PredictOptions")
@plan_option()
@json_option()
@untrusted_option()
def predict(
    run: Path,
    sources: tuple[Path | str, ...],
    out: Path,
    as_json: bool,
    plan_only: bool,
    **options: Any,
) -> int:
    """Predict SOURCES (stores, slides, or features) with the model in the run folder RUN.

    Slides need no store: they are tiled like the training slides, and their patches are not stored. A slide model also
    computes their features, or takes folders of features. If RUN is a cross-validation, its folds are averaged. Writes a
    CSV file of patches per slide, slides.csv and patients.csv; of a segmentation, a map and outlines per slide. Run the same
    command again to predict missing slides.

    \b
    Example: histopipe predict runs/first new-slides/ --out predictions
    """
    if plan_only:
        chosen = {name: options[name] for name in ("part", "images") if name in options}
        return show(histopipe.plan_parts(sources, **chosen), as_json=as_json)
    result = histopipe.predict(run, sources, out=out, **options)
    join = ("predict", run, *sources, "--out", out, "--join")
    has_maps = (out / "maps").is_dir()
    return _show_slides(
        result,
        len(result.done) + len(result.kept),
        as_json=as_json,
        then=join if options.get("part") else ("view" if has_maps else "heatmap", out),
    )


@click.command(cls=SettingsCommand)
@click.argument("sources", nargs=-1, type=path_or_url)
@click.option(
    "--out", type=click.Path(), required=True, help="Folder for the feature files, one per slide."
)
@setting_options(
    "inference.options.EmbedOptions",
    "ingestion.options.SETTING_CLASSES",
    skip="ingestion.options.OF_STORES",
)
@plan_option("the time, measured on some hundred patches, memory, disk, and the parts")
@json_option()
@untrusted_option(model=True)
def embed(
    sources: tuple[Path | str, ...], out: str, as_json: bool, plan_only: bool, **options: Any
) -> int:
    """Compute features of every patch of SOURCES (stores or slides; default: patches.lmdb) for slide-level models.

    Slides need no store: they are tiled as by ingest, with the same options, and their patches are not stored. Writes one
    HDF5 file per slide in the format of CLAM and TRIDENT: features (N, D), and coords (N, 2) in level-0 pixels. Run the
    same command again to embed missing slides. `histopipe encoders` lists foundation models. An ONNX file needs a JSON
    file with the same name and with mean, std and size.

    \b
    Example: histopipe embed patches.lmdb --model uni --weights uni/ --out features
             histopipe embed slides/ --model uni --weights uni/ --out features
    """
    if plan_only:
        return show(
            histopipe.plan_embed(sources or "patches.lmdb", out=out, **options), as_json=as_json
        )
    result = histopipe.embed(sources or "patches.lmdb", out=out, **options)
    done, join = len(result.done) + len(result.kept), ("embed", *sources, "--out", out, "--join")
    then = join if options.get("part") else ("train", "--mil", out)
    return _show_slides(result, done, as_json=as_json, then=then)


@click.command(cls=SettingsCommand)
@click.argument("name", required=False)
@json_option()
def encoders(name: str | None, as_json: bool) -> None:
    """List the encoders (foundation models) for --model of embed and train, or show NAME in detail.

    The details are the expected patches, the licence, and the commands that download the weights. histopipe does not
    download them itself.

    \b
    Example: histopipe encoders uni
    """
    show(histopipe.encoders(name), as_json=as_json, then=() if name else ("encoders", "NAME"))


@click.command(cls=SettingsCommand)
@click.argument("predictions", type=PATH)
@click.option("--out", type=PATH, default="heatmaps", help="Folder for the files.")
@setting_options("reports.options.HeatmapOptions")
@json_option()
@untrusted_option()
def heatmap(predictions: Path, as_json: bool, **options: Any) -> int:
    """Draw heatmaps of PREDICTIONS, a folder of `histopipe predict` or of a finished run, over the slides.

    For a run, draws the validation and test patches; for a slide model, the attention or the contributions. Files are
    named after slides. In QuPath, open the TIFF file next to the slide, or drag the GeoJSON file onto it.

    \b
    Example: histopipe heatmap predictions --out heatmaps --to png,tiff,geojson
    """
    result = histopipe.heatmap(predictions, **options)
    then = (
        ()
        if "tiff" in options.get("formats", ())
        else ("heatmap", predictions, "--to", "tiff,geojson")
    )
    return _show_slides(result, len(result.files), as_json=as_json, then=then)


@click.command(cls=SettingsCommand)
@click.argument("paths", type=PATH, nargs=-1, required=True)
@click.option(
    "--out",
    type=PATH,
    help="HTML file, or .svg for the participant flow only.  [default: PATH/report.html]",
)
@click.option("--no-pictures", is_flag=True, help="Write only tables and charts.")
@setting_options("reports.options.ReportOptions")
@untrusted_option(passed=True)
@json_option()
def report(paths: tuple[Path, ...], no_pictures: bool, as_json: bool, **options: Any) -> None:
    """Write a report of a store, a run, a cross-validation or predictions as one HTML file; of several runs, compare them.

    The report of a store shows every slide: state, route, scale, counts, notes, tissue and some patches. Other reports
    show metrics with intervals, curves, calibration, decision curves, subgroups, failures, the participant flow, slides,
    heatmaps, settings and limitations. The file needs no network.

    \b
    Example: histopipe report runs/first
    Compare: histopipe report runs/first runs/second --out comparison.html
    Submit:  histopipe report runs/first --checklist tripod-ai --out tripod.html
    """
    from histopipe.maintenance.store_info import store_info
    from histopipe.system.folders import FolderKind, folder_kind

    result = histopipe.report(paths, pictures=not no_pictures, **options)
    path = paths[0]
    then: tuple[object, ...] = ()
    kind = folder_kind(path)
    if kind in {FolderKind.STORE, FolderKind.PARTS}:
        then = store_info(path).then
    elif kind in {FolderKind.RUN, FolderKind.CROSS_VALIDATION} and not paths[1:]:
        then = ("predict", path, "SLIDES", "--out", "predictions")
    show(result, as_json=as_json, then=then)


@click.command(cls=SettingsCommand)
@click.argument("paths", nargs=-1, type=PATH)
@store_option("Further store; repeatable.  [default: stores of the runs]")
@setting_options("viewer.options.ViewOptions")
@click.option("--no-browser", is_flag=True, help="Print the address only.")
@json_option("the address")
@untrusted_option(passed=True)
def view(paths: tuple[Path, ...], no_browser: bool, as_json: bool, **options: Any) -> None:
    """Show PATHS in a browser: stores, runs, predictions, slide files or folders of slides (default: patches.lmdb).

    The page shows each slide with its patches, tissue mask, labels, annotations, quality, splits, predictions and
    attention, where they are. It needs no network, and is for this machine only. Ctrl-C ends it.

    \b
    Example: histopipe view runs/first
    Drawing: histopipe view patches.lmdb --annotations outlines
    Labels:  histopipe view patches.lmdb --journal labels --rater anna --classes a,b
    Remote:  ssh -t -L 8765:127.0.0.1:8765 SERVER histopipe view --no-browser PATHS
    """
    viewer = histopipe.view(*paths, browser=not no_browser, **options)
    with suppress(KeyboardInterrupt), viewer:
        show(viewer, as_json=as_json)
        viewer.wait()


def _export_out() -> list[click.Parameter]:
    from histopipe.exporting.export_formats import flag_text

    return [
        click.Option(
            ["--out"],
            type=path_or_url,
            metavar="PATH|URL",
            required=True,
            help=f"File of --index, or folder of --to; with {flag_text('url')} also a URL (s3://, gs://, az://).",
        )
    ]


@click.command(cls=SettingsCommand)
@click.argument("sources", nargs=-1, type=PATH)
@made_when_used(_export_out)
@setting_options("exporting.export_formats.ExportOptions")
@plan_option()
@json_option()
@untrusted_option()
def export(sources: tuple[Path, ...], as_json: bool, plan_only: bool, **options: Any) -> int:
    """Export SOURCES for other tools: a store (default: patches.lmdb), the model of a run, or a folder of features.

    Patches are copied without decoding. Run the same command again to write missing files.

    \b
    Example: histopipe export patches.lmdb --index parquet --out index.parquet
    Patches: histopipe export patches.lmdb --to webdataset --out shards
    Model:   histopipe export runs/first --to onnx --out model
    """
    if plan_only:
        from histopipe.exporting.export_formats import EXPORTS

        name = options.get("to") or options.get("index")
        if name and (EXPORTS[name].index or "shard_patches" in EXPORTS[name].options):
            raise UsageError("--plan", found="files of several slides", expected="a file per slide")
        return show(
            histopipe.plan_parts(sources or "patches.lmdb", part=options.get("part")),
            as_json=as_json,
        )
    result = histopipe.export(sources or "patches.lmdb", **options)
    return show(result, as_json=as_json, then=("info", *(sources[:1] or ("patches.lmdb",))))
