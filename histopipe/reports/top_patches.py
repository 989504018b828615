"""The patches of a slide with the highest and the lowest values: as images, on one sheet, and in a table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from histopipe.predictions.patch_values import NamedPatchValues, SlideImages
from histopipe.slides.thumbnail import resize_image
from histopipe.system.arrays import PixelArray
from histopipe.system.files import atomic_write, path_within
from histopipe.system.output import message
from histopipe.system.table_files import write_table

_SIDE, _GAP, _LINE = 160, 6, 18
"""Side of a patch on the sheet, space between patches, and height of a line of text, in pixels."""
_COLUMNS = ("slide", "measure", "end", "rank", "value", "x_l0", "y_l0", "size_l0", "file")


class TopPatch(NamedTuple):
    """A patch with one of the highest or lowest values: the number of its row among the patches."""

    measure: str
    end: str
    rank: int
    row: int


def top_patches(values: NamedPatchValues, count: int) -> Iterator[TopPatch]:
    """Yield the patches with the `count` highest and lowest values of each measure but attention, which has no sign.

    The two ends share no patch. Of contributions, those of an end have the same sign.
    """
    for name, numbers in values.measures.items():
        if name == "attention" and len(values.measures) > 1:
            continue
        order = np.argsort(numbers, kind="stable")
        signed = name.startswith("contribution")
        half = count if signed else min(count, -(-len(order) // 2))
        for end, rows, sign in (
            ("highest", order[::-1][:half], 1),
            ("lowest", order[: min(half, len(order) if signed else len(order) // 2)], -1),
        ):
            for rank, row in enumerate(rows.tolist(), 1):
                if not signed or numbers[row] * sign > 0:
                    yield TopPatch(name, end, rank, row)


def write_top_patches(
    values: NamedPatchValues, images: SlideImages, folder: Path, count: int
) -> tuple[Path, ...]:
    """Write `SLIDE.top.csv`, a contact sheet `SLIDE.top.png`, and each patch in the folder `SLIDE.top`. Return the first two.

    Patches for which there is neither a store nor a slide file are in the table only, and there is no sheet of none.
    """
    slide, chosen = values.slide.slide, list(top_patches(values, count))
    base = path_within(folder, slide)
    base.parent.mkdir(parents=True, exist_ok=True)
    pictures = base.with_name(f"{base.name}.top")
    for old in pictures.glob("*.png"):
        old.unlink()
    names = {name: number for number, name in enumerate(values.measures, 1)}
    rows, pixels = list[tuple[object, ...]](), dict[TopPatch, PixelArray]()
    for patch in chosen:
        x, y = int(values.x_l0[patch.row]), int(values.y_l0[patch.row])
        image = images.patch(slide, x, y, values.slide.size_l0)
        file = ""
        if image is not None:
            pixels[patch] = image
            words = re.sub(r"\W+", "-", patch.measure)
            path = pictures / f"{names[patch.measure]}-{words}-{patch.end}-{patch.rank:02d}.png"
            pictures.mkdir(exist_ok=True)
            with atomic_write(path) as part:
                Image.fromarray(image).save(part, format="png")
            file = path.relative_to(folder).as_posix()
        value = f"{values.measures[patch.measure][patch.row]:.9g}"
        rows.append((slide, *patch[:3], value, x, y, f"{values.slide.size_l0:g}", file))
    table = base.with_name(f"{base.name}.top.csv")
    write_table(table, _COLUMNS, rows)
    sheet = base.with_name(f"{base.name}.top.png")
    if not pixels:
        sheet.unlink(missing_ok=True)
        message(f"{slide}: no image of the patches found; use --slides or --store")
        return (table,)
    with atomic_write(sheet) as part:
        _sheet(values, pixels).save(part, format="png")
    return table, sheet


def _sheet(values: NamedPatchValues, pixels: dict[TopPatch, PixelArray]) -> Image.Image:
    """Return a picture with a line of patches for each end of each measure, with their values."""
    lines = list(dict.fromkeys((patch.measure, patch.end) for patch in pixels))
    width = max(patch.rank for patch in pixels) * (_SIDE + _GAP) + _GAP
    height = _SIDE + 2 * _LINE + _GAP
    sheet = Image.new("RGB", (max(width, 480), len(lines) * height + _GAP + _LINE), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    draw.text((_GAP, 2), values.slide.slide, "black", font)
    for number, line in enumerate(lines):
        top = _LINE + _GAP + number * height
        draw.text((_GAP, top), f"{line[0]}: {line[1]}", "black", font)
        for patch, image in pixels.items():
            if (patch.measure, patch.end) == line:
                left = _GAP + (patch.rank - 1) * (_SIDE + _GAP)
                picture = Image.fromarray(resize_image(image, _SIDE))
                sheet.paste(picture, (left, top + _LINE))
                value = f"{values.measures[patch.measure][patch.row]:.4g}"
                draw.text((left, top + _LINE + _SIDE), value, "#444444", font)
    return sheet
