"""Synthetic stores with planted outlines: dark areas of known shape, and their annotation files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import shapely
import shapely.affinity
import simplejpeg
import tifffile

from helpers.stores import RECORD, SPEC, columns_of
from histopipe.store.writer import StoreWriter

SIDE, GRID = 32, 3
"""Side of a patch in pixels, and of a slide in patches."""
SCALE = 2.0
"""Level-0 pixels per pixel of a patch."""
EXTENT = int(SIDE * GRID * SCALE)
DARK, LIGHT = (120, 60, 140), (225, 205, 225)


def planted(seed: int) -> shapely.MultiPolygon:
    """Return two areas in level-0 pixels, one of them with a hole."""
    rng = np.random.default_rng(seed)
    first = shapely.Point(rng.uniform(40, 80), rng.uniform(40, 150)).buffer(rng.uniform(25, 34))
    hole = shapely.affinity.scale(first, 0.4, 0.4)
    second = shapely.box(0, 0, rng.uniform(40, 60), rng.uniform(40, 60))
    placed = shapely.affinity.translate(second, rng.uniform(115, 125), rng.uniform(20, 120))
    turned = shapely.affinity.rotate(placed, rng.uniform(0, 40))
    return cast(shapely.MultiPolygon, shapely.union(shapely.difference(first, hole), turned))


def geojson(*areas: tuple[str | None, shapely.Geometry]) -> str:
    """Return outlines with their classes as GeoJSON of QuPath."""
    features = ",".join(
        f'{{"type":"Feature","geometry":{shapely.to_geojson(area)},"properties":'
        f'{{"objectType":"annotation"'
        + (f',"classification":{{"name":"{name}"}}' if name else "")
        + "}}"
        for name, area in areas
    )
    return f'{{"type":"FeatureCollection","features":[{features}]}}'


def _canvas(area: shapely.Geometry, rng: np.random.Generator) -> np.ndarray:
    """Return the pixels of a slide at the scale of its patches: a pixel is dark if its centre is inside."""
    places = (np.arange(SIDE * GRID) + 0.5) * SCALE
    inside = np.asarray(shapely.contains_xy(area, *np.meshgrid(places, places)))
    pixels = np.where(inside[..., None], DARK, LIGHT) + rng.normal(0, 6, (*inside.shape, 3))
    return np.clip(pixels, 0, 255).astype(np.uint8)


def planted_store(folder: Path, slides: int = 6, step: int = 1) -> tuple[Path, Path]:
    """Write a store of slides with planted areas, and a folder with their outlines, of class gland.

    With `step` -1, the last patch of a slide is stored first.
    """
    store, annotations = folder / "planted.lmdb", folder / "outlines"
    annotations.mkdir(parents=True)
    with StoreWriter(store, dataclasses.replace(SPEC, patch_size=SIDE)) as writer:
        records = [
            dataclasses.replace(
                RECORD,
                id=f"s{number}",
                width=EXTENT,
                height=EXTENT,
                mpp=0.25,
                patch_mpp=0.5,
                read_size=int(SIDE * SCALE),
                downsample=1.0,
            )
            for number in range(slides)
        ]
        numbers = writer.register(records)
        for seed, record in enumerate(records):
            area, rng = planted(seed), np.random.default_rng(seed)
            (annotations / f"{record.id}.geojson").write_text(geojson(("gland", area)))
            values, corners = zip(*list(_patches(_canvas(area, rng)))[::step], strict=True)
            crc = writer.put_patches(numbers[record.id], range(len(values)), values)
            columns = columns_of(crc, np.array([len(value) for value in values]))
            columns["x_l0"], columns["y_l0"] = np.array(corners).T
            done = dataclasses.replace(
                record,
                planned=len(values),
                stored=len(values),
                stored_bytes=sum(map(len, values)),
            )
            writer.complete(numbers[record.id], done, columns, {})
    return store, annotations


def planted_slide(path: Path, seed: int, repeats: int = 1) -> np.ndarray:
    """Write a slide file with planted areas, several times in a row. Return its pixels at the scale of patches."""
    canvas = np.tile(_canvas(planted(seed), np.random.default_rng(seed)), (repeats, repeats, 1))
    pixels = canvas.repeat(int(SCALE), axis=0).repeat(int(SCALE), axis=1)
    per_centimetre = (1e4 / 0.25, 1e4 / 0.25)
    tifffile.imwrite(
        path, pixels, tile=(64, 64), photometric="rgb", resolution=per_centimetre,
        resolutionunit="CENTIMETER",
    )  # fmt: skip
    return canvas


def _patches(canvas: np.ndarray) -> Iterator[tuple[bytes, tuple[int, int]]]:
    for row in range(GRID):
        for column in range(GRID):
            y, x = row * SIDE, column * SIDE
            patch = np.ascontiguousarray(canvas[y : y + SIDE, x : x + SIDE])
            value = simplejpeg.encode_jpeg(patch, quality=98, colorsubsampling="444")
            yield value, (int(x * SCALE), int(y * SCALE))
