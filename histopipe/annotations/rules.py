"""Settings that turn outlines into labels. The module imports nothing slow, since `--help` lists them."""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

from histopipe.errors import UsageError
from histopipe.system.settings import check_settings, declared_settings, setting
from histopipe.system.table_cells import cell_number

Origin = Literal["auto", "bounds", "slide"]
Frame = Literal["auto", "stored", "turned"]
ANNOTATIONS = "Annotations"
NOT_ANNOTATED = 255
"""Number of pixels that nobody has annotated, in the place of a class number."""
BACKGROUND = "background"
"""Class of annotated pixels outside of all outlines."""
_MOST_VALUE = 65_535
AGREED = "agreed"
"""In place of the name of a rater: the classes on which all raters of a patch agree."""


@dataclass(frozen=True, init=False, repr=False, eq=False, kw_only=True)
class FrameOptions:
    """The frame of coordinates of other tools."""

    frame: Frame = setting(
        "auto",
        "Frame of outlines, masks and imported coordinates of images with an EXIF orientation: that of the file (stored), "
        "or of the turned image. auto is stored, but compares PNG masks of both shapes with the tissue.",
        group=ANNOTATIONS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelOptions:
    """Options for a folder of `histopipe view --journal`."""

    raters: str | None = setting(
        None,
        f"For a folder of `histopipe view --journal`: name of a rater, or {AGREED} for the classes on which all raters of a "
        "patch agree.",
        group=ANNOTATIONS,
        metavar="NAME",
        default_text=f"{AGREED}, or the only rater",
    )
    held_out: Literal["offered", "all"] = setting(
        "offered",
        "For such a folder: which labels of held-out patients are used; offered: those of patches that were drawn at random, so "
        "that they measure a model fairly.",
        group=ANNOTATIONS,
    )


@dataclass(frozen=True, init=False, repr=False, eq=False, kw_only=True)
class OutlineOptions(FrameOptions):
    """Settings that decide the class and the place of outlines."""

    unclassified: str | None = setting(
        None, "Class of outlines without a class.", group=ANNOTATIONS, default_text="left out"
    )
    class_property: str | None = setting(
        None,
        "Property of an outline that has its class, such as label or Text.",
        group=ANNOTATIONS,
        metavar="NAME",
        default_text="depends on the tool",
    )
    annotation_origin: Origin = setting(
        "auto",
        "Origin of coordinates: corner of the scanned area (bounds) or level 0 (slide). auto depends on the tool.",
        group=ANNOTATIONS,
    )
    roi: str | None = None

    def check_names(self) -> None:
        """Check the names of classes and properties, and bring those of classes into NFC.

        Raises:
            UsageError: a name is empty.
        """
        for flag, name, kind in (
            ("--unclassified", self.unclassified, "a class"),
            ("--roi", self.roi, "a class"),
            ("--class-property", self.class_property, "the name of a property"),
        ):
            if name is not None and not name.strip():
                raise UsageError(flag, found="an empty name", expected=kind)
        for name in ("unclassified", "roi"):
            value = getattr(self, name)
            object.__setattr__(
                self, name, value if value is None else unicodedata.normalize("NFC", value)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationRules(OutlineOptions):
    """Settings that turn outlines into labels; see `annotate`. `roi` is the class of the region of interest.

    Raises:
        UsageError: a value is out of range.
    """

    annotation_threshold: float = setting(
        0.5,
        "Minimum share of a patch that its class covers.",
        group=ANNOTATIONS,
        above=0,
        at_most=1,
        format="share",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        self.check_names()


@dataclass(frozen=True, init=False, repr=False, eq=False, kw_only=True)
class PixelOptions(OutlineOptions):
    """Settings that turn outlines, or label images, into a class for each pixel."""

    annotated_area: str = setting(
        "outlines",
        "Where pixels outside of outlines are annotated, as class background: nowhere (outlines), in the whole slide (all), or "
        "up to this distance from an outline, in µm.",
        group=ANNOTATIONS,
        metavar="outlines|all|UM",
    )
    mask_values: tuple[str, ...] = setting(
        (),
        "Read label images SLIDE.png instead of outlines: the class of each value, such as 1=gland,2=stroma.",
        group=ANNOTATIONS,
        metavar="VALUE=CLASS",
    )

    def changed_options(self) -> list[str]:
        """Return the names of options that are not at their defaults. Raise a UsageError if a value is malformed."""
        self.check_names()
        _ = self.margin_um, self.value_names
        declared = declared_settings(PixelOptions)
        return [name for name in declared if getattr(self, name) != declared[name].default]

    @property
    def margin_um(self) -> float:
        """Distance from outlines up to which pixels are annotated: infinite for the whole slide.

        Raises:
            UsageError: the setting is no distance.
        """
        margin = {"outlines": 0.0, "all": math.inf}.get(self.annotated_area)
        if margin is None:
            margin = cell_number(self.annotated_area)
            if not 0 < margin < math.inf:
                raise UsageError(
                    "--annotated-area",
                    found=repr(self.annotated_area),
                    expected="outlines, all, or a distance in µm, such as 100",
                )
        return margin

    @property
    def value_names(self) -> dict[int, str]:
        """The class of each value of label images; empty for outlines.

        Raises:
            UsageError: an entry is malformed, or a value has two classes.
        """
        pairs = [re.fullmatch(r"\s*(\d{1,5})\s*=\s*(.*\S)\s*", text) for text in self.mask_values]
        names = {int(pair[1]): unicodedata.normalize("NFC", pair[2]) for pair in pairs if pair}
        if len(names) < len(pairs) or max(names, default=0) > _MOST_VALUE:
            raise UsageError(
                "--mask-values",
                found=",".join(self.mask_values),
                expected=f"different values, 0 to {_MOST_VALUE}, each with a class, such as 1=gland,2=stroma",
            )
        return names


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelRules(PixelOptions):
    """Settings that turn outlines, or label images, into a class for each pixel; see `load_dataset`.

    Raises:
        UsageError: a value is malformed.
    """

    def __post_init__(self) -> None:
        check_settings(self)
        self.changed_options()
