"""Make synthetic whole-slide images of any size, with real or synthetic texture. A slide is never held in memory.

    python tools/make_slides.py OUT --count 12 --size 4096x4096          a small labelled cohort
    python tools/make_slides.py OUT --size 35520x35604 --levels 1,4,16   a 1.2-gigapixel Aperio SVS
    python tools/make_slides.py OUT --count 8 --condition fat             tissue that is hard to find

Synthetic tissue is drawn inside smooth random outlines on glass. `NAME.geojson` next to each slide has these outlines
in level-0 pixels. With `--classes`, the slides alternate between classes with different density and size of nuclei,
and `labels.csv` has the class of each slide. `--nodules` draws tumour within the tissue. `--condition` draws other
slides, of 7.7 by 5.8 mm at 2 mpp, whose true tissue is in `NAME.png`; see tools/tissue_scenes.py.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.demo.synthetic_slides import (
    BANK,
    NUCLEI,
    SlideSettings,
    make_slide,
    shifted_textures,
    synthetic_texture,
    texture_side,
    write_slide,
)
from histopipe.errors import UsageError
from histopipe.geometry import PointL0, Size
from histopipe.slides.slide_files import open_slide
from histopipe.system.arrays import PixelArray
from histopipe.tiling.mask import Grid
from histopipe.tiling.mask_files import encode_png

_TIMES = 4
"""Level-0 pixels per pixel of a scene, along each side."""


def main(arguments: list[str] | None = None) -> None:
    """Parse the arguments, and make the slides one by one."""
    options = _parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.condition:
        for number in range(options.count):
            path = options.out / f"{options.name}{number:03d}.svs"
            make_scene(path, options.condition, options.seed * 1_000_000 + number)
        return
    if options.texture:
        options.texture = _texture(options.texture)
    names = {field.name for field in dataclasses.fields(SlideSettings)}
    settings = SlideSettings(**{k: v for k, v in vars(options).items() if k in names})
    rng, labels = np.random.default_rng(options.seed), []
    side = texture_side(settings.size, settings.tile)
    stains = [
        {
            kind: synthetic_texture(rng, kind, options.mpp, side)
            for kind in dict.fromkeys(options.classes)
        }
        for _ in range(options.stains)
    ]
    for number in range(options.count):
        kind = options.classes[number % len(options.classes)]
        path = options.out / f"{options.name}{number:03d}.{options.format}"
        if stains:
            stain = shifted_textures(stains[number // 2 % len(stains)], number)
            settings = dataclasses.replace(settings, texture=stain[kind])
        make_slide(path, kind, number, settings)
        labels.append((path.stem, kind))
        print(f"{path}: {options.size}, {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    with (options.out / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("slide", "label"), *labels])


def make_scene(path: Path, condition: str, seed: int) -> NDArray[np.bool_]:
    """Write a scene as a slide and its true mask as PNG, and return the mask, (H, W) bool."""
    # Late: other tools import this module from elsewhere.
    from tissue_scenes import SCENE_MPP, ScenePainter, scene

    picture, truth = scene(condition, seed)
    settings = SlideSettings(
        size=Size(picture.shape[1] * _TIMES, picture.shape[0] * _TIMES),
        mpp=SCENE_MPP / _TIMES,
        levels=(1, _TIMES),
    )
    write_slide(path, ScenePainter(picture, _TIMES, settings.tile).tile_row, settings)
    size = Size(truth.shape[1], truth.shape[0])
    path.with_suffix(".png").write_bytes(encode_png(truth, Grid(0, 0, _TIMES, size, settings.size)))
    return truth


def _texture(path: Path) -> PixelArray:
    """Return the most colourful square of a real slide, mirrored to the size of a texture if it is smaller."""
    with open_slide(path) as slide:
        size = slide.info.size
        side = min(BANK, size.width, size.height)
        best: PixelArray | None = None
        for y in range(0, size.height - side + 1, max(1, (size.height - side) // 4)):
            for x in range(0, size.width - side + 1, max(1, (size.width - side) // 4)):
                area = slide.read_region(PointL0(x, y), 0, Size(side, side))
                if best is None or np.ptp(area, axis=2).mean() > np.ptp(best, axis=2).mean():
                    best = area
    if best is None:
        raise UsageError(f"{path} is empty")
    pad = BANK - side
    return np.pad(best, ((0, pad), (0, pad), (0, 0)), mode="symmetric")


def _size(text: str) -> Size:
    width, _, height = text.partition("x")
    return Size(int(width), int(height))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=1, help="number of slides (1)")
    parser.add_argument("--name", default="slide-", help="prefix of file names (slide-)")
    parser.add_argument("--format", choices=["svs", "tiff", "scn"], default="svs")
    parser.add_argument(
        "--size", type=_size, default=Size(4096, 4096), help="size of level 0 (4096x4096)"
    )
    parser.add_argument("--mpp", type=float, default=0.499, help="mpp of level 0 (0.499)")
    parser.add_argument("--levels", type=_numbers, default=[1, 4, 16], help="downsamples (1,4,16)")
    parser.add_argument("--tile", type=int, default=256, help="side of native tiles (256)")
    parser.add_argument("--quality", type=int, default=90)
    parser.add_argument("--subsampling", choices=["444", "422", "420"], default="420")
    parser.add_argument(
        "--bounds", type=_numbers, help="scn only: x,y,width,height of the area around the slide"
    )
    parser.add_argument("--pieces", type=int, default=1, help="pieces of tissue (1)")
    parser.add_argument("--nodules", type=int, default=0, help="nodules of tumour per piece (0)")
    parser.add_argument(
        "--classes", type=lambda t: t.split(","), default=["tumour"], help="normal,tumour"
    )
    parser.add_argument(
        "--condition", help="tissue that is hard to find, instead: a name of tools/tissue_scenes.py"
    )
    parser.add_argument("--texture", type=Path, help="real slide whose texture is used")
    parser.add_argument(
        "--stains", type=int, default=0, help="textures that slides share; 0: one each, slower"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    wrong = _wrong(options)
    if wrong:
        parser.error(wrong)
    return options


def _wrong(options: argparse.Namespace) -> str | None:
    """Return the error in the options; None if there is none."""
    size, coarsest = options.size, max(options.levels)
    checks = {
        "--tile: a multiple of 16": options.tile > 0 and options.tile % 16 == 0,
        "--mpp: more than 0": options.mpp > 0,
        "--levels: 1, then increasing powers of 2 that divide the tile": options.levels[0] == 1
        and options.levels == sorted(set(options.levels))
        and all(d > 0 and d & (d - 1) == 0 and options.tile % d == 0 for d in options.levels),
        "--size: at least one pixel of the coarsest level": min(size.width, size.height)
        >= coarsest,
        f"--classes: only {', '.join(NUCLEI)}": set(options.classes) <= set(NUCLEI),
        "--bounds: x,y,width,height for --format scn": options.bounds is None
        or (options.format == "scn" and len(options.bounds) == 4),
        "--count and --pieces: 1 or more": options.count > 0 and options.pieces > 0,
        "--nodules: 0 or more": options.nodules >= 0,
    }
    return next((text for text, right in checks.items() if not right), None)


if __name__ == "__main__":
    main()
