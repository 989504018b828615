"""Choose the route of a slide's patches: copy its native tiles, decode them, or read through OpenSlide."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from histopipe.errors import RouteUnfit
from histopipe.ingestion.options import AskedRoute, RouteName
from histopipe.slides.thumbnail import Thumbnail, colour_note
from histopipe.slides.tiles.check import LEAST_PSNR, NativeLevels, scaled_psnr
from histopipe.slides.tiles.native import NativeLevel, NativeTiles, NotNative, reduction_of
from histopipe.system.result import counted
from histopipe.tiling.plan import TilingPlan, cell_shares
from histopipe.tiling.spec import TilingSpec
from histopipe.tissue_masks.mask import Mask

_MISSING = 0.2
"""Share of a patch in missing tiles above which it is counted: masks may extend a little beyond the tissue."""
_LARGEST_TILE = 4096
"""Maximum side in pixels of a native tile that is decoded for a few patches. Such a tile takes 50 MB."""


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """Route of a slide's patches, and the reason for it.

    `native` is None for the route openslide. Tiles are decoded at 1/`reduction` of their size.
    """

    name: RouteName
    reason: str
    native: NativeLevel | None = None
    reduction: int = 1


def choose_route(
    name: str, plan: TilingPlan, spec: TilingSpec, requested: AskedRoute, levels: NativeLevels
) -> RouteChoice:
    """Choose the fastest route that yields the same pixels as OpenSlide, or the route that the user requested.

    Raises:
        RouteUnfit: the requested route cannot be used.
    """
    if requested == "openslide":
        return RouteChoice("openslide", "requested")
    try:
        tiles, check = levels.get(plan.choice.level)
        native = tiles.native
        if max(native.tile.width, native.tile.height) > _LARGEST_TILE:
            raise NotNative(f"its tiles are {native.tile}, too large to decode for a few patches")  # noqa: TRY301
    except NotNative as error:
        if requested == "auto":
            return RouteChoice("openslide", str(error))
        raise _unfit(name, requested, str(error)) from error
    obstacle = _not_copied(plan, spec, native)
    if obstacle is None and requested != "decode":
        return RouteChoice("copy", f"patches are native tiles; {check}", native)
    if obstacle is not None and requested == "copy":
        raise _unfit(name, requested, obstacle)
    reduction, scaling = _scaling(plan, spec, tiles)
    reason = "; ".join(filter(None, [obstacle or "requested", scaling, str(check)]))
    return RouteChoice("decode", reason, native, reduction)


def pixel_notes(
    levels: NativeLevels, plan: TilingPlan, thumbnail: Thumbnail, chosen: Mask
) -> list[str]:
    """Return notes about pixels that are probably wrong: their colours, and missing tiles where there is tissue.

    Scanners leave out tiles of glass. `chosen` is the mask of the thumbnail by which cells were chosen, or all of it.
    """
    native = levels.located(plan.choice.level)
    notes = [colour_note(thumbnail.pixels), native.conflict if native else None]
    if native is not None and not native.lengths.all():
        missing = chosen & _missing(native, plan, thumbnail)
        count = int((cell_shares(plan, thumbnail, missing) > _MISSING).sum())
        text = "partly in tiles that the file does not contain: they are blank there"
        notes += [f"{counted(count, 'patch')} {text}"] if count else []
    return [note for note in notes if note]


def _missing(native: NativeLevel, plan: TilingPlan, thumbnail: Thumbnail) -> Mask:
    """Return which pixels of a thumbnail have their centre in a tile that was never written, (H, W) bool."""
    step = thumbnail.level.downsample / plan.choice.level.downsample
    y, x = (
        ((start + (np.arange(count) + 0.5) * thumbnail.reduction) * step).astype(np.int64)
        for start, count in zip(
            (thumbnail.y_level, thumbnail.x_level), thumbnail.pixels.shape[:2], strict=True
        )
    )
    absent = np.pad(native.lengths == 0, 1)  # outside of the tiles, nothing is missing
    inside = (
        np.clip(places + 1, 0, side - 1)
        for places, side in zip(native.tile_at(x=x, y=y), absent.shape, strict=True)
    )
    return absent[np.ix_(*inside)]


def _unfit(name: str, requested: str, why: str) -> RouteUnfit:
    return RouteUnfit(
        f"{name} cannot use --route {requested}", found=why, todo="use --route auto for such slides"
    )


def _not_copied(plan: TilingPlan, spec: TilingSpec, native: NativeLevel) -> str | None:
    """Return the reason why patches cannot be copies of native tiles; None if they can."""
    choice, tile = plan.choice, native.tile
    if spec.codec != "auto":
        return f"--codec {spec.codec} re-encodes patches"
    if choice.resampling != "none":
        return f"patches are reduced from {choice.read_size} to {spec.patch_size} pixels"
    if (tile.width, tile.height) != (spec.patch_size, spec.patch_size):
        return f"patches are {spec.patch_size} pixels, native tiles {tile}"
    if native.colour == "grey":
        return "native tiles are grey, patches RGB"
    x, y = plan.x_level - native.x_level, plan.y_level - native.y_level
    if (x % tile.width).any() or (y % tile.height).any():
        return "patches are not aligned with native tiles"
    return None


def _scaling(plan: TilingPlan, spec: TilingSpec, tiles: NativeTiles) -> tuple[int, str]:
    """Return the reduction at which tiles are decoded, and a text for the route's reason."""
    choice, native = plan.choice, tiles.native
    # An error of 40 dB is small compared with that of JPEG encoding, but PNG is lossless.
    if choice.resampling != "area" or spec.resample == "exact" or spec.codec == "png":
        return 1, ""
    corners = (plan.x_level - native.x_level, plan.y_level - native.y_level)
    largest = reduction_of(native, choice.read_size // spec.patch_size)
    reduction = math.gcd(largest, *(int(v) for axis in corners for v in set(axis.tolist())))
    if reduction == 1:
        return 1, ""
    psnr = scaled_psnr(tiles, reduction)
    if psnr < LEAST_PSNR:
        return 1, f"decoded at full size: at 1/{reduction} the PSNR would be only {psnr:.0f} dB"
    return reduction, f"decoded at 1/{reduction}, {psnr:.0f} dB"
