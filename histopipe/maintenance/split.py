"""Split stores into one store per subset of a split."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from histopipe.dataset.selection import store_paths
from histopipe.errors import NothingToDo, UsageError
from histopipe.maintenance.merge import CopyResult, SlideToCopy, copy_slides, open_stores
from histopipe.maintenance.verify import check_untrusted
from histopipe.splits.splits import DROPPED, SlideSplit, read_splits
from histopipe.splits.subsets import SUBSETS, Subset
from histopipe.store.claims import Claims
from histopipe.store.store import Store, recorded
from histopipe.store.writer import StoreWriter
from histopipe.system.output import Progress, Result, counted, default_progress, some


@dataclass(frozen=True, slots=True, repr=False)
class SplitResult(Result):
    """Result of `split`: the copied slides by subset. Subsets without slides have no store."""

    sides: dict[Subset, CopyResult]

    def __str__(self) -> str:
        return "\n".join(map(str, self.sides.values()))


def split(
    sources: Sequence[str | Path],
    splits: str | Path,
    out: str | Path,
    *,
    allow_network: bool = False,
    untrusted: bool = False,
    progress: Progress | None = None,
) -> SplitResult:
    """Copy the slides of each subset of a split into `train.lmdb`, `validation.lmdb` and `test.lmdb`.

    Args:
        sources: the stores of the split, in the same order.
        splits: path of its `splits.json`.
        out: folder for the new stores, created if missing. After an interruption, the same call continues.
        allow_network: allow it to be on a network filesystem.
        untrusted: verify the stores before LMDB opens them.
        progress: where to show progress.

    Raises:
        NothingToDo: there is no store, or no slide is in a subset.
        UsageError: the split assigns patches of one slide to several subsets, as a split by region or patch does.
        DamagedStore: the split belongs to other stores, or a slide does not match its checksums.
        MachineShort: there is not enough free space.
    """
    splits, out, progress = Path(splits), Path(out), progress or default_progress()
    with ExitStack() as stack:
        stores = open_stores(store_paths(sources), stack, untrusted=untrusted, progress=progress)
        slides = {
            subset: [SlideToCopy(stores[slide.store], slide.slide) for slide in of_subset]
            for subset, of_subset in _by_subset(read_splits(splits, stores).slides, splits).items()
        }
        if not slides:
            raise NothingToDo(f"{splits} has no slide in any subset")
        targets = {subset: out / f"{subset}.lmdb" for subset in slides}
        for subset, of_subset in slides.items():
            _refuse_others(targets[subset], {slide.record.id for slide in of_subset})
        total = sum(
            slide.record.stored_bytes for of_subset in slides.values() for slide in of_subset
        )
        out.mkdir(parents=True, exist_ok=True)
        bar = stack.enter_context(progress.bar("split", unit="bytes", total=total))
        copied = {
            subset: copy_slides(
                of_subset, targets[subset], stores[0].spec, allow_network=allow_network, bar=bar
            )
            for subset, of_subset in slides.items()
        }
    return SplitResult(copied)


def _refuse_others(store: Path, ids: set[str]) -> None:
    """Refuse to add slides to the store of another split, since a slide would be in two subsets."""
    other_ids = [record.id for record in recorded(store).values() if record.id not in ids]
    if other_ids:
        raise UsageError(
            f"{store} contains slides of another subset or split",
            found=some(other_ids),
            expected="stores of this split, or no stores",
            todo="choose another --out",
        )


def _by_subset(slides: Sequence[SlideSplit], path: Path) -> dict[Subset, list[SlideSplit]]:
    """Return the slides by subset, without empty subsets."""
    # Patches without a subset do not count: slides are copied with all their patches.
    used = [(slide, set(slide.subsets.tolist()) - {DROPPED}) for slide in slides]
    divided = [slide.id for slide, numbers in used if len(numbers) > 1]
    if divided:
        raise UsageError(
            f"{path} assigns patches of one slide to several subsets",
            found=some(divided),
            expected="one subset per slide: a split by patient, site or slide",
        )
    by_subset = {
        subset: [slide for slide, numbers in used if number in numbers]
        for number, subset in enumerate(SUBSETS)
    }
    return {subset: of_subset for subset, of_subset in by_subset.items() if of_subset}


@dataclass(frozen=True, slots=True, repr=False)
class RemoveResult(Result):
    """Result of `remove`.

    Attributes:
        store: path of the store.
        slides: ids of the removed slides.
        patches: number of patches of these slides.
        reusable_bytes: free bytes inside the file, also from earlier removals.
    """

    store: str
    slides: list[str]
    patches: int
    reusable_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.store}: {counted(len(self.slides), 'slide')} with {counted(self.patches, 'patch')} removed; "
            f"{self.reusable_bytes / 1e6:,.1f} MB of the file are free (`histopipe compact` returns them to the disk)"
        )


def remove(
    store: str | Path,
    slides: Sequence[str],
    *,
    untrusted: bool = False,
    progress: Progress | None = None,
) -> RemoveResult:
    """Remove slides from a store, each with all its entries in one transaction.

    Args:
        store: the store's folder.
        slides: ids of the slides. If one is unknown, nothing is removed.
        untrusted: verify the store before LMDB opens it.
        progress: where to show progress.

    Raises:
        NothingToDo, DamagedStore: there is no store, or it cannot be written.
        UsageError: a slide is not in the store, or is being ingested.
    """
    store, progress = Path(store), progress or default_progress()
    if untrusted:
        check_untrusted(store, progress=progress)
    with Store(store) as opened:
        numbers = {record.id: number for number, record in opened.records.items()}
        planned = {record.id: record.planned for record in opened.slides}
    names = list(dict.fromkeys(slides))
    unknown = [name for name in names if name not in numbers]
    if unknown:
        raise UsageError(
            f"{store} has no such slide",
            found=some(unknown),
            expected=some(difflib.get_close_matches(unknown[0], numbers) or numbers)
            or "a store with slides",
        )
    with (
        StoreWriter(store) as writer,
        Claims(store) as claims,
        progress.bar("remove", unit="slides", total=len(names)) as bar,
    ):
        for name in names:
            if not claims.take(numbers[name]):
                raise UsageError(
                    f"slide {name} of {store} is being ingested",
                    todo="wait until the ingest has finished",
                )
            writer.remove(numbers[name])
            claims.release(numbers[name])
            bar.advance()
        free = writer.reusable_bytes()
    return RemoveResult(str(store), names, sum(planned[name] for name in names), free)
