"""A store's slides into one store a side of a split."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from histopipe.dataset.options import SIDES, Side
from histopipe.dataset.selection import store_paths
from histopipe.dataset.splits import DROPPED, SlideSplit, read_splits
from histopipe.errors import NothingToDo, UsageError
from histopipe.maintenance.copying import Copied, Part, Told, copy_slides, same_spec
from histopipe.maintenance.finding import some
from histopipe.store.store import Store


def split(
    sources: Sequence[str | Path],
    splits: str | Path,
    out: str | Path,
    *,
    allow_network: bool = False,
    told: Told = lambda *_: None,
) -> dict[Side, Copied]:
    """Copy slides into `train.lmdb`, `validation.lmdb` and `test.lmdb`, as a split has them.

    Args:
        sources: the stores that the split was made of, in their order.
        splits: its `splits.json`.
        out: folder for the new stores, made if missing. Called again after an interruption, it goes on.
        allow_network: let it lie on a network filesystem.
        told: hears how far it is.

    Returns:
        What was copied, by side; sides without slides have no store.

    Raises:
        NothingToDo: there is no store, or no slide has a side.
        UsageError: the split divides slides, as by region or patch; a store holds slides whole.
        DamagedStore: the split is not of these stores, or a slide is not what was written.
        MachineShort: there is no room.
    """
    splits, out = Path(splits), Path(out)
    with ExitStack() as stack:
        stores = [stack.enter_context(Store(path)) for path in store_paths(sources)]
        spec = same_spec(stores)
        sides = _sides(read_splits(splits, stores).slides, splits)
        if not sides:
            raise NothingToDo(f"{splits} has no slide on any side")
        parts = {
            side: [Part(stores[slide.store], slide.slide) for slide in slides]
            for side, slides in sides.items()
        }
        for side, chosen in parts.items():
            _refuse_others(out / f"{side}.lmdb", {part.record.id for part in chosen})
        sizes = {side: sum(p.record.stored_bytes for p in chosen) for side, chosen in parts.items()}
        out.mkdir(parents=True, exist_ok=True)
        result: dict[Side, Copied] = {}
        for side, chosen in parts.items():
            before = sum(sizes[other] for other in result)
            result[side] = copy_slides(
                chosen, out / f"{side}.lmdb", spec, allow_network=allow_network,
                told=partial(_told, told, before, sum(sizes.values())),
            )  # fmt: skip
        return result


def _refuse_others(store: Path, ids: set[str]) -> None:
    """Refuse to add to the store of another split: a slide would stand on two sides.

    Raises:
        UsageError: it holds slides that are not of this side.
    """
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


def _told(told: Told, before: int, total: int, count: int, _: int) -> None:
    """One side's progress as a part of all sides'."""
    told(before + count, total)


def _sides(slides: Sequence[SlideSplit], path: Path) -> dict[Side, list[SlideSplit]]:
    """Slides by their side, of the sides that have any."""
    found: dict[Side, list[SlideSplit]] = {side: [] for side in SIDES}
    divided = []
    for slide in slides:
        numbers = sorted(
            set(slide.sides.tolist()) - {DROPPED}
        )  # of patches left out: a store holds slides whole
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
