"""Which level of the pyramid a slide's patches are read from, and how much they are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from histopipe.errors import ScaleError
from histopipe.geometry import SCALE_TOLERANCE, Level, Mpp, same_scale
from histopipe.tiling.spec import TilingSpec

Resampling = Literal["none", "area", "lanczos"]


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """How patches are read.

    Attributes:
        level: the level to read.
        read_size: side of the square to read, pixels of that level.
        stride: distance of neighbouring cells, pixels of that level.
        resampling: how `read_size` becomes the patch size.
        mpp: scale of the patches as stored; None where unknown.
    """

    level: Level
    read_size: int
    stride: int
    resampling: Resampling
    mpp: Mpp | None


def choose_level(
    name: str, levels: tuple[Level, ...], mpp: Mpp | None, spec: TilingSpec
) -> LevelChoice:
    """The coarsest level that is not coarser than wanted; pixels are never invented.

    Args:
        name: slide id, for messages.
        levels: the slide's pyramid.
        mpp: its level-0 scale; None where unknown, which only `--level` allows.
        spec: what the user asked for.

    Raises:
        ScaleError: every level is coarser than wanted, or the level asked for is not there.
    """
    if spec.level is not None:
        return _level_as_asked(name, levels, mpp, spec, spec.level)
    if mpp is None or spec.mpp is None:
        raise ScaleError(f"{name} has no mpp", todo="give one, or use --level")
    wanted = spec.mpp
    fine = [level for level in levels if mpp * level.downsample <= wanted * (1 + SCALE_TOLERANCE)]
    if not fine:
        finest = mpp * levels[0].downsample
        raise ScaleError(
            f"{name} is too coarse",
            found=f"{finest:g} mpp at its finest",
            expected=f"at most {wanted:g}",
            todo="leave it out, or ask for a coarser --mpp (pixels are never invented)",
        )
    level = max(fine, key=lambda level: level.downsample)
    level_mpp = mpp * level.downsample
    reduction = wanted / level_mpp
    if reduction <= 1 + SCALE_TOLERANCE:
        return _as_is(level, Mpp(level_mpp), spec)
    # The tolerance that lets a level be used as it is lets it be halved as it is: a "40×" scan of 0.252 mpp then needs no
    # filter, and its tiles can be decoded at half their size.
    whole = round(reduction)
    if same_scale(Mpp(level_mpp * whole), wanted):
        reduction = whole
    read_size = round(spec.patch_size * reduction)
    return LevelChoice(
        level=level,
        read_size=read_size,
        stride=max(1, round(read_size * (spec.patch_size - spec.overlap) / spec.patch_size)),
        # A whole number of pixels into one is averaged, which is exact; anything else needs a filter.
        resampling="area" if read_size % spec.patch_size == 0 else "lanczos",
        mpp=Mpp(level_mpp * read_size / spec.patch_size),
    )


def _level_as_asked(
    name: str, levels: tuple[Level, ...], mpp: Mpp | None, spec: TilingSpec, number: int
) -> LevelChoice:
    if number >= len(levels):
        raise ScaleError(
            f"{name} has no level {number}",
            found=f"{len(levels)} levels, 0 to {len(levels) - 1}",
            todo="ask for --mpp instead: it finds the level of each slide",
        )
    level = levels[number]
    return _as_is(level, None if mpp is None else Mpp(mpp * level.downsample), spec)


def _as_is(level: Level, mpp: Mpp | None, spec: TilingSpec) -> LevelChoice:
    return LevelChoice(level, spec.patch_size, spec.patch_size - spec.overlap, "none", mpp)
