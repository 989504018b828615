"""Options of `heatmap` and `report`. `--help` imports this module, so it imports nothing slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from histopipe.system.settings import PathLike, setting

_GROUP = "Options"
Objects = Literal["cells", "contours"]
Checklist = Literal["tripod-ai", "claim", "stard-ai", "refine"]
HeatmapFormat = Literal["png", "tiff", "geojson"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatmapOptions:
    """Options of `heatmap`."""

    slide: Sequence[str] = setting(
        (), "Draw this slide only; repeatable.", group=_GROUP, format="repeated"
    )
    class_name: str | None = setting(
        None,
        "Class, label or number that is drawn, or the contribution to it.",
        group=_GROUP,
        flag_name="--class",
        default_text="the last one",
    )
    show: (
        Literal["attention", "contribution", "haematoxylin", "eosin", "dab", "positive"] | None
    ) = setting(
        None,
        "Slide models: attention, or contribution of each patch to the prediction. Of a store: amount of a stain, or share of "
        "positive pixels, of `histopipe stains --amounts`.",
        group=_GROUP,
        default_text="attention",
    )
    formats: Sequence[HeatmapFormat] = setting(
        ("png",),
        "png (over the slide's thumbnail), tiff (pyramid), geojson (objects for QuPath), or several: png,tiff.",
        group=_GROUP,
        flag_name="--to",
    )
    stores: Sequence[PathLike] = setting(
        (),
        "Store of the patches; repeatable.",
        group=_GROUP,
        format="path",
        flag_name="--store",
        default_text="stores of the run, or of its features",
    )
    slides: Sequence[PathLike] = setting(
        (),
        "Slide file or folder of slide files, for finer images than the thumbnails; repeatable.",
        group=_GROUP,
        format="path",
    )
    objects: Objects = setting(
        "cells",
        "GeoJSON objects: one cell per patch, or contours around patches of at least --threshold.",
        group=_GROUP,
    )
    threshold: float | None = setting(
        None,
        "Threshold of --objects contours, in the units of the colour bar.",
        group=_GROUP,
        default_text="the middle of the colour bar",
    )
    top: int = setting(
        0,
        "Also write so many patches with the highest and the lowest values of each class, as images and a table.",
        group=_GROUP,
        at_least=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Options of `report`."""

    stores: Sequence[PathLike] = setting(
        (),
        "Store of a run, if it was moved; repeatable.",
        group=_GROUP,
        format="path",
        flag_name="--store",
    )
    checklist: Checklist | None = setting(
        None,
        "Write this reporting checklist (TRIPOD+AI, CLAIM, STARD-AI or REFINE), filled with what the run knows, into --out: "
        ".html or .md.",
        group=_GROUP,
    )
