"""Tiling spec: all settings that determine the patches of a slide; and the options of tissue masks.

The module imports nothing slow, since `--help` lists the choices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from histopipe.errors import UsageError
from histopipe.geometry import Mpp
from histopipe.slides.scale import MAGNIFICATION_MPP, PLAUSIBLE_MPP
from histopipe.system.settings import check_settings, check_type, setting

Finder = Literal["otsu-1", "otsu-2", "otsu-3"]
"""Algorithm. Defined here because the settings use it and must load without OpenCV."""
AskedFinder = Literal["otsu", Finder]
"""Algorithm as an option; "otsu" is the version of the store, else the newest."""
Tissue = Literal[Finder, "none", "masks", "model"]
"""How tissue is found: an algorithm, not at all, files of masks, or a network."""

FINDER_NAMES: tuple[Finder, ...] = get_args(Finder)
"""Names of the algorithms; `tiling.algorithms` has the functions."""
NEWEST: Finder = "otsu-3"
"""Algorithm of new stores."""

TISSUE = "Tissue"
TissueCheck = Literal["off", "warn", "fail"]
_RANGE = re.compile(r"#([0-9a-f]{6})|(\d{1,5})(?:-(\d{1,5}))?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class MaskRules:
    """Settings for masks of other tools.

    Raises:
        UsageError: a value is not one of these.
    """

    tissue_values: str | None = setting(
        None,
        "Values of PNG masks that are tissue: 255, 1,3, 128-255, or a colour such as '#ff0000'.",
        group=TISSUE,
        default_text="the one above 0; masks of more values are refused",
    )
    tissue_check: TissueCheck = setting(
        "fail",
        "A mask that takes glass and leaves tissue, compared with otsu-3: its slide fails, or gets a note (warn).",
        group=TISSUE,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        ranges_of_values(self.tissue_values or "0")


def ranges_of_values(text: str) -> list[tuple[bool, int, int]]:
    """Return whether each part of `tissue_values` is a colour, and its first and last value; a colour is 0xRRGGBB.

    Raises:
        UsageError: the text has another form.
    """
    ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or int(match[3] or match[2] or 0) < int(match[2] or 0):
            raise UsageError(
                "--tissue-values", found=repr(text), expected="such as 255, 1,3, 128-255 or #ff0000"
            )
        colour, low, high = match.groups()
        first = int(colour, 16) if colour else int(low)
        ranges.append((bool(colour), first, int(high or first)))
    return ranges


Edge = Literal["drop", "shift", "pad"]

PATCHES, ENCODING = "Patches", "Encoding"

ALGORITHMS: Mapping[str, str] = {
    "grid": "grid-1",
    "thumbnail": "native-1",
    "tissue": "otsu-1",  # or a newer one: see `to_json`
    "resample": "area-lanczos-2",
}
"""Versions of the algorithms that determine cells and pixels. Specs with different versions are not equal."""

MIN_PATCH_SIZE, MAX_PATCH_SIZE = 8, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class TilingSpec:
    """Settings to tile slides and to encode their patches. One store has one spec.

    The settings are those of `ingest`, with `roi_threshold` for `annotation_threshold`. The grid "imported" uses the
    cells that another tool has chosen. `tissue` is the algorithm that finds tissue, or "masks" for files of masks, with
    an algorithm for slides without one in `tissue_fallback` and `tissue_values` of their pictures, or "model" for a network
    with this name and checksum.
    `exclude` are the classes of outlines that are cut out. `edge` is what happens to the rest of a slide at its right and
    lower edge, which is smaller than a patch: "drop" leaves it out, "shift" moves the last column and row to the edge,
    so that they overlap their neighbours more, and "pad" lets them extend beyond the slide.

    Raises:
        UsageError: a value is out of range, or not exactly one of `mpp` and `level` is given.
    """

    patch_size: int = setting(
        256,
        "Side of a patch in pixels.",
        group=PATCHES,
        at_least=MIN_PATCH_SIZE,
        at_most=MAX_PATCH_SIZE,
        default_text="256; of images, their smaller side if that is less",
    )
    overlap: int = setting(
        0, "Overlap of neighbouring patches in pixels.", group=PATCHES, at_least=0
    )
    mpp: Mpp | None = setting(
        None,
        "Scale of the patches in micrometres per pixel.",
        group=PATCHES,
        at_least=PLAUSIBLE_MPP[0],
        at_most=PLAUSIBLE_MPP[1],
        default_text="0.5; of images, their own scale",
    )
    level: int | None = setting(
        None,
        "Scale as a pyramid level, without resampling.",
        group=PATCHES,
        at_least=0,
        at_most=1000,
    )
    tissue: Tissue = NEWEST
    tissue_fallback: Finder | None = None
    tissue_model: str | None = None
    tissue_values: str | None = None
    exclude: tuple[str, ...] = ()
    tissue_threshold: float = setting(
        0.5, "Minimum share of tissue in a patch.", group=TISSUE, at_least=0, at_most=1
    )
    codec: Literal["auto", "jpeg", "png"] = setting(
        "auto",
        "Encoding of patches. auto copies the slide's own JPEG tiles if they match the patches, else encodes JPEG.",
        group=ENCODING,
    )
    quality: int = setting(90, "Quality of encoded JPEG.", group=ENCODING, at_least=1, at_most=100)
    subsampling: Literal["444", "422", "420"] = setting(
        "444", "Chroma subsampling of encoded JPEG.", group=ENCODING
    )
    resample: Literal["fast", "exact"] = setting(
        "fast",
        "fast decodes JPEG tiles at 1/2, 1/4 or 1/8 scale if possible; exact decodes all pixels and averages.",
        group=ENCODING,
    )
    grid: Literal["regular", "imported"] = "regular"
    roi: str | None = setting(
        None, "Keep only patches in outlines of this class of --annotations.", group=PATCHES
    )
    roi_threshold: float = 0.5
    edge: Edge = setting(
        "drop",
        "Rest of a slide at its right and lower edge that is smaller than a patch: leave it out, move the last "
        "column and row to the edge, or let them extend beyond it.",
        group=PATCHES,
        default_text="drop; of images, shift",
    )

    def __post_init__(self) -> None:
        if (self.mpp is None) == (self.level is None):
            raise UsageError(
                "the scale of patches",
                found=f"mpp {self.mpp} and level {self.level}",
                expected="one of --mpp, --mag and --level",
            )
        check_settings(self)
        check_type("tissue", self.tissue, Tissue)
        check_type("tissue_fallback", self.tissue_fallback, Finder | None)
        if self.overlap >= self.patch_size:
            raise UsageError(
                "--overlap", found=self.overlap, expected=f"from 0 to {self.patch_size - 1}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the spec with the versions of its algorithms, as stored in `meta`."""
        # Newer settings are left out if they are not used, so that the specs of old stores stay equal.
        unused = {
            "grid": True,  # the version of the algorithm records it
            "tissue_fallback": self.tissue_fallback is None,
            "tissue_model": not self.tissue_model,
            "tissue_values": self.tissue_values is None,
            "exclude": not self.exclude,
            "edge": self.edge == "drop",
            "roi": self.roi is None,
            "roi_threshold": self.roi is None,
        }
        settings = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if not unused.get(name)
        }
        algorithms = {
            **ALGORITHMS,
            **({"grid": "imported-1"} if self.grid == "imported" else {}),
            **({"edge": "edge-1"} if self.edge != "drop" else {}),
            **({"roi": "cut-1"} if self.roi is not None else {}),
        }
        if self.tissue in FINDER_NAMES:
            settings["tissue"], algorithms["tissue"] = "otsu", self.tissue
        elif self.tissue != "none":
            algorithms["tissue"] = f"{self.tissue}-1"
        return {**settings, "algorithms": algorithms}


