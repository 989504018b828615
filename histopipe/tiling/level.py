"""Choose the level that a slide's patches are read from, and how much they are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from histopipe.errors import ScaleError
from histopipe.geometry import SCALE_TOLERANCE, Level, Mpp, same_scale
from histopipe.tiling.spec import TilingSpec

Resampling = Literal["none", "area", "lanczos"]


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """How patches are read: squares of `read_size` pixels of a level, `stride` pixels apart.

    `resampling` reduces them to the patch size. `mpp` is the scale of the patches as stored; None if unknown.
    """

    level: Level
    read_size: int
    stride: int
    resampling: Resampling
    mpp: Mpp | None


def choose_level(
    name: str, levels: tuple[Level, ...], mpp: Mpp | None, spec: TilingSpec
) -> LevelChoice:
    """Choose the level of the spec, or the coarsest that is not coarser than its scale: pixels are never invented.

    Args:
        name: slide id, for messages.
        levels: the slide's pyramid.
        mpp: level-0 scale; None if unknown, which only `--level` allows.
        spec: the tiling settings.

    Raises:
        ScaleError: every level is coarser than wanted, or the slide has no such level.
    """
    if spec.level is not None:
        if spec.level >= len(levels):
            raise ScaleError(
                f"{name} has no level {spec.level}",
                found=f"{len(levels)} levels, 0 to {len(levels) - 1}",
                todo="ask for --mpp instead: it finds the level of each slide",
            )
        level = levels[spec.level]
        return _as_is(level, None if mpp is None else Mpp(mpp * level.downsample), spec)
    if mpp is None or spec.mpp is None:
        raise ScaleError(f"{name} has no mpp", todo="give one, or use --level")
    wanted = spec.mpp
    fine = [level for level in levels if mpp * level.downsample <= wanted * (1 + SCALE_TOLERANCE)]
    if not fine:
        raise ScaleError(
            f"{name} is too coarse",
            found=f"{mpp * levels[0].downsample:g} mpp at its finest",
            expected=f"at most {wanted:g}",
            todo="leave it out, or ask for a coarser --mpp (pixels are never invented)",
        )
    level = max(fine, key=lambda level: level.downsample)
    level_mpp = mpp * level.downsample
    reduction = wanted / level_mpp
    if reduction <= 1 + SCALE_TOLERANCE:
        return _as_is(level, Mpp(level_mpp), spec)
    # The same tolerance applies to whole reductions: a "40×" scan of 0.252 mpp needs no filter, and its tiles can be
    # decoded at half their size.
    whole = round(reduction)
    if same_scale(Mpp(level_mpp * whole), wanted):
        reduction = whole
    read_size = round(spec.patch_size * reduction)
    return LevelChoice(
        level=level,
        read_size=read_size,
        stride=max(1, round(read_size * (spec.patch_size - spec.overlap) / spec.patch_size)),
        # Averaging a whole number of pixels is exact; anything else needs a filter.
        resampling="area" if read_size % spec.patch_size == 0 else "lanczos",
        mpp=Mpp(level_mpp * read_size / spec.patch_size),
    )


def _as_is(level: Level, mpp: Mpp | None, spec: TilingSpec) -> LevelChoice:
    return LevelChoice(level, spec.patch_size, spec.patch_size - spec.overlap, "none", mpp)
