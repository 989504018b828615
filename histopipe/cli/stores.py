"""Commands that make, check and change stores, and check this machine.

They label, find tissue and tile slides (`cohort`, `tissue`, `ingest`, `import-coords`), read or verify a store (`info`,
`verify`), change or copy it (`repair`, `merge`, `remove`), add measurements and labels to it (`annotate`, `quality`,
`stains`), or test the installation (`doctor`, `demo`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import histopipe
from histopipe.cli.parameters import (
    PATH,
    SettingsCommand,
    echo,
    full_option,
    json_option,
    path_or_url,
    plan_option,
    setting_options,
    show,
    store_argument,
    untrusted_option,
    workers_option,
)

if TYPE_CHECKING:
    from histopipe.ingestion.ingest_report import IngestReport

_out_option = click.option(
    "--out",
    type=PATH,
    default="patches.lmdb",
    help="The store: created if missing, extended if its settings are the same.",
)


@click.command(cls=SettingsCommand)
@click.argument("files", nargs=-1, required=True, type=PATH)
@click.option("--out", type=PATH, default="labels.csv", help="The labels file.")
@setting_options("cohorts.options.CohortOptions")
@json_option()
def cohort(files: tuple[Path, ...], out: Path, as_json: bool, **options: Any) -> int:
    """Make a labels file from FILES: tables of an archive, and folders of slides. Nothing is downloaded.

    Tables are CSV, TSV, XLSX or JSON: manifest, sample sheet, cart metadata, clinical and biospecimen tables of GDC; lists
    of IDC, TCIA, CAMELYON, PANDA and BRACS; any table with a column of slides or patients. cohort.csv, next to the labels
    file, has every file, with the reason if it is left out.

    \b
    Example: histopipe cohort gdc_sample_sheet.tsv clinical.cart.tar.gz slides/ --label ajcc_pathologic_stage
    Survival: histopipe cohort gdc_sample_sheet.tsv clinical.tsv slides/ --event vital_status
                --time days_to_death,days_to_last_follow_up
    """
    folders = [path for path in files if path.is_dir()] or [Path("SLIDES")]
    result = histopipe.cohort(files, out, **options)
    return show(
        result, as_json=as_json, then=("ingest", *folders, "--labels", out, "--slide-list", out)
    )


@click.command(cls=SettingsCommand)
@click.argument("slides", nargs=-1, required=True, type=PATH)
@click.option("--out", type=PATH, default="masks", help="Folder of the masks.")
@setting_options("ingestion.options.MaskOptions")
@plan_option()
@json_option("the tissue of every slide")
def tissue(
    slides: tuple[Path, ...], out: Path, *, as_json: bool, plan_only: bool, **options: Any
) -> int:
    """Write the tissue mask of each of SLIDES, files or folders: GeoJSON for QuPath, PNG, and a page with pictures.

    Masks that exist are kept, since they may have been corrected; their pictures and numbers are written again. With
    --cores: the cores of tissue microarrays, with their names, and a page for each slide to correct them.

    \b
    Example: histopipe tissue slides/ --out masks
    Then:    histopipe ingest slides/ --tissue masks
    Example: histopipe tissue tma1.svs --cores map.csv --out cores
    Then:    histopipe ingest tma1.svs --cores cores --labels labels.csv
    """
    if plan_only:
        return show(histopipe.plan_parts(slides, part=options.get("part")), as_json=as_json)
    return show(
        histopipe.tissue(slides, out, **options),
        as_json=as_json,
        then=("ingest", *slides, "--cores" if options.get("cores") else "--tissue", out),
    )


@click.command(cls=SettingsCommand)
@click.argument("slides", nargs=-1, type=path_or_url)
@_out_option
@plan_option("each slide's level, route, patches, and estimated bytes and time")
@setting_options("ingestion.options.SETTING_CLASSES", "ingestion.options.IngestPartOptions")
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
        from histopipe.ingestion.options import SETTING_CLASSES
        from histopipe.system.settings import select_settings

        preview = histopipe.plan(slides, out, **select_settings(options, *SETTING_CLASSES))
        code = show(preview, as_json=as_json)
        if not as_json:
            echo("next: the same command without --plan", err=True)
        return code
    then = ("ingest", *slides, "--out", out, "--join") if options.get("part") else None
    return _show_report(histopipe.ingest(slides, out, **options), as_json=as_json, then=then)


def _show_report(
    report: IngestReport, *, as_json: bool, then: Sequence[object] | None = None
) -> int:
    """Print the summary to standard output, and warnings and failed slides to standard error."""
    notes = [f"warning: {warning}" for warning in report.warnings]
    if report.failed:
        notes.append(f"\n{len(report.failed)} of {len(report.slides)} slides failed:")
        notes += [f"  {line}" for line in report.failed_lines()]
    text = "\n".join([report.store, *report.summary_lines()])
    if then is None:
        then = ("info", report.store) if len(report.failed) < len(report.slides) else ()
    return show(report, as_json=as_json, notes=notes, text=text, then=then)


@click.command(cls=SettingsCommand)
@click.argument("coords", type=PATH)
@click.argument("slides", nargs=-1, type=path_or_url)
@_out_option
@setting_options(
    "ingestion.options.SETTING_CLASSES",
    "ingestion.options.IngestPartOptions",
    skip="ingestion.options.OF_PATCHES",
)
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


@click.command(cls=SettingsCommand)
@click.argument("path", type=PATH, default="patches.lmdb")
@click.option("--json", "as_json", is_flag=True, help="Print everything, with all slides, as JSON.")
@untrusted_option()
def info(path: Path, as_json: bool) -> None:
    """Show the contents of PATH: a store, a run, a cross-validation, a search, predictions, features or probes.

    Stores: slides by state, patches, bytes, scales, labels and settings. Results: settings, progress and metrics.

    \b
    Example: histopipe info patches.lmdb
    Example: histopipe info runs/first
    """
    contents = histopipe.info(path)
    show(contents, as_json=as_json, then=contents.then)


@click.command(cls=SettingsCommand)
@store_argument
@full_option
@click.option(
    "--untrusted",
    is_flag=True,
    help="Treat the store as untrusted: verify its pages before LMDB opens it.",
)
@workers_option
@json_option("all findings")
def verify(store: Path, as_json: bool, **options: Any) -> int:
    """Verify the integrity of STORE: file structure, format, and every record, index and value.

    The checksum of a value includes its key, so swapped values are found. Nothing is written. A damaged file cannot
    crash the command. Exit code 5: damage was found; `histopipe repair` repairs it.

    \b
    Example: histopipe verify patches.lmdb --full
    """
    report = histopipe.verify(store, **options)
    return show(
        report,
        as_json=as_json,
        then=("repair", store, "SLIDES") if report.findings else ("info", store),
    )


@click.command(cls=SettingsCommand)
@click.argument("store", type=PATH)
@click.argument("slides", nargs=-1, required=True, type=PATH)
@setting_options("maintenance.options.RepairOptions", "annotations.rules.AnnotationRules")
@json_option()
def repair(store: Path, slides: tuple[Path, ...], as_json: bool, **options: Any) -> int:
    """Verify STORE, and ingest its damaged slides again from SLIDES, files or folders.

    Only damaged slides are changed. They keep their numbers, labels, stain fits and measurements of patches. Pass the
    annotations, masks, network or coordinates from which their patches were chosen. If the database file is damaged, all
    readable data is first copied into a new file. After an interruption, run the same command again. Exit code 3: some
    slides could not be repaired; 5: other damage remains.

    \b
    Example: histopipe repair patches.lmdb slides/
    """
    done = histopipe.repair(store, slides, **options)
    notes = [
        *done.notes,
        *(f"{name} could not be repaired: {why}" for name, why in done.left.items()),
        *(f"still damaged: {what}" for what in done.remaining),
    ]
    return show(
        done, as_json=as_json, notes=notes, then=() if done.exit_code else ("verify", store)
    )


@click.command(cls=SettingsCommand)
@click.argument("stores", nargs=-1, required=True, type=PATH)
@click.option(
    "--out",
    required=True,
    type=PATH,
    help="The merged store: created if missing, else extended.",
)
@setting_options("maintenance.options.MergeOptions")
@json_option()
@untrusted_option()
def merge(stores: tuple[Path, ...], out: Path, as_json: bool, **options: Any) -> None:
    """Copy the slides of STORES, or of folders of stores (*.lmdb), into one store.

    The stores must have the same settings. If several stores have the same slide, the first one is copied, with a note.
    Every value is compared with its checksum. After an interruption, run the same command again. Slides get new
    numbers, so resume a run on its original stores. A slide whose patches are in several subsets of a run is refused.

    \b
    Example: histopipe merge node1.lmdb node2.lmdb --out patches.lmdb
    Example: histopipe merge patches.lmdb --slides runs/first/slides.csv --subset test --out test.lmdb
    """
    copied = histopipe.merge(stores, out, **options)
    show(copied, as_json=as_json, notes=copied.notes, then=("info", out))


@click.command(cls=SettingsCommand)
@click.argument("store", type=PATH)
@click.argument("slides", nargs=-1)
@click.option("--compact", is_flag=True, help="Return the free space of the file to the disk.")
@untrusted_option()
def remove(store: Path, slides: tuple[str, ...], compact: bool) -> None:
    """Remove SLIDES, given by their ids (see `histopipe info`), and all their data from STORE.

    After an interruption, each slide is either complete or removed. If an id is unknown, no slide is removed. Numbers of
    removed slides are not reused. The file keeps its size, and later writes use the free space first.

    With --compact, also without SLIDES, a copy without free space replaces STORE. Runs on it still fit. The disk needs
    space for the copy. Trainings that read the store continue with the old file. No process may have the store open for
    writing.

    \b
    Example: histopipe remove patches.lmdb slide-17 slide-18
    Example: histopipe remove patches.lmdb --compact
    """
    then = ("verify", store) if compact else ("remove", store, "--compact")
    show(histopipe.remove(store, slides, compact=compact), then=then)


@click.command(cls=SettingsCommand)
@click.argument("store", type=PATH)
@click.argument("annotations", type=PATH)
@setting_options("annotations.rules.AnnotationRules", "annotations.rules.LabelOptions")
@workers_option
@json_option()
@untrusted_option()
def annotate(store: Path, annotations: Path, as_json: bool, **options: Any) -> int:
    """Label the patches of STORE from the files in the folder ANNOTATIONS.

    Files are named after slides: SLIDE.geojson (QuPath), SLIDE.xml (ASAP, Aperio ImageScope), SLIDE.annotations (HALO).
    If outlines of several classes overlap, the smallest outline is used. The patches are not changed. ANNOTATIONS can also
    be a folder of `histopipe view --journal`, with labels of patches.
    `histopipe train --labels-from annotation` trains on these classes. Exit code 4: no patch has a class.

    \b
    Example: histopipe annotate patches.lmdb annotations/
    Example: histopipe annotate patches.lmdb labels/ --raters agreed
    """
    result = histopipe.annotate(store, annotations, **options)
    slides = sorted((result.done | result.unlabelled).items())
    notes = [*result.notes, *(f"{name}: {note}" for name, texts in slides for note in texts)]
    then = ("train", store, "--labels-from", "annotation") if result.patches else ()
    return show(result, as_json=as_json, notes=notes, then=then)


@click.command(cls=SettingsCommand)
@store_argument
@click.option("--force", is_flag=True, help="Also measure slides that already have measurements.")
@workers_option
@json_option()
@untrusted_option()
def quality(store: Path, as_json: bool, **options: Any) -> int:
    """Measure focus, pen marks, folds and black areas of every patch of STORE, and add them to its index.

    focus is the variance of the Laplacian at 1 µm per pixel; pen and dark (folded or black) are shares of the patch.
    No patch is changed or removed. `histopipe train --min-focus 50 --exclude-pen 5%` leaves patches out, so that new
    thresholds need no new ingest. The table shows medians.

    \b
    Example: histopipe quality patches.lmdb
    """
    return show(histopipe.quality(store, **options), as_json=as_json, then=("report", store))


@click.command(cls=SettingsCommand)
@store_argument
@click.option(
    "--amounts",
    is_flag=True,
    help="Measure the amounts of haematoxylin, and of eosin or DAB, in each patch, instead of fits.",
)
@click.option(
    "--stain",
    type=click.Choice(["auto", "he", "ihc"]),
    default="auto",
    help="Of amounts: H&E, or immunohistochemistry with DAB; auto: by the thumbnail of each slide.",
)
@click.option(
    "--vectors",
    type=click.Choice(["ruifrok", "fitted"]),
    default="ruifrok",
    help="Of amounts: colours of the stains, published or fitted to each slide.",
)
@click.option(
    "--positive",
    type=float,
    default=0.2,
    help="Of amounts: least optical density of DAB of a positive pixel.",
)
@click.option("--force", is_flag=True, help="Also fit or measure slides that already were.")
@untrusted_option()
@json_option()
def stains(store: Path, as_json: bool, **options: Any) -> int:
    """Fit the stain of each complete slide of STORE on 64 of its patches, and store the fits.

    Stores two fits, mean and deviation in lαβ (Reinhard et al. 2001) and stain vectors (Macenko et al. 2009), for
    `histopipe train --stain-norm` and `load_dataset(..., stain_norm=...)`. No patch is changed.
    Exit code 3: some slides have too little tissue; 4: all of them.

    With --amounts: optical densities of haematoxylin, and of eosin or DAB, and the share of pixels positive for DAB, as
    columns of the patches, and for each slide in STORE/stains.csv.

    \b
    Example: histopipe stains patches.lmdb
    Example: histopipe stains patches.lmdb --amounts --positive 0.25
    """
    then = ("view", store) if options["amounts"] else ("train", store, "--stain-norm", "macenko")
    return show(histopipe.stains(store, **options), as_json=as_json, then=then)


@click.command(cls=SettingsCommand)
@click.option("--out", type=PATH, default="demo", help="Folder for all results.")
@click.option(
    "--slides", is_flag=True, help="Train a slide model on features, from labels of slides."
)
@click.option("--count", type=int, default=40, help="Number of synthetic slides to train on.")
def demo(out: Path, slides: bool, count: int) -> None:
    """Run the full pipeline on synthetic slides.

    Creates slides of tissue with outlined tumour, ingests them, trains on the outlines, predicts new slides, and writes
    reports. With --slides: computes features, trains a slide model on labels, and predicts new slides from their files.
    Needs TensorFlow, but no data and no network. Takes about a minute on 2 cores.

    \b
    Example: histopipe demo --out demo
    """
    from histopipe.demo.demo import demo

    show(demo(out, slides=slides, count=count), then=("ingest", "SLIDES"))


@click.command(cls=SettingsCommand)
@store_argument
@click.option(
    "--encoder", help="Check whether this encoder can be used here, instead of the machine."
)
@click.option("--weights", type=PATH, help="File or folder of the encoder's weights.")
@json_option("all results")
def doctor(store: Path, encoder: str | None, weights: Path | None, as_json: bool) -> int:
    """Check this machine and installation, and the disk of STORE, which need not exist yet.

    Checks Python, libraries, slide formats, TensorFlow and its GPUs (a matrix product on each), NVIDIA's driver, disk,
    filesystem and limits, and shows how to fix problems. With --encoder: licence, memory, weights, and the time of a
    thousand slides. Exit code 6: a check failed.

    \b
    Example: histopipe doctor /data/patches.lmdb
    """
    report = histopipe.doctor(store, encoder=encoder, weights=weights)
    done = report.exit_code or encoder is not None
    return show(report, as_json=as_json, then=() if done else ("demo",))
