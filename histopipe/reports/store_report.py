"""Report of a store: all slides, with thumbnails, tissue masks and patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from histopipe.errors import DamagedStore, UsageError
from histopipe.maintenance.store_info import StoreInfo, info_of
from histopipe.reports import charts
from histopipe.reports.html_page import (
    SIDE,
    Block,
    Cell,
    Page,
    Picture,
    Table,
    number,
    values_block,
)
from histopipe.slides.thumbnail import resize_image
from histopipe.store.reading import decode_picture
from histopipe.store.record import SlideRecord, SlideState, describe_copies
from histopipe.store.store import Store, opened_parts
from histopipe.system.arrays import PixelArray
from histopipe.system.output import Progress, counted

_PATCHES = 6
"""Patches of a slide that are shown: all of a large store would make a page of gigabytes."""
_GRID, _OUTSIDE = (20, 110, 60), 0.45
"""Colour of the outlines of patches, and contrast of areas without tissue."""
_MAX_OUTLINES = 20_000
"""Maximum number of patches with outlines on a slide. More outlines would hide the slide."""
_MEASURES = {
    "tissue": "Tissue",
    "focus": "Focus",
    "pen": "Pen",
    "dark": "Folded or black",
    "covered": "Covered by the annotated class",
}
"""Titles of columns of the index; all but the focus are shares."""
_NONE = np.empty(0, np.float32)


def store_page(path: Path, *, pictures: bool, progress: Progress) -> Page:
    """Return the page of a store, or of a folder of parts. Without pictures, the page of a large store is small.

    Raises:
        NothingToDo, DamagedStore: the store cannot be read.
    """
    with opened_parts(path) as stores:
        summary, rows = info_of(stores, path), []
        records = [record for store in stores for record in store.slides]
        with progress.bar("report", unit="slides", total=len(records)) as bar:
            for store in stores:
                for slide, record in store.records.items():
                    rows.append(_row(store, slide, record, pictures=pictures))
                    bar.advance()
    spec = summary.spec
    scale = f"{spec['mpp']:g} µm per pixel" if spec["mpp"] else f"level {spec['level']}"
    page = Page(
        f"Store {path.resolve().name}",
        f"patches of {spec['patch_size']}² pixels at {scale}, created {summary.created}, in {path}",
    )
    complete = [record for record in records if record.state is SlideState.COMPLETE]
    whole = bool(rows) and len(complete) == len(rows)
    settings = {
        **spec,
        "algorithms": ", ".join(map(str, spec.get("algorithms", {}).values())),
        "uuid": summary.uuid,
    }
    page.add(
        "Summary",
        _cards(summary),
        Block("text", "All slides are complete.", tone="good") if whole else None,
        values_block("Settings of the store", settings),
    )
    page.add("Failures", _failures(records))
    page.add("Warnings", _warnings(summary, records, complete))
    page.add("Distributions", _distributions(complete, [measures for _, _, measures in rows]))
    columns = [
        name for name in (rows[0][0] if rows else ()) if any(row[0][name].text for row in rows)
    ]
    page.add(
        "Slides",
        Table(
            "All slides",
            columns,
            [[cells[name] for name in columns] for cells, _, _ in rows],
            [images for _, images, _ in rows],
        ),
    )
    return page


def _cards(summary: StoreInfo) -> Block:
    states, labels = summary.states, summary.patch_labels
    return Block(
        "cards",
        [
            (
                "slides complete",
                f"{states.get('complete', 0):,}",
                f"{states.get('failed', 0)} failed, {states.get('pending', 0)} pending",
            ),
            ("patches", f"{summary.patches:,}", f"{summary.unreadable:,} unreadable"),
            ("size", _bytes(summary.file_bytes), f"{_bytes(summary.patch_bytes)} of patches"),
            ("labels", str(len(summary.labels.keys() - {"unlabelled"})), _counts(summary.labels)),
            ("routes", str(len(summary.routes)), _counts(summary.routes)),
            (
                "scale sources",
                str(len(summary.mpp_sources.keys() - {"unknown"})),
                _counts(summary.mpp_sources),
            ),
            *(
                [("annotated patches", f"{sum(labels.values()):,}", _counts(labels))]
                if labels
                else []
            ),
        ],
    )


def _failures(records: Sequence[SlideRecord]) -> Table | None:
    rows = [
        [
            Cell(record.id, tone="id"),
            Cell(record.error_kind or ""),
            Cell(record.error or "", tone="why"),
        ]
        for record in records
        if record.state is SlideState.FAILED
    ]
    return Table("Failed slides", ("slide", "kind", "reason"), rows) if rows else None


def _warnings(
    summary: StoreInfo, records: Sequence[SlideRecord], complete: Sequence[SlideRecord]
) -> Block:
    notes = describe_copies(records)
    if len(summary.routes) > 1:
        notes.append(
            "Patches were made by several routes, so some were JPEG-encoded once more than others. "
            "If routes correlate with labels, a model may learn the routes. Use --route to force one route."
        )
    estimated = summary.mpp_sources.get("objective-power", 0)
    if estimated:
        notes.append(
            f"The scale of {counted(estimated, 'slide')} was estimated from the objective power."
        )
    empty = [record.id for record in complete if not record.stored]
    if empty:
        names = ", ".join(empty[:5]) + (", …" if empty[5:] else "")
        notes.append(f"{counted(len(empty), 'slide')} without patches: {names}")
    return Block("notes", notes)


def _distributions(
    complete: Sequence[SlideRecord], measures: Sequence[Mapping[str, NDArray[np.float32]]]
) -> Block | None:
    if not complete:
        return None
    made = [
        charts.histogram(
            "Patches per slide",
            np.array([record.stored for record in complete]),
            x="patches",
            y="slides",
        )
    ]
    for name, title in _MEASURES.items():
        values = np.concatenate([of_slide.get(name, _NONE) for of_slide in measures])
        if len(values):
            share = name != "focus"
            x = "share of the patch" if share else "variance of the Laplacian at 1 µm"
            made.append(charts.histogram(title, values, x=x, share=share))
    return Block("charts", made)


def _row(
    store: Store, slide: int, record: SlideRecord, *, pictures: bool
) -> tuple[dict[str, Cell], list[Picture], dict[str, NDArray[np.float32]]]:
    """Return the cells of a slide by column, its pictures, and the known values of its measured columns."""
    measures: dict[str, NDArray[np.float32]] = {}
    images: list[Picture] = []
    notes = [record.error or record.route_reason or "", *record.notes, *record.annotation_notes]
    tone = {"complete": "good", "failed": "bad"}.get(record.state, "")
    if record.state is SlideState.COMPLETE and record.planned:
        try:
            index = store.index(slide)
            columns = {name: index.get(name, _NONE) for name in _MEASURES}
            measures = {name: values[np.isfinite(values)] for name, values in columns.items()}
            if pictures:
                images = _pictures(store, slide, record, index)
        except DamagedStore as error:
            notes, tone = [str(error), *notes], "bad"
    medians = {name: float(np.median(values)) for name, values in measures.items() if len(values)}
    return (
        {
            "slide": Cell(record.id, tone="id"),
            "state": Cell(str(record.state), tone=tone),
            "label": Cell(record.label or ""),
            "patient": Cell(record.patient or ""),
            "patches": number(record.stored),
            "unreadable": number(record.unreadable),
            "tissue": number(medians.get("tissue"), 2),
            "focus": number(medians.get("focus"), 0),
            "pen": number(medians.get("pen"), 3),
            "mpp": number(record.mpp, 3),
            "mpp source": Cell(record.mpp_source or ""),
            "route": Cell(record.route or ""),
            "level": number(record.level),
            "notes": Cell("; ".join(filter(None, notes)), tone="why"),
        },
        images,
        measures,
    )


def _pictures(
    store: Store, slide: int, record: SlideRecord, index: Mapping[str, NDArray[Any]]
) -> list[Picture]:
    """Return the thumbnail with mask and grid, and some patches from all parts of the slide."""
    made = []
    plan = draw_plan(store, slide, index)
    if plan is not None:
        caption = f"{record.id}: {counted(record.stored, 'patch')}"
        if store.thumbnail(slide, "mask") is not None:
            caption += "; pale areas have no tissue"
        made.append(Picture.of(f"plan-{slide}", caption, plan))
    rows = np.flatnonzero(index["length"])
    chosen = rows[np.unique(np.linspace(0, len(rows) - 1, min(_PATCHES, len(rows))).astype(int))]
    patches = []
    for row in chosen.tolist():
        with suppress(DamagedStore, UsageError):  # `histopipe verify` reports damaged patches
            patches.append(store.read(record.id, row))
    if patches:
        caption = f"{counted(len(patches), 'patch')} of the slide"
        made.append(Picture.of(f"patches-{slide}", caption, strip(patches)))
    return made


def draw_plan(store: Store, slide: int, index: Mapping[str, NDArray[Any]]) -> PixelArray | None:
    """Draw the outlines of a slide's patches on its thumbnail; None if it has none. Areas without tissue are pale."""
    record = store.records[slide]
    where, thumbnail = f"{store.path}, slide {record.id}", store.thumbnail(slide)
    if thumbnail is None or not record.bounds:
        return None
    image = resize_image(decode_picture(thumbnail, where, least=SIDE), SIDE)
    height, width = image.shape[:2]
    mask = store.thumbnail(slide, "mask")
    if mask is not None:
        pixels = decode_picture(mask, f"{where}: tissue mask", mode="L")
        tissue = np.asarray(
            Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)
        )
        pale = (255 - _OUTSIDE * (255 - image.astype(np.float32))).astype(np.uint8)
        image = np.where((tissue > 0)[..., None], image, pale)
    result = Image.fromarray(image)
    canvas = ImageDraw.Draw(result)
    left, top, full_width, full_height = record.bounds
    scale, largest = (width / full_width, height / full_height), (width - 1, height - 1)
    corners = np.stack([index["x_l0"], index["y_l0"]], axis=1)
    first = ((corners if len(corners) <= _MAX_OUTLINES else corners[:0]) - (left, top)) * scale
    ends = [
        np.clip(np.rint(points), 0, largest)
        for points in (first, first + np.multiply(record.side_l0, scale))
    ]
    for box in np.hstack(ends).tolist():
        canvas.rectangle(box, outline=_GRID)
    return np.asarray(result)


def strip(patches: Sequence[PixelArray]) -> PixelArray:
    """Return patches as one row."""
    side, gap = 84, 4
    row = Image.new("RGB", (len(patches) * (side + gap) - gap, side), "white")
    for place, patch in enumerate(map(Image.fromarray, patches)):
        small = patch.resize((side, side), Image.Resampling.BICUBIC, reducing_gap=2.0)
        row.paste(small, (place * (side + gap), 0))
    return np.asarray(row)


def _bytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _counts(counts: Mapping[str, int]) -> str:
    some = list(counts.items())
    return ", ".join(f"{count:,} {name}" for name, count in some[:4]) + (", …" if some[4:] else "")
