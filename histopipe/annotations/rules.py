"""Settings that turn outlines into labels. The module imports nothing slow, since `--help` lists them."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Literal

from histopipe.errors import UsageError
from histopipe.system.settings import check_settings, setting

Origin = Literal["auto", "bounds", "slide"]
Frame = Literal["auto", "stored", "turned"]
ANNOTATIONS = "Annotations"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationRules(FrameOptions):
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

    def __post_init__(self) -> None:
        check_settings(self)
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