def spec_from_json(value: Mapping[str, Any], **changes: Any) -> TilingSpec:
    """Return the spec in `meta` for other slides: without imported cells, outlines, masks and unknown settings.

    Raises:
        UsageError: a value is out of range.
    """
    return _spec_without(
        {"grid", "roi", "exclude", "tissue_model", "tissue_fallback", "tissue_values"},
        {**value, "tissue": recorded_tissue(value), **changes},
    )


def _spec_without(left_out: set[str], values: Mapping[str, Any]) -> TilingSpec:
    """Return the spec with values of JSON, without some fields and unknown ones."""
    names = {field.name for field in fields(TilingSpec)} - left_out
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name in names
    }
    return TilingSpec(**settings)


def spec_of_store(value: Mapping[str, Any]) -> TilingSpec:
    """Return the spec that reproduces the patches of a store with this spec in `meta`, from the same files.

    Raises:
        UsageError: this version of histopipe creates other patches.
    """
    algorithms = value.get("algorithms")
    grid = algorithms.get("grid") if isinstance(algorithms, Mapping) else None
    spec = _spec_without(
        set(),
        {
            **value,
            "tissue": recorded_tissue(value),
            "grid": "imported" if grid == "imported-1" else "regular",
        },
    )
    if spec.to_json() != value:
        raise UsageError(
            "the patches of the store cannot be reproduced with this version of histopipe",
            found="; ".join(differences(value, spec.to_json())),
            todo="ingest its slides into a new store",
        )
    return spec


def recorded_tissue(value: Mapping[str, Any]) -> Any:
    """Return the setting `tissue` of a spec in `meta`, which records "otsu" and its version separately."""
    algorithms = value.get("algorithms")
    if value.get("tissue") == "otsu" and isinstance(algorithms, Mapping):
        return algorithms.get("tissue")
    return value.get("tissue", NEWEST)


def resolved_tissue(asked: str, recorded: Mapping[str, Any] | None) -> str:
    """Return the algorithm of a setting `tissue`: "otsu" is that of an existing store, else the newest.

    `recorded` is the spec in `meta`; None if there is no store.
    """
    if asked != "otsu":
        return asked
    algorithm = NEWEST if recorded is None else str(recorded_tissue(recorded))
    return algorithm if algorithm in FINDER_NAMES else NEWEST


def magnification_to_mpp(magnification: float) -> Mpp:
    """Return the scale of a magnification: 20× is 0.5 µm per pixel, 40× is 0.25.

    Raises:
        UsageError: the magnification is not positive.
    """
    if not magnification > 0:
        raise UsageError("--mag", found=magnification, expected="a positive number, such as 20")
    return Mpp(MAGNIFICATION_MPP / magnification)


def differences(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    places: tuple[str, str] = ("in the store", "asked for"),
) -> list[str]:
    """Return the differences of two specs, each as a text: `mpp: 0.5 in the store, 0.25 asked for`."""
    first, second = ({"edge": "drop", **spec} for spec in (first, second))
    return [
        f"{key}: {first.get(key)} {places[0]}, {second.get(key)} {places[1]}"
        for key in sorted(first.keys() | second.keys())
        if first.get(key) != second.get(key)
    ]
