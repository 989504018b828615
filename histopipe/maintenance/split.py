"""Split a store into one store per side of a split."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.dataset.options import SIDES, Side
from histopipe.dataset.selection import store_paths
from histopipe.dataset.splits import DROPPED, SlideSplit, read_splits
from histopipe.errors import NothingToDo, UsageError
from histopipe.maintenance.copy_slides import CopyResult, StoredSlide, copy_slides, open_stores
from histopipe.maintenance.findings import some
from histopipe.store.store import Store
from histopipe.system.progress import Progress, default_progress


@dataclass(frozen=True, slots=True)
class SplitResult:
    """What was copied, by side of the split. Sides without slides have no store."""

    sides: dict[Side, CopyResult]

    def to_json(self) -> list[dict[str, Any]]:
        """Return one JSON-ready dict per store."""
        return [copied.to_json() for copied in self.sides.values()]

    def __str__(self) -> str:
        return "\n".join(map(str, self.sides.values()))

    __repr__ = __str__


def split(
    sources: Sequence[str | Path],
    splits: str | Path,
    out: str | Path,
    *,
    allow_network: bool = False,
    untrusted: bool = False,
    progress: Progress | None = None,
) -> SplitResult:
    """Copy slides into `train.lmdb`, `validation.lmdb` and `test.lmdb`, by the sides of a split.

    Args:
        sources: the stores that the split was made of, in their order.
        splits: its `splits.json`.
        out: folder for the new stores, made if missing. After an interruption, the same call continues.
        allow_network: allow it to be on a network filesystem.
        untrusted: verify the stores before LMDB opens them.
        progress: where to show progress.

    Raises:
        NothingToDo: there is no store, or no slide has a side.
        UsageError: the split divides slides, as by region or patch; a store holds slides whole.
        DamagedStore: the split is not of these stores, or a slide is not what was written.
        MachineShort: there is not enough free space.
    """
    splits, out, progress = Path(splits), Path(out), progress or default_progress()
    with ExitStack() as stack:
        paths = store_paths(sources)
        stores = open_stores(paths, stack, untrusted=untrusted, progress=progress)
        spec = stores[0].spec
        sides = _sides(read_splits(splits, stores).slides, splits)
        if not sides:
            raise NothingToDo(f"{splits} has no slide on any side")
        slides = {
            side: [StoredSlide(stores[slide.store], slide.slide) for slide in held]
            for side, held in sides.items()
        }
        targets = {side: out / f"{side}.lmdb" for side in slides}
        for side, held in slides.items():
            _refuse_others(targets[side], {slide.record.id for slide in held})
        total = sum(slide.record.stored_bytes for held in slides.values() for slide in held)
        out.mkdir(parents=True, exist_ok=True)
        bar = stack.enter_context(progress.bar("split", unit="bytes", total=total))
        copied = {
            side: copy_slides(held, targets[side], spec, allow_network=allow_network, bar=bar)
            for side, held in slides.items()
        }
    return SplitResult(copied)


def _refuse_others(store: Path, ids: set[str]) -> None:
    """Refuse to add to the store of another split: a slide would be on two sides."""
    try:
        with Store(store) as there:
            others = [record.id for record in there.slides if record.id not in ids]
    except NothingToDo:
        return
    if others:
        raise UsageError(
            f"{store} holds slides that are not of its side", found=some(others),
            expected="the stores of this split, or none", todo="choose another --out",
        )  # fmt: skip


def _sides(slides: Sequence[SlideSplit], path: Path) -> dict[Side, list[SlideSplit]]:
    """Slides by their side, of the sides that have any."""
    found: dict[Side, list[SlideSplit]] = {side: [] for side in SIDES}
    divided = []
    for slide in slides:
        # Patches that are left out do not count: a store holds slides whole.
        numbers = sorted(set(slide.sides.tolist()) - {DROPPED})
        if len(numbers) > 1:
            divided.append(slide.id)
        elif numbers:
            found[SIDES[numbers[0]]].append(slide)
    if divided:
        raise UsageError(
            f"{path} divides slides among sides", found=some(divided),
            expected="whole slides, as by patient, site or slide",
        )  # fmt: skip
    return {side: held for side, held in found.items() if held}
