"""Tiling spec: all settings that determine the patches of a slide."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from histopipe.errors import SpecMismatch, UsageError
from histopipe.geometry import Mpp
from histopipe.slides.scale import MAGNIFICATION_MPP, PLAUSIBLE_MPP

Tissue = Literal["otsu", "none"]
Codec = Literal["auto", "jpeg", "png"]
Subsampling = Literal["444", "422", "420"]
Resample = Literal["fast", "exact"]
GridKind = Literal["regular", "imported"]

ALGORITHMS: Mapping[str, str] = {
    "grid": "grid-1",
    "thumbnail": "native-1",
    "tissue": "otsu-1",
    "resample": "area-lanczos-2",
}
"""Versions of the algorithms that determine cells and pixels. Specs with different versions are not equal."""

MAX_PATCH_SIZE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class TilingSpec:
    """Settings to tile slides and to encode their patches. One store has one spec.

    The settings are those of `ingest`, with `roi_threshold` for `annotation_threshold`. The grid "imported" uses the
    cells that another tool has chosen.

    Raises:
        UsageError: a value is out of range, or not exactly one of `mpp` and `level` is given.
    """

    patch_size: int = 256
    overlap: int = 0
    mpp: Mpp | None = None
    level: int | None = None
    tissue: Tissue = "otsu"
    tissue_threshold: float = 0.5
    codec: Codec = "auto"
    quality: int = 90
    subsampling: Subsampling = "444"
    resample: Resample = "fast"
    grid: GridKind = "regular"
    roi: str | None = None
    roi_threshold: float = 0.5

    def __post_init__(self) -> None:
        if (self.mpp is None) == (self.level is None):
            raise UsageError(
                "the scale of patches",
                found=f"mpp {self.mpp} and level {self.level}",
                expected="one of --mpp, --mag and --level",
            )
        low, high = PLAUSIBLE_MPP
        _within("--patch-size", self.patch_size, 8, MAX_PATCH_SIZE)
        _within("--overlap", self.overlap, 0, self.patch_size - 1)
        _within("--tissue-threshold", self.tissue_threshold, 0, 1)
        _within("--quality", self.quality, 1, 100)
        if self.mpp is not None:
            _within("--mpp", self.mpp, low, high)
        if self.level is not None:
            _within("--level", self.level, 0, 1000)
        _one_of("--tissue", self.tissue, get_args(Tissue))
        _one_of("--codec", self.codec, get_args(Codec))
        _one_of("--subsampling", self.subsampling, get_args(Subsampling))
        _one_of("--resample", self.resample, get_args(Resample))

    def to_json(self) -> dict[str, Any]:
        """Return the spec with the versions of its algorithms, as stored in `meta`."""
        settings = dataclasses.asdict(self)
        # Newer settings are left out if they are not used, so that the specs of old stores stay equal.
        changed = {"grid": "imported-1"} if settings.pop("grid") == "imported" else {}
        if self.roi is None:
            del settings["roi"], settings["roi_threshold"]
        else:
            changed["roi"] = "cut-1"
        return {**settings, "algorithms": {**ALGORITHMS, **changed}}


def spec_from_json(value: Mapping[str, Any], **changes: Any) -> TilingSpec:
    """Return the spec in `meta` for other slides, without imported cells, region of interest and unknown settings.

    Raises:
        UsageError: a value is out of range.
    """
    names = {field.name for field in dataclasses.fields(TilingSpec)} - {"grid", "roi"}
    return TilingSpec(**{k: v for k, v in {**value, **changes}.items() if k in names})


def spec_of_store(value: Mapping[str, Any]) -> TilingSpec:
    """Return the spec that reproduces the patches of a store with this spec in `meta`.

    Raises:
        SpecMismatch: this version of histopipe creates other patches, or another tool has chosen them.
    """
    names = {field.name for field in dataclasses.fields(TilingSpec)} - {"grid"}
    spec = TilingSpec(**{name: value[name] for name in names & value.keys()})
    if spec.to_json() != value:
        raise SpecMismatch(
            "the patches of the store cannot be reproduced with this version of histopipe",
            found="; ".join(differences(value, spec.to_json())),
            todo="ingest its slides into a new store",
        )
    return spec


def magnification_to_mpp(magnification: float) -> Mpp:
    """Return the scale of a magnification: 20× is 0.5 µm per pixel, 40× is 0.25.

    Raises:
        UsageError: the magnification is not positive.
    """
    if not magnification > 0:
        raise UsageError("--mag", found=magnification, expected="a positive number, such as 20")
    return Mpp(MAGNIFICATION_MPP / magnification)


def differences(
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    places: tuple[str, str] = ("in the store", "asked for"),
) -> list[str]:
    """Return the differences of two specs, each as a text: `mpp: 0.5 in the store, 0.25 asked for`."""
    keys = sorted(found.keys() | wanted.keys())
    return [
        f"{key}: {found.get(key)} {places[0]}, {wanted.get(key)} {places[1]}"
        for key in keys
        if found.get(key) != wanted.get(key)
    ]


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UsageError(name, found=value, expected=f"from {low:g} to {high:g}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(name, found=repr(value), expected=" or ".join(allowed))
