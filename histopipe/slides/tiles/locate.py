"""Find the native JPEG tiles of a slide's level."""

from __future__ import annotations

from pathlib import Path

from histopipe.geometry import Level
from histopipe.slides.slide import SlideInfo
from histopipe.slides.tiles.native import NativeLevel


def find_native(files: tuple[Path, ...], info: SlideInfo, level: Level) -> NativeLevel:
    """Where a level's native JPEG tiles lie.

    Args:
        files: all of the slide's files.
        info: the slide's header.
        level: one of its levels.

    Raises:
        NotNative: they cannot be taken directly; the text says why.
    """
    # Late: a slide is either, and each import costs a tenth of a second.
    if info.vendor == "dicom":
        from histopipe.slides.tiles import dicom as dicom_tiles

        return dicom_tiles.find_tiles(files, level)
    from histopipe.slides.tiles import tiff as tiff_tiles

    return tiff_tiles.find_tiles(files, info, level)
