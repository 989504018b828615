"""Convert the arguments of `ingest`, `plan` and `import_coords` to slides, a tiling spec and options."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from histopipe.annotations.annotation_files import find_annotations
from histopipe.annotations.rules import AnnotationRules
from histopipe.errors import HistopipeError, NothingToDo, SlideError, UsageError, first_line
from histopipe.geometry import Mpp
from histopipe.ingestion.coords import CoordsFile, find_coords, spec_of
from histopipe.ingestion.core_entries import core_parents, with_cores, without_rows
from histopipe.ingestion.options import (
    IMPORT_SETTINGS,
    INGEST_SETTINGS,
    IngestOptions,
)
from histopipe.ingestion.slide_job import SlideJob
from histopipe.slides.discovery import discover, show_links, with_recorded_ids
from histopipe.slides.scale import resolve_mpp
from histopipe.slides.slide_files import SlideFile, SlideNames, is_image, open_slide
from histopipe.slides.staging import stage_folder
from histopipe.slides.tables import SlideLabel, read_labels, read_mpps, select_listed, urls_in_list
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store, parts_of, recorded
from histopipe.system.folders import FolderKind, folder_kind
from histopipe.system.forecast import spelled
from histopipe.system.output import Progress, counted, some
from histopipe.system.settings import (
    PathLike,
    read_arguments,
    select_settings,
)
from histopipe.system.table_cells import NA_VALUES, nfc
from histopipe.system.urls import is_url
from histopipe.system.worker_pool import WorkerPool, result_of
from histopipe.tiling.mask_files import PNG, find_masks
from histopipe.tiling.network import (
    SUFFIXES,
    check_network,
    identify_network,
    read_segmenter,
)
from histopipe.tiling.spec import (
    FINDER_NAMES,
    MIN_PATCH_SIZE,
    MaskRules,
    TilingSpec,
    magnification_to_mpp,
    recorded_tissue,
    resolved_tissue,
)

_MOST_SIDE = 256
"""Largest default patch size of images, which is that of slides."""
_FINE_MPP = 4.0
"""Below this scale, a network takes minutes for a slide."""
_SMALLER = 20
"""At most one of so many images may be smaller than a patch: a few small ones must not make all patches small."""


def read_request(
    slides: PathLike | Sequence[PathLike],
    store: Path | None,
    settings: Mapping[str, Any],
    progress: Progress,
    *,
    coords: Path | None = None,
    records: Sequence[SlideRecord] | None = None,
) -> tuple[list[SlideJob], TilingSpec, IngestOptions]:
    """Find the slides, read the tables and annotations, and show which slides and files are skipped.

    Without a store, no record of slides and no tiling comes first. The settings are those of `import_coords` if a
    folder of coordinates is given, else those of `ingest`.

    Raises:
        UsageError: a setting, a table or a folder is wrong.
        NothingToDo: no slide was found.
    """
    settings = read_arguments(settings, INGEST_SETTINGS if coords is None else IMPORT_SETTINGS)
    options = IngestOptions(**select_settings(settings, IngestOptions))
    slide_list = None if options.slide_list is None else Path(options.slide_list)
    sources = _sources(slides, slide_list)
    if records is None:
        records = [] if store is None else [*recorded(store).values()]
    slide_files = with_recorded_ids(
        discover(sources, images=options.images),
        {r.resolved_path: r.id for r in records if not r.scan},
    )
    show_links(slide_files, progress)
    slides_of = SlideNames([slide.id for slide in slide_files], [r.id for r in records])
    folder = None if options.cores is None else Path(options.cores)
    slide_files, cores = with_cores(slide_files, folder, records, progress)
    parents = core_parents(slide_files)
    names = SlideNames([slide.id for slide in slide_files], [r.id for r in records])
    files_of = SlideNames(names.ids, [r.id for r in records], parents)
    extra = options.allow_extra_rows
    chosen = select_listed(slide_files, slide_list, names, allow_extra=extra)
    chosen_names = SlideNames([slide.id for slide in chosen], parents=core_parents(chosen))
    mpps = (
        {}
        if options.mpp_csv is None
        else read_mpps(Path(options.mpp_csv), slides_of, allow_extra=extra)
    )
    if coords is None:
        store_spec = None if store is None else read_recorded_spec(store)
        settings = _with_image_defaults(settings, chosen, store_spec, mpps, progress)
        tissue, masks, network = read_tissue(settings, store_spec, chosen_names, progress)
        spec, files = _spec(settings, tissue), dict[str, CoordsFile]()
    else:
        masks, network = {}, None
        files = find_coords(coords, chosen_names, progress, allow_extra=extra)
        chosen = [slide for slide in chosen if slide.id in files]
        spec = spec_of(files.values(), **select_settings(settings, TilingSpec))
    rules = AnnotationRules(**select_settings(settings, AnnotationRules), roi=settings.get("roi"))
    of_masks = MaskRules(**select_settings(settings, MaskRules))
    annotations = _annotations(options, rules.roi, files_of, progress)
    labels = _labels(slide_files, sources, options, names, progress)
    if labels or options.labels is not None:
        chosen = without_rows(chosen, labels, progress)
    unnamed = sorted(record.id for record in records if record.id not in labels)
    if options.labels is not None and unnamed:
        left = f"{counted(len(unnamed), 'slide')} of {store} not in {options.labels}"
        progress.message(f"{left}, which keep their labels: {some(unnamed, 3)}")
    patients = {name: core.case for name, core in cores.items() if core.case}
    patients |= _patients(options.patient_regex, chosen)
    named = patients.keys() | {name for name, row in labels.items() if row.patient}
    alone = [slide.id for slide in chosen if slide.core is not None and slide.id not in named]
    if alone:
        progress.message(
            f"{counted(len(alone), 'core')} without a patient, each of which counts as one: {some(alone, 3)}; name the "
            "patients in --labels, so that no patient is in two subsets"
        )
    jobs = [
        SlideJob(
            slide,
            labels.get(slide.id),
            mpps.get(parents.get(slide.id, slide.id)),
            files.get(slide.id),
            annotations.get(slide.id),
            masks.get(slide.id),
            patients.get(slide.id),
            frame=rules.frame,
            core=cores.get(slide.id),
        )
        for slide in chosen
    ]
    stage = stage_folder(options.stage, chosen)
    options = replace(options, rules=rules, masks=of_masks, tissue_network=network, stage=stage)
    return jobs, spec, options


def _sources(slides: PathLike | Sequence[PathLike], slide_list: Path | None) -> Sequence[PathLike]:
    """Return the files, folders and URLs of an ingest, with the URLs in its list of slides."""
    sources = [slides] if isinstance(slides, str | Path) else [*slides]
    sources += [] if slide_list is None else urls_in_list(slide_list)
    if not sources:
        raise UsageError(
            "no slides", expected="files, folders or URLs, or a --slide-list with URLs"
        )
    return sources


def _with_image_defaults(
    settings: Mapping[str, Any],
    slides: Sequence[SlideFile],
    recorded: Mapping[str, Any] | None,
    mpps: Mapping[str, Mpp],
    progress: Progress,
) -> Mapping[str, Any]:
    """Return the settings of an ingest, with other defaults if all slides are images, and show these.

    Images keep their scale, and have no background. The settings of an existing store come first, so that a command
    gives the same after more images were added, and for a store that an earlier version wrote. `recorded` is the spec
    in `meta`; None if there is no store. `mpps` are scales by slide id.
    """
    # Both stop at the first file that decides: opening TIFF files takes time.
    if any(is_image(slide) is False for slide in slides) or not any(map(is_image, slides)):
        return settings
    defaults: dict[str, Any] = {"tissue": "none", "edge": "shift", "level": 0}
    if recorded is not None:
        defaults = {
            "edge": recorded.get("edge", "drop"),
            "tissue": "none" if recorded_tissue(recorded) == "none" else "otsu",
            "patch_size": recorded["patch_size"],
            **{name: recorded[name] for name in ("mpp", "level") if recorded.get(name) is not None},
        }
    elif "patch_size" not in settings:
        defaults["patch_size"] = _usual_side(slides, settings, mpps)
    if {"mpp", "mag", "level"} & settings.keys():
        defaults = {k: v for k, v in defaults.items() if k not in ("mpp", "level")}
    unnamed = [name for name in defaults if name not in settings]
    if recorded is None and unnamed:
        flags = " ".join(f"--{name.replace('_', '-')} {defaults[name]}" for name in sorted(unnamed))
        progress.message(f"{counted(len(slides), 'image')}: the default is {flags}")
    return {**defaults, **settings}


def _usual_side(
    slides: Sequence[SlideFile], settings: Mapping[str, Any], mpps: Mapping[str, Mpp]
) -> int:
    """Return the patch size: 256, or the smaller side of the images at the scale of patches if that is less."""
    mag, default = settings.get("mag"), settings.get("default_mpp")
    target = settings.get("mpp") if mag is None else magnification_to_mpp(mag)
    sides = []
    for slide in slides:
        # Images that cannot be read fail when they are planned.
        with suppress(SlideError), open_slide(slide.path, settings.get("reader", "auto")) as opened:
            info, reduction = opened.info, 1.0
            if target is not None:
                scale = resolve_mpp(slide.id, info, from_csv=mpps.get(slide.id), default=default)
                reduction = max(1.0, target / scale.mpp)
            sides.append(int(min(info.size.width, info.size.height) / reduction + 1e-6))
    smaller = sorted(sides)[len(sides) // _SMALLER] if sides else _MOST_SIDE
    return max(MIN_PATCH_SIZE, min(_MOST_SIDE, smaller))


def read_tissue(
    settings: Mapping[str, Any],
    store_spec: Mapping[str, Any] | None,
    names: SlideNames,
    progress: Progress,
) -> tuple[dict[str, Any], dict[str, Path], Path | None]:
    """Return the fields of the spec about tissue, the masks by slide id, and the file of a network.

    `store_spec` is the spec in `meta`; None if there is no store.

    Raises:
        UsageError: a setting, a folder or a file is wrong.
    """
    asked, fallback = settings.get("tissue", "otsu"), settings.get("tissue_fallback")
    fields: dict[str, Any] = {"exclude": tuple(sorted(set(map(nfc, settings.get("exclude", ())))))}
    masks: dict[str, Path] = {}
    path, network = Path(asked), None
    if folder_kind(path) is FolderKind.RUN:
        path /= "model.keras"
    if asked in ("otsu", "none", *FINDER_NAMES):
        fields["tissue"] = resolved_tissue(str(asked), store_spec)
    elif path.is_dir():
        masks, fields["tissue"] = find_masks(path, names), "masks"
    elif path.suffix.lower() in SUFFIXES:
        network = path
        fields |= {"tissue": "model", "tissue_model": identify_network(path)}
        _try_network(path, progress)
    else:
        raise UsageError(
            "--tissue",
            found=repr(str(asked)),
            expected=f"otsu, {', '.join(FINDER_NAMES)}, none, a folder of masks, "
            f"a network ({' or '.join(SUFFIXES)}), or the folder of a run",
        )
    fields["tissue_values"] = settings.get("tissue_values")
    for name in ("tissue_fallback", "tissue_values"):
        if settings.get(name) is not None and not masks:
            raise UsageError(
                f"--{name.replace('_', '-')}",
                found=f"--tissue {asked}",
                expected="a folder of masks",
            )
    if fallback is not None:
        fields["tissue_fallback"] = resolved_tissue(str(fallback), store_spec)
    if fields["exclude"]:
        _check_exclude(masks, progress, has_annotations=settings.get("annotations") is not None)
    if masks and len(masks) < len(names.ids):
        progress.message(
            f"{counted(len(names.ids) - len(masks), 'slide')} without a mask: "
            + (f"--tissue-fallback {fallback}" if fallback else "they will fail")
        )
    return fields, masks, network


def _try_network(path: Path, progress: Progress) -> None:
    """Run a network once in a separate process: it may load TensorFlow, or crash. Show how long a fine one takes."""
    with WorkerPool(1) as pool:
        try:
            seconds = result_of(pool.submit(check_network, path))
            if read_segmenter(path).mpp < _FINE_MPP:
                progress.message(
                    f"tissue at {read_segmenter(path).mpp:.3g} µm per pixel takes about {spelled(seconds)} per cm² of a slide, in "
                    "each process"
                )
        except HistopipeError:
            raise
        except Exception as error:  # Keras raises errors of many classes
            raise UsageError(f"{path} cannot be run", found=first_line(error)) from error


def _check_exclude(masks: Mapping[str, Path], progress: Progress, *, has_annotations: bool) -> None:
    """Check that there are outlines of classes to be cut out: in annotations, or in masks that are not pictures."""
    if not masks and not has_annotations:
        raise UsageError(
            "--exclude",
            found="no outlines",
            expected="--annotations, or a folder of masks with --tissue",
        )
    pictures = sum(mask.suffix.lower() == PNG for mask in masks.values())
    what = f"--exclude: {pictures} of {counted(len(masks), 'mask')} have no outlines of classes"
    if pictures and pictures == len(masks) and not has_annotations:
        raise UsageError(what, found="PNG", expected="GeoJSON, or --annotations")
    if pictures:
        progress.message(f"{what}: only --annotations can cut them")


def read_recorded_spec(store: Path) -> Mapping[str, Any] | None:
    """Return the spec of a store, or of the first part of a folder of parts; None without a store."""
    with suppress(NothingToDo):
        for part in parts_of(store)[:1]:
            with Store(part) as opened:
                return opened.spec
    return None


def _spec(settings: Mapping[str, Any], tissue: Mapping[str, Any]) -> TilingSpec:
    scales = [name for name in ("mpp", "mag", "level") if settings.get(name) is not None]
    if len(scales) > 1:
        raise UsageError(
            "several scales for patches",
            found=" and ".join(f"--{name}" for name in scales),
            expected="one of --mpp, --mag and --level",
        )
    tiling = {**select_settings(settings, TilingSpec), **tissue}
    if scales in ([], ["mag"]):
        tiling["mpp"] = magnification_to_mpp(settings["mag"] if scales else 20.0)
    if "annotation_threshold" in settings:
        tiling["roi_threshold"] = settings["annotation_threshold"]
    return TilingSpec(**tiling)


def _annotations(
    options: IngestOptions, roi: str | None, names: SlideNames, progress: Progress
) -> Mapping[str, Path]:
    """Return the annotation files by slide id, and show which files are not used."""
    if options.annotations is None:
        if roi is not None:
            raise UsageError("--roi", found="no --annotations", expected="a folder of annotations")
        return {}
    files, notes = find_annotations(Path(options.annotations), names)
    for note in notes:
        progress.message(note)
    return files


def _patients(regex: str | None, slides: list[SlideFile]) -> dict[str, str]:
    """Return patients by slide id: the first group of a regular expression, or all that it matches.

    Raises:
        UsageError: it is invalid, or finds no patient in some ids.
    """
    if regex is None:
        return {}
    try:
        matches = {slide.id: re.search(regex, slide.id) for slide in slides}
    except re.error as error:
        raise UsageError("--patient-regex", found=f"'{regex}': {error}") from error
    patients = {
        name: match[1 if match.re.groups else 0] for name, match in matches.items() if match
    }
    missing = [name for name in matches if not patients.get(name)]
    if missing:
        raise UsageError(
            f"--patient-regex '{regex}' finds no patient in {counted(len(missing), 'slide')}",
            found=", ".join(missing[:3]),
            expected="a match in the id of every slide",
            todo="correct it, or name the patients in a file with --labels",
        )
    return patients


def _labels(
    slides: list[SlideFile],
    sources: Sequence[PathLike],
    options: IngestOptions,
    names: SlideNames,
    progress: Progress,
) -> dict[str, SlideLabel]:
    """Return labels by slide id: from the file, else from labels.csv in the folders, else the names of sub-folders."""
    na = NA_VALUES if options.na is None else options.na
    extra = options.allow_extra_rows or options.cores is not None  # those of missing cores
    read = partial(read_labels, na=na, notify=progress.message, with_label=None)
    of_folders = label_by_subfolder(slides)
    if options.labels is not None:
        rows = read(Path(options.labels), names, allow_extra=extra)
        return {
            name: replace(of_folders[name], patient=row.patient, site=row.site)
            if row.keeps_label and name in of_folders
            else row
            for name, row in rows.items()
        }
    rows = {}
    paths = [Path(source) for source in sources if not is_url(source)]
    for folder in dict.fromkeys(p if p.is_dir() else p.parent for p in paths):
        if (folder / "labels.csv").is_file():
            # labels.csv of a folder names the slides of this folder. The user may have given only some of these files.
            below = SlideNames(s.id for s in slides if s.path.is_relative_to(folder))
            rows |= read(folder / "labels.csv", below, allow_extra=extra or folder not in paths)
    return rows or of_folders


def label_by_subfolder(slides: Sequence[SlideFile]) -> dict[str, SlideLabel]:
    """Return the sub-folders' names as labels, if all slides are in sub-folders of at least two slides each.

    A download with one folder per slide, as from GDC, gets no labels.
    """
    count = Counter(slide.subfolder for slide in slides)
    if None in count or len(count) < 2 or min(count.values(), default=0) < 2:
        return {}
    return {slide.id: SlideLabel(slide.subfolder) for slide in slides}
