"""The patches that a model was trained on, with which other patches are compared before they are predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.dataset.options import StainNorm
from histopipe.errors import ScaleError, UsageError
from histopipe.geometry import Mpp, same_scale
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.progress import Progress
from histopipe.tiling.spec import TilingSpec, recorded_tissue, resolved_tissue, spec_from_json


@dataclass(frozen=True, slots=True)
class TrainedPatches:
    """The patches of a training. `owner` is the folder of the run, for messages."""

    owner: Path
    patch_size: int
    spec: Mapping[str, Any] | None
    """Tiling of the patches; None if it is not recorded."""
    patch_mpp: float | None
    stain_norm: StainNorm

    def fit(self, store: Store) -> bool:
        """Return whether the patches of a store have this size and scale."""
        try:
            check_store(store, self)
        except (UsageError, ScaleError):
            return False
        return True


def check_scale(record: SlideRecord, trained: TrainedPatches) -> None:
    """Check that the patches of a slide have the scale of the training patches.

    The scales can differ if patches were read from a pyramid level without resampling.

    Raises:
        ScaleError: the scales differ.
    """
    mpp, expected = record.patch_mpp, trained.patch_mpp
    if mpp is None or expected is None or same_scale(Mpp(mpp), Mpp(expected)):
        return
    raise ScaleError(
        f"{record.id}: the scale of its patches differs from the training patches of {trained.owner}",
        found=f"{mpp:g} µm per pixel", expected=f"{expected:g}",
        todo="train on patches ingested with --mpp, which selects a level for each slide",
    )  # fmt: skip


def check_store(store: Store, trained: TrainedPatches) -> None:
    """Check that the patches of a store have the size and scale of the training patches.

    Raises:
        UsageError, ScaleError: size or scale differ.
    """
    if store.patch_size != trained.patch_size:
        raise UsageError(
            f"{store.path}: the size of its patches differs from the training patches of {trained.owner}",
            found=f"{store.patch_size} pixels", expected=f"{trained.patch_size}",
        )  # fmt: skip
    for record in store.complete.values() if store.spec.get("level") is not None else ():
        check_scale(record, trained)
    names = ("mpp", "level")
    spec = trained.spec
    if spec is not None and any(store.spec.get(name) != spec.get(name) for name in names):
        raise UsageError(
            f"{store.path}: the scale of its patches differs from the training patches of {trained.owner}",
            found=", ".join(f"{name} {store.spec.get(name)}" for name in names),
            expected=", ".join(f"{name} {spec.get(name)}" for name in names),
            todo="ingest the slides with the settings of the training",
        )  # fmt: skip


def spec_for_slides(
    trained: TrainedPatches, tiling: Mapping[str, Any], progress: Progress
) -> TilingSpec:
    """Return the tiling of the training, without the parts that do not apply to other slides.

    Raises:
        UsageError: the tiling of the training is unknown.
    """
    spec = trained.spec
    if spec is None:
        raise UsageError(
            f"{trained.owner} does not record the tiling of its patches, and its store is missing",
            todo="ingest the slides with the settings of the training, and predict the store",
        )
    tiling, algorithms = dict(tiling), spec.get("algorithms")
    all_tissue = "all patches with tissue are predicted"
    if isinstance(algorithms, Mapping) and algorithms.get("grid") == "imported-1":
        progress.message(f"the training patches were chosen by another tool: {all_tissue}")
        tiling.setdefault("tissue", "otsu")
    if spec.get("roi") is not None:
        progress.message(f"the training patches were in the region {spec['roi']!r}: {all_tissue}")
    if recorded_tissue(spec) == "masks" or spec.get("exclude"):
        progress.message(f"the tissue of the training was in files of masks: {all_tissue}")
        tiling.setdefault("tissue", spec.get("tissue_fallback", "otsu"))
    elif recorded_tissue(spec) == "model":
        progress.message("the tissue of the training was found by a network: --tissue otsu is used")
        tiling.setdefault("tissue", "otsu")
    if "tissue" in tiling:
        tiling["tissue"] = resolved_tissue(tiling["tissue"], spec)
    return spec_from_json(spec, **tiling)
