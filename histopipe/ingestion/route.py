"""Choose the route of a slide's patches: copied, decoded from its native tiles, or read through OpenSlide."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from histopipe.errors import RouteUnfit
from histopipe.slides.tiles.check import LEAST_PSNR, NativeLevels, scaled_psnr
from histopipe.slides.tiles.native import NativeLevel, NativeTiles, NotNative, reduction_of
from histopipe.tiling.plan import TilingPlan
from histopipe.tiling.spec import TilingSpec

RouteName = Literal["copy", "decode", "openslide"]
AskedRoute = Literal["auto", "copy", "decode", "openslide"]

_LARGEST_TILE = 4096
"""Largest side of a native tile that is decoded for few patches, in pixels: 50 MB."""


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """How a slide's patches are made, and why.

    `native` is None for openslide. Tiles are decoded at 1/`reduction` of their size.
    """

    name: RouteName
    reason: str
    native: NativeLevel | None = None
    reduction: int = 1


def choose_route(
    name: str, plan: TilingPlan, spec: TilingSpec, asked: AskedRoute, levels: NativeLevels
) -> RouteChoice:
    """Choose the fastest route that gives the pixels of OpenSlide, or the one that the user asked for.

    Raises:
        RouteUnfit: the route asked for cannot be taken.
    """
    if asked == "openslide":
        return RouteChoice("openslide", "asked for")
    try:
        tiles, check = levels.get(plan.choice.level)
        native = tiles.native
        if max(native.tile.width, native.tile.height) > _LARGEST_TILE:
            raise NotNative(f"its tiles are {native.tile}, too large to decode one for few patches")  # noqa: TRY301
    except NotNative as error:
        if asked == "auto":
            return RouteChoice("openslide", str(error))
        raise _unfit(name, asked, str(error)) from error
    obstacle = _not_copied(plan, spec, native)
    if obstacle is None and asked != "decode":
        return RouteChoice("copy", f"patches are native tiles; {check}", native)
    if obstacle is not None and asked == "copy":
        raise _unfit(name, asked, obstacle)
    reduction, scaling = _scaling(plan, spec, tiles)
    reason = "; ".join(filter(None, [obstacle or "asked for", scaling, str(check)]))
    return RouteChoice("decode", reason, native, reduction)


def _unfit(name: str, asked: str, why: str) -> RouteUnfit:
    return RouteUnfit(
        f"{name} cannot go by --route {asked}", found=why, todo="use --route auto for such slides"
    )


def _not_copied(plan: TilingPlan, spec: TilingSpec, native: NativeLevel) -> str | None:
    """Return why patches cannot be copies of native tiles; None if they can."""
    choice, tile = plan.choice, native.tile
    if spec.codec != "auto":
        return f"--codec {spec.codec} encodes anew"
    if choice.resampling != "none":
        return f"patches are reduced from {choice.read_size} to {spec.patch_size} pixels"
    if (tile.width, tile.height) != (spec.patch_size, spec.patch_size):
        return f"patches are {spec.patch_size} pixels, native tiles {tile}"
    if native.colour == "grey":
        return "native tiles are grey, patches RGB"
    x, y = plan.x_level - native.x_level, plan.y_level - native.y_level
    if (x % tile.width).any() or (y % tile.height).any():
        return "patches lie across native tiles"
    return None


def _scaling(plan: TilingPlan, spec: TilingSpec, tiles: NativeTiles) -> tuple[int, str]:
    """Return the reduction of tiles while they are decoded, and the text for the reason."""
    choice, native = plan.choice, tiles.native
    # Against PNG, unlike JPEG, 40 dB would be a loss.
    if choice.resampling != "area" or spec.resample == "exact" or spec.codec == "png":
        return 1, ""
    corners = (plan.x_level - native.x_level, plan.y_level - native.y_level)
    wanted = reduction_of(native, choice.read_size // spec.patch_size)
    reduction = math.gcd(wanted, *(int(v) for axis in corners for v in set(axis.tolist())))
    if reduction == 1:
        return 1, ""
    psnr = scaled_psnr(tiles, reduction)
    if psnr < LEAST_PSNR:
        return 1, f"decoded in full: at 1/{reduction} it would agree to {psnr:.0f} dB only"
    return reduction, f"decoded at 1/{reduction}, {psnr:.0f} dB"
