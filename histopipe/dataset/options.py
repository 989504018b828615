"""Options of a dataset: their choices, and checks, which raise a `UsageError`.

The module imports nothing slow, since `--help` lists the choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from histopipe.errors import OnError, UsageError
from histopipe.system.settings import check_settings, setting
from histopipe.system.table_cells import NA_VALUES
from histopipe.tasks.choices import Balance, LabelsFrom, StainNorm

PatchColumn = Literal["x_l0", "y_l0", "slide"]


_MAX_COUNT = (1 << 40) - 1
_MAX_SEED = (1 << 63) - 1


def check_whole(least: int, **values: Any) -> None:
    """Check that arguments are whole numbers of at least `least`. A `seed` has a higher maximum."""
    for name, value in values.items():
        most = _MAX_SEED if name == "seed" else _MAX_COUNT
        if type(value) is not int or not least <= value <= most:
            raise UsageError(
                name, found=repr(value), expected=f"a whole number, {least} to {most:,}"
            )


def check_shard(shard: Any) -> tuple[int, int]:
    """Check a shard, and return its index and count."""
    match shard:
        case (int(index), int(count)) if 0 <= index < count and bool not in map(type, shard):
            return index, count
    raise UsageError(
        "shard", found=repr(shard), expected="(index, count), index from 0 to count - 1"
    )


Classes = Sequence[str] | Mapping[str, int]
_ORDER, _LABELS, _PATCHES, _LOADING = "Order", "Labels", "Patches", "Loading"
_MOST = 1_000_000_000
"""Maximum of counts, far below those that TensorFlow cannot hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Further options of `load_dataset`."""

    start_step: int = setting(
        0,
        "First step to yield, counted over all epochs. Skipping steps costs nothing.",
        flag_name="start_step",
        group=_ORDER,
        at_least=0,
        at_most=_MOST,
    )
    shuffle: bool = setting(True, "False keeps the order of the stores.", group=_ORDER)
    shuffle_block: int | None = setting(
        None,
        "Shuffle blocks of this many neighbours, and patches within every 16 blocks. For hard disks and network "
        "filesystems; 256 is a good size.",
        flag_name="shuffle_block",
        group=_ORDER,
        at_least=1,
        at_most=_MOST,
    )
    balance: Balance = setting(
        "none",
        "Draw every class, slide or patient equally often. The length of an epoch is rounded up to a multiple of their "
        "number. Patches of small groups are repeated; of large groups, each epoch draws different patches.",
        group=_ORDER,
    )
    max_per_slide: int | None = setting(
        None,
        "Maximum number of patches per slide and epoch; each epoch draws different ones. With labels from annotations, "
        "the maximum is per class of a slide.",
        flag_name="max_per_slide",
        group=_ORDER,
        at_least=1,
        at_most=_MOST,
    )
    shard: tuple[int, ...] = setting(
        (0, 1),
        "(index, count): yield only this worker's part of each step. All shards together are one epoch, and have the same "
        "number of steps.",
        group=_ORDER,
    )
    classes: Classes | None = setting(
        None,
        "Names of the classes in the order of their numbers, or numbers by name.",
        group=_LABELS,
        default_text="the sorted labels",
    )
    na: Sequence[str] = setting(
        NA_VALUES,
        "Cells of a labels CSV that are missing values, apart from the empty cell.",
        group=_LABELS,
    )
    labelled_only: bool = setting(
        False,
        "Leave out slides, or patches, without a label in `classes`. Otherwise they have label -1.",
        group=_LABELS,
    )
    labels_from: LabelsFrom = setting(
        "slide",
        "annotation takes the class of each patch from `histopipe annotate`. `splits` record their source.",
        group=_LABELS,
    )
    min_tissue: float = setting(0.0, "Minimum share of tissue, 0 to 1.", group=_PATCHES)
    min_focus: float = setting(0.0, "Minimum focus (`histopipe quality`).", group=_PATCHES)
    exclude_pen: float = setting(1.0, "Maximum share of pen marks.", group=_PATCHES)
    exclude_dark: float = setting(1.0, "Maximum share of folds and black.", group=_PATCHES)
    columns: Sequence[PatchColumn] = setting(
        (), "Additional fields: x_l0, y_l0 (level-0 pixels), slide (its id).", group=_PATCHES
    )
    stain_norm: StainNorm = setting(
        "none",
        "Normalize the stain of every slide to one reference; see `histopipe stains`.",
        group=_PATCHES,
    )
    on_error: OnError = setting(
        "raise",
        "raise stops at a damaged patch. skip gives it weight 0, logs it, and records it in the dataset's attribute "
        "`skipped`, a dictionary of reasons by key.",
        group=_LOADING,
    )
    parallel_calls: int | None = setting(
        None,
        "Number of batches decoded in parallel.",
        flag_name="parallel_calls",
        group=_LOADING,
        at_least=1,
        at_most=_MOST,
        default_text="the number of cores and a quarter more",
    )
    prefetch: int = setting(
        2,
        "Number of batches to load in advance.",
        flag_name="prefetch",
        group=_LOADING,
        at_least=0,
        at_most=_MOST,
    )
    read_ahead: int | None = setting(
        None,
        "Number of batches to request from disk in advance.",
        flag_name="read_ahead",
        group=_LOADING,
        at_least=0,
        at_most=_MOST,
        default_text="16 while batches wait for the disk",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        check_shard(self.shard)
