"""Tissue masks to check and to correct: the function `tissue`, the page of all slides, and the masks of a store."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.annotation_files import GEOJSON, XML, annotation_files, match_files
from histopipe.errors import NothingToDo, SlideError, UsageError
from histopipe.geometry import Mpp, Size
from histopipe.ingestion.options import MaskOptions, prepare
from histopipe.ingestion.request import read_tissue
from histopipe.reports.html_page import TEMPLATES, Block, Cell, Page, Picture, Table, number
from histopipe.slides.discovery import discover, show_links
from histopipe.slides.slide_files import SlideNames, file_sizes
from histopipe.slides.tables import read_mpps
from histopipe.slides.thumbnail import resize_image
from histopipe.store.reading import decode_picture
from histopipe.store.store import Store
from histopipe.system.cluster_parts import on_cluster
from histopipe.system.files import path_within, roomy, write_atomically
from histopipe.system.output import Progress, counted, default_progress, slide_failure
from histopipe.system.settings import PathLike, declared_settings, make_settings, takes
from histopipe.system.shared_folders import PARTS, Share
from histopipe.system.table_files import write_dicts
from histopipe.system.worker_pool import (
    WorkerDied,
    WorkerPool,
    map_in_pool,
    result_of,
)
from histopipe.tiling.core_files import STATES, CoreNames, core_features, read_core_names
from histopipe.tiling.finding import SlideCores, write_one_mask
from histopipe.tiling.mask import Grid, TissueMask
from histopipe.tiling.mask_files import (
    PAGE,
    SlideTissue,
    TissueReport,
    overlay_path,
    read_png_grid,
    write_slide_mask,
)
from histopipe.tiling.spec import MaskRules, recorded_tissue

_PAGE_SIDE = 300
"""Longer side of a picture on the page."""
_SECONDS = 1800.0
"""Time limit per slide. A network at a fine scale takes minutes."""


@takes(declared_settings(MaskOptions))
def tissue(
    slides: PathLike | Sequence[PathLike],
    out: PathLike = "masks",
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> TissueReport:
    """Write the tissue mask of each slide, to check, to correct in QuPath, and to give to `ingest`.

    Writes `SLIDE.geojson` (QuPath), `SLIDE.png`, `SLIDE-overlay.jpg`, `masks.csv`, and the page `index.html` with the
    pictures of all slides. A mask that exists is kept, since it may have been corrected: its pictures and numbers are
    written again.

    With `cores`, it writes the cores of tissue microarrays instead: `SLIDE.geojson` for `ingest`, `cores.csv`, and for each
    slide the page `SLIDE.html` to check and to correct them.

    Args:
        slides: slide files and folders.
        out: folder of the masks.
        progress: shows the progress; `default_progress()` if None.
        settings: options by name, as in docs/reference/settings.md and as the flags of `histopipe tissue`.

    Returns:
        Areas and pieces of each slide, and the failures.

    Raises:
        UsageError: an option is wrong, or `out` is a file.
        NothingToDo: no slide was found.
        MachineShort: the disk is full.

    Example:
        >>> tissue("slides", "masks")  # doctest: +SKIP
        masks of 12 slides: masks/index.html
    """
    options = make_settings(MaskOptions, settings)
    display, folder, share = progress or default_progress(), Path(out), options.share
    if options.cluster:
        return on_cluster(tissue, slides, out, progress=display, **settings)
    files = discover(
        [Path(path) for path in ([slides] if isinstance(slides, str | Path) else slides)]
    )
    show_links(files, display)
    names = SlideNames(file.id for file in files)
    maps = None if options.cores is None else _read_maps(Path(options.cores), names)
    if maps is not None and (options.part or options.join):
        raise UsageError("--part with --cores", todo="leave it out: cores are found in seconds")
    if any(of_slide.cases for of_slide in (maps or {}).values()):
        display.message(
            f"{options.cores}: cells with the same text: they are cases, and cores are named by row and column"
        )
    asked = {name: getattr(options, name) for name in ("tissue", "tissue_values")}
    fields, masks, network = read_tissue(asked, None, names, display)
    method = fields["tissue"]
    mpps = {} if options.mpp_csv is None else read_mpps(Path(options.mpp_csv), names)
    chosen = share.chosen(file_sizes(files))
    about: Mapping[str, Path | CoreNames] = masks if maps is None else maps
    tasks = [(file, mpps.get(file.id), about.get(file.id)) for file in files if file.id in chosen]
    write = partial(
        write_one_mask,
        folder=folder,
        default_mpp=options.default_mpp,
        method=method,
        network=network,
        recorded_method=str(fields.get("tissue_model", method)),
        force=options.force,
        rules=MaskRules(tissue_values=options.tissue_values, tissue_check=options.tissue_check),
        frame=options.frame,
    )
    result, grids = TissueReport(folder), list[SlideCores]()
    with (
        share.held(folder),
        roomy(folder),
        WorkerPool(options.worker_count, prepare) as pool,
        display.bar("finding tissue", unit="slides", total=len(tasks)) as bar,
    ):
        if share.is_part:
            how = {name: str(value) for name, value in write.keywords.items() if name != "folder"}
            share.record(folder / "settings", how, ignored=(), contents="masks")
        read_journals(result, share, [file.id for file in files])
        for (file, _, _), future in map_in_pool(
            pool, write, [] if share.join else tasks, seconds=_SECONDS
        ):
            try:
                done = result_of(future)
                if isinstance(done, SlideCores):
                    grids.append(done)
                else:
                    result.slides.append(done)
            except (WorkerDied, SlideError) as error:
                result.failed[file.id] = str(error)
                bar.item(f"failed {file.id}: {error}", problem=True)
            bar.advance()
        if maps is None:
            write_table_and_page(result, share)
        else:
            write_grids(result, grids, maps)
    return result


def read_journals(result: TissueReport, share: Share, slides: Iterable[str]) -> None:
    """Add the slides of the parts to a result, if they are to be joined.

    Raises:
        UsageError: a slide is missing.
    """
    if share.join:
        rows, failed = (share.joined(result.folder, name) for name in ("rows", "failed"))
        for slide in slides:
            if slide in rows:
                row = rows[slide]
                result.slides.append(SlideTissue(**row | {"notes": tuple(row["notes"])}))
            elif slide in failed:
                result.failed[slide] = failed[slide]
            else:
                raise share.missing(result.folder, slide)


def write_table_and_page(result: TissueReport, share: Share) -> None:
    """Sort the slides of a result, and write `masks.csv` and `index.html`; a part, its journal.

    Raises:
        NothingToDo: no slide has a mask.
    """
    share.end(result.folder, result.failed, rows={row.slide: asdict(row) for row in result.slides})
    if share.is_part:
        return
    if not result.slides:
        raise NothingToDo(
            "no tissue mask was written", found="; ".join(result.failed.values()) or None
        )
    result.slides.sort(key=lambda slide: slide.slide)
    rows = [asdict(slide) | {"notes": "; ".join(slide.notes)} for slide in result.slides]
    rounded = [
        {n: round(v, 4) if isinstance(v, float) else v for n, v in row.items()} for row in rows
    ]
    write_dicts(result.folder / "masks.csv", rounded)
    page = Page(f"Tissue: {result.folder.name}", f"masks of {counted(len(result.slides), 'slide')}")
    if result.failed:
        page.add(
            "Failed", Block("notes", [f"{n}: {reason}" for n, reason in result.failed.items()])
        )
    page.add(
        "Slides",
        Block(
            "gallery",
            [
                Picture.of(
                    f"slide-{i}", _caption(slide), _small_picture(result.folder, slide.slide)
                )
                for i, slide in enumerate(result.slides)
            ],
        ),
    )
    page.add(
        "Numbers",
        Table(
            "Tissue by slide",
            ("slide", "tissue, mm²", "share", "pieces", "threshold", "source", "notes"),
            [
                [
                    Cell(slide.slide),
                    number(slide.tissue_mm2, 2),
                    number(100 * slide.share, 1, " %"),
                    number(slide.pieces),
                    number(slide.threshold, 3),
                    Cell(slide.source),
                    Cell("; ".join(slide.notes)),
                ]
                for slide in result.slides
            ],
        ),
    )
    page.write(result.folder / PAGE)


def _small_picture(folder: Path, slide: str) -> NDArray[np.uint8]:
    path = overlay_path(folder, slide)
    return resize_image(decode_picture(path.read_bytes(), str(path)), _PAGE_SIDE)


def _caption(slide: SlideTissue) -> str:
    area = f"{slide.share:.0%}" if slide.tissue_mm2 is None else f"{slide.tissue_mm2:,.1f} mm²"
    pieces = counted(slide.pieces, "piece") if slide.pieces else "no tissue"
    return " · ".join([slide.slide, area, pieces, *slide.notes])


def export_masks(store: Path, *, out: Path, share: Share, progress: Progress) -> TissueReport:
    """Write the tissue masks of the complete slides of a store, with the same files as `tissue`; see `export`.

    Raises:
        UsageError: the folder has masks, which may have been corrected.
        NothingToDo: the store has no masks.
    """
    if any(out.rglob(f"*{GEOJSON[0]}")) and not (out / PARTS).is_dir():
        raise UsageError(
            f"{out} has masks already",
            expected="a folder without masks",
            todo="choose another --out: they may have been corrected",
        )
    result = TissueReport(out)
    with Store(store) as opened, share.held(out), roomy(out):
        complete = opened.complete
        if not complete:
            raise NothingToDo(f"{store} has no complete slide", todo="see `histopipe info`")
        chosen = share.chosen({record.id: record.planned for record in complete.values()})
        read_journals(result, share, chosen)
        mine = {n: r for n, r in complete.items() if r.id in chosen and not share.join}
        with progress.bar("exporting masks", unit="slides", total=len(mine)) as bar:
            for slide, record in mine.items():
                where, notes = f"{store}, slide {record.id}", list(record.notes)
                thumbnail, mask = opened.thumbnail(slide), opened.thumbnail(slide, "mask")
                try:
                    if thumbnail is None or mask is None:
                        raise NothingToDo("the store has no tissue mask of it")  # noqa: TRY301
                    pixels = decode_picture(mask, f"{where}: tissue mask", mode="L") > 0
                    bounds = record.frame_bounds
                    grid = read_png_grid(bytes(mask))
                    if grid is None:
                        grid = Grid.estimated(pixels, bounds, Size(record.width, record.height))
                        notes.append(
                            "outlines may be off by a pixel: an older version wrote the store"
                        )
                    row = write_slide_mask(
                        out,
                        record.id,
                        TissueMask(pixels),
                        grid,
                        bounds=bounds,
                        thumbnail=decode_picture(thumbnail, where),
                        mpp=None if record.mpp is None else Mpp(record.mpp),
                        source=record.mask or str(recorded_tissue(opened.spec)),
                        notes=notes,
                        orientation=record.orientation or 1,
                        # Of a part that is done again: it may have been corrected.
                        outlines=not path_within(out, f"{record.id}{GEOJSON[0]}").exists(),
                    )
                    result.slides.append(row)
                except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                    result.failed[record.id] = slide_failure(error)
                bar.advance()
        write_table_and_page(result, share)
    return result


_MAPS = (".csv", ".tsv", ".txt", ".xlsx", ".qptma", *XML)


def _read_maps(maps: Path, names: SlideNames) -> Mapping[str, CoreNames]:
    """Return the map of each slide: one for all, or those in a folder with the names of slides.

    Raises:
        UsageError: a map cannot be read, or a slide has none.
    """
    if not maps.is_dir():
        return dict.fromkeys(names.ids, read_core_names(maps))
    exact, loose, _ = match_files(annotation_files(maps, _MAPS), maps, names)
    missing = sorted(names.ids - (loose | exact).keys())
    if missing:
        raise UsageError(f"{maps} has no map of {missing[0]}", expected=f"{missing[0]}.csv")
    return {slide: read_core_names(path) for slide, path in (loose | exact).items()}


def write_grids(
    result: TissueReport, grids: Sequence[SlideCores], maps: Mapping[str, CoreNames]
) -> None:
    """Add the cores of slides to a result, and write `cores.csv` and the page of each slide.

    Raises:
        NothingToDo: no slide has cores.
    """
    if not grids:
        raise NothingToDo("no cores", found="; ".join(result.failed.values()) or None)
    for grid in grids:
        states = Counter(core.state for core in grid.cores)
        result.cores[grid.slide] = {state: states[state] for state in STATES}
        if grid.reason:
            result.uncertain[grid.slide] = grid.reason
        data = {
            "slide": grid.slide,
            "side": grid.side,
            "states": STATES,
            "map": maps[grid.slide].by_row.tolist(),
            "cases": dict(maps[grid.slide].cases),
            "features": core_features(grid.cores),
        }
        picture = base64.b64encode(grid.thumbnail).decode()
        page = TEMPLATES.get_template("cores.html.j2").render(
            slide=grid.slide, reason=grid.reason, data=data, picture=picture
        )
        write_atomically(path_within(result.folder, f"{grid.slide}.html"), page)
    write_dicts(
        result.folder / "cores.csv",
        [
            {
                "slide": f"{grid.slide}/{core.name}",
                "patient": core.case,
                "state": core.state,
                "why": core.why or grid.reason,
                "x_l0": round(core.area.centroid.x),
                "y_l0": round(core.area.centroid.y),
            }
            for grid in grids
            for core in grid.cores
        ],
    )
