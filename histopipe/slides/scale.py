"""Scale of slides in micrometres per pixel (mpp), and its source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from histopipe.errors import ScaleError
from histopipe.geometry import Mpp, same_scale

if TYPE_CHECKING:
    from histopipe.slides.slide import SlideInfo

PLAUSIBLE_MPP = (0.05, 50.0)
MAGNIFICATION_MPP = 10.0
"""An objective of power m means 10/m µm per pixel: 20× is 0.5, 40× is 0.25."""

_USUAL_DPI = (72, 96, 600, 720, 1000, 1200, 1440, 2400, 4800)
"""Resolutions of screens and printers, which programs write into images. Others are not plausible as scales."""


class MppSource(StrEnum):
    """Source of a slide's mpp, in order of precedence. `OBJECTIVE` means that it is estimated."""

    CSV = "mpp-csv"
    PROPERTIES = "properties"
    OBJECTIVE = "objective-power"
    DEFAULT = "default-mpp"


@dataclass(frozen=True, slots=True)
class ResolvedMpp:
    """Scale of level 0, its source, and a note for the user, if any."""

    mpp: Mpp
    source: MppSource
    note: str | None = None


def equal_scales(a: Mpp, b: Mpp) -> bool:
    """Return whether two scales are equal but for the rounding of their texts."""
    return math.isclose(a, b, rel_tol=1e-6)


def resolve_mpp(
    name: str, info: SlideInfo, *, from_csv: Mpp | None = None, default: Mpp | None = None
) -> ResolvedMpp:
    """Return the scale of a slide: from the CSV file, else its properties, else its objective power, else the default.

    Raises:
        ScaleError: none of these is plausible, or the pixels are not square.
    """
    in_header, rejected = _from_properties(name, info, from_csv)
    if in_header is not None and (from_csv is None or equal_scales(from_csv, in_header)):
        return ResolvedMpp(in_header, MppSource.PROPERTIES)
    if from_csv is not None:
        if in_header is not None and not same_scale(from_csv, in_header):
            rejected = (
                f"{from_csv:g} mpp from the CSV is used; the slide's header has {in_header:g}"
            )
        return ResolvedMpp(from_csv, MppSource.CSV, rejected)
    power = _number(info.objective_power)
    if power and _implausible(MAGNIFICATION_MPP / power) is None:
        note = f"mpp estimated from the objective power {power:g}"
        return ResolvedMpp(Mpp(MAGNIFICATION_MPP / power), MppSource.OBJECTIVE, note)
    if default is not None:
        return ResolvedMpp(default, MppSource.DEFAULT, rejected)
    raise ScaleError(
        f"{name} has no usable mpp",
        found=rejected or "neither an mpp nor an objective power in its header",
        todo="give one with --mpp-csv (columns slide,mpp) or --default-mpp, or use --level",
    )


def _from_properties(
    name: str, info: SlideInfo, from_csv: Mpp | None
) -> tuple[Mpp | None, str | None]:
    """Return the mpp of the header, or the reason why it is rejected."""
    values = [value for value in map(_number, (info.mpp_x, info.mpp_y)) if value is not None]
    if not values:
        return None, None
    for value in values:
        if why := _implausible(value):
            return None, f"{value:g} mpp in its header, rejected: {why}"
    if not same_scale(Mpp(values[0]), Mpp(values[-1])):
        if from_csv is not None:
            return None, (
                f"{from_csv:g} mpp from the CSV is used; the slide's header has "
                f"{values[0]:g} by {values[-1]:g} mpp"
            )
        raise ScaleError(
            f"{name} has pixels that are not square",
            found=f"{values[0]:g} by {values[-1]:g} mpp",
            expected="at most 2 % difference",
            todo="leave it out, or use --level, which reads its pixels unscaled",
        )
    return Mpp(sum(values) / len(values)), None


def _implausible(mpp: float) -> str | None:
    for dpi in _USUAL_DPI:
        if math.isclose(mpp, 25400 / dpi, rel_tol=1.5e-3):
            kind = "screen" if dpi < 100 else "print"
            return f"this is a {dpi}-dpi {kind} resolution, not a scanner's"
    low, high = PLAUSIBLE_MPP
    return None if low <= mpp <= high else f"not between {low:g} and {high:g}"


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value and 0 < value < float("inf") else None
