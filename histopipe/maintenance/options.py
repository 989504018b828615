"""Options of `repair` and `merge`. `--help` imports this module, so it imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass

from histopipe.system.settings import PathLike, setting
from histopipe.tasks.choices import Subset

_GROUP = "Options"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairOptions:
    """Options of `repair`, apart from the rules of annotations."""

    annotations: PathLike | None = setting(
        None,
        "Annotations, as for ingest. A store with a region of interest or excluded outlines needs those of the ingest.",
        group=_GROUP,
        format="path",
        default_text="patches keep their classes if these are intact",
    )
    tissue: PathLike | None = setting(
        None,
        "Masks, or segmentation network, from which the tissue was found at the ingest.",
        group=_GROUP,
        format="path",
    )
    coords: PathLike | None = setting(
        None, "Folder of the coordinates that were imported.", group=_GROUP, format="path"
    )
    full: bool = setting(
        False,
        "Also decode every patch and picture, and ingest slides again whose patches cannot be decoded.",
        group=_GROUP,
    )
    workers: int | None = setting(
        None, "Number of processes.", group=_GROUP, at_least=1, default_text="one per core"
    )
    allow_network: bool = setting(
        False, "Allow the output to be on a network filesystem, at your own risk.", group=_GROUP
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """Options of `merge`."""

    slides: PathLike | None = setting(
        None,
        "Copy only the slides in this file: an id per line, a table with the column slide, or the slides.csv of a run.",
        group=_GROUP,
        format="path",
    )
    subset: Subset | None = setting(
        None,
        "Copy only the slides of this subset of the slides.csv of a run. Then --out may have no other slides.",
        group=_GROUP,
    )
    allow_network: bool = setting(
        False, "Allow the output to be on a network filesystem, at your own risk.", group=_GROUP
    )
